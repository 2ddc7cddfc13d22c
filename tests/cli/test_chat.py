"""`finefit chat` without a terminal, as a script uses it, and what Ctrl-C stops."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import EvalResult
from finefit.cli.chat_session import _COMMANDS, ChatSession, LineInput, append_row, converse
from finefit.data.rows import Message, Row
from finefit.data.sources import open_source
from finefit.errors import DataError, FinefitError
from finefit.export.chat import ChatHistory, Piece, Sampling
from finefit.spec.data import Source
from tests.cli.conftest import COMMAND, STAGE, Answer, Finefit, environment
from tests.conftest import make_model_folder

RUN = "runs/tiny-1"
PROMPT = b"> "
Chat = Callable[..., Answer]


@pytest.fixture
def chat(finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """`chat(["a line", ...], target, *options)`: eight tokens at most, as the run's evaluation."""

    def call(lines: Sequence[str], target: str, *options: str) -> Answer:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return finefit("chat", target, "--device", "cpu", "--max-new-tokens", "8", *options)

    return call


def _answers(answer: Answer) -> list[dict[str, Any]]:
    assert answer.code == 0, answer.err
    return [json.loads(line) for line in answer.out.splitlines()]


def _scored(folder: Path, checkpoint: str) -> dict[str, str]:
    """The run's own answers by what was asked."""
    path = StageDir(folder / RUN / STAGE).evaluation("json_match", checkpoint).result
    asked = (json.loads(line)["messages"][0]["content"] for line in (folder / "test.jsonl").read_text().splitlines())
    return dict(zip(asked, (item.answer for item in read_record(path, EvalResult).items), strict=True))


def _fresh(questions: Sequence[str], *after: str) -> list[str]:
    """Each in a conversation of its own, with these commands after its answer."""
    return [line for question in questions for line in (question, *after, "/reset")]


def test_answers_are_those_of_the_runs_evaluation(finished: Path, chat: Chat) -> None:
    wanted = _scored(finished, "checkpoint-12")
    found = _answers(chat(_fresh(list(wanted)), f"{RUN}:final", "--json"))
    assert {one["prompt"]: one["answer"] for one in found} == wanted
    plain = chat(_fresh(list(wanted)), f"{RUN}:12")
    assert plain.out == "".join(f"{text}\n" for text in wanted.values())


def test_weights_that_are_not_those_of_the_training_do_not_answer(finished: Path, chat: Chat) -> None:
    weights = finished / RUN / STAGE / "checkpoints/final/adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    answer = chat(["hello"], f"{RUN}:final")
    assert answer.code == 2
    assert "does not verify" in answer.err


def test_compare_answers_with_the_adapter_off_as_the_base_does(finished: Path, chat: Chat) -> None:
    tuned, base = _scored(finished, "checkpoint-12"), _scored(finished, "base")
    assert tuned != base
    asked = ["/compare on", *_fresh(list(tuned))]
    for one in _answers(chat(asked, f"{RUN}:final", "--json")):
        assert (one["answer"], one["base"]["answer"]) == (tuned[one["prompt"]], base[one["prompt"]])
    first = next(iter(tuned))
    after = _answers(chat([first, "/compare", "/undo", first], f"{RUN}:final", "--json"))
    assert [one["answer"] for one in after] == [tuned[first]] * 3  # the adapter is on again
    assert after[1]["base"]["answer"] == base[first]


@pytest.mark.usefixtures("finished")
def test_an_adapter_folder_and_its_model_folder_are_chatted_with(chat: Chat) -> None:
    asked, adapter = _fresh(["add 3 and 4"]), f"{RUN}/{STAGE}/checkpoints/checkpoint-12"
    (tuned,) = _answers(chat(["/compare on", *asked], adapter, "--json"))
    (base,) = _answers(chat(asked, "model", "--json"))
    assert tuned["base"]["answer"] == base["answer"]
    refused = chat(["/compare on"], "model")
    assert refused.code == 2


@pytest.mark.usefixtures("finished")
def test_a_saved_exchange_is_a_row_that_training_reads(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    lines = ["first", '"""two', 'lines"""', f"/save {file}", f"/save {file} all"]
    answers = [one["answer"] for one in _answers(chat(lines, RUN, "--system", "Be brief.", "--json"))]
    rows = list(open_source(Source(path=str(file)), Path.cwd(), split="train").rows())
    system, last = Message("system", "Be brief."), (Message("user", "two\nlines"), Message("assistant", answers[1]))
    assert all(isinstance(row, Row) for row in rows)
    assert [row.messages for row in rows if isinstance(row, Row)][1:] == [
        (system, *last),
        (system, Message("user", "first"), Message("assistant", answers[0]), *last),
    ]


def test_a_row_is_appended_only_to_a_file_of_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        append_row(tmp_path / "rows.csv", {})
    with pytest.raises(DataError):
        append_row(tmp_path / "nowhere" / "rows.jsonl", {})


@pytest.mark.usefixtures("finished")
def test_an_unknown_command_and_help_list_the_commands_and_the_chat_goes_on(chat: Chat) -> None:
    for asked in ("/sing", "/help"):
        answer = chat([asked, "hello", "/quit", "never asked"], RUN)
        assert answer.code == 0
        assert len(answer.out.splitlines()) == 1
        assert all(name in answer.err for name in _COMMANDS)


@pytest.mark.usefixtures("finished")
def test_a_system_prompt_a_reset_and_an_undo_change_what_is_asked(chat: Chat) -> None:
    lines = ["hello", "hello", "/undo", "hello", "/reset", "hello", "/system Shout.", "/reset", "hello"]
    once, twice, undone, reset, shouted = _answers(chat(lines, RUN, "--json"))
    assert (once["reused_tokens"], reset["answer"]) == (0, once["answer"])
    assert undone["answer"] == twice["answer"]
    assert twice["reused_tokens"] > once["new_tokens"]
    (asked,) = _answers(chat(["hello"], RUN, "--json", "--system", "Shout."))
    assert asked["answer"] == shouted["answer"]


@pytest.mark.usefixtures("finished")
def test_a_model_without_a_template_forgets_the_turns_before(chat: Chat) -> None:
    make_model_folder(Path("plain"), chat=False)
    answer = chat(["once upon", "a time", "once upon"], "plain", "--json")
    first, _, again = _answers(answer)
    assert first["answer"] == again["answer"]
    assert "no chat template" in answer.err


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("nowhere", "nowhere"),
        ("spec.yaml", RUN),
        ("runs/other-1", "tiny-1"),
        (f"{RUN}:7", "checkpoint-12"),
        ("nowhere.gguf", "nowhere.gguf"),
        ("train.jsonl", "train.jsonl is not a folder"),
        ("embedded:gpt-5", "smollm2-135m"),
    ],
)
def test_what_cannot_be_chatted_with_is_the_users_to_mend(chat: Chat, target: str, named: str) -> None:
    refused = chat(["hello"], target)
    assert refused.code == 2
    assert named in refused.err


