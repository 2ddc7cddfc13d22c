"""A run as one self-contained page, to attach or to archive, or as Markdown."""

from pathlib import Path

from finefit.artifacts.atomic import write_text
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, shown_parts
from finefit.errors import UserError
from finefit.report.blocks import Heading, Lines, html, markdown
from finefit.report.page import html_page, no_plots
from finefit.report.plots import can_plot
from finefit.report.run import status_of
from finefit.report.run_sections import run_blocks


def page(run: RunDir) -> str:
    parts = [] if can_plot() else [no_plots()]
    about = f"finefit report: {_about(run)}"
    return html_page(about, shown_parts(run.path)[-1], [*parts, *map(html, run_blocks(run))])


def markdown_report(run: RunDir) -> str:
    head = (Heading(text=shown_parts(run.path)[-1], level=1), Lines(lines=(_about(run),)))
    return markdown((*head, *run_blocks(run)))


def write_report(run: RunDir, file: Path) -> Path:
    """Markdown if the name ends in .md, a page if it ends in .html."""
    formats = {".html": page, ".htm": page, ".md": markdown_report}
    if file.suffix.lower() not in formats:
        raise UserError(f"{file} is neither a page nor Markdown", "give a name that ends in .html or .md")
    if not file.resolve().parent.is_dir():
        problem = f"{file} cannot be written: there is no folder {file.resolve().parent}"
        raise UserError(problem, "create it first, or give another path")
    write_text(file, formats[file.suffix.lower()](run))
    return file


def _about(run: RunDir) -> str:
    record = read_record(run.run, Run)
    begun = record.created.replace("T", " ").replace("+00:00", " UTC")
    return f"{record.name}, {status_of(run)}, begun {begun}, finefit {record.finefit}"
