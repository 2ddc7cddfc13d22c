"""`finefit plan`: predicts what a run needs on a card, before it runs."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit import api
from finefit.cli.console import AsJson, Set, announce_code, open_console, planning, print_json
from finefit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.spec.pipeline import Pipeline

_CARD = (
    "A card's name, 24GiB, 8xA100-40GB, cpu or auto; with a price: A100-40GB@1.10/h. May be repeated; default: the "
    "spec's."
)
_STAGE = "The stage to show in full, if there are several; default: the one that needs the most memory."
_MEASURE = "Run one real step on the longest rows of this machine's card and compare."


def plan(
    target: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file.")],
    cards: Annotated[list[str] | None, typer.Option("--card", metavar="CARD", help=_CARD)] = None,
    overrides: Set = None,
    apply: Annotated[int | None, typer.Option(metavar="N", min=1, help="Write suggestion N into the spec.")] = None,
    stage: Annotated[str | None, typer.Option(metavar="STAGE", help=_STAGE)] = None,
    measure: Annotated[bool, typer.Option("--measure", help=_MEASURE)] = False,
    as_json: AsJson = False,
) -> None:
    """Predict what a run needs on a card, without a GPU and without weights: memory, the place of its peak, time, and
    changes that would make it fit. Every stage is planned before any of them has run.

    Exit code 0: it fits (on one of the cards at least). 1: it does not.

    Examples:

      finefit plan spec.yaml --card "RTX 4090"

      finefit plan spec.yaml --card "RTX 5070" --card A100-40GB@1.10/h --card cpu

      finefit plan spec.yaml --card 24GiB --apply 1
    """
    from finefit.facts.cards import parse_card
    from finefit.report.plan import plan_document, show_plan

    console = open_console(as_json=as_json)
    spec = api.load_spec(target, tuple(overrides or ()))
    pipeline = spec.pipeline
    if apply is not None and overrides:
        problem = "--apply writes into the spec, which --set overrides only for this command"
        raise UserError(problem, "write the overrides into the spec first")
    for card in cards or ():
        parse_card(card)  # a misspelt name is reported before anything is read
    if stage is not None:
        _require_training(pipeline, stage, target)
    announce_code(pipeline, spec.base, console)
    if measure:
        return _measure(target, pipeline, tuple(overrides or ()), console, as_json)
    with planning("rehearsing", console):
        found = api.plan(spec, cards or ())
    if as_json:
        print_json(plan_document(found))
    else:
        show_plan(found, console, now=datetime.now().astimezone(), only=stage)
    if apply is not None:
        console.print(f"wrote {', '.join(api.apply_suggestion(spec, found, apply))} to {target}", soft_wrap=True)
    elif not any(found.fits(at) for at in range(found.num_cards)):
        raise typer.Exit(1)
    return None


def _require_training(pipeline: "Pipeline", stage: str, target: Path) -> None:
    if pipeline.is_flat:
        raise UserError(f"--stage {stage} is for specs with stages, but {target} has none", "leave it out")
    if stage not in pipeline.stages:
        raise UserError(f"there is no stage {stage}", f"the stages are {', '.join(pipeline.order())}")
    if pipeline.stages[stage].kind != "train":
        problem = f"stage {stage} does not train, so there is nothing more to show"
        raise UserError(problem, "name a stage of kind train")


def _measure(target: Path, pipeline: "Pipeline", overrides: tuple[str, ...], console: "Console", as_json: bool) -> None:
    from finefit.report.layout import gib
    from finefit.run.command import measure_step

    if not pipeline.is_flat:
        problem = "--measure runs one real step, but a pipeline has steps in every stage"
        raise UserError(problem, "measure a spec that holds one of its trainings")
    with console.status("one real step on the longest rows"):
        found = measure_step(target, overrides)
    if as_json:
        return print_json(found)
    predicted, measured = gib(found["predicted_bytes"]), gib(found["measured_bytes"])
    line = f"{predicted} predicted, {measured} measured on {found['card']}: {found['error']:+.2%}"
    return console.print(line, soft_wrap=True)
