"""`finefit plan`: what a run will take on a card, known before it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.code import tell_code
from finefit.cli.console import open_console
from finefit.cli.options import AsJson, Set
from finefit.cli.plan_stages import Wishes, apply_suggestion, plan_stages
from finefit.errors import UserError

if TYPE_CHECKING:
    from finefit.artifacts.forecasts import Forecast

Cards = Annotated[
    list[str] | None,
    typer.Option(
        "--card",
        metavar="CARD",
        help="A card's name, 24GiB, 8xA100-40GB, cpu or auto; with a price: A100-40GB@1.10/h. May be repeated; default: the spec's.",
    ),
]
Apply = Annotated[int | None, typer.Option("--apply", metavar="N", min=1, help="Write suggestion N into the spec.")]
InFull = Annotated[
    str | None,
    typer.Option(
        "--stage", metavar="STAGE", help="Of several stages: which one to show in full; default: the fullest."
    ),
]


def plan(
    target: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file.")],
    cards: Cards = None,
    overrides: Set = None,
    apply: Apply = None,
    stage: InFull = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run one real step on the longest rows of this machine's card and compare."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a run needs on a card, without a GPU and without weights: memory, its peak's place, time, and what would make it fit. Of a
    spec with stages every stage is planned, before any of them has run.

    Exit code 0: it fits (on one of the cards at least). 1: it does not.

    Examples:

      finefit plan spec.yaml --card "RTX 4090"

      finefit plan spec.yaml --card "RTX 5070" --card A100-40GB@1.10/h --card cpu

      finefit plan spec.yaml --card 24GiB --apply 1
    """
    from finefit.facts.cards import parse_card
    from finefit.pipeline.forecasting import forecast, lengths_of
    from finefit.report.plan import forecast_document, in_order
    from finefit.spec.load import load_any
    from finefit.spec.stages import Pipeline

    console = open_console(as_json=as_json)
    spec = load_any(target, tuple(overrides or ()))
    if apply is not None and overrides:
        raise UserError(
            "--apply writes into the spec, which --set overrides only for this command",
            "write the overrides into the spec first",
        )
    asked = tuple(cards or (spec.card,))
    for card in asked:
        parse_card(card)  # a misspelt name is told before anything is read
    tell_code(spec, target.resolve().parent, console)
    if isinstance(spec, Pipeline):
        return plan_stages(target, spec, asked, Wishes(apply=apply, stage=stage, measure=measure, as_json=as_json))
    if stage is not None:
        raise UserError(f"--stage {stage} is for specs with stages, and {target} has none", "leave it out")
    if measure:
        return _measure(target, tuple(overrides or ()), as_json=as_json)
    with console.status("rehearsing"):
        base = target.resolve().parent
        forecasts = forecast(spec, base, asked, lengths_of(spec, base))
    if as_json:
        typer.echo(json.dumps(forecast_document({spec.objective.kind: forecasts}), indent=2))
    else:
        _show(forecasts, spec.objective.kind)
    if apply is not None:
        apply_suggestion(target, in_order(forecasts[0].suggestions), apply, fits=forecasts[0].fits, as_json=as_json)
    elif not any(f.fits and not f.gradients.unreached and not f.gradients.frozen for f in forecasts):
        raise typer.Exit(1)
    return None


def _measure(target: Path, overrides: tuple[str, ...], *, as_json: bool) -> None:
    from finefit.pipeline.measuring import measure_step

    console = open_console(as_json=as_json)
    with console.status("one real step on the longest rows"):
        found = measure_step(target, overrides)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from finefit.report.units import gib

    words = f"{gib(found['foretold_bytes'])} foretold, {gib(found['measured_bytes'])} measured on {found['card']}: {found['error']:+.2%}"
    console.print(words, soft_wrap=True)


def _show(forecasts: "tuple[Forecast, ...]", stage: str) -> None:
    from datetime import datetime

    from finefit.report.plan import show_forecast
    from finefit.report.plan_cards import show_cards

    console = open_console()
    if len(forecasts) > 1:
        show_cards(forecasts, console, now=datetime.now().astimezone())
    else:
        show_forecast(forecasts[0], console, stage=stage)
