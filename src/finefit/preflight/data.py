"""Checks of the prepared data: one function per check, yielding findings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from finefit.artifacts.records import Finding
from finefit.artifacts.stage_records import Preparation, RowProblem, SourceLedger
from finefit.data.fingerprint import fingerprint, system_is_content
from finefit.data.overlap import SAMPLE_ROWS, Overlap, OverlapIndex, common_windows
from finefit.data.rows import Row, is_asked, read_items
from finefit.data.sources import LEFT_OUT, SourceReader, open_source, sampled_rows
from finefit.errors import DataError
from finefit.model.resolve_model import model_outline
from finefit.plan.prepared_data import PreparedData
from finefit.preflight import in_order, require_no_errors
from finefit.spec.data import Source
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.tasks import Form, LmEval
from finefit.tasks import NoResult, Task, make_task, row_builder

_CUT_SHARE = 0.25
"""Share of cut tokens above which a warning is given."""
_MAX_SHOWN = 10
Check = Callable[[Preparation, Spec], Iterator[Finding]]


def rows_can_be_used(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "unusable"):
        problem = f"{fault.count:,} {fault.split} {_rows(fault.count)} cannot be used:\n{_lines(fault)}"
        if spec.data.bad_rows == "drop":
            yield Finding(level="warning", problem=problem, remedy=fault.remedy)
        else:
            yield Finding(level="error", problem=problem, remedy=fix_or_drop(fault))


def fix_or_drop(fault: RowProblem) -> str:
    """Whatever is wrong with rows, they can be left out."""
    before = fault.remedy and fault.remedy + ("\nor " if "\n" in fault.remedy else ", or ")
    return f"{before}set data.bad_rows: drop to leave them out, counted"


def rows_fit_the_budget(found: Preparation, spec: Spec) -> Iterator[Finding]:
    level: Literal["error", "warning"] = "error" if spec.data.too_long == "error" else "warning"
    for fault in _faults(found, "too long"):
        rows = f"{fault.count:,} {fault.split} {_rows(fault.count)}"
        problem = f"{rows} longer than data.max_tokens {spec.data.max_tokens:,}:\n{_lines(fault)}"
        ways = " or ".join(way for way in ("cut_prompt", "drop") if way != spec.data.too_long)
        remedy = f"raise data.max_tokens, or set data.too_long: {ways}; an answer is never cut"
        yield Finding(level=level, problem=problem, remedy=remedy)


def few_rows_are_lost(found: Preparation, spec: Spec) -> Iterator[Finding]:
    reported = {"unusable": spec.data.bad_rows, "too long": spec.data.too_long}  # as errors, unless dropped on request
    for source in found.sources:
        lost = sum(
            count
            for reason, count in source.dropped.items()
            if reason not in LEFT_OUT and reported.get(reason) != "error"
        )
        yield from _above(source, "dropped", lost, source.read, spec.data.drop_at_most, "data.drop_at_most")
        yield from _above(source, "cut", source.cut, source.used, spec.data.cut_at_most, "data.cut_at_most")


def _above(source: SourceLedger, what: str, count: int, of: int, at_most: float, key: str) -> Iterator[Finding]:
    if of and count / of > at_most:
        rows = f"{source.source}: {count:,} of {of:,} {source.split} rows"
        problem = f"{rows} are {what} ({count / of:.0%}), {key} is {at_most:g}"
        remedy = f"look at the reasons in the ledger; if this is intended, --set {key}={count / of + 0.005:.2f}"
        yield Finding(level="error", problem=problem, remedy=remedy)


def prompts_keep_most_of_their_text(found: Preparation, _: Spec) -> Iterator[Finding]:
    """Few rows may lose much."""
    for source in found.sources:
        whole = source.tokens + source.cut_tokens
        if whole and source.cut_tokens > _CUT_SHARE * whole:
            tokens = f"{source.cut_tokens:,} of {whole:,} {source.split} tokens"
            problem = f"{source.source}: {tokens} are cut out of prompts ({source.cut_tokens / whole:.0%})"
            yield Finding(level="warning", problem=problem, remedy="raise data.max_tokens, or set data.too_long: drop")


def something_is_learnt(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for split in dict.fromkeys(source.split for source in found.sources):
        if not any(source.used for source in found.sources if source.split == split):
            remedy = "`finefit check` shows why each row was left out"
            yield Finding(level="error", problem=f"no {split} row is left", remedy=remedy)
    if found.lengths is None:
        return
    for source in found.sources:
        if source.split != "test" and source.used and not source.supervised_tokens:
            problem = f"{source.source}: none of its {source.tokens:,} tokens is supervised, so it teaches nothing"
            yield Finding(level="error", problem=problem, remedy="look at its rows with `finefit check --show 3`")
    rows = found.lengths.num_rows or 0
    if rows < spec.global_batch:
        step = f"a step takes {spec.global_batch:,} (global_batch): every step is a whole epoch"
        remedy = f"--set global_batch={max(1, rows // 4)}, or take more rows"
        yield Finding(level="warning", problem=f"train has {rows:,} {_rows(rows)}, and {step}", remedy=remedy)


def splits_are_disjoint(found: Preparation, spec: Spec) -> Iterator[Finding]:
    """The score of a row that was trained on is worthless."""
    share = spec.data.validation.share if spec.data.validation else None
    for fault in _faults(found, "overlap"):
        is_our_split = fault.split == "validation" and share is not None  # finefit chose these rows, not the user
        level: Literal["error", "warning"] = "warning" if spec.data.overlap == "warn" or is_our_split else "error"
        rows = f"{fault.split} shares {fault.count:,} {_rows(fault.count)}"
        problem = f"{rows} with what the model is trained or chosen on:\n{_lines(fault)}"
        remedy = "remove them from one side, or set data.overlap: drop to take them out of train, or warn to ignore it"
        yield Finding(level=level, problem=problem, remedy=remedy)


def train_has_no_duplicates(found: Preparation, _: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "duplicate"):
        problem = f"train repeats {fault.count:,} of its rows:\n{_lines(fault)}"
        remedy = "remove them, unless they are meant to count more than others"
        yield Finding(level="warning", problem=problem, remedy=remedy)


def texts_hold_no_control_tokens(found: Preparation, _: Spec) -> Iterator[Finding]:
    """A message with an end-of-turn token forges the turn of somebody else."""
    for fault in _faults(found, "special token"):
        rows = f"{fault.count:,} {fault.split} {_rows(fault.count)}"
        problem = f"the tokenizer reads text of {rows} as control tokens:\n{_lines(fault)}"
        remedy = "write these tokens differently, unless they are meant as such"
        yield Finding(level="warning", problem=problem, remedy=remedy)


def repairs_are_reported(found: Preparation, _: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "repaired"):
        problem = f"{fault.count:,} {fault.split} {_rows(fault.count)} repaired, as data.task asks:\n{_lines(fault)}"
        yield Finding(level="note", problem=problem, remedy="")


def template_is_what_others_use(found: Preparation, _: Spec) -> Iterator[Finding]:
    for note in found.notes:
        yield Finding(level="note", problem=note, remedy="")


def padding_is_not_the_end(found: Preparation, _: Spec) -> Iterator[Finding]:
    """finefit supervises by position, so the end is learnt anyway; other programs mask by token."""
    if found.pad_is_end:
        problem = "the tokenizer pads with a token that ends an answer; finefit supervises the end all the same"
        remedy = "programs that mask padding by its token would never teach the model to stop"
        yield Finding(level="note", problem=problem, remedy=remedy)


QUESTION_CHECKS: tuple[Check, ...] = (
    rows_can_be_used,
    rows_fit_the_budget,
    few_rows_are_lost,
    prompts_keep_most_of_their_text,
)
"""Of rows that are only answered."""
CHECKS: tuple[Check, ...] = (
    *QUESTION_CHECKS,
    something_is_learnt,
    splits_are_disjoint,
    train_has_no_duplicates,
    texts_hold_no_control_tokens,
    repairs_are_reported,
    template_is_what_others_use,
    padding_is_not_the_end,
)


def check_data(found: Preparation, spec: Spec, *, embeddings: int | None) -> tuple[Finding, ...]:
    """`embeddings`: rows of the model's embedding table, where known."""
    findings = [finding for check in CHECKS for finding in check(found, spec)]
    if embeddings is not None and found.largest_token >= embeddings:
        rows = f"the rows hold token {found.largest_token:,}, the model has embeddings for {embeddings:,}"
        problem = f"{rows}: tokens were added without resizing the embeddings"
        remedy = "take the tokenizer that belongs to the model, or resize its embeddings and save it"
        findings.append(Finding(level="error", problem=problem, remedy=remedy))
    return in_order(findings)


