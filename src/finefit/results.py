"""What the functions of the Python API return: the records of a run, which a notebook shows as HTML. Everything heavy
is imported when it is needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from finefit.artifacts.export_records import ExportReport
    from finefit.artifacts.forecasts import Plan
    from finefit.artifacts.records import Finding
    from finefit.artifacts.rundir import RunDir, StageDir
    from finefit.artifacts.stage_records import EvalResult, StageResult
    from finefit.compare.records import Comparison
    from finefit.run.check_stages import CheckedPipeline
    from finefit.spec.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFile:
    """A spec that was read and found valid. A spec without stages is a pipeline of one."""

    path: Path
    overrides: tuple[str, ...]
    pipeline: "Pipeline"

    @property
    def base(self) -> Path:
        """The folder that relative paths in the spec start from."""
        return self.path.resolve().parent

    def _repr_html_(self) -> str:
        from finefit.report.layout import terminal_html
        from finefit.spec.load import whole_text

        lines = [whole_text(self.path).rstrip(), *(f"--set {override}" for override in self.overrides)]
        return terminal_html(lambda console: console.print("\n".join(lines), soft_wrap=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was proved about a spec before its first step."""

    found: "CheckedPipeline"

    @property
    def ok(self) -> bool:
        return not self.found.has_errors

    @property
    def findings(self) -> "tuple[Finding, ...]":
        """Errors first."""
        return tuple(finding for _, finding in self.found.findings)

    def _repr_html_(self) -> str:
        from finefit.report.check import show_check
        from finefit.report.layout import terminal_html

        return terminal_html(lambda console: show_check(self.found, console))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The results of one evaluation: a record for each task and checkpoint, with every item."""

    run: "RunDir"
    results: "tuple[EvalResult, ...]"

    def _repr_html_(self) -> str:
        from finefit.report.layout import terminal_html
        from finefit.report.scores import score_boards

        return terminal_html(lambda console: console.print(score_boards(self.results, self.run)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    record: "Comparison"

    def _repr_html_(self) -> str:
        from finefit.report.compare_page import page_with_what_is_installed
        from finefit.report.page import framed

        return framed(page_with_what_is_installed(self.record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export, and how it was proved equal to what was trained."""

    out: Path
    report: "ExportReport"

    def _repr_html_(self) -> str:
        from finefit.report.export import show_export
        from finefit.report.layout import terminal_html

        def show(console: "Console") -> None:
            for part in show_export(self.report, out=str(self.out)):
                console.print(part, soft_wrap=isinstance(part, str))

        return terminal_html(show)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run directory, read anew at every call: also of a run that another process works on, or a copy of one."""

    path: Path

    @property
    def status(self) -> str:
        """prepared, running, finished, stopped or failed."""
        from finefit.report.run import status_of

        return status_of(self._run)

    @property
    def stages(self) -> "dict[str, OpenRun]":
        """The trainings and evaluations of a pipeline that have begun, by name; empty for a run of a flat spec."""
        from finefit.artifacts.rundir import is_pipeline, is_run
        from finefit.report.run import states_of

        if not is_pipeline(self.path):
            return {}
        places = {state.name: self.path / state.place for state in states_of(self._run)}
        return {name: OpenRun(place) for name, place in places.items() if is_run(place)}

    @property
    def spec(self) -> "Pipeline":
        """As it was resolved when the run began; a spec without stages is a pipeline of one."""
        from finefit.artifacts.records import read_pipeline, read_spec
        from finefit.artifacts.rundir import is_pipeline
        from finefit.spec.pipeline import Pipeline

        return read_pipeline(self._run) if is_pipeline(self.path) else Pipeline.of(read_spec(self._run))

    @property
    def plan(self) -> "Plan | None":
        """Every decision with its source, and the forecast. None for a run that trains nothing."""
        from finefit.artifacts.forecasts import Plan
        from finefit.artifacts.records import read_if_there

        return read_if_there(self._run.plan, Plan)

    @property
    def result(self) -> "StageResult | None":
        """How the training ended; None if it has not."""
        from finefit.artifacts.records import read_if_there
        from finefit.artifacts.stage_records import StageResult

        return read_if_there(self._stage.result, StageResult)

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """Those that are kept, by step."""
        from finefit.artifacts.checkpoint import list_checkpoints

        return tuple(list_checkpoints(self._stage.checkpoints))

    @property
    def evaluations(self) -> "tuple[EvalResult, ...]":
        from finefit.report.run import evals_of

        return tuple(evals_of(self._stage))

    def metrics(self) -> "pa.Table":
        """A row for each optimizer step; `.to_pandas()` makes a data frame where pandas is installed."""
        from finefit.artifacts.atomic import read_steps

        return _table_of(read_steps(self._stage.metrics))

    def validations(self) -> "pa.Table":
        from finefit.artifacts.atomic import read_validations

        return _table_of(read_validations(self._stage.metrics))

    def memory(self) -> "pa.Table":
        """What the process held at each noted instant: load, first backward, each step, and so on."""
        from finefit.artifacts.atomic import read_lines

        return _table_of(read_lines(self._stage.memory))

    def document(self) -> dict[str, Any]:
        """The output of `finefit run --json`."""
        from finefit.report.run import run_document

        return run_document(self._run)

    def write_report(self, file: Path | str) -> Path:
        """One self-contained page, or Markdown if the name ends in .md."""
        from finefit.report.run_page import write_report

        return write_report(self._run, Path(file))

    @property
    def _run(self) -> "RunDir":
        from finefit.artifacts.rundir import open_any_run

        return open_any_run(self.path)

    @property
    def _stage(self) -> "StageDir":
        from finefit.artifacts.rundir import open_run, stage_of

        return stage_of(open_run(self.path))

    def _repr_html_(self) -> str:
        from finefit.report.page import framed
        from finefit.report.run_page import page

        return framed(page(self._run))


def _table_of(lines: "Iterator[dict[str, Any]] | list[dict[str, Any]]") -> "pa.Table":
    """A column for every key of any line; a line without it has a null."""
    import pyarrow as pa

    found = list(lines)
    names = dict.fromkeys(name for line in found for name in line)
    return pa.table({name: pa.array([line.get(name) for line in found]) for name in names})
