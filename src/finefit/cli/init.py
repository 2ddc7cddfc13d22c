"""`finefit init`: writes a spec, from a data file or from a config of another tool."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from finefit.cli.console import AsJson, open_console, planning, print_json
from finefit.errors import HubUnreachable, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.drafts.data_file import InspectedData
    from finefit.drafts.from_data import Choices, Proposal
    from finefit.report.plan import RunPlan

T = TypeVar("T")
_DATA = "A file of rows, a folder, or hf://datasets/owner/name."
_FROM = "A config of axolotl, LLaMA-Factory, TRL, Unsloth (also a notebook or script) or torchtune to translate."
_FIELDS = 'What the columns hold, as in a spec: "{prompt: ticket, answer: team}". Default: recognised.'
_TOOL = "With --from: the tool, if its config does not show it, such as axolotl, llama-factory or trl."
_DEVICES = "With --from: the number of devices that the other tool was launched on."
_INFO = "With --from: LLaMA-Factory's dataset_info.json."
_OUT = "The spec to write."
_FORCE = "Replace a spec that is there."
_MODEL = "The base model: a hub id, a folder, or smollm2-135m. Default: the largest that fits the card."
_TASK = "How answers are scored, such as exact_match, json_match or rouge. Default: by the answers."
_CARD = "The card to plan for. Default: this machine's."
_EPOCHS = "Passes over the rows. Default: 1 to 3, by their number."
_HOURS = "Train for at most this long, with fewer epochs if need be."
_YES = "Take every default without asking; also without a terminal."


def init(
    data: Annotated[str | None, typer.Argument(help=_DATA)] = None,
    config: Annotated[Path | None, typer.Option("--from", metavar="CONFIG", help=_FROM)] = None,
    fields: Annotated[str | None, typer.Option("--fields", metavar="FIELDS", help=_FIELDS)] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help=_MODEL)] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK", help=_TASK)] = None,
    card: Annotated[str | None, typer.Option("--card", metavar="CARD", help=_CARD)] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", min=0.01, max=1000, help=_EPOCHS)] = None,
    hours: Annotated[float | None, typer.Option("--hours", min=0.001, help=_HOURS)] = None,
    yes: Annotated[bool, typer.Option("--yes", help=_YES)] = False,
    out: Annotated[Path, typer.Option("--out", metavar="SPEC", help=_OUT)] = Path("spec.yaml"),
    tool: Annotated[str | None, typer.Option("--tool", metavar="TOOL", help=_TOOL)] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, max=1024, help=_DEVICES)] = 1,
    dataset_info: Annotated[Path | None, typer.Option("--dataset-info", metavar="FILE", help=_INFO)] = None,
    force: Annotated[bool, typer.Option("--force", help=_FORCE)] = False,
    as_json: AsJson = False,
) -> None:
    """Write a spec that fits: from a data file, with at most five questions, or from a config of another tool, every
    key of which is translated, the same in both, or listed as not carried over.

    The questions are the data file, the card, the base model, how answers are scored, and the hours. Each has a flag,
    and all but the first have a default.

    Exit code 0: the spec is written. 1: it is written, but its plan does not fit. 2: rows, model or a flag cannot be
    used, and nothing is written.

    Examples:

      finefit init train.jsonl --card "RTX 4090"

      finefit init train.jsonl --model Qwen/Qwen3-4B --yes

      finefit init tickets.csv --fields "{prompt: ticket, answer: team}"

      finefit init --from qlora.yml --devices 4
    """
    if config is not None and data is not None:
        raise UserError("a data file and --from are both given", "give one of them")
    _require_free(out, force=force)
    console = open_console(as_json=as_json)
    if config is not None:
        return _from_config(config, out, console, as_json, tool=tool, devices=devices, dataset_info=dataset_info)
    ask = InitQuestions(is_asked=not (yes or as_json) and sys.stdin.isatty())
    given: dict[str, Any] = {"data": data, "fields": fields, "card": card, "model": model, "task": task}
    given |= {"epochs": epochs, "hours": hours}
    return _from_data(out, console, as_json, ask, given)


def _require_free(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise UserError(f"{out} exists, and would be replaced", "give another --out, or --force")
    if not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} is not there", "create it, or give another --out")


def _from_config(
    config: Path,
    out: Path,
    console: "Console",
    as_json: bool,
    *,
    tool: str | None,
    devices: int,
    dataset_info: Path | None,
) -> None:
    from finefit.artifacts.atomic import write_text
    from finefit.drafts.from_config import document, import_config
    from finefit.report.imports import show_import

    with console.status("reading the config, and the rows that are here"):
        found = import_config(config, out, devices=devices, dataset_info=dataset_info, tool=tool)
    write_text(out, found.text)
    if as_json:
        print_json(document(found) | {"written": str(out)})
    else:
        show_import(found, console, written=str(out))


class InitQuestions:
    """Asks on a terminal, again after an answer that cannot be used; takes flags and defaults otherwise."""

    def __init__(self, *, is_asked: bool) -> None:
        self.is_asked = is_asked

    def __call__(self, what: str, given: Any, default: str | None, read: Callable[[Any], T]) -> T:
        if given is not None:
            return read(given)
        if not self.is_asked:
            if default is None:
                raise UserError(f"no {what} is given, and there is no terminal to ask on", "see finefit init --help")
            return read(default)

        def read_again(text: str) -> T:
            try:
                return read(text)
            except UserError as error:
                raise typer.BadParameter(str(error)) from None

        answer: T = typer.prompt(what, default=default, value_proc=read_again)
        return answer


def _from_data(out: Path, console: "Console", as_json: bool, ask: InitQuestions, given: dict[str, Any]) -> None:
    """Nothing is written before the spec is planned: rows or a model that it cannot be planned with end the command."""
    from datetime import datetime

    from finefit.artifacts.atomic import write_text
    from finefit.drafts import from_data
    from finefit.facts.cards import parse_card
    from finefit.report.drafts import draft_document, show_data, show_proposals
    from finefit.report.plan import show_plan

    for name, read in (("card", _known_card), ("task", _known_task)):
        if given[name] is not None:
            read(given[name])  # a misspelt flag is reported before anything is read
    base = out.parent
    found = ask("data file", given["data"], None, lambda path: _read_rows(path, given["fields"], base, console))
    show_data(found, console)
    card = ask("card (a name, 24GiB, cpu, or auto)", given["card"], from_data.default_card(), _known_card)
    epochs = given["epochs"] or from_data.default_epochs(found)
    proposals: tuple[Proposal, ...] = ()
    if given["model"] is None and not parse_card(card).is_cpu and not found.num_images:
        with planning("planning sizes", console):
            proposals = from_data.propose(found, card, epochs, base)
        show_proposals(proposals, card, console)
    usual = from_data.default_model(found, card, proposals)
    what = "base model (a hub id, a folder, or smollm2-135m)"
    model = ask(what, given["model"], usual, lambda name: _known_model(name, base))
    task = ask("task that scores answers, or none", given["task"], found.task or "none", _known_task)
    chosen = from_data.Choices(model=model, task=task, card=card, epochs=epochs)
    plan = _plan(found, chosen, out, console)
    seconds = plan.seconds() if plan is not None and plan.fits() else None
    if seconds is not None:
        usual = from_data.rounded_hours(seconds)
        hours = ask("hours at most, with fewer epochs if need be", given["hours"], usual, _positive)
        shorter = from_data.within_hours(chosen, seconds, hours)
        if shorter != chosen:
            chosen, plan = shorter, _plan(found, shorter, out, console)
    elif given["hours"] is not None and (plan is None or plan.fits()):
        problem = f"how long {model} takes on {card} is not known, so --hours {given['hours']:g} cannot be kept"
        raise UserError(problem, "leave it out, give --epochs, and see what `finefit plan` says")
    if plan is not None:
        console.print()
        show_plan(plan, console, now=datetime.now().astimezone())
    write_text(out, from_data.text_of(found, chosen, base))
    if as_json:
        print_json(draft_document(found, chosen, proposals, written=str(out), plan=plan))
    following = f"next: finefit check {out}, finefit run {out}"
    if plan is None:
        following = f"next, where the model can be fetched: finefit plan {out}"
    elif not plan.fits():
        following = "its plan does not fit: change it, or give another --model or --card with --force"
    console.print(f"\nwrote {out}; {following}", soft_wrap=True)
    if plan is not None and not plan.fits():
        raise typer.Exit(1)


def _read_rows(path: str, fields: str | None, base: Path, console: "Console") -> "InspectedData":
    from finefit.drafts.data_file import look_at
    from finefit.drafts.from_data import parse_fields

    if not path.strip():
        raise UserError("the data file has no name", "name a file of rows, a folder, or hf://datasets/owner/name")
    with console.status("reading the rows"):
        return look_at(_from_folder(path, base), base, None if fields is None else parse_fields(fields))


def _from_folder(path: str, base: Path) -> str:
    """Returns a path that starts from the spec's folder instead of the current one."""
    place = Path(path).expanduser()
    if "://" in path or not place.exists():
        return path
    found, root = place.resolve(), base.resolve()
    return found.relative_to(root).as_posix() if found.is_relative_to(root) else found.as_posix()