def _faults(found: Preparation, kind: str) -> list[RowProblem]:
    return [fault for fault in found.problems if fault.kind == kind]


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _lines(fault: RowProblem) -> str:
    more = [f"  and {fault.count - len(fault.lines):,} more"] if fault.count > len(fault.lines) else []
    return "\n".join([*(f"  {line}" for line in fault.lines), *more])


# Prepared data with its references


def data_findings(spec: Spec, base: Path, prepared: PreparedData) -> tuple[Finding, ...]:
    config = model_outline(spec.model, base).config
    embeddings = config.get("text_config", config).get("vocab_size")
    found = check_data(prepared.record, spec, embeddings=embeddings)
    asked = [one for one in spec.evaluate if not isinstance(one.task, LmEval)]  # lm-eval brings its own rows
    if not asked:
        return found
    if spec.data.test is None:
        problem = "evaluate names a task, but data.test names no rows to answer"
        return (*found, Finding(level="error", problem=problem, remedy="add data.test: {path: ...}, or drop evaluate"))
    rows = read_items(prepared.path("test.jsonl"))
    return (*found, *unreadable_references(asked, rows, form=spec.data.task, base=base))


def unreadable_references(
    evaluations: Iterable[Evaluation], rows: Sequence[Row], *, form: Form | None, base: Path
) -> tuple[Finding, ...]:
    """References that their task cannot read are found now, not after the training."""
    tasks = [(make_task(one, form=form, base=base), one) for one in evaluations if not isinstance(one.task, LmEval)]
    asked = [(task, row) for task, evaluation in tasks for row in rows if is_asked(row, evaluation.sources)]
    faults = [
        f"{row.place} cannot be a reference of {task.name}: {reason}"
        for task, row in asked
        if (reason := _unreadable(task, row))
    ]
    if not faults:
        return ()
    more = f"\nand {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
    problem = "\n".join(faults[:_MAX_SHOWN]) + more
    return (Finding(level="error", problem=problem, remedy="fix these rows, or evaluate another task"),)


