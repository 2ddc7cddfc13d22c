"""Checks of the prepared data: one function per check, yielding findings."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from finefit.artifacts.records import Finding
from finefit.artifacts.stage_records import Preparation, RowProblem
from finefit.data.fingerprint import fingerprint, system_is_content
from finefit.data.overlap import SAMPLE_ROWS, Overlap, OverlapIndex, common_windows
from finefit.data.rows import Row, is_asked, read_items
from finefit.data.sources import LEFT_OUT, SourceReader, open_source, sampled_rows
from finefit.errors import DataError
from finefit.model.resolve_model import read_stub
from finefit.plan.prepared_data import PreparedData
from finefit.preflight import error, in_order, note, require_no_errors, warning
from finefit.spec.data import Source
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.tasks import Anls, ExactMatch, Form, LmEval, RelaxedAccuracy, VqaAccuracy
from finefit.tasks import NoResult
from finefit.tasks.custom import row_builder
from finefit.tasks.make import make_task

_CUT_SHARE = 0.25
"""Share of cut tokens above which a warning is given."""
_MAX_SHOWN = 10
_OF_SHORT_ANSWERS = ExactMatch | RelaxedAccuracy | Anls | VqaAccuracy
_LONG_REFERENCE = 120
"""Characters above which an answer is hardly ever repeated word for word."""
Check = Callable[[Preparation, Spec], Iterator[Finding]]


def rows_can_be_used(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "unusable"):
        problem = f"{_rows(fault)} cannot be used:\n{_lines(fault)}"
        drops = spec.data.bad_rows == "drop"
        yield warning(problem, fault.remedy) if drops else error(problem, fix_or_drop(fault))


def fix_or_drop(fault: RowProblem) -> str:
    """Rows can always be left out, whatever is wrong with them."""
    before = fault.remedy and fault.remedy + ("\nor " if "\n" in fault.remedy else ", or ")
    return f"{before}set data.bad_rows: drop to drop and count them"


def rows_fit_the_budget(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "too long"):
        problem = f"{_rows(fault)} longer than data.max_tokens {spec.data.max_tokens:,}:\n{_lines(fault)}"
        ways = " or ".join(way for way in ("cut_prompt", "drop") if way != spec.data.too_long)
        remedy = f"raise data.max_tokens, or set data.too_long: {ways}; an answer is never cut"
        yield error(problem, remedy) if spec.data.too_long == "error" else warning(problem, remedy)


def few_rows_are_lost(found: Preparation, spec: Spec) -> Iterator[Finding]:
    data = spec.data
    reported = {"unusable": data.bad_rows, "too long": data.too_long}  # reported as errors, unless dropped on request
    for source in found.sources:
        reasons = [why for why in source.dropped if why not in LEFT_OUT and reported.get(why) != "error"]
        lost = sum(source.dropped[why] for why in reasons)
        for what, key, count, of, at_most in (
            ("dropped", "data.drop_at_most", lost, source.read, data.drop_at_most),
            ("cut", "data.cut_at_most", source.cut, source.used, data.cut_at_most),
        ):
            if of and count / of > at_most:
                rows = f"{source.source}: {count:,} of {of:,} {source.split} rows"
                yield error(
                    f"{rows} are {what} ({count / of:.0%}), {key} is {at_most:g}",
                    f"look at the reasons in the ledger; if this is intended, --set {key}={count / of + 0.005:.2f}",
                )


def prompts_keep_most_of_their_text(found: Preparation, _: Spec) -> Iterator[Finding]:
    """Few rows may lose much of their text."""
    for source in found.sources:
        whole = source.tokens + source.cut_tokens
        if whole and source.cut_tokens > _CUT_SHARE * whole:
            tokens = f"{source.cut_tokens:,} of {whole:,} {source.split} tokens"
            problem = f"{source.source}: {tokens} are cut out of prompts ({source.cut_tokens / whole:.0%})"
            yield warning(problem, "raise data.max_tokens, or set data.too_long: drop")


def something_is_learnt(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for split in dict.fromkeys(source.split for source in found.sources):
        sources = [source for source in found.sources if source.split == split]
        if not any(source.used for source in sources):
            read, reasons = sum(source.read for source in sources), Counter[str]()
            for source in sources:
                reasons.update(source.dropped)
            counts = ", ".join(f"{count:,} {why}" for why, count in reasons.most_common()) or "nothing was read"
            problem = f"none of the {read:,} {split} rows is left: {counts}"
            yield error(problem, f"fix these rows, or name other files in data.{split}")
    if found.lengths is None:
        return
    for source in found.sources:
        if source.split != "test" and source.used and not source.supervised_tokens:
            problem = f"{source.source}: none of its {source.tokens:,} tokens is supervised, so it teaches nothing"
            yield error(problem, "look at its rows with `finefit check --show 3`")
    rows = found.lengths.num_rows or 0
    if rows < spec.global_batch:
        step = f"a step takes {spec.global_batch:,} (global_batch): every step is a whole epoch"
        problem = f"train has {rows:,} {'row' if rows == 1 else 'rows'}, but {step}"
        yield warning(problem, f"--set global_batch={max(1, rows // 4)}, or add rows")


def splits_are_disjoint(found: Preparation, spec: Spec) -> Iterator[Finding]:
    """The score of a row that was trained on is worthless."""
    share = spec.data.validation.share if spec.data.validation else None
    for fault in _faults(found, "overlap"):
        is_our_split = fault.split == "validation" and share is not None  # finefit chose these rows, not the user
        rows = "row" if fault.count == 1 else "rows"
        shared = f"{fault.split} shares {fault.count:,} {rows} with the rows on which the model is trained or selected"
        problem = f"{shared}:\n{_lines(fault)}"
        remedy = "remove them from one side, or set data.overlap: drop to remove them from train, or warn to ignore it"
        yield warning(problem, remedy) if spec.data.overlap == "warn" or is_our_split else error(problem, remedy)


def train_has_no_duplicates(found: Preparation, _: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "duplicate"):
        problem = f"train repeats {fault.count:,} of its rows:\n{_lines(fault)}"
        yield warning(problem, "remove them, unless they are meant to count more than others")


def texts_hold_no_control_tokens(found: Preparation, _: Spec) -> Iterator[Finding]:
    """A message with an end-of-turn token can inject another speaker's turn."""
    for fault in _faults(found, "special token"):
        problem = f"the tokenizer reads text of {_rows(fault)} as control tokens:\n{_lines(fault)}"
        yield warning(problem, "write these tokens differently, unless they are meant as control tokens")


