"""`finefit init`: writes a spec, from a data file or from a config of another tool."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finefit.cli.console import AsJson, open_console, planning, print_json
from finefit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.drafts.data_file import DataFile
    from finefit.drafts.from_data import Choices, Proposal

_DATA = "A file of rows, a folder, or hf://datasets/owner/name."
_FROM = "A config of axolotl, LLaMA-Factory, TRL, Unsloth (also a notebook or script) or torchtune to translate."
_TOOL = "With --from: the tool, if its config does not show it, such as axolotl, llama-factory or trl."
_DEVICES = "With --from: the number of devices that the other tool was launched on."
_INFO = "With --from: LLaMA-Factory's dataset_info.json."
_OUT = "The spec to write."
_FORCE = "Replace a spec that is there."
_MODEL = "The base model: a hub id, a folder, or smollm2-135m. Default: the largest that fits the card."
_TASK = "How answers are scored, such as exact_match, json_match or rouge. Default: by the answers."
_CARD = "The card to plan for. Default: this machine's."
_EPOCHS = "Passes over the rows. Default: 1 to 3, by their number."
_HOURS = "At most this long, with fewer epochs if need be."
_YES = "Take every default without asking; also without a terminal."


def init(
    data: Annotated[str | None, typer.Argument(help=_DATA)] = None,
    config: Annotated[Path | None, typer.Option("--from", metavar="CONFIG", help=_FROM)] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help=_MODEL)] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK", help=_TASK)] = None,
    card: Annotated[str | None, typer.Option("--card", metavar="CARD", help=_CARD)] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", min=0.01, max=1000, help=_EPOCHS)] = None,
    hours: Annotated[float | None, typer.Option("--hours", min=0.01, help=_HOURS)] = None,
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

    Exit code 0: the spec is written. 1: it is written, but its plan does not fit.

    Examples:

      finefit init train.jsonl --card "RTX 4090"

      finefit init train.jsonl --model Qwen/Qwen3-4B --yes

      finefit init --from qlora.yml --devices 4
    """
    if config is not None and data is not None:
        raise UserError("a data file and --from are both given", "give one of them")
    _require_free(out, force=force)
    console = open_console(as_json=as_json)
    if config is not None:
        return _from_config(config, out, console, as_json, tool=tool, devices=devices, dataset_info=dataset_info)
    ask = Questions(is_asked=not (yes or as_json) and sys.stdin.isatty())
    if data is None:
        data = ask("data file", None, None, str)
    asked = {"model": model, "task": task, "card": card, "epochs": epochs, "hours": hours}
    return _from_data(str(data), out, console, as_json, ask, asked)


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


class Questions:
    """Asks on a terminal, and takes flags and defaults otherwise."""

    def __init__(self, *, is_asked: bool) -> None:
        self.is_asked, self.count = is_asked, 0

    def __call__(self, what: str, given: Any, default: Any, kind: Callable[[str], Any]) -> Any:
        if given is not None:
            return given
        if not self.is_asked:
            if default is None:
                raise UserError(f"no {what} is given, and there is no terminal to ask on", "see finefit init --help")
            return default
        self.count += 1
        return typer.prompt(what, default=default, type=kind)


