"""A chat from its first line to its last: what is typed, what is answered, and what Ctrl-C stops. On a terminal an
answer appears as it is written; elsewhere messages are lines of stdin and answers lines of stdout."""

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from finefit.errors import DataError, FinefitError
from finefit.export.chat import ChatHistory, Sampling, Speaker, require_base
from finefit.report.layout import visible

_QUOTES = '"""'
_PROMPT, _MORE = "> ", "... "
_COMMANDS = {
    "/compare": "answer the last message again without the adapter, side by side; on or off: every message",
    "/system": "TEXT: set the system prompt; -: remove it; alone: show it",
    "/save": "FILE.jsonl: append the last exchange as a row for data.train; FILE.jsonl all: the whole conversation",
    "/undo": "take back the last turn",
    "/reset": "begin a new conversation with the same system prompt",
    "/help": "list the commands",
    "/quit": "end the chat; so does Ctrl-D",
}
_HELP = "\n".join(
    [
        *(f"{name:<10}{what}" for name, what in _COMMANDS.items()),
        f"{_QUOTES:<10}begins and ends a message of several lines; //text sends /text",
    ]
)
Watch = Callable[[str], None]
"""Is given an answer as far as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    text: str
    seconds: float
    new_tokens: int | None = None
    reused_tokens: int | None = None
    cut_tokens: int = 0
    is_cut: bool = False
    is_stopped: bool = False

    @property
    def remark(self) -> str:
        """What a user should know about it; empty for most."""
        words = []
        if self.is_stopped:
            words.append("stopped; Ctrl-C again ends the chat")
        if self.is_cut:
            words.append(f"cut at {self.new_tokens:,} tokens; --max-new-tokens allows more")
        if self.cut_tokens:
            words.append(f"{self.cut_tokens:,} tokens were cut out of the longest message, as in training")
        return "; ".join(words)


class Screen(Protocol):
    def read(self) -> str | None:
        """The next message or command; None at the end."""

    def note(self, words: str) -> None: ...

    def writing(self, sides: int) -> Any:
        """A context in which answers appear: yields a Watch for each side."""

    def answered(self, said: str, answer: ChatReply, base: ChatReply | None) -> None: ...

    def failed(self, error: FinefitError) -> None: ...


@dataclass(slots=True)
class ChatSession:
    speaker: Speaker
    conversation: ChatHistory
    sampling: Sampling
    screen: Screen
    compares: bool = False

    def introduce(self, name: str) -> None:
        self.screen.note(f"{visible(name)}; /help lists the commands")
        if not self.speaker.remembers:
            self.screen.note("it has no chat template: each message is a prompt by itself, without the turns before it")

    def answer(self, said: str) -> bool:
        """Whether it was stopped. An answer that fails leaves the conversation as it was."""
        prompt = self.conversation.prompt(said, remembers=self.speaker.remembers)
        with self.screen.writing(1 + self.compares) as watches:
            answer = self._stream(prompt, watches[0])
            base = self._stream(prompt, watches[1], base=True) if self.compares and not answer.is_stopped else None
        self.conversation.turns.append((said, answer.text))
        self.screen.answered(said, answer, base)
        return answer.is_stopped or (base is not None and base.is_stopped)

    def compare_last(self) -> bool:
        """The base answers what the model has answered last, after the same conversation."""
        require_base(self.speaker)
        if not self.conversation.turns:
            self.screen.note("nothing was asked yet")
            return False
        said, text = self.conversation.turns[-1]
        prompt = self.conversation.before_last().prompt(said, remembers=self.speaker.remembers)
        with self.screen.writing(2) as watches:
            watches[0](text)
            base = self._stream(prompt, watches[1], base=True)
        self.screen.answered(said, ChatReply(text=text, seconds=0.0), base)
        return base.is_stopped

    def _stream(self, prompt: Any, watch: Watch, *, base: bool = False) -> ChatReply:
        began, text = time.perf_counter(), ""
        answer = ChatReply(text="", seconds=0.0)
        with stop_on_ctrl_c() as is_stopped, closing(self.speaker.stream(prompt, self.sampling, base=base)) as pieces:
            for piece in pieces:
                text += piece.text
                answer = ChatReply(
                    text=text,
                    seconds=0.0,
                    new_tokens=piece.new_tokens,
                    reused_tokens=piece.reused_tokens,
                    cut_tokens=piece.cut_tokens,
                    is_cut=piece.is_cut,
                )
                watch(text)
                if is_stopped():
                    answer = replace(answer, is_stopped=piece.new_tokens is None)
                    break
        return replace(answer, text=text, seconds=time.perf_counter() - began)

    def command(self, line: str) -> bool:
        """Whether Ctrl-C stopped it."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/compare" if rest in ("on", "off"):
                require_base(self.speaker)
                self.compares = rest == "on"
            case "/compare" if not rest:
                return self.compare_last()
            case "/system" if rest:
                self.conversation.system = "" if rest == "-" else rest
            case "/system":
                self.screen.note(self.conversation.system or "no system prompt")
            case "/save" if rest:
                self._save(rest)
            case "/undo" if self.conversation.turns:
                self.conversation.turns.pop()
            case "/undo":
                self.screen.note("there is no turn to take back")
            case "/reset":
                self.conversation.turns.clear()
            case "/help":
                self.screen.note(_HELP)
            case known if known in _COMMANDS:
                self.screen.note(f"{name:<10}{_COMMANDS[name]}")
            case _:
                self.screen.note(f"there is no command {visible(name)}\n{_HELP}")
        return False

    def _save(self, rest: str) -> None:
        file = rest.removesuffix(" all").strip()
        if not self.conversation.turns:
            self.screen.note("nothing was answered yet, so there is no row to save")
            return
        append_row(Path(file).expanduser(), self.conversation.row(whole=file != rest))
        self.screen.note(f"appended to {file}")


