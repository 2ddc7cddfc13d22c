"""`finefit export`: a trained model as a folder or file for other programs, proved equal to what was trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from finefit import api
from finefit.cli.console import AsJson, open_console, print_json, set_torch_variables

if TYPE_CHECKING:
    from finefit.results import Exported

_TARGET = (
    "A run directory, or PIPELINE/STAGE, or RUN:CHECKPOINT; a folder with a model or an adapter; hub:owner/name; "
    "embedded:smollm2-135m."
)
_TO = "adapter, merged[:bf16|fp16|fp32], gguf[:q8_0|q4_k_m|...], gguf-lora; several with commas, or repeated."
_OUT = "A folder that does not exist yet, or holds an earlier export of the same. By default exports/NAME."
_CHECKPOINT = "Of a run: best, final, or a step number. By default the best, where validation chose one."
_ONTO = (
    "What an adapter that was trained on 4 or 8 bits is merged into: the original weights, or those that it was "
    "trained on, unpacked."
)
_ACCEPT = "Publish what is worse than its bound, too; export.json records it."
_BASE = "The model below an adapter, if its config does not name it."
_PUSH = "Upload the export to this repository of the hub."


def export(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help=_TARGET)],
    to: Annotated[list[str], typer.Option(metavar="FORMAT", help=_TO)],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help=_OUT)] = None,
    checkpoint: Annotated[str | None, typer.Option(help=_CHECKPOINT)] = None,
    onto: Annotated[Literal["original", "trained"], typer.Option(help=_ONTO)] = "original",
    base: Annotated[str | None, typer.Option(metavar="MODEL", help=_BASE)] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts on which an export is compared.")] = 16,
    with_modelfile: Annotated[bool, typer.Option("--ollama", help="Write a Modelfile for ollama.")] = False,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help=_PUSH)] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a public repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --push: show what would be uploaded.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help=_ACCEPT)] = False,
    as_json: AsJson = False,
) -> None:
    """Export a model: each format is loaded by another program and compared with what was trained.

    Examples:

      finefit export runs/orders-1 --to merged -o orders

      finefit export runs/orders-1 --to gguf:q4_k_m,adapter --ollama

      finefit export runs/orders-1:40 --to merged:fp32

      finefit export runs/orders-1 --to gguf --push me/orders --dry-run
    """
    from finefit.errors import UserError

    console = open_console(as_json=as_json)
    if push is None and (public or dry_run):
        raise UserError("--public and --dry-run are for --push", "add --push OWNER/NAME, or leave them out")
    set_torch_variables()
    with console.status("reading the model") as status:
        from finefit.export.push import push as push_export
        from finefit.export.push import require_repo_name
        from finefit.report.export import show_export

        if push is not None:
            require_repo_name(push)
        made = api.export(
            target,
            to,
            out,
            checkpoint=checkpoint,
            onto=onto,
            base=base,
            prompts=prompts,
            with_modelfile=with_modelfile,
            accept=accept,
            progress=lambda now: status.update(now.words),
        )
    if not as_json:
        for part in show_export(made.report, out=str(made.out)):
            console.print(part, soft_wrap=isinstance(part, str))
    pushed = None
    if push is not None:
        pushed = push_export(made.out, push, private=not public, dry_run=dry_run, say=console.print)
    if as_json:
        print_json(_document(made, pushed))


def _document(made: "Exported", pushed: object) -> dict[str, object]:
    from dataclasses import asdict

    from finefit.artifacts.export_records import ExportReport
    from finefit.artifacts.reading import adapter_of

    document = {"out": str(made.out), "export": adapter_of(ExportReport).dump_python(made.report, mode="json")}
    if pushed is not None:
        document["push"] = asdict(pushed)  # type: ignore[call-overload]
    return document