@pytest.mark.slow  # a process on a pseudo-terminal; the parts are held by the tests around it
@pytest.mark.usefixtures("finished")
def test_on_a_terminal_both_answers_appear_side_by_side_and_two_ctrl_c_end_the_chat() -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "chat", f"{RUN}:final", "--device", "cpu", "--max-new-tokens", "8"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment() | {"TERM": "xterm"})
    os.close(theirs)
    try:
        _until(ours, PROMPT)
        os.write(ours, b"add 3 and 4\n")
        _until(ours, PROMPT)
        os.write(ours, b"/compare\n")
        shown = _until(ours, PROMPT)
        assert b"tuned" in shown
        assert b"base" in shown
        _interrupt(child)
        assert b"again" in _until(ours, PROMPT)
        _interrupt(child)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def _interrupt(child: "subprocess.Popen[bytes]") -> None:
    """As a person would, who sees the prompt first: a signal before readline waits is only seen at the next key."""
    time.sleep(1)
    child.send_signal(signal.SIGINT)


def _until(terminal: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        assert select.select([terminal], [], [], 120)[0], found
        found += os.read(terminal, 4096)
    return found


@dataclass
class _Slow:
    """A speaker during whose answers a key is pressed, as a terminal would send it."""

    interrupts: dict[int, int] = field(default_factory=dict)
    """How many Ctrl-C arrive at the second word of an answer, by its number."""
    remembers, has_base = True, False
    asked: list[list[str]] = field(default_factory=list)

    def stream(
        self, messages: Sequence[Message], sampling: Sampling, *, base: bool = False
    ) -> Generator[Piece, None, None]:
        assert not base
        self.asked.append([message.content for message in messages])
        yield Piece(text="one")
        for _ in range(self.interrupts.get(len(self.asked), 0)):
            signal.raise_signal(signal.SIGINT)
        yield Piece(text=" two")
        yield Piece(text=" three", new_tokens=sampling.max_new_tokens)


class _Keys(LineInput):
    """What is typed; None is Ctrl-C at the prompt."""

    def __init__(self, *typed: str | None) -> None:
        self._typed, self.said = list(typed), list[str]()

    def read(self) -> str | None:
        if not self._typed:
            return None
        line = self._typed.pop(0)
        if line is None:
            raise KeyboardInterrupt
        return line

    def note(self, words: str) -> None:
        self.said.append(words)

    def failed(self, error: FinefitError) -> None:
        self.said.append(error.problem)


def _chatted(speaker: _Slow, *typed: str | None) -> ChatSession:
    session = ChatSession(speaker, ChatHistory(), Sampling(max_new_tokens=9), _Keys(*typed))
    converse(session)
    return session


def test_ctrl_c_stops_an_answer_and_not_the_chat() -> None:
    speaker = _Slow({1: 1})
    session = _chatted(speaker, "a", "b")
    assert session.conversation.turns == [("a", "one two"), ("b", "one two three")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("speaker", "typed"),
    [(_Slow({1: 1}), ("a", None, "b")), (_Slow(), ("a", None, None, "b")), (_Slow({1: 2}), ("a", "b"))],
)
def test_a_second_ctrl_c_ends_the_chat(speaker: _Slow, typed: tuple[str | None, ...]) -> None:
    _chatted(speaker, *typed)
    assert [asked[-1] for asked in speaker.asked] == ["a"]


def test_an_error_between_two_ctrl_c_counts_as_a_message() -> None:
    speaker = _Slow()
    _chatted(speaker, None, "/compare", None, "b")
    assert speaker.asked == [["b"]]


def test_two_ctrl_c_with_a_message_between_them_do_not() -> None:
    speaker = _Slow()
    _chatted(speaker, None, "a", None, "b")
    assert [asked[-1] for asked in speaker.asked] == ["a", "b"]


def test_a_message_may_begin_with_a_slash() -> None:
    speaker = _Slow()
    _chatted(speaker, "//etc/hosts", "/quit", "b")
    assert speaker.asked == [["/etc/hosts"]]
