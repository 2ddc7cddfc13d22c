"""What the preparation of the data means for the run that is about to begin: one function per check, each yielding findings."""

from collections.abc import Callable, Iterator

from finefit.artifacts.records import Finding
from finefit.artifacts.trainings import Fault, Preparation, SourceLedger
from finefit.preflight.findings import in_order
from finefit.spec.schema import Spec

_ASKED_FOR = ("left out by limit", "left out by weight")
"""Rows that the spec itself leaves out are no loss."""
_MUCH = 0.25
"""Share of the tokens, beyond which a cut is worth a word."""


def rows_can_be_used(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "unusable"):
        problem = f"{fault.count:,} {fault.split} {_rows(fault.count)} cannot be used:\n{_lines(fault)}"
        if spec.data.bad_rows == "drop":
            yield Finding(level="warning", problem=problem, remedy=fault.remedy)
        else:
            yield Finding(level="error", problem=problem, remedy=mend_or_drop(fault))


def mend_or_drop(fault: Fault) -> str:
    """Whatever is wrong with rows, they can be left out."""
    before = fault.remedy and fault.remedy + ("\nor " if "\n" in fault.remedy else ", or ")
    return f"{before}set data.bad_rows: drop to leave them out, counted"


def rows_fit_the_budget(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "too long"):
        level = "error" if spec.data.too_long == "error" else "warning"
        problem = f"{fault.count:,} {fault.split} {_rows(fault.count)} longer than data.max_tokens {spec.data.max_tokens:,}:\n{_lines(fault)}"
        ways = " or ".join(way for way in ("cut_prompt", "drop") if way != spec.data.too_long)
        remedy = f"raise data.max_tokens, or set data.too_long: {ways}; an answer is never cut"
        yield Finding(level=level, problem=problem, remedy=remedy)  # type: ignore[arg-type]


def few_rows_are_lost(found: Preparation, spec: Spec) -> Iterator[Finding]:
    told = {
        "unusable": spec.data.bad_rows,
        "too long": spec.data.too_long,
    }  # an error of their own, where they are not dropped on request
    for source in found.sources:
        lost = sum(
            count
            for reason, count in source.dropped.items()
            if reason not in _ASKED_FOR and told.get(reason) != "error"
        )
        yield from _above(source, "dropped", lost, source.read, spec.data.drop_at_most, "data.drop_at_most")
        yield from _above(source, "cut", source.cut, source.used, spec.data.cut_at_most, "data.cut_at_most")


def _above(source: SourceLedger, what: str, count: int, of: int, at_most: float, key: str) -> Iterator[Finding]:
    if of and count / of > at_most:
        problem = f"{source.source}: {count:,} of {of:,} {source.split} rows are {what} ({count / of:.0%}), {key} is {at_most:g}"
        remedy = f"look at the reasons in the ledger; if this is meant, --set {key}={count / of + 0.005:.2f}"
        yield Finding(level="error", problem=problem, remedy=remedy)


def prompts_keep_most_of_their_text(found: Preparation, _: Spec) -> Iterator[Finding]:
    """Few rows may lose much."""
    for source in found.sources:
        whole = source.tokens + source.cut_tokens
        if whole and source.cut_tokens > _MUCH * whole:
            share = f"{source.cut_tokens / whole:.0%}"
            problem = f"{source.source}: {source.cut_tokens:,} of {whole:,} {source.split} tokens are cut out of prompts ({share})"
            yield Finding(level="warning", problem=problem, remedy="raise data.max_tokens, or set data.too_long: drop")


def something_is_learnt(found: Preparation, spec: Spec) -> Iterator[Finding]:
    for split in dict.fromkeys(source.split for source in found.sources):
        if not any(source.used for source in found.sources if source.split == split):
            yield Finding(
                level="error", problem=f"no {split} row is left", remedy="`finefit check` shows what became of each"
            )
    if found.lengths is None:
        return
    for source in found.sources:
        if source.split != "test" and source.used and not source.supervised_tokens:
            problem = f"{source.source}: none of its {source.tokens:,} tokens is supervised, so nothing would be learnt from it"
            yield Finding(level="error", problem=problem, remedy="look at its rows with `finefit check --show 3`")
    rows = found.lengths.num_rows or 0
    if rows < spec.global_batch:
        problem = f"train has {rows:,} {_rows(rows)}, and a step takes {spec.global_batch:,} (global_batch): every step is a whole epoch"
        yield Finding(
            level="warning", problem=problem, remedy=f"--set global_batch={max(1, rows // 4)}, or take more rows"
        )


