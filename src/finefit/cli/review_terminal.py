"""Judging in a terminal, with the keys of the page."""

import codecs
import os
import re
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console

from finefit.report.review import REASON_KEYS, describe_marks, legend, results_view, show_item
from finefit.review.session import BlindItem, Press, Refused, Session, Turn
from finefit.review.verdicts import Reason, results_of

_PRESSES: dict[str, Press] = {"1": "1", "2": "2", "t": "tie", "0": "tie", "s": "skip"}
_REASONS: dict[str, Reason] = {key: reason for reason, key in REASON_KEYS.items()}
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
_END_OF_LINE = re.compile(r"\r\n?|\n")
_CTRL_D = "\x04"
_QUITS = frozenset({"q", _CTRL_D, ""})


class Keys(Protocol):
    def key(self) -> str:
        """The next key; empty at the end of input."""

    def line(self) -> str: ...


class _Marks:
    """Reasons marked and the note written on the current item."""

    def __init__(self, turn: Turn) -> None:
        self.reasons: list[set[Reason]] = [set(names) for names in turn.draft.reasons]
        self.note = turn.draft.note

    def toggle(self, side: int, reason: Reason) -> None:
        self.reasons[side] ^= {reason}


class TerminalReview:
    """One rater at one terminal."""

    def __init__(self, session: Session, rater: str, console: Console, keys: Keys) -> None:
        self._session = session
        self._rater = rater
        self._console = console
        self._keys = keys

    def judge_all(self) -> None:
        """Until nothing is left or the rater quits; every decision is kept."""
        turn: Turn | None = self._session.turn(self._rater)
        while turn is not None:
            turn = self._end(turn) if turn.item is None else self._judge(turn, turn.item)

    def _end(self, turn: Turn) -> Turn | None:
        """None if the rater quits."""
        self._console.print("all judged; u undoes the last verdict, r shows the results, any other key quits")
        match self._keys.key():
            case "u" if turn.can_undo:
                return self._session.undo(turn.rater)
            case "r":
                return self._results(turn)
            case _:
                return None

    def _judge(self, turn: Turn, item: BlindItem) -> Turn | None:
        """The next turn; None if the rater quits."""
        marks = _Marks(turn)
        show_item(turn, item, marks.reasons, marks.note, self._console)
        self._console.print(legend(len(item.answers)), style="dim")
        while (key := self._keys.key()) not in _QUITS:
            try:
                if (after := self._pressed(key, turn, item, marks)) is not None:
                    return after
            except Refused as reason:
                self._console.print(str(reason), style="red")
        return None

    def _pressed(self, key: str, turn: Turn, item: BlindItem, marks: _Marks) -> Turn | None:
        """None if the item stays on screen."""
        if key in _PRESSES:
            return self._session.judge(
                turn.rater,
                item.handle,
                _PRESSES[key],
                reasons=[sorted(names) for names in marks.reasons],
                note=marks.note,
            )
        if key == "u":
            return self._session.undo(turn.rater)
        if key == "r":
            return self._results(turn)
        if key.lower() in _REASONS:
            marks.toggle(int(key.isupper() and len(item.answers) == 2), _REASONS[key.lower()])
            self._console.print(describe_marks(marks.reasons))
        elif key == "n":
            self._console.print("note: ", end="")
            marks.note = self._keys.line().strip()
        return None

    def _results(self, turn: Turn) -> Turn:
        if not turn.has_seen_results:
            left = turn.total - turn.judged - turn.skipped
            self._console.print(
                f"results name the models; {left} items are still to judge, and verdicts given afterwards count as not "
                "blind. Press y to show them"
            )
            if self._keys.key() != "y":
                return self._session.turn(turn.rater)
            self._session.reveal(turn.rater)
        self._console.print(results_view(results_of(self._session.review_set, self._session.entries)))
        return self._session.turn(turn.rater)


class _Pipe:
    """Every character except line breaks is a key; a note is the rest of its line."""

    def key(self) -> str:
        while (key := sys.stdin.read(1)) in ("\n", "\r"):
            pass
        return key

    def line(self) -> str:
        return sys.stdin.readline()


class _Terminal:
    """Keys arrive as they are pressed. Keys pressed ahead wait; escape sequences, such as those of arrow keys, are
    ignored."""

    def __init__(self, descriptor: int, saved: list[Any]) -> None:
        self._descriptor = descriptor
        self._saved = saved
        self._ahead = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def key(self) -> str:
        while not self._ahead:
            pressed = os.read(self._descriptor, 1024)
            if not pressed:
                return ""
            self._ahead = _ESCAPE_SEQUENCE.sub("", self._decode(pressed))
        key, self._ahead = self._ahead[0], self._ahead[1:]
        return key

    def line(self) -> str:
        """Reads past `sys.stdin`, whose buffer would hide the keys after the line."""
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._saved)
        try:
            while not _END_OF_LINE.search(self._ahead) and (typed := os.read(self._descriptor, 1024)):
                self._ahead += self._decode(typed)
        finally:
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)
        line, *rest = _END_OF_LINE.split(self._ahead, maxsplit=1)
        self._ahead = "".join(rest)
        return line


@contextmanager
def open_keys() -> Iterator[Keys]:
    """Restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield _Pipe()
        return
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        yield _Terminal(descriptor, saved)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
