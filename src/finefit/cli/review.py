"""`finefit review`: people judge answers without knowing which model gave them."""

import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.console import LOOPBACK, AsJson, Host, Port, UseToken, open_console, print_json
from finefit.errors import DataError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.review.items import ReviewSet
    from finefit.review.session import Session

_RUNS = "RUN[:CHECKPOINT] [RUN[:CHECKPOINT]]"
_TARGETS = "One or two evaluated runs, or PIPELINE/STAGE."
_ANSWERS = "Answers from a file: CSV or JSONL with prompt and answer, or with prompt, answer_a and answer_b."
_TASK = "The task whose answers are judged; by default the first one that all runs have results for."
_CHECKPOINT = "For runs given without one: final, best, base or a step number."
_NAME = "Name of the review: reviews/NAME.jsonl in the (first) run directory."
_OVERLAP = (
    "Show this many items to every rater, and each of the others to one rater; by default all items for all raters."
)
_EXPORT_PAIRS = "Write preference pairs for DPO training to this .jsonl file."


def review(
    targets: Annotated[list[str] | None, typer.Argument(metavar=_RUNS, help=_TARGETS)] = None,
    answers: Annotated[Path | None, typer.Option(help=_ANSWERS)] = None,
    task: Annotated[str | None, typer.Option(help=_TASK)] = None,
    checkpoint: Annotated[str | None, typer.Option(help=_CHECKPOINT)] = None,
    rater: Annotated[str | None, typer.Option(help="Who judges; otherwise the page asks.")] = None,
    name: Annotated[str | None, typer.Option(help=_NAME)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="A sample of the items, the same for every rater.")] = None,
    overlap: Annotated[int | None, typer.Option(min=0, help=_OVERLAP)] = None,
    no_reference: Annotated[bool, typer.Option("--no-reference", help="Do not show the reference.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of a new review's order; random by default.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Judge here instead of on a page.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Show the results so far; they name the models.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write all verdicts to this .jsonl or .csv file.")] = None,
    export_pairs: Annotated[Path | None, typer.Option(help=_EXPORT_PAIRS)] = None,
    host: Host = LOOPBACK,
    port: Port = 0,
    token: UseToken = False,
    as_json: AsJson = False,
) -> None:
    """Judge answers blind, on a local page or in the terminal: one model's as good or bad, or which of two is better.

    Verdicts are saved as they are given; the same command continues the review. Ctrl-C ends it.

    Examples:

      finefit review runs/orders-1

      finefit review runs/sft-1 runs/dpo-1:checkpoint-40 --rater ann

      finefit review runs/sft-1 runs/dpo-1 --results

      finefit review runs/medical-1/sft runs/medical-1/dpo

      finefit review --answers answers.csv --terminal
    """
    console = open_console(as_json=as_json)
    review_set, folder = _review_set(targets or [], answers, task=task, checkpoint=checkpoint, name=name)
    if results or export or export_pairs:
        to = {"verdicts": export, "pairs": export_pairs}
        return _report(review_set, folder, console, limit=limit, shows=results, as_json=as_json, **to)
    from finefit.review.session import open_session

    shown = not no_reference
    with open_session(review_set, folder, seed=seed, limit=limit, overlap=overlap, shows_reference=shown) as session:
        if terminal:
            _in_terminal(session, rater, console)
        else:
            _on_page(session, rater, console, host=host, port=port, asks_token=token, as_json=as_json)
    return None


def _review_set(
    targets: list[str], answers: Path | None, *, task: str | None, checkpoint: str | None, name: str | None
) -> "tuple[ReviewSet, Path]":
    """Returns the answers to judge, and the folder that holds `reviews/`."""
    from finefit.review.items import RunTarget, review_set_of_rows, review_set_of_runs

    if name is not None and (not name.strip(".") or Path(name).name != name):
        raise UserError(f"--name {name} is not a file name", "give a plain name: it becomes reviews/NAME.jsonl")
    if answers is not None:
        if targets:
            problem = "both runs and --answers were given"
            raise UserError(problem, "review the file by itself: it may hold the answers of two models")
        from finefit.data.files import find_files
        from finefit.data.records import read_records
        from finefit.data.rows import BadRow

        rows = []
        files = find_files(answers.name, answers.parent, split="test")
        for record in chain.from_iterable(map(read_records, files)):
            if isinstance(record, BadRow):
                raise DataError(f"{record.place} {record.reason}", "correct the row: all items count")
            rows.append((record.place, record.value))
        return review_set_of_rows(rows, file=answers.name, name=name or answers.stem), answers.parent
    if not 1 <= len(targets) <= 2:
        problem = f"{len(targets)} runs were named; one run is judged as good or bad, two are judged against each other"
        raise UserError(problem, "name one or two")
    named = [RunTarget.parse(target, checkpoint) for target in targets]
    return review_set_of_runs(named, task=task, name=name), named[0].run.path


def _report(
    review_set: "ReviewSet",
    folder: Path,
    console: "Console",
    *,
    limit: int | None,
    shows: bool,
    verdicts: Path | None,
    pairs: Path | None,
    as_json: bool,
) -> None:
    from finefit.report.review import describe_pairs, results_document, results_view
    from finefit.review.export import export_pairs, export_verdicts
    from finefit.review.session import journal_of, sampled
    from finefit.review.verdicts import read_entries, results_of

    entries = read_entries(journal_of(folder, review_set.name))
    review_set = sampled(review_set, entries, limit)
    found = results_of(review_set, entries)
    document = results_document(found)
    if shows and not as_json:
        console.print(results_view(found))
    if verdicts is not None:
        count = export_verdicts(verdicts, review_set, entries)
        document["exported"] = {"path": str(verdicts), "verdicts": count}
        console.print(f"{count} verdicts written to {verdicts}", soft_wrap=True)
    if pairs is not None:
        made = export_pairs(pairs, review_set, entries)
        document["pairs"] = {"path": str(pairs), "pairs": len(made.rows), "left_out": made.left_out}
        console.print(f"{describe_pairs(made)}; written to {pairs}", soft_wrap=True)
    if as_json:
        print_json(document)


def _in_terminal(session: "Session", rater: str | None, console: "Console") -> None:
    from finefit.cli.review_terminal import judge_all, open_keys

    with open_keys() as keys:
        if rater is None:
            console.print("your name: ", end="")
            rater = keys.line()
        name = _rater_name(rater)
        try:
            judge_all(session, name, console, keys)
        except KeyboardInterrupt:  # everything is saved
            console.print()
    turn = session.turn(name)
    console.print(f"{turn.judged} judged, {turn.skipped} skipped of {turn.total}; the same command continues")


def _rater_name(rater: str) -> str:
    from finefit.review.session import Refused, rater_name

    try:
        return rater_name(rater)
    except Refused as reason:
        raise UserError(str(reason), "give another --rater") from None


def _on_page(
    session: "Session", rater: str | None, console: "Console", *, host: str, port: int, asks_token: bool, as_json: bool
) -> None:
    from finefit.web.review import review_app
    from finefit.web.server import serve_page

    name = None if rater is None else _rater_name(rater)

    def ready(address: str, hint: str) -> None:
        console.print(f"judge at {address}{hint}\nCtrl-C ends the review", soft_wrap=True)
        if as_json:
            counts = {"items": len(session.review_set.items), "models": len(session.review_set.models)}
            typer.echo(json.dumps({"url": address, **counts}))

    serve_page(
        lambda token: review_app(session, rater=name, token=token),
        host=host,
        port=port,
        asks_token=asks_token,
        ready=ready,
    )
    console.print("ended; all verdicts are saved, and the same command continues the review")
