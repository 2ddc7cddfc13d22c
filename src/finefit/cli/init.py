"""`finefit init`: writes a spec, from a config of another tool or from a data file."""

from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import AsJson, open_console, print_json
from finefit.errors import UserError

_FROM = "A config of axolotl, LLaMA-Factory, TRL, Unsloth (also a notebook or script) or torchtune to translate."
_TOOL = "With --from: the tool, if its config does not show it, such as axolotl, llama-factory or trl."
_DEVICES = "With --from: the number of devices that the other tool was launched on."
_INFO = "With --from: LLaMA-Factory's dataset_info.json."
_OUT = "The spec to write."
_FORCE = "Replace a spec that is there."


def init(
    config: Annotated[Path | None, typer.Option("--from", metavar="CONFIG", help=_FROM)] = None,
    out: Annotated[Path, typer.Option("--out", metavar="SPEC", help=_OUT)] = Path("spec.yaml"),
    tool: Annotated[str | None, typer.Option("--tool", metavar="TOOL", help=_TOOL)] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, max=1024, help=_DEVICES)] = 1,
    dataset_info: Annotated[Path | None, typer.Option("--dataset-info", metavar="FILE", help=_INFO)] = None,
    force: Annotated[bool, typer.Option("--force", help=_FORCE)] = False,
    as_json: AsJson = False,
) -> None:
    """Write a spec from a config of another tool: every key is translated, the same in both, or listed as not carried
    over with the reason.

    Examples:

      finefit init --from qlora.yml

      finefit init --from train.yaml --dataset-info data/dataset_info.json --devices 4 --out my-spec.yaml
    """
    if config is None:
        raise UserError("name a config to translate with --from CONFIG", "see finefit init --help")
    _require_free(out, force=force)
    from finefit.artifacts.atomic import write_text
    from finefit.drafts.from_config import document, import_config
    from finefit.report.imports import show_import

    console = open_console(as_json=as_json)
    with console.status("reading the config, and the rows that are here"):
        found = import_config(config, out, devices=devices, dataset_info=dataset_info, tool=tool)
    write_text(out, found.text)
    if as_json:
        print_json(document(found) | {"written": str(out)})
    else:
        show_import(found, console, written=str(out))


def _require_free(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise UserError(f"{out} exists, and would be replaced", "give another --out, or --force")
    if not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} is not there", "create it, or give another --out")