def placeholders_are_filled_in(found: Preparation, _: Spec) -> Iterator[Finding]:
    """A model that is trained on `I am {{name}}` says exactly that."""
    for fault in _faults(found, "placeholder"):
        verb = "contains" if fault.count == 1 else "contain"
        problem = f"{_rows(fault)} {verb} literal placeholders, which are trained and scored as they are:"
        remedy = "replace them with what they stand for, for instance with sed, unless the rows are about templates"
        yield warning(f"{problem}\n{_lines(fault)}", remedy)


def recordings_are_not_asked_about(found: Preparation, _: Spec) -> Iterator[Finding]:
    """A model that cannot hear answers a question about `<audio>` without what it is about."""
    for fault in _faults(found, "medium"):
        verb = "marks" if fault.count == 1 else "mark"
        problem = f"the prompts of {_rows(fault)} {verb} audio or video, which is not part of them:"
        remedy = "leave these rows out, unless they only speak of the mark, as of HTML"
        yield warning(f"{problem}\n{_lines(fault)}", remedy)


def preparation_is_reported(found: Preparation, _: Spec) -> Iterator[Finding]:
    """Reports repairs and choices, and padding with the token that ends an answer: finefit supervises by position, so
    the end is learned anyway, but other programs mask by token."""
    for fault in _faults(found, "repaired"):
        yield note(f"{_rows(fault)} repaired, as requested by data.task:\n{_lines(fault)}")
    yield from map(note, found.notes)
    if found.pad_is_end:
        problem = "the tokenizer pads with a token that ends an answer; finefit still supervises the end"
        yield note(problem, "programs that mask padding by its token would never teach the model to stop")


QUESTION_CHECKS: tuple[Check, ...] = (
    rows_can_be_used,
    rows_fit_the_budget,
    few_rows_are_lost,
    prompts_keep_most_of_their_text,
)
"""Checks of rows that are only answered."""
CHECKS: tuple[Check, ...] = (
    *QUESTION_CHECKS,
    something_is_learnt,
    splits_are_disjoint,
    train_has_no_duplicates,
    texts_hold_no_control_tokens,
    placeholders_are_filled_in,
    recordings_are_not_asked_about,
    preparation_is_reported,
)


def check_data(found: Preparation, spec: Spec, *, embeddings: int | None) -> tuple[Finding, ...]:
    """`embeddings`: rows of the model's embedding table, if known."""
    findings = [finding for check in CHECKS for finding in check(found, spec)]
    if embeddings is not None and found.largest_token >= embeddings:
        rows = f"the rows contain token {found.largest_token:,}, but the model has embeddings for {embeddings:,}"
        problem = f"{rows}: tokens were added without resizing the embeddings"
        remedy = "use the tokenizer that belongs to the model, or resize its embeddings and save it"
        findings.append(error(problem, remedy))
    return in_order(findings)


