"""Judging in a terminal: the keys of the page, over any connection."""

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

from finefit.report.review import REASON_KEYS, legend, marked_words, results_view, show_sheet
from finefit.review.results import results_of
from finefit.review.session import Face, Press, Refused, Session, Turn
from finefit.review.verdicts import Reason

_PRESSES: dict[str, Press] = {"1": "1", "2": "2", "t": "tie", "0": "tie", "s": "skip"}
_REASONS: dict[str, Reason] = {key: reason for reason, key in REASON_KEYS.items()}
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
_END_OF_LINE = re.compile(r"\r\n?|\n")
_CTRL_D = "\x04"
_QUITS = frozenset({"q", _CTRL_D, ""})


class Keys(Protocol):
    def key(self) -> str:
        """The next one; empty where there will be none."""

    def line(self) -> str: ...


class _Marks:
    """What is marked and noted on the sheet that is shown."""

    def __init__(self, turn: Turn) -> None:
        self.reasons: list[set[Reason]] = [set(names) for names in turn.draft.reasons]
        self.note = turn.draft.note

    def toggle(self, side: int, reason: Reason) -> None:
        self.reasons[side] ^= {reason}


class Judging:
    """One rater at one terminal."""

    def __init__(self, session: Session, rater: str, console: Console, keys: Keys) -> None:
        self._session = session
        self._rater = rater
        self._console = console
        self._keys = keys

    def judge_all(self) -> None:
        """Until nothing is left or the rater has enough; what is decided is kept either way."""
        turn: Turn | None = self._session.turn(self._rater)
        while turn is not None:
            turn = self._end(turn) if turn.face is None else self._judge(turn, turn.face)

    def _end(self, turn: Turn) -> Turn | None:
        """None where the rater wants nothing more."""
        self._console.print("all judged; u takes the last verdict back, r shows the results, any other key ends")
        match self._keys.key():
            case "u" if turn.can_undo:
                return self._session.undo(turn.rater)
            case "r":
                return self._results(turn)
            case _:
                return None

    def _judge(self, turn: Turn, face: Face) -> Turn | None:
        """The next turn; None where the rater quits."""
        marks = _Marks(turn)
        show_sheet(turn, face, marks.reasons, marks.note, self._console)
        self._console.print(legend(len(face.answers)), style="dim")
        while (key := self._keys.key()) not in _QUITS:
            try:
                if (after := self._pressed(key, turn, face, marks)) is not None:
                    return after
            except Refused as reason:
                self._console.print(str(reason), style="red")
        return None

    def _pressed(self, key: str, turn: Turn, face: Face, marks: _Marks) -> Turn | None:
        """None where the sheet stays."""
        if key in _PRESSES:
            return self._session.judge(
                turn.rater,
                face.handle,
                _PRESSES[key],
                reasons=[sorted(names) for names in marks.reasons],
                note=marks.note,
            )
        if key == "u":
            return self._session.undo(turn.rater)
        if key == "r":
            return self._results(turn)
        if key.lower() in _REASONS:
            marks.toggle(int(key.isupper() and len(face.answers) == 2), _REASONS[key.lower()])
            self._console.print(marked_words(marks.reasons))
        elif key == "n":
            self._console.print("note: ", end="")
            marks.note = self._keys.line().strip()
        return None

    def _results(self, turn: Turn) -> Turn:
        if not turn.has_seen_results:
            left = turn.total - turn.judged - turn.skipped
            self._console.print(
                f"results name the models; {left} are still to judge, and what is judged afterwards counts as not blind. y shows them"
            )
            if self._keys.key() != "y":
                return self._session.turn(turn.rater)
            self._session.reveal(turn.rater)
        self._console.print(results_view(results_of(self._session.stack, self._session.entries)))
        return self._session.turn(turn.rater)


class _Pipe:
    """Every character is a key but line breaks, and a note is the rest of its line."""

    def key(self) -> str:
        while (key := sys.stdin.read(1)) in ("\n", "\r"):
            pass
        return key

    def line(self) -> str:
        return sys.stdin.readline()


class _Terminal:
    """Keys come as they are pressed. What was pressed ahead waits, and arrows and their like, which send several characters, mean nothing."""

    def __init__(self, descriptor: int, usual: list[Any]) -> None:
        self._descriptor = descriptor
        self._usual = usual
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
        """Past the buffer of `sys.stdin`, where what follows the line would be out of sight."""
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._usual)
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
    """The terminal is left as it was found."""
    if not sys.stdin.isatty():
        yield _Pipe()
        return
    descriptor = sys.stdin.fileno()
    usual = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        yield _Terminal(descriptor, usual)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, usual)
