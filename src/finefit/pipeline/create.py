"""A run directory comes into being whole: filled under a hidden name, then renamed to runs/<name>-<n>."""

import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from finefit import __version__
from finefit.artifacts.atomic import full_disk_named, write_text
from finefit.artifacts.journal import Journal
from finefit.artifacts.records import Check, DroppedRow, Facts, Lengths, Plan, Run, SourceLedger, write_record
from finefit.artifacts.rundir import RunDir, StageDir, next_number
from finefit.data.prepared import Prepared, prepare, write_examples, write_items
from finefit.data.render import Renderer
from finefit.data.rows import Row
from finefit.data.tasks import TASKS, NoResult, Task
from finefit.errors import DataError, SpecError
from finefit.facts.files import read_file
from finefit.facts.machine import read_machine
from finefit.pipeline.inputs import Opened, between, pinned, relocate
from finefit.pipeline.preparation import findings_of, foresee, require_sound
from finefit.plan.lengths import measured_lengths
from finefit.plan.resolve import make_stage, resolve
from finefit.spec.load import spec_to_json

_SHOWN = 10


def create_run(opened: Opened, *, spec_text: str, overrides: tuple[str, ...], base: Path, runs: Path) -> RunDir:
    """`base` is where the spec's relative paths start."""
    runs.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".staging-{opened.spec.name}-", dir=runs))
    try:
        needed_bytes = 2 * sum(file.size_bytes for files in opened.inputs.data.values() for file in files)
        with full_disk_named(runs / opened.spec.name, needed_bytes):
            _fill(RunDir(staging), opened, spec_text, overrides, base)
        staging.chmod(0o755)
        return RunDir(_rename(staging, runs, opened.spec.name))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _rename(staging: Path, runs: Path, name: str) -> Path:
    while True:
        final = runs / f"{name}-{next_number(runs, name)}"
        try:
            staging.rename(final)
        except OSError:
            if not final.exists():
                raise
        else:
            return final  # otherwise another process took the number: the next one then


def _fill(run: RunDir, opened: Opened, spec_text: str, overrides: tuple[str, ...], base: Path) -> None:
    spec = pinned(relocate(opened.spec, between(base.resolve(), run.path.resolve())), opened.located)
    where = run.stage(1, spec.objective.kind)
    for folder in (where.path / "data", where.tokenizer, run.log.parent):
        folder.mkdir(parents=True)
    write_text(run.spec_yaml, spec_text)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    machine = read_machine()
    write_record(run.facts, Facts(machine=machine, inputs=opened.inputs))
    prepared = _prepare_data(where, opened)
    opened.renderer.tokenizer.save_pretrained(where.tokenizer)
    num_rows = len(prepared["train"].examples)
    foretold = foresee(opened.spec, base, _lengths(opened, prepared), machine)
    values = resolve(opened.spec, overrides=overrides, machine=machine, num_rows=num_rows, forecast=foretold)
    findings = findings_of(opened.spec, foretold, machine, base, run.path, values["total_steps"].value)
    require_sound(findings)
    write_record(run.check, Check(findings=findings))
    files = {p.name: read_file(p, where.path).sha256 for p in sorted((where.path / "data").iterdir())}
    stage = make_stage(spec, values, inputs=opened.inputs, forecast=foretold, num_rows=num_rows, prepared=files)
    write_record(run.plan, Plan(stages={stage.name: values}, forecasts={stage.name: foretold}))
    write_record(where.stage, stage)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_record(run.run, Run(name=spec.name, digest=opened.digest, finefit=__version__, created=now, status="prepared", overrides=overrides))


def _lengths(opened: Opened, prepared: Mapping[str, Prepared]) -> Lengths:
    validation = prepared["validation"].examples if "validation" in prepared else ()
    prompts = [opened.renderer.prompt_tokens(row.prompt) for row in opened.rows.get("test", [])]
    return measured_lengths(prepared["train"].examples, validation, prompts)


def _prepare_data(where: StageDir, opened: Opened) -> dict[str, Prepared]:
    data = opened.spec.data
    if opened.spec.evaluate and "test" not in opened.rows:
        raise SpecError("evaluate names a task, but data.test names no rows to answer", "add data.test: {path: ...}, or remove evaluate")
    test_rows = opened.rows.get("test", [])
    _require_references([TASKS[e.task] for e in opened.spec.evaluate], test_rows)
    _require_prompts(opened.renderer, test_rows)
    _require_disjoint(opened.rows)
    prepared = {
        split: prepare(rows, opened.renderer, split=split, max_tokens=data.max_tokens, too_long=data.too_long)
        for split, rows in opened.rows.items()
        if split != "test"
    }
    for split, part in prepared.items():
        write_examples(where.prepared(f"{split}.safetensors"), part.examples)
    if "test" in opened.rows:
        write_items(where.prepared("test.jsonl"), opened.rows["test"])
    with Journal(where.ledger) as ledger:
        for part in prepared.values():
            for source in part.ledger:
                ledger.write(**TypeAdapter(SourceLedger).dump_python(source, mode="json"))
            for row in part.dropped:
                ledger.write(**TypeAdapter(DroppedRow).dump_python(row, mode="json"))
    return prepared


def _require_references(tasks: list[Task], rows: list[Row]) -> None:
    """A reference that its task cannot read is found now, not after the training."""
    faults = [f"{row.place} cannot be a reference of {task.name}: {reason}" for task in tasks for row in rows if (reason := _unreadable(task, row))]
    if faults:
        more = f"\nand {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise DataError("\n".join(faults[:_SHOWN]) + more, "mend these rows, or evaluate another task")


def _require_prompts(renderer: Renderer, rows: list[Row]) -> None:
    """A prompt that the template refuses is found now, too."""
    for row in rows:
        try:
            renderer.prompt_tokens(row.prompt)
        except DataError as error:
            raise DataError(f"{row.place} {error.problem}", error.remedy) from None


def _require_disjoint(rows: Mapping[str, list[Row]]) -> None:
    """A row that is trained on and tested on makes its score worthless."""
    trained = {row.messages: row.place for row in rows["train"]}
    doubles = [(row, split) for split in ("validation", "test") for row in rows.get(split, []) if row.messages in trained]
    if doubles:
        lines = [f"{row.place} ({split}) is {trained[row.messages]} (train) again" for row, split in doubles[:_SHOWN]]
        more = f"\nand {len(doubles) - _SHOWN} more" if len(doubles) > _SHOWN else ""
        raise DataError("\n".join(lines) + more, "remove these rows from the training data, or from the others")


def _unreadable(task: Task, row: Row) -> str | None:
    try:
        task.extract(row.answer)
    except NoResult as reason:
        return str(reason)
    return None


def stage_of(run: RunDir) -> StageDir:
    (where,) = run.stages()
    return where