def converse(session: ChatSession) -> None:
    """Until /quit, the end of the input, or two Ctrl-C in a row."""
    was_pressed = False
    while True:
        try:
            line = session.screen.read()
            if line is None or line.strip() == "/quit":
                return
            was_pressed = False
            was_pressed = _carry_out(session, line)
        except FinefitError as error:
            session.screen.failed(error)
        except SecondCtrlC:
            return
        except KeyboardInterrupt:  # while nothing was answered
            if was_pressed:
                return
            was_pressed = True
            session.screen.note("Ctrl-C again ends the chat")


def _carry_out(session: ChatSession, line: str) -> bool:
    if not line.strip():
        return False
    if line.startswith("/") and not line.startswith("//"):
        return session.command(line.strip())
    return session.answer(line.removeprefix("/") if line.startswith("//") else line)


class SecondCtrlC(KeyboardInterrupt):
    """During one answer."""


@contextmanager
def stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed; a second one raises SecondCtrlC."""
    pressed = list[int]()

    def note(number: int, _frame: FrameType | None) -> None:
        if pressed:
            raise SecondCtrlC
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """A line after those that are there, also where the last one was not ended."""
    if path.suffix != ".jsonl":
        problem = f"{path} does not end in .jsonl, and a row is appended as a line"
        raise DataError(problem, f"name a file such as {path.with_suffix('.jsonl').name}")
    try:
        with path.open("a+b") as file:
            size = file.seek(0, io.SEEK_END)
            if size:
                file.seek(size - 1)
            joint = "" if not size or file.read(1) == b"\n" else "\n"
            file.write(f"{joint}{json.dumps(row, ensure_ascii=False)}\n".encode())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}", "name another file") from None


def open_screen(*, as_json: bool) -> Screen:
    if as_json:
        return JsonLines()
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else LineInput()


def _message(read_line: Callable[[str], str | None]) -> str | None:
    """One line, or several between quotes."""
    line = read_line(_PROMPT)
    if line is None or not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES) and (following := read_line(_MORE)) is not None:
        lines.append(following)
    return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n")


class Terminal:
    def __init__(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401 gives `input` its line editing and history
        self._console = Console(markup=False, emoji=False, highlight=False)

    def read(self) -> str | None:
        def line(prompt: str) -> str | None:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None

        return _message(line)

    def note(self, words: str) -> None:
        self._console.print(Text(words, style="dim"), soft_wrap=True)

    @contextmanager
    def writing(self, sides: int) -> Iterator[list[Watch]]:
        if sides == 2:
            with Live(console=self._console, refresh_per_second=8) as live:
                texts = ["", ""]

                def watch(side: int) -> Watch:
                    def show(text: str) -> None:
                        texts[side] = text
                        live.update(_side_by_side(*texts))

                    return show

                yield [watch(0), watch(1)]
            return
        said = ""

        def show(text: str) -> None:
            nonlocal said
            sys.stdout.write(visible(text[len(said) :]))
            sys.stdout.flush()
            said = text

        try:
            yield [show]
        finally:
            print()

    def answered(self, said: str, answer: ChatReply, base: ChatReply | None) -> None:  # noqa: ARG002 it is on the screen
        for remark in dict.fromkeys(one.remark for one in (answer, base) if one is not None and one.remark):
            self.note(remark)

    def failed(self, error: FinefitError) -> None:
        self._console.print(Text(str(error), style="red"), soft_wrap=True)


def _side_by_side(tuned: str, base: str) -> Table:
    table = Table(expand=True)
    table.add_column("tuned", ratio=1, overflow="fold")
    table.add_column("base", ratio=1, overflow="fold")
    table.add_row(Text(visible(tuned)), Text(visible(base)))
    return table


class LineInput:
    """A failure ends the chat, so that a script notices it."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a prompt that is not text is refused with a reason

    def read(self) -> str | None:
        def line(_prompt: str) -> str | None:
            text = sys.stdin.readline()
            return text.rstrip("\r\n") if text else None

        return _message(line)

    def note(self, words: str) -> None:
        typer.echo(words, err=True)

    @contextmanager
    def writing(self, sides: int) -> Iterator[list[Watch]]:
        yield [lambda _text: None] * sides

    def answered(self, said: str, answer: ChatReply, base: ChatReply | None) -> None:  # noqa: ARG002
        typer.echo(answer.text)
        if base is not None:
            typer.echo(f"base: {base.text}")
        if answer.remark:
            self.note(answer.remark)

    def failed(self, error: FinefitError) -> None:
        raise error


class JsonLines(LineInput):
    def answered(self, said: str, answer: ChatReply, base: ChatReply | None) -> None:
        document = {"prompt": said, **_document(answer)} | ({"base": _document(base)} if base is not None else {})
        typer.echo(json.dumps(document, ensure_ascii=False))


def _document(answer: ChatReply) -> dict[str, Any]:
    counts = {"new_tokens": answer.new_tokens, "reused_tokens": answer.reused_tokens, "cut_tokens": answer.cut_tokens}
    ends = {"is_cut": answer.is_cut, "is_stopped": answer.is_stopped}
    return {"answer": answer.text, **counts, **ends, "seconds": round(answer.seconds, 3)}
