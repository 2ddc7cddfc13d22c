"""`finefit eval`: scores the answers of a run's checkpoints, of any model, or of a file."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from finefit.cli.console import AsJson, Runs, announce_models, open_console, print_json

_TARGET = (
    "A run directory, or PIPELINE/STAGE; a folder with a model or an adapter; hub:owner/name; embedded:smollm2-135m."
)
_TASK = "A task, a mapping in YAML, or a .yaml or .py file; may be repeated. By default those of the spec."
_DATA = "Rows to use instead of the run's own; required for a model."
_DEVICE = "By default the run's device, or a GPU if there is one."
_BASE = "The base model of an adapter, if its config does not name it."
_ANSWERS = "Score existing answers from this file, each with its prompt or id."
_SERVER = "Ask an OpenAI-compatible server: its URL, or its settings in YAML."
_BY = "Metric of the best checkpoint; by default the task's main score."


def evaluate(
    target: Annotated[str | None, typer.Argument(metavar="RUN_OR_MODEL", help=_TARGET)] = None,
    checkpoint: Annotated[str, typer.Option(help="For a run: final, best, base, a step number, or all.")] = "final",
    task: Annotated[list[str] | None, typer.Option(help=_TASK)] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help=_DATA)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="A seeded sample of the items instead of all.")] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help=_DEVICE)] = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help=_BASE)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Answers at a time; by default as many as fit.")] = None,
    answers: Annotated[Path | None, typer.Option(metavar="FILE", help=_ANSWERS)] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help=_SERVER)] = None,
    by: Annotated[str | None, typer.Option(metavar="METRIC", help=_BY)] = None,
    show: Annotated[int, typer.Option(min=0, help="Show this many answers, evenly spaced.")] = 0,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Score answers, each checkpoint in a process of its own. All items count; a failed answer scores zero.

    Examples:

      finefit eval runs/orders-1

      finefit eval runs/orders-1 --checkpoint all --limit 50

      finefit eval runs/orders-1 --data other.jsonl --task rouge --show 3

      finefit eval my-model/ --data test.jsonl --task exact_match

      finefit eval runs/orders-1 --server http://localhost:8000/v1

      finefit eval --answers theirs.jsonl --data test.jsonl --task rouge
    """
    console = open_console(as_json=as_json)
    with console.status("reading model and rows"):
        from finefit.report.live import RunView
        from finefit.report.scores import require_metric, sample_answers, score_boards, scores_document
        from finefit.run.eval_args import EvalArgs
        from finefit.run.evaluation import evaluate_all, open_evaluation

        args = EvalArgs(
            target=target,
            checkpoint=checkpoint,
            tasks=tuple(task or ()),
            data=data,
            limit=limit,
            device=device,
            base=base,
            max_new_tokens=max_new_tokens,
            batch=batch,
            answers=answers,
            server=server,
            runs=runs,
        )
        requests = open_evaluation(args)
    announce_models((request.subject.model for request in requests.requests), requests.run.path, console)
    with RunView(requests.run, console, log=requests.run.log, evaluates=True) as view:
        results = evaluate_all(requests, tick=view.tick, say=view.say)
    require_metric(results, by)
    if as_json:
        print_json(scores_document(results, requests.run.stages()[0], by=by))
        return
    console.print(score_boards(results, requests.run, by=by))
    for part in sample_answers(results, show):
        console.print(part)
    console.print(f"run      {requests.run.path}", soft_wrap=True)
