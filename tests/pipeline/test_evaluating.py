"""What an evaluation asks, what is asked anew, where scores are filed, and who is told of them; the processes are played."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.checkpoint import MANIFEST
from finefit.artifacts.records import EvalRequest, Room, Stage, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.errors import RunError, SpecError
from finefit.pipeline import evaluating
from finefit.pipeline.create import stage_of
from finefit.pipeline.evaluating import Rooms, at_the_end, evaluate, evaluations_of, note_scores, relabelled, request_of, scores_told
from finefit.pipeline.scoring import Wish, carry_out, open_work
from finefit.spec.schema import Evaluation, Tracker
from tests.conftest import make_rows, write_jsonl
from tests.evals import make_item, make_result

Launched = list[EvalRequest]
FAKE = """
import json, os
def init(**_): pass
def finish(): pass
def log(metrics, step):
    with open(os.environ["FAKE_SEEN"], "a") as seen:
        seen.write(json.dumps([step, metrics]) + "\\n")
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Every request, answered at once."""
    found: Launched = []

    def launch(_: str, argument: Path, *, log: Path, **__: Any) -> int:
        log.touch()
        request = read_record(argument, EvalRequest)
        found.append(request)
        paths = StageDir(argument.parents[2]).evaluation(request.evaluation.label, request.checkpoint, request.evaluation.limit)
        write_record(paths.result, make_result(request.checkpoint, (make_item(0, all_fields=1.0),), task=request.evaluation.label))
        return 0

    monkeypatch.setattr(evaluating, "launch", launch)
    return found


@pytest.fixture
def trained(run: RunDir) -> RunDir:
    folder = stage_of(run).checkpoints
    for step in (9, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / MANIFEST).write_text(json.dumps({"step": step}))
    (folder / "final").symlink_to("checkpoint-12")
    return run


def _ask(run: RunDir, checkpoint: str = "base", **settings: Any) -> EvalRequest:
    (declared,) = evaluations_of(run)
    return request_of(run, checkpoint, declared.model_copy(update=settings))


def _score(run: RunDir, request: EvalRequest) -> None:
    evaluate(run, request, base=run.path, lock=0, tick=lambda: None)


def _stage(run: RunDir, **changes: Any) -> None:
    where = stage_of(run)
    write_record(where.stage, replace(read_record(where.stage, Stage), **changes))


def test_a_run_plans_the_room_of_its_evaluations_and_takes_it_at_its_end(trained: RunDir, launched: Launched) -> None:
    stage = read_record(stage_of(trained).stage, Stage)
    assert stage.rooms["json_match"].rows == 16
    at_the_end(trained, lock=0, tick=lambda: None, say=lambda _: None)
    assert [(request.checkpoint, request.room) for request in launched] == [
        ("base", stage.rooms["json_match"]),
        ("checkpoint-12", stage.rooms["json_match"]),
    ]


def test_every_checkpoint_is_scored_where_the_spec_asks_for_all(trained: RunDir, launched: Launched) -> None:
    every = Evaluation.model_validate({"task": "json_match", "checkpoints": "all", "base": False, "max_new_tokens": 8})
    _stage(trained, evaluate=(every,))
    at_the_end(trained, lock=0, tick=lambda: None, say=lambda _: None)
    assert [request.checkpoint for request in launched] == ["checkpoint-9", "checkpoint-12"]


def test_another_length_of_answers_asks_for_another_room(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def rooms_here(_: object, __: object, evaluations: tuple[Evaluation, ...], prompt_tokens: int) -> dict[str, Room]:
        asked.append(prompt_tokens)
        return {evaluations[0].label: Room(rows=3, tokens=9)}

    monkeypatch.setattr(evaluating, "rooms_here", rooms_here)
    rooms = Rooms(run=run, prompt_tokens=77)
    assert rooms.find(_ask(run)).rows == 16
    assert (rooms.find(_ask(run, max_new_tokens=9)).rows, rooms.find(_ask(run, max_new_tokens=9, limit=2)).rows, asked) == (3, 3, [77])


@pytest.mark.parametrize("broken", ["request", "result"])
def test_a_record_of_another_version_is_scored_anew(run: RunDir, launched: Launched, broken: str) -> None:
    _score(run, _ask(run))
    paths = stage_of(run).evaluation("json_match", "base")
    path = getattr(paths, broken)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
    _score(run, _ask(run))
    assert len(launched) == 2


def test_a_task_file_is_copied_beside_the_request_and_another_content_is_asked_anew(run: RunDir, launched: Launched) -> None:
    own = Evaluation.model_validate({"task": {"kind": "python", "path": str(run.path / "mine.py")}})
    for content, times in (("A = 1\n", 1), ("A = 1\n", 1), ("A = 2\n", 2)):
        (run.path / "mine.py").write_text(content)
        _score(run, request_of(run, "base", own))
        assert len(launched) == times
    copied = stage_of(run).evaluation("mine", "base").folder / "task.py"
    assert (copied.read_text(), launched[1].evaluation.label) == ("A = 2\n", "mine")
    assert launched[0].task_sha256 != launched[1].task_sha256


def test_other_rows_are_filed_apart_and_asked_with_the_template_of_the_run(
    trained: RunDir, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "other rows.jsonl", make_rows(3, seed=9))
    work = open_work(Wish(target=str(trained.path), data="other rows.jsonl", checkpoint="all"))
    monkeypatch.setattr(evaluating, "rooms_here", lambda _, __, asked, ___: {asked[0].label: Room(rows=2, tokens=99)})
    carry_out(work, tick=lambda: None, say=lambda _: None)
    assert [request.checkpoint for request in launched] == ["base", "checkpoint-9", "checkpoint-12"]
    (label,) = {request.evaluation.label for request in launched}
    assert label.startswith("json_match-on-other-rows-")
    subject, stage = launched[0].subject, read_record(stage_of(trained).stage, Stage)
    assert (subject.template_sha256, subject.items_sha256 != stage.prepared["test.jsonl"]) == (stage.template_sha256, True)
    assert len(stage_of(trained).prepared(subject.items).read_text().splitlines()) == 3
    assert not stage_of(trained).evaluation("json_match", "base").result.exists()


def test_another_device_leaves_the_scores_of_the_runs_own_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "precision_on", lambda _: "bf16")
    (request,) = open_work(Wish(target=str(run.path), device="cuda", checkpoint="base")).requests
    assert (request.evaluation.label, request.subject.device, request.subject.precision) == ("json_match-on-cuda", "cuda", "bf16")
    (same,) = open_work(Wish(target=str(run.path), device="cpu", checkpoint="base")).requests
    assert same.evaluation.label == "json_match"


def test_a_card_that_is_not_there_is_refused(run: RunDir) -> None:
    with pytest.raises(SpecError, match="--device cuda is asked for, but torch"):
        open_work(Wish(target=str(run.path), device="cuda", checkpoint="base"))


def test_a_label_keeps_what_sets_it_apart_however_long_it_is() -> None:
    long = Evaluation.model_validate({"task": "rouge", "name": "n" * 64})
    label = relabelled(long, "rows-0123abcd").label
    assert (len(label), label.endswith("-on-rows-0123abcd")) == (64, True)
    assert (
        Evaluation.model_validate(json.loads(relabelled(long, "rows").model_dump_json()) | {"task": "rouge"}).label == relabelled(long, "rows").label
    )


def test_a_run_without_test_rows_says_how_to_name_some(run: RunDir) -> None:
    stage = read_record(stage_of(run).stage, Stage)
    _stage(run, prepared={name: digest for name, digest in stage.prepared.items() if name != "test.jsonl"})
    with pytest.raises(RunError, match="has no test rows to answer for json_match") as caught:
        evaluations_of(run)
    assert "--data FILE" in caught.value.remedy


def _told(run: RunDir, say: Callable[[str], None]) -> None:
    items = tuple(make_item(at, all_fields=1.0) for at in range(9))
    with scores_told(stage_of(run), say):
        note_scores(stage_of(run), make_result("checkpoint-12", items))


def test_scores_and_a_few_answers_reach_the_trackers_of_the_run(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen"))
    _stage(run, trackers=(Tracker(kind="trackio"),))
    said: list[str] = []
    _told(run, said.append)
    _told(run, said.append)
    lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert (len(lines), said) == (2, [])  # each once
    step, sent = lines[0]
    assert (step, sent["json_match/all_fields"], sent["json_match/all_fields_low"], sent["json_match/coverage"]) == (12, 0.5, 0.1, 1.0)
    samples = [value for name, value in sent.items() if "/sample-" in name]
    assert (len(samples), samples[1]) == (3, "prompt 3\n\nanswer: [3]\n\nreference: [7]")


def test_a_tracker_that_fails_is_told_and_the_scores_are_whole(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text("def init(**_): pass\ndef finish(): pass\ndef log(metrics, step): raise ValueError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _stage(run, trackers=(Tracker(kind="trackio"),))
    said: list[str] = []
    _told(run, said.append)
    (line,) = said
    assert line.startswith("trackio did not get all scores: ValueError: no")
    assert json.loads(stage_of(run).evals.read_text())["json_match/all_fields"] == 0.5


def test_the_real_tensorboard_reads_scores_and_answers(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _stage(run, trackers=(Tracker(kind="tensorboard"),))
    said: list[str] = []
    _told(run, said.append)
    assert said == []
    events = EventAccumulator(str(stage_of(run).path / "tensorboard"))
    events.Reload()
    (score,) = events.Tensors("json_match/all_fields")
    assert (score.step, float(score.tensor_proto.float_val[0])) == (12, 0.5)
    texts = {name: events.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in events.Tags()["tensors"] if "sample" in name}
    assert len(texts) == 3
    assert any("answer: [3]" in text for text in texts.values())