def splits_are_disjoint(found: Preparation, spec: Spec) -> Iterator[Finding]:
    """A row that is trained on and tested on makes its score worthless."""
    share = spec.data.validation.share if spec.data.validation else None
    for fault in _faults(found, "overlap"):
        is_ours = fault.split == "validation" and share is not None  # nobody has put those rows there
        level = "warning" if spec.data.overlap == "warn" or is_ours else "error"
        problem = f"{fault.split} shares {fault.count:,} {_rows(fault.count)} with what the model is trained or chosen on:\n{_lines(fault)}"
        remedy = "remove them from one side; data.overlap: drop takes them out of train, counted; data.overlap: warn goes on as it is"
        yield Finding(level=level, problem=problem, remedy=remedy)  # type: ignore[arg-type]


def rows_are_not_repeated_unseen(found: Preparation, _: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "duplicate"):
        problem = f"train repeats {fault.count:,} of its rows:\n{_lines(fault)}"
        yield Finding(
            level="warning", problem=problem, remedy="remove them, if they are not meant to count more than others"
        )


def texts_hold_no_control_tokens(found: Preparation, _: Spec) -> Iterator[Finding]:
    """A message that holds the mark of a turn's end forges the turn of another."""
    for fault in _faults(found, "special token"):
        problem = f"the tokenizer reads text of {fault.count:,} {fault.split} {_rows(fault.count)} as control tokens:\n{_lines(fault)}"
        yield Finding(
            level="warning", problem=problem, remedy="write these marks differently, if they are not meant as such"
        )


def repairs_are_told(found: Preparation, _: Spec) -> Iterator[Finding]:
    for fault in _faults(found, "repaired"):
        problem = f"{fault.count:,} {fault.split} {_rows(fault.count)} repaired, as data.task asks:\n{_lines(fault)}"
        yield Finding(level="note", problem=problem, remedy="")


def template_is_what_others_use(found: Preparation, _: Spec) -> Iterator[Finding]:
    for note in found.notes:
        yield Finding(level="note", problem=note, remedy="")


def padding_is_not_the_end(found: Preparation, _: Spec) -> Iterator[Finding]:
    """Supervision goes by place, so the end is learnt all the same; others mask by token."""
    if found.pad_is_end:
        problem = "the tokenizer pads with a token that ends an answer; here the end is supervised all the same"
        yield Finding(
            level="note",
            problem=problem,
            remedy="programs that mask padding by its token would never teach the model to stop",
        )


CHECKS: tuple[Callable[[Preparation, Spec], Iterator[Finding]], ...] = (
    rows_can_be_used,
    rows_fit_the_budget,
    few_rows_are_lost,
    prompts_keep_most_of_their_text,
    something_is_learnt,
    splits_are_disjoint,
    rows_are_not_repeated_unseen,
    texts_hold_no_control_tokens,
    repairs_are_told,
    template_is_what_others_use,
    padding_is_not_the_end,
)


def examine_data(found: Preparation, spec: Spec, *, embeddings: int | None) -> tuple[Finding, ...]:
    """`embeddings`: rows of the model's table, where it is known. Errors first."""
    findings = [finding for check in CHECKS for finding in check(found, spec)]
    if embeddings is not None and found.largest_token >= embeddings:
        problem = f"the rows hold token {found.largest_token:,}, the model has embeddings for {embeddings:,}: tokens were added without room for them"
        remedy = "take the tokenizer that belongs to the model, or resize its embeddings and save it"
        findings.append(Finding(level="error", problem=problem, remedy=remedy))
    return in_order(findings)


def _faults(found: Preparation, kind: str) -> list[Fault]:
    return [fault for fault in found.faults if fault.kind == kind]


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _lines(fault: Fault) -> str:
    more = [f"  and {fault.count - len(fault.lines):,} more"] if fault.count > len(fault.lines) else []
    return "\n".join([*(f"  {line}" for line in fault.lines), *more])
