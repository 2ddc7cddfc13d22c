"""`finefit plan` of a spec with stages: the whole of it, before any stage has run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from finefit.cli.console import open_console
from finefit.errors import UserError

if TYPE_CHECKING:
    from finefit.artifacts.forecasts import Suggestion
    from finefit.spec.stages import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What else was asked for on the command line."""

    apply: int | None
    stage: str | None
    measure: bool
    as_json: bool


def plan_stages(target: Path, pipeline: "Pipeline", cards: tuple[str, ...], wishes: Wishes) -> None:
    from finefit.facts.files import free_bytes
    from finefit.pipeline.outlooks import is_here, look_ahead
    from finefit.report.plan_stages import (
        fit_on,
        num_cards,
        outlook_document,
        show_outlooks,
        show_outlooks_on_cards,
        suggestions_of,
    )

    _require_sense(pipeline, wishes)
    console = open_console(as_json=wishes.as_json)
    with console.status("rehearsing every stage"):
        outlooks = look_ahead(pipeline, target.resolve().parent, cards=cards)
    free = tuple(free_bytes(Path("runs")) if is_here(card) else None for card in cards)
    if wishes.as_json:
        typer.echo(json.dumps(outlook_document(outlooks, free=free), indent=2))
    elif len(cards) > 1:
        show_outlooks_on_cards(outlooks, console, free=free)
    else:
        show_outlooks(outlooks, console, name=pipeline.name, only=wishes.stage, free=free)
    fits = [fit_on(outlooks, at, free) for at in range(num_cards(outlooks))]
    if wishes.apply is not None:
        apply_suggestion(target, suggestions_of(outlooks), wishes.apply, fits=fits[0], as_json=wishes.as_json)
    elif not any(fits):
        raise typer.Exit(1)


def _require_sense(pipeline: "Pipeline", wishes: Wishes) -> None:
    if wishes.measure:
        raise UserError(
            "--measure runs one real step, and a pipeline has a step in every stage",
            "measure a spec that holds one of its trainings",
        )
    if wishes.stage is not None and wishes.stage not in pipeline.stages:
        raise UserError(f"there is no stage {wishes.stage}", f"the stages are {', '.join(pipeline.order())}")
    if wishes.stage is not None and pipeline.stages[wishes.stage].kind != "train":
        raise UserError(
            f"stage {wishes.stage} trains nothing, so there is no more to show of it", "name a stage of kind train"
        )


def apply_suggestion(
    target: Path, suggestions: "Sequence[Suggestion]", number: int, *, fits: bool, as_json: bool
) -> None:
    """`suggestions` as they are numbered."""
    from finefit.artifacts.atomic import write_text
    from finefit.spec.edit import changed_text
    from finefit.spec.load import load_any, parse_any

    if not suggestions:
        raise UserError(
            "there is nothing to apply: the plan fits as it is"
            if fits
            else "no change was found that would make it fit"
        )
    if number > len(suggestions):
        raise UserError(
            f"there are {len(suggestions)} suggestions, not {number}", f"--apply 1 to --apply {len(suggestions)}"
        )
    changes = suggestions[number - 1].changes
    text = changed_text(target.read_text(encoding="utf-8-sig"), changes)
    if parse_any(text, where=str(target)) != load_any(target, changes):
        raise UserError(
            f"{', '.join(changes)} would mean something else in {target}, above its base",
            "change the base, or write the keys by hand",
        )
    write_text(target, text)
    open_console(as_json=as_json).print(f"{target} now says {', '.join(changes)}", soft_wrap=True)
