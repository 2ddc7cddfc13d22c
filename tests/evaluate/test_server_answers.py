"""A server that answers over HTTP gives the scores that the same model gives here, and whatever it does instead of
answering ends in words, with every answer so far on disk."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from finefit.artifacts.records import read_record
from finefit.artifacts.stage_records import EvalFailure
from finefit.data.rows import ImageRef
from finefit.errors import DataError, Resumable, RunError, SpecError
from finefit.evaluate import server_answers
from finefit.evaluate.decoding import decode, likeliest
from finefit.evaluate.openai_client import RetryPolicy
from finefit.evaluate.server_answers import only_model_at, open_server
from finefit.evaluate.worker import EvalJob, evaluate
from finefit.facts.files import sha256_of
from finefit.spec.schema import Evaluation
from finefit.spec.served import Server
from finefit.tasks.make import make_task
from tests.evaluate.addresses import Address, Answer, address, said
from tests.evaluate.conftest import RENDERER, ROWS, make_work, never

QUICK = RetryPolicy(attempts=3, first_seconds=0.01, longest_seconds=0.05, reply_seconds=60)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and limits in the time of a test."""
    monkeypatch.setattr(server_answers, "RetryPolicy", lambda **asked: replace(QUICK, attempts=asked["attempts"]))


def from_model(model: nn.Module) -> Answer:
    """A completions endpoint with a real model."""

    def answer(_: int, body: dict[str, Any]) -> tuple[int, str]:
        (tokens,) = decode(
            model,
            [body["prompt"]],
            max_new_tokens=body["max_tokens"],
            stops=RENDERER.stop_tokens,
            pad=RENDERER.pad,
            device="cpu",
            choose=likeliest,
        )
        has_ended = tokens[-1] in RENDERER.stop_tokens
        text = RENDERER.tokenizer.decode(tokens[:-1] if has_ended else tokens)
        choice = {"text": text, "finish_reason": "stop" if has_ended else "length"}
        return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": len(tokens)}})

    return answer


def echo(_: int, body: dict[str, Any]) -> tuple[int, str]:
    return 200, said(f"to {body['messages'][-1]['content']}")


def _job(folder: Path, state: Address, *, model: Path | None = None, server: dict[str, Any] | None = None) -> EvalJob:
    """Without a model, one that could not be loaded: the folder is empty but for a config."""
    if model is None:
        model = folder / "none"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return make_work(folder, model, server={"url": state.url, "model": "wise-1", **(server or {})})


def _kept(job: EvalJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in job.paths.items.read_text().splitlines()]


def test_the_answers_of_a_completions_endpoint_are_those_of_the_model_here(
    talker: nn.Module, talker_folder: Path, tmp_path: Path
) -> None:
    here = evaluate(make_work(tmp_path / "here", talker_folder, max_new_tokens=24))
    with address(from_model(talker)) as state:
        job = _job(tmp_path / "there", state, server={"endpoint": "completions"})
        there = evaluate(job)
    assert [item.answer for item in there.items] == [item.answer for item in here.items]
    assert there.metrics == here.metrics
    assert [item.new_tokens for item in there.items] == [item.new_tokens for item in here.items]
    assert {body["path"] for body in state.asked} == {"/v1/completions"}
    assert sorted(body["prompt"] for body in state.asked) == sorted(RENDERER.prompt_tokens(row.prompt) for row in ROWS)
    assert there.signature["server"] == state.url
    assert (there.peak_bytes, there.loaded_bytes) == (None, None)


def test_a_chat_endpoint_gets_the_messages_greedily_and_no_more_at_once_than_asked_for(tmp_path: Path) -> None:
    with address(echo, seconds=0.02) as state:
        result = evaluate(_job(tmp_path, state, server={"concurrency": 3}))
    assert [item.answer for item in result.items] == [f"to {row.prompt[-1].content}" for row in ROWS]
    assert {(body["path"], body["temperature"], body["max_tokens"], body["model"]) for body in state.asked} == {
        ("/v1/chat/completions", 0, 24, "wise-1")
    }
    asked = sorted(str(body["messages"]) for body in state.asked)
    assert asked == sorted(str([{"role": m.role, "content": m.content} for m in row.prompt]) for row in ROWS)
    assert 2 <= state.most_at_once <= 3


