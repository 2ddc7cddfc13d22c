"""The process of an evaluation: its record, its items, what it does when it is stopped, and the same from two processes
as from one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import read_record, write_record
from finefit.artifacts.stage_records import EvalFailure, EvalResult
from finefit.data.rows import Row, is_asked
from finefit.errors import DataError, Resumable, WorkerDied
from finefit.evaluate import batches, worker
from finefit.evaluate import generate as generate_module
from finefit.evaluate.decoding import decode
from finefit.evaluate.generate import examples_of, logprobs
from finefit.evaluate.worker import (
    EvalJob,
    ItemShare,
    answer_share,
    evaluate,
    other_shares,
    read_job,
    sample,
)
from finefit.stats.metrics import cautions, mean, rate
from finefit.tasks import Likelihood, Reply, ScoredReply, Task
from tests.evaluate.conftest import LIMIT, RENDERER, ROWS, make_work, never

BOTH = Task(
    name="both",
    metrics=(rate("is_likelier"), mean("length", unit="number")),
    read=lambda reply, _: ScoredReply(
        extracted=None, counts={"is_likelier": float(_likelier(reply)), "length": float(len(reply.text))}
    ),
    nothing=lambda _: {"is_likelier": 0.0, "length": 0.0},
    require=lambda _: None,
    candidates=lambda row: ((row.answer, "{}"), ("no",)),
    signature={"kind": "made here"},
)

COMMAND = [sys.executable, "-m", "finefit.evaluate.worker"]


def _likelier(reply: Reply) -> bool:
    return max(found.logprob for found in reply.right) > max(found.logprob for found in reply.wrong)


def _with_task(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    monkeypatch.setattr(worker, "make_task", lambda *_, **__: task)


def _words(result: EvalResult) -> list[tuple[int, str, int | None]]:
    return [(item.item, item.answer, item.new_tokens) for item in result.items]


def test_the_record_says_what_was_answered_how_and_with_what_memory(tmp_path: Path, talker_folder: Path) -> None:
    asked = make_work(tmp_path, talker_folder, batch_limit=replace(LIMIT, held_bytes=12345))
    result = evaluate(asked)
    assert (result.n, result.available, result.task, result.checkpoint) == (14, 14, "json_match", "base")
    assert result.signature.keys() == {"finefit", "torch", "transformers", "peft", "decoding", "precision"}
    assert (
        result.signature["torch"] == torch.__version__.split("+")[0] or result.signature["torch"] == torch.__version__
    )
    assert result.signature["decoding"] == "greedy, at most 24 new tokens"
    assert result.new_tokens == sum(item.new_tokens or 0 for item in result.items) > 14
    assert result.predicted_bytes == 12345
    assert result.loaded_bytes is not None
    assert result.peak_bytes is not None
    assert 50 * 2**20 < result.loaded_bytes <= result.peak_bytes < 20 * 2**30
    assert result.seconds > 0
    assert result.warnings == cautions(14)
    assert result.items[3].prompt == RENDERER.prompt_text(ROWS[3].prompt)
    assert {path.name for path in asked.paths.folder.iterdir()} == {"base.request.json", "base.items.jsonl"}


def test_what_is_answered_already_is_neither_asked_nor_measured_again(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_work(tmp_path, talker_folder)
    first = evaluate(asked)
    monkeypatch.setattr("finefit.evaluate.worker._load", None)
    again = evaluate(asked)
    assert (again.items, again.metrics) == (first.items, first.metrics)
    assert again.loaded_bytes is again.peak_bytes is None


def test_items_that_were_answered_before_a_kill_are_kept_and_the_rest_is_as_it_would_have_been(
    tmp_path: Path, talker_folder: Path
) -> None:
    asked = make_work(tmp_path, talker_folder)
    whole = evaluate(asked)
    lines = asked.paths.items.read_text().splitlines(keepends=True)
    asked.paths.items.write_text("".join(lines[:5]) + lines[5][:30])
    assert evaluate(asked).items == whole.items


def test_a_task_that_wants_an_answer_and_likelihoods_gets_both(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_task(monkeypatch, BOTH)
    result = evaluate(make_work(tmp_path, talker_folder))
    for item, row in zip(result.items, ROWS, strict=True):
        assert [(c.text, c.is_right, c.tokens) for c in item.candidates] == [
            (row.answer, True, len(row.answer) + 1),
            ("{}", True, 3),
            ("no", False, 3),
        ]
        assert item.candidates[0].logprob > item.candidates[2].logprob  # it was trained on these
        assert item.answer
        assert item.new_tokens
    assert result.metrics["is_likelier"].value == 1.0
    assert result.signature["kind"] == "made here"


def test_items_that_are_asked_in_two_ways_are_written_slice_by_slice(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop then costs one slice and not all likelihoods."""
    _with_task(monkeypatch, BOTH)
    monkeypatch.setattr(generate_module, "_SLICE", 1)
    asked, order = make_work(tmp_path, talker_folder), list[str]()

    def noted(module: Any, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(module, name)

        def noting(*given: Any, **more: Any) -> Any:
            order.append(name)
            return call(*given, **more)

        return noting

    for module, name in ((batches, "answers"), (generate_module, "logprobs")):
        monkeypatch.setattr(module, name, noted(module, name))
    evaluate(asked)
    assert order == ["logprobs", "answers"] * 4  # 14 items by fours


def test_a_task_that_generates_nothing_asks_for_likelihoods_alone(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_task(monkeypatch, replace(BOTH, generates=False))
    monkeypatch.setattr(batches, "answers", None)
    result = evaluate(make_work(tmp_path, talker_folder))
    assert {(item.answer, item.new_tokens) for item in result.items} == {("", None)}
    assert result.new_tokens == 0
    assert result.metrics["is_likelier"].value == 1.0


def test_what_a_task_counts_in_the_end_is_counted_for_items_with_a_result(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Reply, row: Row) -> ScoredReply:
        return ScoredReply(extracted=None, counts={"later": 0.0}, failure="odd" if row.number % 2 else None)

    def finish(items: Sequence[tuple[Row, Reply]]) -> list[Mapping[str, float]]:
        assert [row.number for row, _ in items] == [2, 4, 6, 8, 10, 12, 14]
        assert all(reply.right[0].text == row.answer for row, reply in items)
        return [{"later": float(row.number)} for row, _ in items]

    late = replace(
        BOTH,
        metrics=(mean("later", unit="number"),),
        read=read,
        nothing=lambda _: {"later": 0.0},
        finish=finish,
        generates=False,
    )
    _with_task(monkeypatch, late)
    result = evaluate(make_work(tmp_path, talker_folder))
    assert result.metrics["later"].value == pytest.approx((2 + 4 + 6 + 8 + 10 + 12 + 14) / 14)
    assert [item.scores["later"] for item in result.items[:4]] == [0.0, 2.0, 0.0, 4.0]
    assert result.coverage == 0.5


def test_plain_text_is_weighed_over_all_its_windows_and_needs_no_prompt(
    tmp_path: Path, talker: torch.nn.Module, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row(source="t.txt", number=at, text=f"text {at} and more of it") for at in (1, 2)]
    task = replace(
        BOTH,
        generates=False,
        window=8,
        candidates=lambda row: ((row.answer,), ()),
        read=_nats,
        nothing=_nothing,
        metrics=(mean("nats"),),
    )
    _with_task(monkeypatch, task)
    result = evaluate(make_work(tmp_path, talker_folder, rows))
    assert [(item.prompt, item.candidates[0].tokens) for item in result.items] == [
        ("", 19),
        ("", 19),
    ]  # 22 tokens in 3 windows
    for row, item in zip(rows, result.items, strict=True):
        windows = examples_of(RENDERER, row, "", prompt=(), window=8)
        alone = logprobs(talker, windows, pad=RENDERER.pad, batch_limit=LIMIT, device="cpu", warn=never)
        assert item.counts["nats"] == pytest.approx(-sum(logprob for _, logprob in alone), abs=1e-3)
    assert len({item.key for item in result.items}) == 2


def _nats(reply: Reply, _: Row) -> ScoredReply:
    found: Likelihood = reply.right[0]
    return ScoredReply(extracted=None, counts={"nats": -found.logprob})


def _nothing(_: Row) -> dict[str, float]:
    return {"nats": 0.0}


def test_memory_that_ran_out_is_in_the_record_and_stays_there(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = evaluate(make_work(tmp_path / "plain", talker_folder))

    def short(model: torch.nn.Module, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(model, prompts, **how)

    monkeypatch.setattr("finefit.evaluate.batches.decode", short)
    asked = make_work(tmp_path / "short", talker_folder)
    result = evaluate(asked)
    assert _words(result) == _words(plain)
    assert len(result.warnings) == 2
    assert result.warnings[0].startswith("out of memory with 4 rows")
    assert evaluate(asked).warnings == result.warnings


def test_a_model_that_does_not_fit_is_told_in_words(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> torch.nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("finefit.evaluate.worker.load_for_answers", load)
    with pytest.raises(
        Resumable,
        match=r"model does not fit in the free memory: CUDA out of memory\. Tried to allocate 20\.00 GiB",
    ):
        evaluate(make_work(tmp_path, talker_folder))


# a sample


def test_a_sample_is_the_same_items_for_every_run_that_has_them() -> None:
    rows = [replace(ROWS[0], number=at, text=f"row {at}") for at in range(100)]
    chosen = sample(rows, 10)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 10
    assert max(chosen) > 20
    turned = sample(rows[::-1], 10)
    assert {rows[::-1][at].text for at in turned} == {rows[at].text for at in chosen}
    assert set(chosen) < set(sample(rows, 30))
    assert sample(rows, None) == sample(rows, 100) == sample(rows, 999) == list(range(100))


def test_a_sample_is_drawn_from_the_sources_that_are_asked() -> None:
    rows = [replace(row, dataset="ab"[at % 2]) for at, row in enumerate(ROWS)]
    asked = [at for at, row in enumerate(rows) if is_asked(row, ("b",))]
    assert asked == list(range(1, len(rows), 2))
    assert sample(rows, None, among=asked) == asked
    assert set(sample(rows, 2, among=asked)) < set(asked)
    assert len(sample(rows, 2, among=asked)) == 2
    assert all(is_asked(row, ()) for row in rows)
    assert all(is_asked(row, ("b",)) for row in ROWS)  # the only source there is


def test_a_sample_has_a_record_of_its_own_and_leaves_its_answers_to_all(tmp_path: Path, talker_folder: Path) -> None:
    asked = make_work(tmp_path, talker_folder, limit=5)
    result = evaluate(asked)
    assert (result.n, result.available) == (5, 14)
    assert [item.item for item in result.items] == sample(ROWS, 5)
    assert asked.paths.result.name == "base.sample-5.json"
    assert asked.paths.items.name == "base.items.jsonl"


# several processes


def _shared(asked: EvalJob, devices: int) -> EvalJob:
    write_record(asked.path, replace(asked.request, batch_limit=replace(asked.request.batch_limit, devices=devices)))
    return read_job(asked.path)


@pytest.mark.slow
def test_two_processes_give_the_record_of_one(tmp_path: Path, talker_folder: Path) -> None:
    alone = evaluate(make_work(tmp_path / "one", talker_folder))
    asked = _shared(make_work(tmp_path / "two", talker_folder), 2)
    both = evaluate(asked)
    assert (both.items, both.metrics, both.new_tokens) == (alone.items, alone.metrics, alone.new_tokens)
    written = [{line["item"] for line in read_lines(asked.paths.items_of(part))} for part in (0, 1)]
    assert written == [set(range(0, 14, 2)), set(range(1, 14, 2))]


def test_a_part_answers_what_is_its_own_and_not_answered_yet(tmp_path: Path, talker_folder: Path) -> None:
    asked = make_work(tmp_path, talker_folder)
    answer_share(asked, ItemShare(number=1, of=3))
    assert {line["item"] for line in read_lines(asked.paths.items_of(1))} == {1, 4, 7, 10, 13}
    before = asked.paths.items_of(1).read_bytes()
    answer_share(asked, ItemShare(number=1, of=2))  # another number of processes goes on with the same answers
    found = [line["item"] for line in read_lines(asked.paths.items_of(1))]
    assert asked.paths.items_of(1).read_bytes().startswith(before)
    assert sorted(found) == [1, 3, 4, 5, 7, 9, 10, 11, 13]
    assert not asked.paths.result.exists()


def test_answers_of_all_processes_are_set_aside_together(tmp_path: Path, talker_folder: Path) -> None:
    asked = make_work(tmp_path, talker_folder)
    answer_share(asked, ItemShare(number=0, of=2))
    answer_share(asked, ItemShare(number=1, of=2))
    asked.paths.warnings.write_text("{}\n")
    assert len(asked.paths.answered()) == 2
    asked.paths.set_aside()
    assert list(asked.paths.folder.iterdir()) == [asked.paths.earlier]


def test_parts_are_told_by_number() -> None:
    assert ItemShare.read("2/5") == ItemShare(number=2, of=5)
    assert str(ItemShare(number=2, of=5)) == "2/5"
    assert [ItemShare(number=at, of=3).missing([1, 5, 6, 9], ()) for at in range(3)] == [[1, 9], [5], [6]]


def _plays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Companions that do something else than answering."""
    (tmp_path / "played.py").write_text(body)
    monkeypatch.setattr(worker, "MODULE", "played")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_companions_hold_the_lock_of_the_run_too(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which this process inherited: a run is locked while anybody works in it."""
    lock = os.open(tmp_path / "run.lock", os.O_CREAT | os.O_RDWR)
    _plays(
        monkeypatch, tmp_path, f"import os\nopen({str(tmp_path / 'seen')!r}, 'w').write(str(os.fstat({lock}).st_ino))\n"
    )
    asked = make_work(tmp_path, talker_folder)
    os.set_inheritable(lock, True)
    try:
        with other_shares(asked.path, asked.paths, 2):
            pass
        assert (tmp_path / "seen").read_text() == str(os.fstat(lock).st_ino)
    finally:
        os.close(lock)


def test_a_companion_that_was_killed_ends_the_evaluation_resumable(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plays(monkeypatch, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    asked = make_work(tmp_path, talker_folder)
    with (
        pytest.raises(WorkerDied, match="process 2 of 2 that share the items was ended by SIGKILL"),
        other_shares(asked.path, asked.paths, 2),
    ):
        pass


def test_what_a_companion_failed_with_is_what_is_told(tmp_path: Path, talker_folder: Path) -> None:
    asked = _shared(make_work(tmp_path, talker_folder), 2)
    where = asked.where.prepared("test.jsonl")
    told = r"process 2 of 2 that share the items: .*test.jsonl are missing or have changed"
    with pytest.raises(DataError, match=told), other_shares(asked.path, asked.paths, 2):
        where.write_text(where.read_text() + "\n")
    assert read_record(asked.paths.failure_of(1), EvalFailure).failure.kind == "DataError"


def test_companions_end_with_an_evaluation_that_fails(
    tmp_path: Path, talker_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plays(monkeypatch, tmp_path, "import time\ntime.sleep(60)\n")
    asked, began = make_work(tmp_path, talker_folder), time.monotonic()
    started: list[subprocess.Popen[bytes]] = []
    start: Any = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ZeroDivisionError), other_shares(asked.path, asked.paths, 3):
        raise ZeroDivisionError
    assert time.monotonic() - began < 20
    assert [child.poll() for child in started] == [-signal.SIGTERM] * 2


@pytest.mark.slow
def test_a_stop_ends_every_process_and_keeps_every_answer(tmp_path: Path, talker_folder: Path) -> None:
    asked = _shared(make_work(tmp_path, talker_folder, ROWS * 40, max_new_tokens=40), 2)
    process = subprocess.Popen([*COMMAND, str(asked.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        _until(
            lambda: all(
                asked.paths.items_of(part).exists() and asked.paths.items_of(part).stat().st_size for part in (0, 1)
            )
        )
        process.send_signal(signal.SIGTERM)
    finally:
        process.communicate()  # the end of its standard input ends it too
    assert process.returncode == 3
    assert not asked.paths.result.exists()
    assert read_record(asked.paths.failure, EvalFailure).failure.kind == "Interrupted"
    kept = [json.loads(line) for part in (0, 1) for line in asked.paths.items_of(part).read_text().splitlines()]
    time.sleep(0.5)
    assert len(kept) == sum(
        len(asked.paths.items_of(part).read_text().splitlines()) for part in (0, 1)
    )  # nobody writes any more


def _until(holds: Callable[[], bool], seconds: float = 300) -> None:
    """On a busy machine two processes take a while to begin."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_says_in_a_record_why_it_failed(tmp_path: Path, talker_folder: Path) -> None:
    asked = make_work(tmp_path, talker_folder)
    write_record(asked.path, replace(asked.request, subject=replace(asked.request.subject, model_fingerprint="0" * 64)))
    done = subprocess.run([*COMMAND, str(asked.path)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 2
    failure = read_record(asked.paths.failure, EvalFailure).failure
    assert (failure.kind, failure.problem) == ("RunError", "the model model has changed since this run began")


def test_fewer_cards_than_processes_are_told(tmp_path: Path, talker_folder: Path) -> None:
    asked = make_work(tmp_path, talker_folder, batch_limit=EvalBatchLimit(rows=1, tokens=99, devices=2))
    write_record(asked.path, replace(asked.request, subject=replace(asked.request.subject, device="cuda")))
    if torch.cuda.device_count() < 2:
        with pytest.raises(Exception, match="the items are to be shared over 2 cards, and torch sees"):
            answer_share(read_job(asked.path), ItemShare(number=1, of=2))