def _known_model(name: str, base: Path) -> str:
    if not name.strip():
        raise UserError("the base model has no name", "name a hub id, a folder, or smollm2-135m")
    return _from_folder(name, base)


def _known_card(text: str) -> str:
    from finefit.facts.cards import parse_card

    parse_card(text)
    return text


def _known_task(task: str) -> str | None:
    from finefit.spec.tasks import task_kinds

    if task == "none":
        return None
    if task not in task_kinds():
        raise UserError(f"there is no task {task}", f"the tasks are {', '.join(task_kinds())}, or none")
    return task


def _positive(hours: str | float) -> float:
    try:
        found = float(hours)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise UserError(f"{hours} is not a number of hours", "give one such as 0.5 or 12")
    return found


def _plan(found: "InspectedData", chosen: "Choices", out: Path, console: "Console") -> "RunPlan | None":
    """What `finefit plan` will say of the spec. A model that cannot be fetched is planned by its shape; None if that is
    not known."""
    from finefit import api
    from finefit.drafts import from_data
    from finefit.drafts.sizes import SIZES, size_named
    from finefit.plan.stage_costs import training_costs
    from finefit.report.plan import RunPlan
    from finefit.results import SpecFile
    from finefit.spec.load import parse_any
    from finefit.spec.pipeline import Pipeline

    text = from_data.text_of(found, chosen, out.parent)
    spec = SpecFile(path=out, overrides=(), pipeline=Pipeline.of(parse_any(text, where=str(out))))
    with planning("rehearsing", console):
        try:
            return api.plan(spec)
        except HubUnreachable as error:
            console.print(f"{error.problem}\n{error.remedy}", soft_wrap=True)
        size = size_named(chosen.model)
        if size is None:
            known = ", ".join(one.id for one in SIZES)
            console.print(f"so it is not planned; without its files, plans are made for {known}", soft_wrap=True)
            return None
        console.print(f"planned by the shape of {size.id}, since its files are not here", soft_wrap=True)
        forecast = from_data.plan_of(found, size, chosen.card, chosen.epochs, out.parent)
        costs = {name: training_costs((forecast,)) for name in spec.pipeline.order()}
        return RunPlan(name=spec.pipeline.name, is_flat=True, costs=costs)
