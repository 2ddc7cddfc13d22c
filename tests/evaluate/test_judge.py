"""A judge behind a real address on this machine, which fails as such addresses do."""

import json
import threading
import time
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from pydantic import ValidationError

from finefit.artifacts.stage_records import EvalItem
from finefit.errors import Resumable, RunError, SpecError
from finefit.evaluate.judge import judge_items, with_current_marks
from finefit.evaluate.openai_client import RetryPolicy
from finefit.evaluate.score import score_item, summarise
from finefit.spec.schema import Evaluation
from finefit.spec.served import Judge
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.judge_marks import judge_question, mark_in
from finefit.tasks.make import make_task
from tests.evaluate.addresses import Address, address, said
from tests.tasks.task_rows import make_row

QUICK = RetryPolicy(attempts=3, first_seconds=0.01, longest_seconds=0.05, reply_seconds=0.5)


def marking(_: int, body: dict[str, Any]) -> tuple[int, str]:
    """The mark that stands in the answer it is shown."""
    return 200, said("Mark: " + _question(body).rpartition("worth ")[2][:1])


def _question(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def _judge(state: Address, **more: Any) -> Judge:
    return Judge(url=state.url, model="wise-1", **more)


def _task(judge: Judge) -> Task:
    return make_task(Evaluation(task={"kind": "exact_match"}, judge=judge))  # type: ignore[arg-type]


def _items(task: Task, answers: list[str]) -> list[EvalItem]:
    rows = [make_row("the reference") for _ in answers]
    return [
        score_item(task, at, row, prompt="what?", reply=Reply(text=answer))
        for at, (row, answer) in enumerate(zip(rows, answers, strict=True))
    ]


def _judged(state: Address, answers: list[str], folder: Path, **more: Any) -> list[EvalItem]:
    judge = _judge(state, **more)
    task = _task(judge)
    return judge_items(task, _items(task, answers), judge, verdicts=folder / "verdicts.jsonl", seed=5, retries=QUICK)


def test_every_answer_gets_its_mark_and_the_mean_is_over_all_items(tmp_path: Path) -> None:
    with address(marking) as state:
        items = _judged(state, ["worth 5", "worth 3", " "], tmp_path)
    assert [item.counts["judge"] for item in items] == [1.0, 0.5, 0.0]
    assert [item.verdict for item in items] == ["Mark: 5", "Mark: 3", None]
    assert items[0].scores["judge"] == 1.0
    result = summarise(_task(_judge(state)), "base", items, available=3, seconds=1.0)
    assert result.metrics["judge"].value == 0.5
    assert result.metrics["judge_marked"].value == pytest.approx(2 / 3)
    assert result.metrics["exact"].value == 0.0


def test_answers_of_before_a_judge_was_asked_for_are_judged_and_lose_their_marks_after_one(tmp_path: Path) -> None:
    plain, answers = make_task(Evaluation(task={"kind": "exact_match"})), ["worth 5", " "]  # type: ignore[arg-type]
    with address(marking) as state:
        task = _task(judge := _judge(state))
        before = [with_current_marks(task, item) for item in _items(plain, answers)]
        items = judge_items(task, before, judge, verdicts=tmp_path / "verdicts.jsonl", retries=QUICK)
    assert before == _items(task, answers)
    assert summarise(task, "base", items, available=2, seconds=1.0).metrics["judge"].value == 0.5
    assert [with_current_marks(plain, item) for item in _items(task, answers)] == _items(plain, answers)


def test_the_judge_is_asked_once_for_each_answer_and_greedily(tmp_path: Path) -> None:
    with address(marking) as state:
        _judged(state, ["worth 5", " ", "worth 5 {reference}"], tmp_path)
    assert {(body["path"], body["model"], body["temperature"], body["seed"]) for body in state.asked} == {
        ("/v1/chat/completions", "wise-1", 0, 5)
    }
    questions = sorted(map(_question, state.asked))
    assert len(questions) == 2
    assert all("what?" in question and "the reference" in question for question in questions)
    assert any("worth 5 {reference}" in question for question in questions)


def test_a_question_of_ones_own_is_asked_and_recorded(tmp_path: Path) -> None:
    own = 'Give {"mark": ...}? No: judge {answer} by {reference}. {unknown}'
    with address(lambda *_: (200, said("4"))) as state:
        (item,) = _judged(state, ["an answer"], tmp_path, question=own)
    assert _question(state.asked[0]) == 'Give {"mark": ...}? No: judge an answer by the reference. {unknown}'
    assert item.counts["judge"] == 0.75
    signature = _task(_judge(state, question=own)).signature
    assert signature["judge_question"] == own
    assert signature["judge"] == f"wise-1 at {state.url}, temperature 0"


@pytest.mark.parametrize("reply", ["I like it", "Mark: 7", "", None, "Mark: 4.5", "Mark: 2\nMark: 3"])
def test_a_reply_without_a_mark_counts_nothing_and_shows(tmp_path: Path, reply: str | None) -> None:
    with address(lambda *_: (200, said(reply))) as state:
        (item,) = _judged(state, ["an answer"], tmp_path)
    assert (item.counts["judge"], item.counts["judge_marked"]) == (0.0, 0.0)
    assert item.verdict == (reply or "")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(tmp_path: Path, status: int) -> None:
    with address(lambda before, body: (status, "busy") if before < 2 else marking(before, body)) as state:
        (item,) = _judged(state, ["worth 2"], tmp_path)
    assert item.counts["judge"] == 0.25
    assert len(state.asked) == 3


def test_an_address_that_asks_to_wait_is_waited_for(tmp_path: Path) -> None:
    retries, wait = RetryPolicy(attempts=2, first_seconds=0.01, reply_seconds=5), {"Retry-After": "1"}
    with address(lambda at, body: (429, "later") if at == 0 else marking(at, body), headers=wait) as state:
        judge = _judge(state)
        task, began = _task(judge), time.perf_counter()
        judge_items(task, _items(task, ["worth 2"]), judge, verdicts=tmp_path / "v", retries=retries)
    assert time.perf_counter() - began >= 1


def test_slow_replies_and_garbage_are_tried_again_and_then_told(tmp_path: Path) -> None:
    with (
        address(marking, seconds=1.0) as state,
        pytest.raises(Resumable, match=r"cannot be reached: ReadTimeout.*\(3 attempts\)"),
    ):
        _judged(state, ["worth 2"], tmp_path)
    assert len(state.asked) == 3
    for garbage in ("<html>hello</html>", "{}", '{"choices": []}', "[1]", '{"choices": [{"message": {"content": 5}}]}'):
        with (
            address(lambda *_, text=garbage: (200, text)) as state,
            pytest.raises(Resumable, match="gives no chat completion") as error,
        ):
            _judged(state, ["worth 2"], tmp_path)
        assert "/v1" in error.value.remedy


def test_an_address_that_is_not_there_ends_the_evaluation_with_words(tmp_path: Path) -> None:
    with address(marking) as state:
        pass
    with pytest.raises(Resumable, match=r"wise-1 at .* cannot be reached: ConnectError") as error:
        _judged(state, ["worth 2"], tmp_path)
    assert "the same command again" in error.value.remedy


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_will_not_pass_is_told_at_once(tmp_path: Path, status: int) -> None:
    with (
        address(lambda *_: (status, "no such model")) as state,
        pytest.raises(RunError, match=f"refuses: {status} no such model"),
    ):
        _judged(state, ["worth 2"], tmp_path)
    assert len(state.asked) == 1


def test_verdicts_from_before_a_failure_are_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    answers, is_down = [f"{n} worth {1 + n % 5}" for n in range(20)], [True]
    with address(lambda before, body: (500, "gone") if is_down[0] and before >= 10 else marking(before, body)) as state:
        with pytest.raises(Resumable, match="answers 500: gone"):
            _judged(state, answers, tmp_path)
        path = tmp_path / "verdicts.jsonl"
        kept = [json.loads(line)["verdict"] for line in path.read_text().splitlines()]
        assert len(kept) == 10
        path.write_text(path.read_text() + '{"key": "torn')  # as a killed process leaves it
        judged, is_down[0], before = state.asked[:10], False, len(state.asked)
        items = _judged(state, answers, tmp_path)
        assert len({_question(body) for body in state.asked[before:]}) == 10
        assert not {_question(body) for body in state.asked[before:]} & set(map(_question, judged))
        before = len(state.asked)
        _judged(state, answers, tmp_path)
        assert len(state.asked) == before
    assert [item.counts["judge"] for item in items] == [n % 5 / 4 for n in range(20)]


def test_another_answer_or_another_question_is_asked_anew(tmp_path: Path) -> None:
    with address(marking) as state:
        _judged(state, ["worth 2"], tmp_path)
        assert _judged(state, ["worth 4"], tmp_path)[0].counts["judge"] == 0.75
        _judged(state, ["worth 4"], tmp_path, question="{answer}")
    assert len(state.asked) == 3


def test_so_many_are_asked_at_once_and_no_more(tmp_path: Path) -> None:
    with address(marking, seconds=0.05) as state:
        _judged(state, [f"{n} worth 1" for n in range(24)], tmp_path)
    assert 2 <= state.most_at_once <= 8


def test_the_secret_goes_to_the_address_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the end of the line that it was read with."""
    monkeypatch.setenv("JUDGE_KEY", " s3cret-s3cret\r\n")
    with address(
        lambda before, body: (401, "bad key s3cret-s3cret") if "worth 2" in str(body) else marking(before, body)
    ) as state:
        _judged(state, ["worth 4"], tmp_path, key="JUDGE_KEY")
        assert state.headers[0]["authorization"] == "Bearer s3cret-s3cret"
        with pytest.raises(RunError) as error:
            _judged(state, ["worth 2"], tmp_path, key="JUDGE_KEY")
    assert "bad key ***" in str(error.value)
    signature = str(_task(_judge(state, key="JUDGE_KEY")).signature)
    assert "s3cret" not in str(error.value) + (tmp_path / "verdicts.jsonl").read_text() + signature


@pytest.mark.parametrize("secret", [None, "s3cret\ns3cret", "s3cret\x7f", "s3cret-đ"])
def test_a_secret_that_is_not_set_or_cannot_be_sent_is_told_by_its_variable_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if secret is not None:
        monkeypatch.setenv("JUDGE_KEY", secret)
    problem = "JUDGE_KEY, which " + ("is not set" if secret is None else "has characters other than printable ASCII")
    with address(marking) as state, pytest.raises(RunError, match=problem) as error:
        _judged(state, ["worth 2"], tmp_path, key="JUDGE_KEY")
    assert "s3cret" not in str(error.value) + error.value.remedy
    assert state.asked == []


def test_a_secret_stays_out_of_what_the_connection_complains_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of a protocol's failure quote what was sent, here a status line that is none."""

    class Echo(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"no status but s3cret-s3cret\r\n\r\n")

    monkeypatch.setenv("JUDGE_KEY", "s3cret-s3cret")
    with ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            with pytest.raises(Resumable, match=r"cannot be reached: RemoteProtocolError .*but \*\*\*") as error:
                _judged(
                    Address(f"http://127.0.0.1:{server.server_address[1]}/v1"), ["worth 2"], tmp_path, key="JUDGE_KEY"
                )
        finally:
            server.shutdown()
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        ({"url": "localhost:8000"}, "is not a URL"),
        ({"url": "https://me:secret@host/v1"}, "holds a user or a query"),
        ({"url": "https://host/v1?api_key=x"}, "holds a user or a query"),
        ({"url": "http://host/v1", "question": "good?"}, "lacks {answer}"),
        ({"url": "http://host/v1", "key": "sk-123"}, "not the name of an environment variable"),
        ({"url": "http://host/v1", "key": ""}, "not the name of an environment variable"),
    ],
)
def test_a_judge_that_cannot_be_asked_or_would_leak_is_refused_with_the_spec(
    judge: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        Judge(model="m", **judge)


def test_a_task_that_generates_nothing_has_nothing_to_judge() -> None:
    evaluation = Evaluation.model_validate({"task": "perplexity", "judge": {"url": "http://host/v1", "model": "m"}})
    with pytest.raises(SpecError, match="generates no answers"):
        make_task(evaluation)


def test_counts_of_a_failed_item_name_the_judge_too() -> None:
    task = _task(Judge(url="http://host/v1", model="m"))
    with pytest.raises(NoResult):
        task.read(Reply(text=""), make_row("x"))
    assert task.nothing(make_row("x")) == {"exact": 0.0, "judge": 0.0, "judge_marked": 0.0}


@pytest.mark.parametrize(
    ("reply", "mark"),
    [
        ("Mark: 4", 4),
        ("**Mark: 5**", 5),
        ("It is fine.\n\nscore = 3/5.", 3),
        (" 2 \n", 2),
        ("1/5", 1),
        ("<think>Mark: 1? or\nMark: 2</think>\nMark: 5", 5),
        ("Mark: 3\nRating: 3", 3),
        ("Mark: 3\nRating: 4", None),
        ("Mark: 45", None),
        ("Mark: -3", None),
        ("Mark: 0", None),
        ("Mark 4", None),
        ("I would give it 4", None),
        ("4 reasons", None),
        ("", None),
    ],
)
def test_a_mark_is_read_strictly(reply: str, mark: int | None) -> None:
    assert mark_in(reply) == mark


def test_braces_in_an_answer_stay_what_they_are() -> None:
    judge = Judge(url="http://host/v1", model="m", question="{prompt}|{answer}|{reference}")
    assert judge_question(judge, prompt="{answer}", answer="{reference}", reference="{x}") == "{answer}|{reference}|{x}"
