"""What an export is, and how it was proved, in a short table."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from finefit.artifacts.export_records import ExportedFormat, ExportReport, OntoCost
from finefit.stats.intervals import Interval

_ORIGINS = {
    "test": "held-out rows of the run",
    "validation": "validation rows of the run",
    "built-in": "neutral prompts",
}


def show_export(report: ExportReport, *, out: str) -> Iterator[RenderableType]:
    yield f"{report.name}: {report.parameters:,} parameters, base {report.base}{_packed(report)}"
    asked = f"{report.prompts} {_ORIGINS[report.prompts_from]}, {report.answer_tokens:,} answer tokens"
    if report.computed_in is not None:
        yield f"compared with the trained model on {asked}, in {report.computed_in}"
    else:
        yield "compared with the trained model by files alone: it does not fit in memory"
    yield _table(report)
    for one in report.exports:
        yield from _notes(one)
    yield from map(_onto_line, report.onto_costs)
    yield from _answers(report)
    for server, how in report.serving.items():
        yield f"{server:<8} {how}"
    yield f"export   {out}"


def _packed(report: ExportReport) -> str:
    if report.bits is None:
        return ""
    onto = {"original": "the original weights", "trained": "the weights that were trained on", None: "them"}[
        report.onto
    ]
    return f"; trained on weights in {report.bits} bits, merged into {onto}"


def _table(report: ExportReport) -> Table:
    table = Table()
    table.add_column("format", no_wrap=True)
    for name in ("size", "KL a token", "at most", "same tokens", "same answers"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.exports:
        table.add_row(*_row(one))
    return table


def _row(one: ExportedFormat) -> list[str]:
    distance, equal = one.distance, sum(answers.are_equal for answers in one.answers)
    kl = "-" if distance is None else f"{distance.kl.value:.1e}"
    agreement = "-" if distance is None else f"{distance.agreement.value:.1%}"
    answers = f"{equal} of {len(one.answers)}" if one.answers else "-"
    return [one.format, _size(sum(one.files.values())), kl, f"{one.bound.kl:g}", agreement, answers]


def _share(found: Interval) -> str:
    return f"{found.value:.1%} ({found.low:.0%} to {found.high:.0%})"


def _equal(is_equal: bool) -> str:
    return "equal" if is_equal else "differ"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _notes(one: ExportedFormat) -> Iterator[str]:
    words = f"{one.format}: made in {one.seconds:.0f} s, loaded by {one.loaded_by}, proved in {one.proof_seconds:.0f} s"
    if one.score is not None:
        score = f"{one.score.task} {one.score.exported.value:.1%}, trained model {_share(one.score.trained)}"
        words += f"; {score}"
    texts = {"template": one.template_is_equal, "stop tokens": one.stops_are_equal}
    if same := [f"{name} {_equal(is_equal)}" for name, is_equal in texts.items() if is_equal is not None]:
        words += f"; {', '.join(same)}"
    yield words
    yield from (f"warning: {one.format} was accepted although {problem}" for problem in one.problems)
    yield from (f"{one.format}: {note}" for note in one.notes)


def _onto_line(cost: OntoCost) -> str:
    words = {"original": "the original weights", "trained": "the unpacked weights that were trained on"}[cost.onto]
    kl, agreement = cost.distance.kl, cost.distance.agreement
    return f"onto {words}: KL per token {kl.value:.1e} ({kl.low:.1e} to {kl.high:.1e}), {_share(agreement)} the same"


def _answers(report: ExportReport) -> Iterator[str]:
    """The first greedy answer of each format that is not the trained model's."""
    for one in report.exports:
        for answers in [answers for answers in one.answers if not answers.are_equal][:1]:
            yield f"{one.format}: the first answer that differs"
            yield f"  trained   {_short(answers.trained)}"
            yield f"  exported  {_short(answers.exported)}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:90]} ..."
