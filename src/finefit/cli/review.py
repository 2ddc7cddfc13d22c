"""`finefit review`: people judge answers without knowing whose they are."""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.review.session import Session
    from finefit.review.stack import Stack

TOKEN = "FINEFIT_TOKEN"
_SHORTEST_TOKEN = 16
_LOOPBACK = "127.0.0.1"


def review(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN[:CHECKPOINT] [RUN[:CHECKPOINT]]", help="One or two evaluated runs, or PIPELINE/STAGE."
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Answers made elsewhere: CSV or JSONL with prompt and answer, or answer_a and answer_b."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Whose answers are judged; by default the first task that all have a result for.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Of runs that name none: final, best, base or a step number.")
    ] = None,
    rater: Annotated[str | None, typer.Option(help="Who judges; the page asks otherwise.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the review: reviews/NAME.jsonl in the (first) run directory.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="A sample of the items, the same for every rater.")] = None,
    overlap: Annotated[
        int | None,
        typer.Option(
            min=0, help="So many items for every rater, each other one for one rater; by default all for all."
        ),
    ] = None,
    no_reference: Annotated[bool, typer.Option("--no-reference", help="Do not show the reference.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of a new review's order; by default drawn.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Judge here instead of on a page.")] = False,
    results: Annotated[
        bool, typer.Option("--results", help="What the verdicts come to so far; it names the models.")
    ] = False,
    export: Annotated[Path | None, typer.Option(help="Write all verdicts to this .jsonl or .csv file.")] = None,
    export_pairs: Annotated[
        Path | None, typer.Option(help="Write preference pairs for a DPO training to this .jsonl file.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Listen on another address than this machine's own loopback; raters then need a token.")
    ] = _LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    token: Annotated[
        bool, typer.Option("--token", help=f"Ask for a token on loopback too; it is that of ${TOKEN}, or a new one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Judge answers blind, on a local page or in the terminal: one model's as good or bad, or which of two is better.

    Verdicts are kept as they are given; the same command again goes on. Ctrl-C ends it.

    Examples:

      finefit review runs/orders-1

      finefit review runs/sft-1 runs/dpo-1:checkpoint-40 --rater ann

      finefit review runs/sft-1 runs/dpo-1 --results

      finefit review runs/medical-1/sft runs/medical-1/dpo

      finefit review --answers answers.csv --terminal
    """
    console = open_console(as_json=as_json)
    stack, folder = _stack(targets or [], answers, task=task, checkpoint=checkpoint, name=name)
    if results or export or export_pairs:
        return _report(
            stack, folder, console, limit=limit, shows=results, verdicts=export, pairs=export_pairs, as_json=as_json
        )
    from finefit.review.session import open_session

    with open_session(
        stack, folder, seed=seed, limit=limit, overlap=overlap, shows_reference=not no_reference
    ) as session:
        if terminal:
            _in_terminal(session, rater, console)
        else:
            _on_page(session, rater, console, host=host, port=port, asks_token=token, as_json=as_json)
    return None


def _stack(
    targets: list[str], answers: Path | None, *, task: str | None, checkpoint: str | None, name: str | None
) -> "tuple[Stack, Path]":
    """What is judged, and the folder that `reviews/` lies in."""
    from finefit.errors import UserError
    from finefit.review.runs import Named, stack_of_runs

    if name is not None and (not name.strip(".") or Path(name).name != name):
        raise UserError(f"--name {name} is no name of a file", "give a plain name: it becomes reviews/NAME.jsonl")
    if answers is not None:
        if targets:
            raise UserError(
                "runs and --answers were both given",
                "a file is judged by itself: it may hold the answers of two models",
            )
        return _stack_of_file(answers, name), answers.parent
    if not 1 <= len(targets) <= 2:
        raise UserError(
            f"{len(targets)} runs were named; one is judged as good or bad, two against one another", "name one or two"
        )
    named = [Named.parse(target, checkpoint) for target in targets]
    return stack_of_runs(named, task=task, name=name), named[0].run.path


def _stack_of_file(path: Path, name: str | None) -> "Stack":
    from finefit.data.files import find_files
    from finefit.data.records import read_records
    from finefit.data.rows import BadRow
    from finefit.errors import DataError
    from finefit.review.elsewhere import stack_of_rows

    rows = []
    for file in find_files(path.name, path.parent, split="test"):
        for record in read_records(file):
            if isinstance(record, BadRow):
                raise DataError(f"{record.place} {record.reason}", "mend it: all items count")
            rows.append((f"{record.source}:{record.number}", record.value))
    return stack_of_rows(rows, file=path.name, name=name or path.stem)


def _report(
    stack: "Stack",
    folder: Path,
    console: "Console",
    *,
    limit: int | None,
    shows: bool,
    verdicts: Path | None,
    pairs: Path | None,
    as_json: bool,
) -> None:
    from finefit.report.review import pairs_words, results_document, results_view
    from finefit.review.export import export_pairs, export_verdicts
    from finefit.review.results import results_of
    from finefit.review.session import journal_of, sampled
    from finefit.review.verdicts import read_entries

    entries = read_entries(journal_of(folder, stack.name))
    stack = sampled(stack, entries, limit)
    found = results_of(stack, entries)
    document = results_document(found)
    if shows and not as_json:
        console.print(results_view(found))
    if verdicts is not None:
        count = export_verdicts(verdicts, stack, entries)
        document["exported"] = {"path": str(verdicts), "verdicts": count}
        console.print(f"{count} verdicts written to {verdicts}", soft_wrap=True)
    if pairs is not None:
        made = export_pairs(pairs, stack, entries)
        document["pairs"] = {"path": str(pairs), "pairs": len(made.rows), "left_out": made.left_out}
        console.print(f"{pairs_words(made)}; written to {pairs}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(document, indent=2))


def _in_terminal(session: "Session", rater: str | None, console: "Console") -> None:
    from finefit.cli.judging import Judging, open_keys

    with open_keys() as keys:
        if rater is None:
            console.print("your name: ", end="")
            rater = keys.line()
        known = _known(rater)
        try:
            Judging(session, known, console, keys).judge_all()
        except KeyboardInterrupt:  # as good an end as any: all is kept
            console.print()
    turn = session.turn(known)
    console.print(f"{turn.judged} judged, {turn.skipped} skipped of {turn.total}; the same command goes on")


def _known(rater: str) -> str:
    from finefit.errors import UserError
    from finefit.review.session import Refused, rater_name

    try:
        return rater_name(rater)
    except Refused as reason:
        raise UserError(str(reason), "give another --rater") from None


def _on_page(
    session: "Session", rater: str | None, console: "Console", *, host: str, port: int, asks_token: bool, as_json: bool
) -> None:
    from finefit.web.guard import Guard, Token
    from finefit.web.review import review_app
    from finefit.web.serve import bound, is_loopback, names_of, serve

    known = None if rater is None else _known(rater)
    given = _given_token()
    with bound(host, port) as listening:
        port = listening.getsockname()[1]
        token = (
            Token(secret=given or secrets.token_urlsafe(24), port=port) if asks_token or not is_loopback(host) else None
        )
        names = names_of(host, port)
        address = f"http://{names[0]}/" + (f"#token={token.secret}" if token and not given else "")
        app = Guard(review_app(session, rater=known, token=token), hosts=names, token=token)

        def ready() -> None:
            beside = f", with #token= and the value of ${TOKEN} behind it" if token and given else ""
            console.print(f"judge at {address}{beside}\nCtrl-C ends it", soft_wrap=True)
            if as_json:
                typer.echo(
                    json.dumps(
                        {"url": address, "items": len(session.stack.sheets), "models": len(session.stack.models)}
                    )
                )

        with suppress(KeyboardInterrupt):  # how a server ends
            serve(app, listening, ready=ready)
    console.print("ended; every verdict is kept, and the same command goes on")


def _given_token() -> str | None:
    """Not an option: what stands on a command line is seen by everybody on the machine."""
    from finefit.errors import UserError

    given = os.environ.get(TOKEN)
    if given is not None and len(given) < _SHORTEST_TOKEN:
        raise UserError(
            f"${TOKEN} has {len(given)} characters, and can be guessed",
            f"give at least {_SHORTEST_TOKEN}, or none: then one is made",
        )
    return given
