"""That code of the user's own is about to run is said by every verb that runs it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.spec.schema import Spec
    from finefit.spec.stages import Pipeline


def tell_code(spec: "Spec | Pipeline", base: Path, console: "Console") -> None:
    """`base`: where the paths of the spec start. Nothing where no model is one of the user's own."""
    from finefit.pipeline.stage_paths import models_of
    from finefit.spec.stages import Pipeline

    tell_models(
        [model for stage in spec.stages.values() for _, model in models_of(stage)]
        if isinstance(spec, Pipeline)
        else [spec.model],
        base,
        console,
    )


def tell_models(models: Iterable[object], base: Path, console: "Console") -> None:
    from finefit.model.custom_files import written
    from finefit.spec.models import CustomModel

    for line in dict.fromkeys(written(model, base).notice for model in models if isinstance(model, CustomModel)):
        console.print(line, soft_wrap=True)
