"""What happened in a run besides its steps, in words: one short line for each event of its metrics that a reader should know of."""

from collections.abc import Callable
from typing import Any

from finefit.artifacts.measurements import WORTH_A_WARNING
from finefit.report.units import gib

Line = dict[str, Any]
_NAMES_TOLD = 3
_QUIET = {
    "zero": "exactly zero for",
    "faint": "rounding for",
    "idle": "missing, since no row came to these experts, for",
    "blind": "missing, since no row of this step has an image, for",
}
"""What an audit says of a gradient, where it is worth a word."""


def event_words(line: Line) -> str | None:
    """None where there is nothing to tell: a step, a checkpoint, whatever is shown otherwise."""
    tell = _WORDS.get(line.get("event", ""))
    return tell(line) if tell is not None else None


def validation_words(line: Line) -> str:
    """Of a line that was written when the model was validated: the loss, and what belongs to its objective."""
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
        f"memory is not as planned: {gib(line['measured_bytes'])} reserved with the longest rows, {gib(line['foretold_bytes'])} foretold "
        f"({line['error']:+.1%}); please report it"
    )


def _rescued(line: Line) -> str:
    return f"step {line['step']} ran out of memory; the same rows again with {_changes(line)}"


def _validation_rescued(line: Line) -> str:
    return f"step {line['step']}: validation ran out of memory; it is made with {_changes(line)} from now on, and training as before"


def _changes(line: Line) -> str:
    return ", ".join(
        f"{name} {line['before'].get(name)} -> {value}"
        for name, value in line["after"].items()
        if value != line["before"].get(name)
    )


def _validation_left_out(line: Line) -> str:
    return f"step {line['step']}: validation does not fit even row by row with every exact lever pulled; it is left out, and training goes on"


def _stalled(line: Line) -> str:
    return f"nothing has gone on for {line['seconds']:.0f} s since {line['since']}; the stacks of all threads are in the log"


def _tracker_failed(line: Line) -> str:
    lost = (
        f"{line['tracker']} did not get {line['lost_lines']:,} lines"
        if line.get("lost_lines")
        else f"{line['tracker']} failed"
    )
    return (
        "; ".join(part for part in (lost, line["found"], f"see {line['log']}" if "log" in line else "") if part)
        + "; the run's own metrics are whole"
    )


def _audited(line: Line) -> str | None:
    found = [f"{words} {_few(line[name])}" for name, words in _QUIET.items() if line.get(name)]
    return f"step {line['step']}: the gradient is {'; it is '.join(found)}" if found else None


def _few(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_TOLD]) + (
        f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    )


def _dpo_start(line: Line) -> str:
    found = line["found"]
    return f"before the first step the DPO loss is {found if isinstance(found, str) else f'{found:.6f}'}, and ln 2 is 0.693147"


def _routed(line: Line) -> str:
    """Of each data set, how often each expert is the first choice."""
    told = [f"{source} to {' / '.join(_shares(shares, line['experts']))}" for source, shares in line["first"].items()]
    return f"step {line['step']}: first choices of {'held-out' if line['held_out'] else 'trained'} tokens: {'; '.join(told)}"


def _shares(shares: list[float], experts: list[str]) -> list[str]:
    most = sorted(range(len(shares)), key=lambda at: -shares[at])[:_NAMES_TOLD]
    return [f"{experts[at]} {shares[at]:.0%}" for at in most]


_WORDS: dict[str, Callable[[Line], str | None]] = {
    "resumed": lambda line: f"resumed from {line['checkpoint']}",
    "rejected": lambda line: str(line["note"]),
    "not_finite": lambda line: f"step {line['step']} was not applied: {line['found']}",
    "measured": _measured,
    "worst_does_not_fit": lambda _: (
        "rows as long as the longest and as much supervised as any do not fit: a later step may run out of memory"
    ),
    "rolled_back": lambda line: f"rolled back to step {line['step']}",
    "left_out": lambda line: f"step {line['step']} is left out: it was not finite before",
    "validated": lambda line: f"step {line['step']}: {validation_words(line)}",
    "validation_not_finite": lambda line: (
        f"step {line['step']}: validation loss {line['found']}, so this step cannot be the best"
    ),
    "amended": lambda line: f"after step {line['step']}: {line['note'] or ', '.join(line['changes'])}",
    "rescued": _rescued,
    "validation_rescued": _validation_rescued,
    "validation_left_out": _validation_left_out,
    "spike": lambda line: (
        f"step {line['step']}: loss {line['found']:.4f} leaps out of the steps before it, whose median is {line['usual']:.4f}"
    ),
    "stalled": _stalled,
    "tracker_failed": _tracker_failed,
    "audited": _audited,
    "loss_scale": lambda line: (
        f"step {line['step']} overflowed in fp16 and is made again with loss scale {line['scale']:g}"
    ),
    "dpo_start": _dpo_start,
    "routed": _routed,
}