def _unreadable(task: Task, row: Row) -> str | None:
    try:
        task.require(row)
    except NoResult as reason:
        return str(reason)
    return None


def require_data(findings: tuple[Finding, ...]) -> None:
    require_no_errors(((None, finding) for finding in findings), DataError)


# Training rows among those that a model is asked later


def find_leaks(
    trained: tuple[Source, ...],
    asked: Source,
    *,
    base: Path,
    seed: int,
    turns: Literal["all", "last"] = "all",
    form: Form | None = None,
) -> tuple[Overlap, ...]:
    """For each asked row that is trained on, the first training row that holds it. Rows are compared as they are read:
    none is rendered, cut or left out for its length. `turns`: the answers that are trained on; `form`: what both are
    built with."""
    sample = list(_leak_sample(trained, base, form))
    with_system = system_is_content(sample)
    index = OverlapIndex(common_windows(fingerprint(row, with_system=with_system) for row in sample))
    for row in _sampled_rows(asked, base, seed, "test", form):
        index.add_held("test", row, fingerprint(row, with_system=with_system))
    found: dict[str, Overlap] = {}
    for source in trained:
        for row in _sampled_rows(source, base, seed, "train", form):
            overlap = index.find(row, fingerprint(row, with_system=with_system, turns=turns))
            if overlap is not None:
                found.setdefault(overlap.other, overlap)
    return tuple(found.values())


def _leak_sample(sources: Sequence[Source], base: Path, form: Form | None) -> Iterator[Row]:
    """Enough of every source to recognise text that all rows share."""
    each = -(-SAMPLE_ROWS // max(1, len(sources)))
    for source in sources:
        yield from islice((row for row in _reader(source, base, "train", form).rows() if isinstance(row, Row)), each)


def _sampled_rows(source: Source, base: Path, seed: int, split: str, form: Form | None) -> Iterator[Row]:
    reader = _reader(source, base, split, form)
    return (row for row in sampled_rows(reader, source, seed) if isinstance(row, Row))


def _reader(source: Source, base: Path, split: str, form: Form | None) -> SourceReader:
    return replace(open_source(source, base, split=split), build=row_builder(form, base=base))
