"""Judges answers in a terminal, with the same keys as the page."""

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
        """Returns the next key; empty at the end of input."""

    def line(self) -> str: ...


def judge_all(session: Session, rater: str, console: Console, keys: Keys) -> None:
    """Runs until nothing is left or the rater quits; every decision is saved."""
    turn: Turn | None = session.turn(rater)
    while turn is not None:
        if turn.item is not None:
            turn = _judge(session, turn, turn.item, console, keys)
            continue
        console.print("all judged; u undoes the last verdict, r shows the results, any other key quits")
        match keys.key():
            case "u" if turn.can_undo:
                turn = session.undo(turn.rater)
            case "r":
                turn = _results(session, turn, console, keys)
            case _:
                return


def _judge(session: Session, turn: Turn, item: BlindItem, console: Console, keys: Keys) -> Turn | None:
    """Returns the next turn; None if the rater quits."""
    marked: list[set[Reason]] = [set(names) for names in turn.draft.reasons]
    note = turn.draft.note
    show_item(turn, item, marked, note, console)
    console.print(legend(len(item.answers)), style="dim")
    while (key := keys.key()) not in _QUITS:
        try:
            if key in _PRESSES:
                reasons = [sorted(names) for names in marked]
                return session.judge(turn.rater, item.handle, _PRESSES[key], reasons=reasons, note=note)
            if key == "u":
                return session.undo(turn.rater)
            if key == "r":
                return _results(session, turn, console, keys)
        except Refused as reason:
            console.print(str(reason), style="red")
            continue
        if key.lower() in _REASONS:
            marked[key.isupper() and len(item.answers) == 2] ^= {_REASONS[key.lower()]}
            console.print(describe_marks(marked))
        elif key == "n":
            console.print("note: ", end="")
            note = keys.line().strip()
    return None


def _results(session: Session, turn: Turn, console: Console, keys: Keys) -> Turn:
    if not turn.has_seen_results:
        left = f"{turn.total - turn.judged - turn.skipped} items are still to judge"
        blind = f"{left}, and verdicts given afterwards count as not blind"
        console.print(f"results name the models; {blind}. Press y to show them")
        if keys.key() != "y":
            return session.turn(turn.rater)
        session.reveal(turn.rater)
    console.print(results_view(results_of(session.review_set, session.entries)))
    return session.turn(turn.rater)


class _Pipe:
    """Every character except line breaks is a key; a note is the rest of its line."""

    def key(self) -> str:
        while (key := sys.stdin.read(1)) in ("\n", "\r"):
            pass
        return key

    def line(self) -> str:
        return sys.stdin.readline()


class _Terminal:
    """Keys that are pressed early are queued; escape sequences, such as those of arrow keys, are ignored."""

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
        """Bypasses `sys.stdin`, whose buffer would hide the keys after the line."""
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
