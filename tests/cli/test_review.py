"""`finefit review` as a user meets it: results, exports, the terminal, and a server that only this machine reaches."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.cli.review_terminal import _Terminal
from finefit.data.rows import Row
from finefit.data.sources import open_source
from finefit.report.layout import visible
from finefit.report.review import show_item
from finefit.review.items import ReviewSet, RunTarget, review_set_of_runs
from finefit.review.session import open_session
from finefit.spec.data import Source
from tests.cli.conftest import COMMAND, Finefit, environment, process, started
from tests.reviews import in_memory, make_items, make_review_set, make_run, make_single


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two evaluated runs, a-1 and b-1, below the working directory."""
    for name in ("a-1", "b-1"):
        make_run(tmp_path / name, {"checkpoint-8": make_items(6, name)}, final="checkpoint-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _judged(*presses: str) -> None:
    """On both runs, for a-1 or b-1, wherever it stands."""
    with open_session(
        review_set_of_runs([RunTarget.parse("a-1"), RunTarget.parse("b-1")]), Path("a-1"), seed=1
    ) as session:
        for wish in presses:
            item = session.turn("ann").item
            assert item is not None
            session.judge("ann", item.handle, "1" if item.answers[0].startswith(wish) else "2")


@pytest.mark.usefixtures("runs")
def test_the_document_holds_preference_rates_raters_and_agreement(finefit: Finefit) -> None:
    _judged("a-1", "a-1", "b-1")
    answer = finefit("review", "a-1", "b-1", "--results", "--json")
    assert answer.code == 0
    found = answer.document
    assert found["models"] == ["a-1:checkpoint-8", "b-1:checkpoint-8"]
    assert (found["items"], found["judged"]) == (6, 3)
    assert (found["preference"]["wins"], found["preference"]["losses"], found["preference"]["ties"]) == (2, 1, 0)
    assert found["preference"]["share"].keys() == {"value", "low", "high", "n"}
    assert found["raters"][0]["rater"] == "ann"
    assert found["agreement"] == []


@pytest.mark.usefixtures("runs")
def test_results_change_nothing(finefit: Finefit) -> None:
    assert finefit("review", "a-1", "b-1", "--results", "--json").document["judged"] == 0
    assert not Path("a-1/reviews").exists()


@pytest.mark.usefixtures("runs")
def test_verdicts_and_pairs_are_written_beside_one_another(finefit: Finefit) -> None:
    _judged("a-1", "b-1")
    found = finefit("review", "a-1", "b-1", "--export", "all.csv", "--export-pairs", "pairs.jsonl", "--json").document
    assert found["exported"] == {"path": "all.csv", "verdicts": 2}
    assert found["pairs"] == {"path": "pairs.jsonl", "pairs": 2, "left_out": {"not judged": 4}}
    pairs = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    assert {(pair["chosen"][:3], pair["rejected"][:3]) for pair in pairs} == {("a-1", "b-1"), ("b-1", "a-1")}
    assert pairs[0]["prompt"][0]["role"] == "user"
    assert len(Path("all.csv").read_text().splitlines()) == 3


@pytest.mark.usefixtures("finished")
def test_base_and_result_of_a_real_run_are_judged_and_become_pairs(finefit: Finefit) -> None:
    """The prompts are the messages of the rows, not the text that a template made of them."""
    models = ("runs/tiny-1:base", "runs/tiny-1")
    assert finefit("review", *models, "--results", "--json").document["models"] == [
        "tiny-1:base",
        "tiny-1:checkpoint-12",
    ]
    review_set = review_set_of_runs([RunTarget.parse(model) for model in models])
    assert len(review_set.items) == 5
    with open_session(review_set, Path("runs/tiny-1")) as session:
        while (item := session.turn("ann").item) is not None:
            session.judge("ann", item.handle, "1")
    pairs = finefit("review", *models, "--export-pairs", "pairs.jsonl", "--json").document["pairs"]
    assert pairs["pairs"] + pairs["left_out"].get("empty answer", 0) + pairs["left_out"].get("equal answers", 0) == 5
    rows = list(open_source(Source(path="pairs.jsonl"), Path.cwd(), split="train").rows()) if pairs["pairs"] else []
    assert [row.kind for row in rows if isinstance(row, Row)] == ["pair"] * pairs["pairs"]
    assert all(said.text.startswith("add ") for item in review_set.items for said in item.prompt)
    assert {said.role for item in review_set.items for said in item.prompt} == {"user"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 runs were named"),
        (["a-1", "b-1", "a-1"], "3 runs were named"),
        (["nothing"], "nothing is "),
        (["a-1", "a-1"], "both sides are a-1:checkpoint-8"),
        (["a-1", "--task", "rouge"], "has no result of rouge"),
        (["a-1", "--name", "../x"], "--name ../x"),
        (["a-1", "--answers", "x.csv"], "--answers"),
        (["--answers", "x.csv"], "x.csv"),
        (["a-1", "--results", "--export", "out.pdf"], ".pdf"),
        (["a-1", "--rater", " "], "1 to 40 printable characters"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_mistake_is_told_with_a_remedy(finefit: Finefit, arguments: list[str], message: str) -> None:
    answer = finefit("review", *arguments)
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert len(answer.err.strip().splitlines()) >= 2


def test_a_table_with_a_bad_row_is_refused_with_its_place(tmp_path: Path, finefit: Finefit) -> None:
    (tmp_path / "made.jsonl").write_text('{"prompt": "q", "answer": "a"}\n{"prompt": \n')
    answer = finefit("review", "--answers", tmp_path / "made.jsonl", "--results")
    assert answer.code == 2
    assert "made.jsonl:2" in answer.err


def test_a_spreadsheet_is_judged_line_by_line_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "made.csv").write_text(
        "prompt,answer,reference\none,uno,1\ntwo,dos,2\nthree,tres,3\nfour,cuatro,4\n", encoding="utf-8-sig"
    )
    judged = subprocess.run(
        [*COMMAND, "review", "--answers", "made.csv", "--terminal"],
        input="ann\nf1f1\nwn too long\n2u2sq",
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "judged good, but a reason against it is marked" in " ".join(judged.stdout.split())
    assert "2 judged, 1 skipped of 4" in judged.stdout
    (line,) = [
        json.loads(text) for text in (tmp_path / "reviews/made.jsonl").read_text().splitlines() if "too long" in text
    ][-1:]
    assert (line["choice"], line["reasons"], line["note"]) == ("bad", [["wrong inference"]], "too long")


class Terminal:
    """A child behind a pseudo-terminal."""

    def __init__(self, child: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.child = child
        self._descriptor = descriptor
        self.shown = ""

    def until(self, text: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown:\n{self.shown}"
            self.shown += os.read(self._descriptor, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._descriptor)

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())


@contextlib.contextmanager
def _terminal(*arguments: str, cwd: Path) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment() | {"COLUMNS": "120", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(child, ours)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        os.close(ours)


def test_what_is_typed_before_a_note_is_asked_for_is_the_note_and_then_keys() -> None:
    ours, theirs = pty.openpty()
    usual = termios.tcgetattr(theirs)
    tty.setcbreak(theirs, termios.TCSADRAIN)
    keys = _Terminal(theirs, usual)
    try:
        os.write(ours, b"made up\n1")
        assert keys.line() == "made up"
        assert keys.key() == "1"
    finally:
        os.close(ours)
        os.close(theirs)


def test_single_keys_judge_in_a_terminal_and_the_same_command_goes_on(runs: Path) -> None:
    with _terminal("review", "a-1", "b-1", "--terminal", "--rater", "ann", cwd=runs) as terminal:
        terminal.until("1 of 6")
        terminal.until("q quit")
        terminal.press("\x1b[C")  # an arrow is no mark
        terminal.press("F")
        terminal.until("answer 2: fabricated")
        terminal.press("n")
        terminal.until("note: ")
        terminal.press("made up\n")
        terminal.press("1")
        terminal.until("2 of 6")
        terminal.press("t")
        terminal.until("3 of 6")
        terminal.press("u")
        terminal.until("2 of 6")
        terminal.press("s")
        terminal.until("3 of 6")
        terminal.press("q")
        terminal.until("1 judged, 1 skipped of 6")
        assert terminal.child.wait(30) == 0
    with _terminal("review", "a-1", "b-1", "--terminal", "--rater", "ann", cwd=runs) as terminal:
        terminal.until("3 of 6")
        terminal.press("r")
        terminal.until("4 items are still to judge")
        terminal.press("y")
        terminal.until("a-1:checkpoint-8 over b-1:checkpoint-8")
        terminal.until("3 of 6")
        terminal.press("1212")
        terminal.until("all judged")
        terminal.press("q")
        assert terminal.child.wait(30) == 0
    (found,) = json.loads(process("review", "a-1", "b-1", "--results", "--json", cwd=runs).out)["raters"]
    assert (found["judged"], found["skipped"], found["undone"], found["not_blind"]) == (5, 1, 1, 4)
    kept = (runs / "a-1/reviews").glob("*.jsonl")
    first = next(json.loads(line) for line in next(kept).read_text().splitlines() if "verdict" in line)
    assert first["note"] == "made up"
    assert first["reasons"][first["shown"][1]] == ["fabricated"]


def test_the_terminal_is_left_as_it_was_found(runs: Path) -> None:
    with _terminal("review", "a-1", "--terminal", "--rater", "ann", cwd=runs) as terminal:
        before = terminal.settings()
        terminal.until("q quit")
        assert terminal.settings() != before
        terminal.child.send_signal(signal.SIGINT)
        terminal.until("the same command continues")
        assert terminal.child.wait(30) == 0
        assert terminal.settings() == before


def test_nothing_before_the_results_names_a_model_in_a_terminal(runs: Path) -> None:
    for name in ("a-1", "b-1"):
        make_run(runs / f"secret-{name}", {"checkpoint-8": make_items(2, "said")}, final="checkpoint-8")
    done = subprocess.run(
        [*COMMAND, "review", "secret-a-1", "secret-b-1", "--terminal", "--rater", "ann"],
        input="1t",
        cwd=runs,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 judged" in done.stdout
    assert "secret" not in done.stdout


@pytest.mark.parametrize("width", [40, 80, 101, 140])
@pytest.mark.parametrize("review_set", [make_single(1), make_review_set(1)], ids=["one", "two"])
def test_a_terminal_shows_every_character_of_an_answer(review_set: ReviewSet, width: int) -> None:
    answers = tuple(f"{'x' * 300}{side}end {'word ' * 50}last{side}" for side in range(len(review_set.models)))
    session, _ = in_memory(replace(review_set, items=(replace(review_set.items[0], answers=answers),)))
    turn = session.turn("ann")
    assert turn.item is not None
    console = Console(width=width, file=io.StringIO(), markup=False, emoji=False, highlight=False)
    show_item(turn, turn.item, [set() for _ in answers], "", console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("x") >= 300 * len(answers)
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())


def test_an_answer_cannot_command_the_terminal() -> None:
    assert visible("a\x1b[2Jb\x07\r\x9b31m\u202eok\tfine\n") == r"a\u001b[2Jb\u0007\u000d\u009b31m\u202eok" + "\tfine\n"
    assert visible("می\u200cخواهم 👩\u200d🔬") == "می\u200cخواهم 👩\u200d🔬"


@contextlib.contextmanager
def _served(*arguments: str, cwd: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    with started("review", *arguments, "--json", cwd=cwd) as child:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["url"], child


def _raw(port: int, request: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request.replace("\n", "\r\n").encode())
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def _port(url: str) -> int:
    return int(re.findall(r":(\d+)/", url)[0])


def test_a_server_answers_this_machine_by_its_own_name_only(runs: Path) -> None:
    with _served("a-1", "b-1", cwd=runs) as (url, child):
        port = _port(url)
        assert url == f"http://127.0.0.1:{port}/"
        page = _raw(port, f"GET / HTTP/1.1\nHost: 127.0.0.1:{port}\nConnection: close\n\n")
        assert page.startswith("HTTP/1.1 200")
        assert "server:" not in page.lower()
        for path in ("/../../../../etc/passwd", "/..%2f..%2fetc/passwd", "/./review.py", "/review.js/../../guard.py"):
            assert _raw(port, f"GET {path} HTTP/1.1\nHost: 127.0.0.1:{port}\nConnection: close\n\n").startswith(
                "HTTP/1.1 404"
            )
        for host in ("evil.example", f"evil.example:{port}"):
            assert _raw(port, f"GET / HTTP/1.1\nHost: {host}\nConnection: close\n\n").startswith("HTTP/1.1 421")
        twice = f"GET / HTTP/1.1\nHost: 127.0.0.1:{port}\nHost: evil.example\nConnection: close\n\n"
        assert _raw(port, twice).split()[1] in ("400", "421")
        others = [address for address in _other_addresses() if _is_open(address, port)]
        assert others == []
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0


def _other_addresses() -> list[str]:
    import psutil

    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return [address for address in found if not address.startswith("127.")]


def _is_open(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2):
        return True
    return False


def test_a_wider_bind_has_a_token_that_is_printed_or_the_users_own(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _served("a-1", "--host", "0.0.0.0", cwd=runs) as (url, _):
        assert len(url.partition("#token=")[2]) >= 32
        asked = f"POST /api/begin HTTP/1.1\nHost: localhost:{_port(url)}\nOrigin: http://localhost:{_port(url)}\n"
        body = "Content-Type: application/json\nContent-Length: 2\nConnection: close\n\n{}"
        assert _raw(_port(url), asked + body).startswith("HTTP/1.1 401")
    monkeypatch.setenv("FINEFIT_TOKEN", "my-own-token-of-some-length")
    with _served("a-1", "--host", "0.0.0.0", cwd=runs) as (url, child):
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
        assert "my-own-token" not in url + out + err
        assert "$FINEFIT_TOKEN" in err
    monkeypatch.setenv("FINEFIT_TOKEN", "short")
    answer = process("review", "a-1", "--host", "0.0.0.0", cwd=runs)
    assert answer.code == 2
    assert "has 5 characters" in answer.err
    assert "short" not in answer.err


def test_a_second_server_of_one_review_is_refused(runs: Path) -> None:
    with _served("a-1", cwd=runs) as (_, child):
        answer = process("review", "a-1", cwd=runs)
        assert answer.code == 2
        assert f"already open in process {child.pid}" in answer.err


def test_judging_loads_neither_torch_nor_transformers(runs: Path) -> None:
    code = """
import sys
sys.argv = ["finefit", "review", "a-1", "b-1", "--terminal", "--rater", "ann"]
from finefit.cli import main
main_error = None
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
import finefit.web.review, finefit.web.server
print("HEAVY", sorted({"torch", "transformers", "datasets", "peft"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, input="1", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