def _from_data(path: str, out: Path, console: "Console", as_json: bool, ask: Questions, asked: dict[str, Any]) -> None:
    from finefit.artifacts.atomic import write_text
    from finefit.drafts import from_data
    from finefit.drafts.data_file import look_at
    from finefit.facts.cards import parse_card
    from finefit.report.drafts import draft_document, show_data, show_proposals

    base = out.parent
    with console.status("reading the rows"):
        found = look_at(_from_folder(path, base), base)
    show_data(found, console)
    card = str(ask("card", asked["card"], from_data.default_card(), str))
    parse_card(card)
    epochs = float(ask("epochs", asked["epochs"], from_data.default_epochs(found), float))
    proposals: tuple[Proposal, ...] = ()
    if asked["model"] is None and not parse_card(card).is_cpu and not found.has_images:
        with planning("planning sizes", console):
            proposals = from_data.propose(found, card, epochs, base)
        show_proposals(proposals, card, console)
    model = str(ask("base model", asked["model"], from_data.default_model(found, card, proposals), str))
    task = ask("what a good answer is scored by", asked["task"], found.task, str)
    chosen = from_data.Choices(model=model, task=_known_task(task), card=card, epochs=epochs, hours=asked["hours"])
    planned = _planned(found, chosen, base, console)
    if chosen.hours is not None and (planned is None or planned.total_seconds is None):
        problem = f"how long {model} takes on {card} is not known, so --hours {chosen.hours:g} cannot be kept"
        raise UserError(problem, "leave it out, give --epochs, and see what `finefit plan` says")
    if planned is not None:
        chosen = from_data.within_hours(chosen, planned)
    write_text(out, from_data.text_of(found, chosen, base))
    if as_json:
        print_json(draft_document(found, chosen, proposals, str(out), ask.count))
    console.print(f"\nwrote {out}; next: finefit plan {out}, finefit check {out}, finefit run {out}\n", soft_wrap=True)
    _show_plan(out, found, chosen, console)


def _from_folder(path: str, base: Path) -> str:
    """Returns a path that starts from the spec's folder instead of the current one."""
    place = Path(path).expanduser()
    if "://" in path or not place.exists():
        return path
    found, root = place.resolve(), base.resolve()
    return found.relative_to(root).as_posix() if found.is_relative_to(root) else found.as_posix()


def _known_task(task: str | None) -> str | None:
    from finefit.spec.tasks import task_kinds

    if task in (None, "none"):
        return None
    if task not in task_kinds():
        raise UserError(f"there is no task {task}", f"the tasks are {', '.join(task_kinds())}, or none")
    return task


def _planned(found: "DataFile", chosen: "Choices", base: Path, console: "Console") -> Any:
    """The plan by the model's shape, where it is known; only needed to keep to a time."""
    from finefit.drafts.from_data import plan_of
    from finefit.drafts.sizes import size_named

    size = size_named(chosen.model)
    if chosen.hours is None or size is None:
        return None
    with planning("planning", console):
        return plan_of(found, size, chosen.card, chosen.epochs, base)


def _show_plan(out: Path, found: "DataFile", chosen: "Choices", console: "Console") -> None:
    """`finefit plan` of the result; without the model's files by its shape, where that is known."""
    from datetime import datetime

    from finefit.drafts.from_data import forecast_shape, parse_values, spec_values
    from finefit.drafts.sizes import size_named
    from finefit.errors import ModelError
    from finefit.facts.files import free_bytes
    from finefit.plan.stage_costs import forecast_stages, is_this_machine, training_costs
    from finefit.report.plan import RunPlan, show_plan
    from finefit.spec.load import load_pipeline

    base, size = out.resolve().parent, size_named(chosen.model)
    pipeline = load_pipeline(out)
    with planning("rehearsing", console):
        try:
            costs = forecast_stages(pipeline, base, cards=(chosen.card,))
        except ModelError as error:
            if size is None:
                console.print(f"not planned: {error.problem}\n  {error.remedy}", soft_wrap=True)
                return
            console.print("planned by the model's shape, since its files are not here", soft_wrap=True)
            values = spec_values(found, chosen, base) | {"model": {"kind": "shape", "config": size.config}}
            spec = parse_values({key: value for key, value in values.items() if key != "evaluate"})
            costs = {
                name: training_costs((forecast_shape(spec, found, chosen.card, base),)) for name in pipeline.order()
            }
    free = (free_bytes(Path("runs")) if is_this_machine(chosen.card) else None,)
    plan = RunPlan(name=pipeline.name, is_flat=pipeline.is_flat, costs=costs, free=free)
    show_plan(plan, console, now=datetime.now().astimezone())
    if not plan.fits():
        raise typer.Exit(1)
