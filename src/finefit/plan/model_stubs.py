"""Stubs of models that stages have yet to make: a folder with config and tokenizer but no weights, so that later stages
are planned as if the model existed; and its size. Both are cached by content."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from finefit.artifacts.cache import cached_folder, cached_record, content_key, source_digest
from finefit.artifacts.forecasts import ModelSize
from finefit.artifacts.records import read_record, write_record
from finefit.artifacts.wiring import wired_model
from finefit.errors import FinefitError, ModelError
from finefit.facts.files import TEMPLATES, finefit_cache
from finefit.model.resolve_model import ModelOutline, model_outline
from finefit.spec.models import Lora
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import STAGE_PATH, AnyStage, BuildMoe, ForcedRouter, Input, MergeAdapter, TrainStage

FinishedOutput = Callable[[str], Path | None]
"""The output folder of a stage that has run, by its name."""
_TEXTS = (".json", ".jinja", ".model", ".txt")
_NO_TOKENIZER_FILES = ("config.json", "model.safetensors.index.json", "adapter_config.json", "trainer_state.json")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def no_output(_: str) -> Path | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """What the config of a mixture of experts adds to that of its base."""

    num_experts: int
    top_k: int
    shared: Literal["none", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStubs:
    """The models and files of a pipeline, whether they exist yet or not."""

    pipeline: Pipeline
    base: Path
    """Where relative paths of the spec start; absolute."""
    done: FinishedOutput = no_output
    known: dict[str, Path] = field(default_factory=dict)

    def at(self, name: str) -> Path:
        """The output of a stage: the real one, else its stub, else a folder that does not exist."""
        if name not in self.known:
            stub = self.done(name) or self._stub(self.pipeline.stages[name])
            self.known[name] = stub or _stubs_folder() / "to-come" / name
        return self.known[name]

    def of(self, asked: Input) -> ModelOutline:
        """Without an adapter that may be laid over it."""
        return model_outline(wired_model(self.pipeline, asked, self.at).model, self.base)

    def is_made(self, path: str) -> bool:
        """False for a path into the output of a stage that has not made it yet."""
        found = STAGE_PATH.fullmatch(path)
        return found is None or (self.at(found[1]) / (found[2] or "")).exists()

    def _stub(self, stage: AnyStage) -> Path | None:
        match stage:
            case TrainStage(tuning=Lora()):
                return None  # makes only an adapter
            case TrainStage() | MergeAdapter():
                return _cached_stub(self.of(stage.model), None)
            case BuildMoe():
                return _cached_stub(self.of(stage.base), mixture_shape(stage))
        return None


def mixture_shape(stage: BuildMoe) -> MixtureShape | None:
    """None for an average, which is a model like its base. Copies that will be collapsed count once, as far as the spec
    shows them; a forced router leaves all but one expert out."""
    if stage.merge == "average":
        return None
    if isinstance(stage.router, ForcedRouter):
        return MixtureShape(num_experts=1, top_k=1, shared=stage.shared)
    count = len(stage.experts) - (len(expert_copies(stage)) if stage.copies == "collapse" else 0)
    top_k = {"top_k": min(stage.top_k, count), "weighted_sum": count, "top_1": 1}[stage.routing]
    return MixtureShape(num_experts=count, top_k=top_k, shared=stage.shared)


def expert_copies(stage: BuildMoe) -> dict[str, str]:
    """Experts that name the same model as an earlier one, and which."""
    first: dict[str, str] = {}
    found = {name: first.setdefault(asked.model_dump_json(), name) for name, asked in stage.experts.items()}
    return {name: other for name, other in found.items() if other != name}


def _stubs_folder() -> Path:
    return finefit_cache() / "model_stubs"


def _cached_stub(outline: ModelOutline, mixture: MixtureShape | None) -> Path:
    """Code for mixtures, and torch with it, is imported only for a mixture."""
    texts = {}
    if (folder := outline.tokenizer) is not None:
        for path in sorted((*folder.iterdir(), *(folder / TEMPLATES).glob("*"))):
            if path.is_file() and path.suffix in _TEXTS and path.name not in _NO_TOKENIZER_FILES:
                texts[path.relative_to(folder).as_posix()] = path

    def fill(staging: Path) -> None:
        config = outline.config
        for name, path in texts.items():
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, staging / name)
        if mixture is not None:
            from finefit.moe.build import moe_config

            config = moe_config(config, num_experts=mixture.num_experts, top_k=mixture.top_k, shared=mixture.shared)
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if mixture is not None and outline.tokenizer is not None:
            from finefit.moe.dense import keep_tokenizer  # which opens it with the mixture's config

            keep_tokenizer(outline.tokenizer, staging)

    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in texts.items()}
    made_by = [asdict(mixture), version("transformers"), source_digest("moe")] if mixture else None
    key = content_key([outline.config, made_by, digests])[:32]
    return cached_folder(_stubs_folder() / key, fill, is_complete=lambda stub: (stub / "config.json").is_file())


# Sizes


def model_size(config: dict[str, Any]) -> ModelSize:
    """Counted on the meta device, in a process of its own."""
    return cached_record("sizes", [config, version("transformers")], ModelSize, lambda: _count_in_process(config))


def _count_in_process(config: dict[str, Any]) -> ModelSize:
    with tempfile.TemporaryDirectory(prefix="finefit-size-") as folder:
        asked, answered = Path(folder) / "config.json", Path(folder) / "size.json"
        asked.write_text(json.dumps(config), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "finefit.plan.model_stubs", str(asked), str(answered)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
        if answered.exists():
            return read_record(answered, ModelSize)
    reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
    raise ModelError(
        f"the parameters of a model of type {config.get('model_type')} cannot be counted: {reason}",
        "`finefit doctor` shows the installed versions",
    )


def count_parameters(config: dict[str, Any]) -> ModelSize:
    """In this process; tied tensors count once."""
    import torch

    from finefit.moe.build import unknown_mlp_tensor
    from finefit.rehearse.fake_model import read_config
    from finefit.vision import auto_class

    read = read_config(config)
    with torch.device("meta"):
        model = auto_class(read).from_config(read)
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        match = _LAYER.search(name)
        sizes[match[1] if match else "outside"] += parameter.numel()
    outside = sizes.pop("outside", 0)
    return ModelSize(
        parameters=outside + sizes.total(),
        outside=outside,
        largest_layer=max(sizes.values(), default=0),
        foreign=unknown_mlp_tensor(name for name, _ in model.named_parameters()),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # transformers warns about configs, and nobody loads this one
    try:
        write_record(Path(sys.argv[2]), count_parameters(json.loads(Path(sys.argv[1]).read_bytes())))
    except FinefitError as error:
        sys.exit(error.problem)