def test_a_server_that_dies_is_named_and_asked_only_for_what_is_missing(tmp_path: Path) -> None:
    is_down = [True]

    def dying(before: int, body: dict[str, Any]) -> tuple[int, str]:
        return (502, "gone") if is_down[0] and before >= 5 else echo(before, body)

    with address(dying) as state:
        job = _job(tmp_path, state, server={"concurrency": 1})
        with pytest.raises(Resumable, match=r"server wise-1 at .* answers 502: gone \(6 attempts\)") as error:
            evaluate(job)
        kept, is_down[0], before = _kept(job), False, len(state.asked)
        result = evaluate(job)
    assert "the answers so far are kept" in error.value.remedy
    assert error.value.exit_code == 3
    assert len(kept) == 5
    assert len(state.asked) - before == len(ROWS) - 5
    assert sorted(item.answer for item in result.items) == sorted(f"to {row.prompt[-1].content}" for row in ROWS)


@pytest.mark.parametrize(
    ("status", "text", "problem"),
    [
        (200, "<html>welcome</html>", "gives no chat completion: <html>welcome"),
        (200, said("x").replace('"x"', "7"), "gives no chat completion"),
        (200, "[" * 50_000, "gives no chat completion"),
        (200, said("long " * 40_000), 'more than 90,112 bytes: {"choices"'),
        (503, "loading", "answers 503: loading"),
    ],
)
def test_nonsense_and_answers_without_an_end_are_tried_again_and_named(
    tmp_path: Path, status: int, text: str, problem: str
) -> None:
    with address(lambda *_: (status, text)) as state:
        job = _job(tmp_path, state, server={"concurrency": 1, "attempts": 2})
        with pytest.raises(Resumable, match=problem):
            evaluate(job)
    assert len(state.asked) == 2
    assert _kept(job) == []


def test_a_slow_server_is_named_even_if_it_says_a_little_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_answers, "RetryPolicy", lambda **_: replace(QUICK, attempts=1, reply_seconds=0.5))
    with address(echo, seconds=1.0) as state, pytest.raises(Resumable, match="ReadTimeout"):
        evaluate(_job(tmp_path / "late", state, server={"concurrency": 1}))
    with (
        address(echo, dripping=0.05) as state,
        pytest.raises(Resumable, match=r"the reply has not ended after 0\.5 seconds \(1 attempts\)"),
    ):
        evaluate(_job(tmp_path / "dripping", state, server={"concurrency": 1}))


def test_what_a_server_refuses_names_the_item(tmp_path: Path) -> None:
    with (
        address(lambda *_: (400, "the prompt has 9 tokens and the context 8")) as state,
        pytest.raises(RunError, match=r"refuses test.jsonl:\d+: 400 the prompt has 9 tokens") as error,
    ):
        evaluate(_job(tmp_path, state, server={"concurrency": 1}))
    assert error.value.exit_code == 2
    assert "server.model" in error.value.remedy
    assert len(state.asked) == 1