def _faults(found: Preparation, kind: str) -> list[RowProblem]:
    return [fault for fault in found.problems if fault.kind == kind]


def _rows(fault: RowProblem) -> str:
    return f"{fault.count:,} {fault.split} {'row' if fault.count == 1 else 'rows'}"


def _lines(fault: RowProblem) -> str:
    more = [f"  and {fault.count - len(fault.lines):,} more"] if fault.count > len(fault.lines) else []
    return "\n".join([*(f"  {line}" for line in fault.lines), *more])


def data_findings(spec: Spec, base: Path, prepared: PreparedData) -> tuple[Finding, ...]:
    config = read_stub(spec.model, base).config
    inner = config.get("text_config")
    embeddings = (inner if isinstance(inner, dict) else config).get("vocab_size")
    found = check_data(prepared.record, spec, embeddings=embeddings if isinstance(embeddings, int) else None)
    asked = [one for one in spec.evaluate if not isinstance(one.task, LmEval)]  # lm-eval brings its own rows
    if not asked:
        return found
    if spec.data.test is None:
        problem = "evaluate names a task, but data.test names no rows to answer"
        return (*found, error(problem, "add data.test: {path: ...}, or drop evaluate"))
    rows = read_items(prepared.path("test.jsonl"))
    unreadable = unreadable_references(asked, rows, form=spec.data.task, base=base)
    return (*found, *unreadable, *long_references(asked, rows))


def unreadable_references(
    evaluations: Iterable[Evaluation], rows: Sequence[Row], *, form: Form | None, base: Path
) -> tuple[Finding, ...]:
    """Finds references that their task cannot read before the training, not after it."""
    faults = []
    for one in evaluations:
        if isinstance(one.task, LmEval):
            continue
        task = make_task(one, form=form, base=base)
        for row in rows:
            if is_asked(row, one.sources):
                try:
                    task.require(row)
                except NoResult as reason:
                    faults.append(f"{row.place} cannot be a reference of {task.name}: {reason}")
    more = f"\nand {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
    problem = "\n".join(faults[:_MAX_SHOWN]) + more
    return (error(problem, "fix these rows, or evaluate another task"),) if faults else ()


def long_references(evaluations: Iterable[Evaluation], rows: Sequence[Row]) -> Iterator[Finding]:
    """A metric of short answers gives 0 to every answer that words a long reference differently."""
    for one in evaluations:
        if not isinstance(one.task, _OF_SHORT_ANSWERS):
            continue
        asked = [row for row in rows if is_asked(row, one.sources)]
        num_long = sum(min(map(len, (row.answer, *row.references))) > _LONG_REFERENCE for row in asked)
        if 2 * num_long > len(asked):
            long = f"{num_long:,} of {len(asked):,} references have more than {_LONG_REFERENCE} characters"
            problem = f"{one.label} compares whole answers, and {long}: a correct answer in different words scores 0"
            other = "if only the end of an answer counts, such as its last number, use a task file of your own"
            yield warning(problem, f"use rouge or chrf for long texts; {other} (docs/evaluation.md has one)")


def require_data(findings: tuple[Finding, ...]) -> None:
    require_no_errors(((None, finding) for finding in findings), DataError)


def find_leaks(
    trained: tuple[Source, ...],
    asked: Source,
    *,
    base: Path,
    seed: int,
    turns: Literal["all", "last"] = "all",
    form: Form | None = None,
) -> tuple[Overlap, ...]:
    """Returns, for each test row that is trained on, the first training row that contains it. Rows are compared as they
    are read: none is rendered, cut or dropped for its length. `turns`: the answers that are trained on; `form`: how
    both are built."""

    def reader(source: Source, split: str) -> SourceReader:
        return replace(open_source(source, base, split=split), build=row_builder(form, base=base))

    def rows(source: Source, split: str) -> Iterator[Row]:
        return (row for row in sampled_rows(reader(source, split), source, seed) if isinstance(row, Row))

    sample: list[Row] = []  # enough of every source to recognise text that all rows share
    for source in trained:
        first = (row for row in reader(source, "train").rows() if isinstance(row, Row))
        sample += islice(first, -(-SAMPLE_ROWS // len(trained)))
    with_system = system_is_content(sample)
    index = OverlapIndex(common_windows(fingerprint(row, with_system=with_system) for row in sample))
    for row in rows(asked, "test"):
        index.add_held("test", row, fingerprint(row, with_system=with_system))
    found: dict[str, Overlap] = {}
    for source in trained:
        for row in rows(source, "train"):
            if overlap := index.find(row, fingerprint(row, with_system=with_system, turns=turns)):
                found.setdefault(overlap.other, overlap)
    return tuple(found.values())
