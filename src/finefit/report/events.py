"""Events of a run besides its steps: one line for each event in `metrics.jsonl` that a user should know of."""

from collections.abc import Callable
from typing import Any

from finefit.artifacts.cache import WORTH_A_WARNING
from finefit.report.layout import gib

Line = dict[str, Any]
_MAX_NAMES = 3
_QUIET = {
    "zero": "exactly zero for",
    "faint": "rounding for",
    "idle": "missing, because no token was routed to these experts, for",
    "blind": "missing, because no row of this step has an image, for",
}
"""Gradients that an audit reports, by kind."""


def describe_event(line: Line) -> str | None:
    """None if there is nothing to report."""
    describe = _WORDS.get(line.get("event", ""))
    return describe(line) if describe is not None else None


def describe_validation(line: Line) -> str:
    """The loss of a validation and the metrics of its objective."""
    shown = {
        "validation_loss": "validation loss {:.4f}",
        "perplexity": "perplexity {:.4g}",
        "accuracy": "accuracy {:.1%}",
        "margin": "margin {:.4f}",
    }
    return ", ".join(words.format(line[name]) for name, words in shown.items() if name in line)


def _measured(line: Line) -> str | None:
    if abs(line["error"]) <= WORTH_A_WARNING:
        return None
    return (
        f"memory is not as planned: {gib(line['measured_bytes'])} reserved with the longest rows, "
        f"{gib(line['predicted_bytes'])} predicted "
        f"({line['error']:+.1%}); please report it"
    )


def _rescued(line: Line) -> str:
    return f"step {line['step']} ran out of memory; the same rows are repeated with {_changes(line)}"


def _validation_rescued(line: Line) -> str:
    return (
        f"step {line['step']}: validation ran out of memory; it now runs with {_changes(line)}, and training is "
        "unchanged"
    )


def _changes(line: Line) -> str:
    return ", ".join(
        f"{name} {line['before'].get(name)} -> {value}"
        for name, value in line["after"].items()
        if value != line["before"].get(name)
    )


def _validation_left_out(line: Line) -> str:
    return (
        f"step {line['step']}: validation does not fit even row by row with every exact lever; it is skipped, and "
        "training continues"
    )


def _stalled(line: Line) -> str:
    return f"no progress for {line['seconds']:.0f} s since {line['since']}; the stacks of all threads are in the log"


def _tracker_failed(line: Line) -> str:
    lost = (
        f"{line['tracker']} did not get {line['lost_lines']:,} lines"
        if line.get("lost_lines")
        else f"{line['tracker']} failed"
    )
    return (
        "; ".join(part for part in (lost, line["found"], f"see {line['log']}" if "log" in line else "") if part)
        + "; the run's own metrics are complete"
    )


def _audited(line: Line) -> str | None:
    found = [f"{words} {_few(line[name])}" for name, words in _QUIET.items() if line.get(name)]
    return f"step {line['step']}: the gradient is {'; it is '.join(found)}" if found else None


def _few(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def _dpo_start(line: Line) -> str:
    found = line["found"]
    return (
        f"before the first step the DPO loss is {found if isinstance(found, str) else f'{found:.6f}'}, and ln 2 is "
        "0.693147"
    )


def _routed(line: Line) -> str:
    """How often each expert is the first choice, by data set."""
    shown = [f"{source} to {' / '.join(_shares(shares, line['experts']))}" for source, shares in line["first"].items()]
    return (
        f"step {line['step']}: first choices of {'held-out' if line['held_out'] else 'trained'} tokens: "
        f"{'; '.join(shown)}"
    )


def _shares(shares: list[float], experts: list[str]) -> list[str]:
    most = sorted(range(len(shares)), key=lambda at: -shares[at])[:_MAX_NAMES]
    return [f"{experts[at]} {shares[at]:.0%}" for at in most]


_WORDS: dict[str, Callable[[Line], str | None]] = {
    "resumed": lambda line: f"resumed from {line['checkpoint']}",
    "rejected": lambda line: str(line["note"]),
    "not_finite": lambda line: f"step {line['step']} was not applied: {line['found']}",
    "measured": _measured,
    "worst_does_not_fit": lambda _: (
        "the longest rows with the most supervised tokens do not fit: a later step may run out of memory"
    ),
    "rolled_back": lambda line: f"rolled back to step {line['step']}",
    "left_out": lambda line: f"step {line['step']} is skipped: it was not finite before",
    "validated": lambda line: f"step {line['step']}: {describe_validation(line)}",
    "validation_not_finite": lambda line: (
        f"step {line['step']}: validation loss {line['found']}, so this step cannot be the best"
    ),
    "amended": lambda line: f"after step {line['step']}: {line['note'] or ', '.join(line['changes'])}",
    "oom_recovered": _rescued,
    "validation_oom_recovered": _validation_rescued,
    "validation_left_out": _validation_left_out,
    "spike": lambda line: (
        f"step {line['step']}: loss {line['found']:.4f} is a spike; the median of the steps before it is "
        f"{line['usual']:.4f}"
    ),
    "stalled": _stalled,
    "tracker_failed": _tracker_failed,
    "audited": _audited,
    "loss_scale": lambda line: (
        f"step {line['step']} overflowed in fp16 and is repeated with loss scale {line['scale']:g}"
    ),
    "dpo_start": _dpo_start,
    "routed": _routed,
}