def test_nothing_is_sent_where_a_server_redirects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "s3cret-s3cret")
    with address(echo) as elsewhere:
        moved = {"Location": f"{elsewhere.url}/chat/completions?key=s3cret-s3cret"}
        with address(lambda *_: (307, ""), headers=moved) as state:
            job = _job(tmp_path, state, server={"concurrency": 1, "key": "SERVER_KEY"})
            with pytest.raises(RunError, match=r"redirects to http://.*key=\*\*\*") as error:
                evaluate(job)
    assert elsewhere.asked == []
    assert state.headers[0]["authorization"] == "Bearer s3cret-s3cret"
    assert "s3cret" not in str(error.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_half_a_surrogate_pair_is_an_answer_that_a_file_can_hold(tmp_path: Path) -> None:
    with address(lambda *_: (200, said("good \ud83d"))) as state:
        result = evaluate(_job(tmp_path, state))
    assert {item.answer for item in result.items} == {"good \ufffd"}


def test_answers_cut_before_any_text_bring_a_warning(tmp_path: Path) -> None:
    choice = {"message": {"content": None}, "finish_reason": "length"}
    with address(lambda *_: (200, json.dumps({"choices": [choice]}))) as state:
        result = evaluate(_job(tmp_path, state))
    (warning,) = [words for words in result.warnings if "max_new_tokens" in words]
    assert f"{len(ROWS)} answers of wise-1 reached 24 tokens before any text" in warning
    assert {item.new_tokens for item in result.items} == {24}
    assert result.coverage == 0


def test_images_are_sent_as_they_are(tmp_path: Path) -> None:
    import PIL.Image

    PIL.Image.new("RGB", (4, 3), "red").save(tmp_path / "red.png")
    ref = ImageRef(str(tmp_path / "red.png"), "", sha256_of(tmp_path / "red.png"), (4, 3), ())
    row = replace(ROWS[0], image_refs=(ref,))
    task = make_task(Evaluation.model_validate({"task": "json_match"}))
    with address(lambda *_: (200, said("{}"))) as state:
        server = Server(url=state.url, model="wise-1")
        with open_server(server, renderer=None, max_new_tokens=8, max_prompt_tokens=None, seed=0, warn=never) as opened:
            (reply,) = opened.replies(task, {0: row})
    asked = next(m for m in state.asked[0]["messages"] if m["role"] == "user")["content"]
    assert [part["type"] for part in asked] == ["image_url", "text"]
    assert asked[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert reply.reply.text == "{}"


def test_what_a_server_cannot_be_asked_is_refused_before_it_is_asked() -> None:
    task = make_task(Evaluation.model_validate({"task": "json_match"}))
    common: dict[str, Any] = {"max_new_tokens": 8, "max_prompt_tokens": None, "seed": 0, "warn": never}
    with address(echo) as state:
        chat = Server(url=state.url, model="m")
        tokens = chat.model_copy(update={"endpoint": "completions"})
        with open_server(chat, renderer=RENDERER, **common) as server, pytest.raises(DataError, match="has tools"):
            list(server.replies(task, {0: replace(ROWS[0], tools='[{"name": "f"}]')}))
        with open_server(tokens, renderer=None, **common) as server, pytest.raises(RunError, match="none is known"):
            list(server.replies(task, {0: ROWS[0]}))
        likelihoods = make_task(Evaluation.model_validate({"task": "perplexity"}))
        with open_server(chat, renderer=None, **common) as server, pytest.raises(RunError, match="likelihoods"):
            list(server.replies(likelihoods, {0: ROWS[0]}))
    assert state.asked == []
    for kind in ("perplexity", "hallucination", "truthfulqa", {"kind": "lm_eval", "tasks": ["arc_easy"]}):
        with pytest.raises(ValidationError, match="needs likelihoods of given answers"):
            Evaluation.model_validate({"task": kind, "server": {"url": "http://host/v1", "model": "m"}})


def test_a_url_alone_means_the_only_model_there() -> None:
    listed = json.dumps({"data": [{"id": "wise-1"}]})
    with address(echo, models=listed) as state:
        assert only_model_at(state.url) == Server(url=state.url, model="wise-1")
    several = json.dumps({"data": [{"id": f"m{n}"} for n in range(7)]})
    with (
        address(echo, models=several) as state,
        pytest.raises(RunError, match="has 7 models: m0, m1, m2, m3, m4 and 2 more"),
    ):
        only_model_at(state.url)
    for models in ("<html>", "[1]", '{"data": [7]}'):
        with address(echo, models=models) as state, pytest.raises(RunError, match="does not say which models"):
            only_model_at(state.url)
    with pytest.raises(RunError, match="does not say which models it has: ConnectError"):
        only_model_at(state.url)
    with pytest.raises(SpecError, match="holds a user"):
        only_model_at("http://me:secret@host/v1")


def test_what_an_address_says_that_it_has_is_read_within_limits_of_bytes_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = json.dumps({"data": [{"id": "wise-1"}]})
    monkeypatch.setattr(server_answers, "MOST_BYTES", len(listed) - 1)
    with address(echo, models=listed) as state, pytest.raises(RunError, match="does not say which models"):
        only_model_at(state.url)
    monkeypatch.setattr(server_answers, "_LOOKUP_SECONDS", 0.2)
    with address(echo, models=" " * 900 + listed, dripping=0.01) as state, pytest.raises(RunError, match="ReadTimeout"):
        only_model_at(state.url)


@pytest.mark.parametrize(
    "url",
    [
        f"http://{'a' * 70}/v1",
        "http://a..b/v1",
        "http://xn--/v1",
        "http://1.2.3.999/v1",
        "http://[::1/v1",
        "http://host:99999/v1",
        "http://ho\nst/v1",
        "http://\ud800/v1",
        f"http://host/{'v' * 70_000}",
    ],
    ids=range(9),
)
def test_an_address_that_nothing_can_be_sent_to_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(SpecError, match="is not a URL"):
        only_model_at(url)
    with pytest.raises(ValidationError, match="is not a URL"):
        Server(url=url, model="m")


@pytest.mark.slow
def test_a_failing_process_leaves_its_reason_and_no_traceback(tmp_path: Path) -> None:
    with address(lambda *_: (401, "who are you?")) as state:
        job = _job(tmp_path, state)
        command = [sys.executable, "-m", "finefit.evaluate.worker", str(job.path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "401 who are you?" in read_record(job.paths.failure, EvalFailure).failure.problem
