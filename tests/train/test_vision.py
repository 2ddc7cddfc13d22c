"""A model that sees, trained in all its towers: by one process and by two alike, again from a checkpoint, and with rows
that show nothing."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.checkpoint import list_checkpoints, step_of
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.data import image_check
from finefit.train.worker import work
from tests.conftest import write_jsonl
from tests.faults import Job, finish, make_job, outcome, run_to_end, start, words
from tests.ranks import as_ranks
from tests.vision_models import make_vlm, write_reading_task

SPEC = """\
name: seeing
seed: 7
device: cpu
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 4, alpha: 8, targets: {language: all-linear, vision: all-linear, projector: all-linear}}
data: {train: [{path: train.jsonl}], validation: {path: validation.jsonl}, overlap: warn}
optimizer: {lr: 1e-2}
schedule: {steps: 4, warmup: 0.25}
global_batch: 4
levers: {micro_batch: 2, recompute: 1, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1, kernels: torch}
save: {every: 2 steps, keep: 9}
"""  # noqa: E501
TOWERS = {"language": 28, "vision": 20, "projector": 4}
"""Trained tensors of each."""


def _project(folder: Path, *, spec: str) -> Path:
    make_vlm("qwen2_5_vl", folder / "model")
    for name, rows in (("train", 8), ("validation", 3)):
        write_reading_task(folder, rows=rows, seed=1, name=name)
    path = folder / "spec.yaml"
    path.write_text(spec, encoding="utf-8")
    return path


def _audits(where: StageDir, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in read_lines(where.metrics_of(rank)) if line.get("event") == "audited"]


def _by_two(where: StageDir) -> None:
    ended = as_ranks(2, lambda place: work(where, place, is_child_of_ours=False), deadline_seconds=300)
    assert [(end.value, end.error, end.trace) for end in ended] == [(0, None, "")] * 2, words(where)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, StageDir]:
    job = make_job(tmp_path_factory.mktemp("alone"), spec=SPEC, project=_project)
    return job, run_to_end(job)


def test_every_tower_is_reached_in_the_first_step_and_above_rounding_in_the_second(alone: tuple[Job, StageDir]) -> None:
    first, second = _audits(alone[1])
    for line in (first, second):
        assert line["towers"] == {tower: {"tensors": count, "reached": count} for tower, count in TOWERS.items()}
        assert line["ranks"] == [TOWERS]
        assert "not_finite" not in line
    assert "waiting" in first
    assert {"waiting", "zero", "faint"}.isdisjoint(second)


def test_the_plan_counts_what_is_trained_of_each_tower(alone: tuple[Job, StageDir]) -> None:
    (forecast,) = read_record(RunDir(alone[1].run).plan, Plan).forecasts.values()
    assert {name: tower.tensors for name, tower in forecast.towers.items()} == TOWERS
    assert sum(tower.trainable for tower in forecast.towers.values()) == forecast.trainable_parameters
    assert sum(tower.parameters for tower in forecast.towers.values()) == forecast.parameters
    assert all(tower.unreached == 0 for tower in forecast.towers.values())
    assert forecast.lengths.grids


@pytest.mark.slow
def test_two_processes_train_as_one_does(alone: tuple[Job, StageDir], tmp_path: Path) -> None:
    where = make_job(tmp_path, spec=SPEC + "engine: {kind: ddp, devices: 2}\n", project=_project).fresh()
    _by_two(where)
    ones, twos = read_steps(alone[1].metrics), read_steps(where.metrics)
    assert [line["loss"] for line in twos] == pytest.approx([line["loss"] for line in ones], rel=1e-5)
    wanted, found = (
        load_file(place.checkpoints / "final" / "adapter_model.safetensors") for place in (alone[1], where)
    )
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    for rank in range(2):
        assert [line["ranks"] for line in _audits(where, rank)] == [[TOWERS, TOWERS]] * 2


def test_a_run_that_goes_on_ends_bit_for_bit_as_one_that_was_not_interrupted(alone: tuple[Job, StageDir]) -> None:
    job, whole = alone
    again = job.copy(whole.run)
    for checkpoint in list_checkpoints(again.checkpoints):
        if step_of(checkpoint) > 2:
            shutil.rmtree(checkpoint)
    for link in [path for path in again.checkpoints.iterdir() if path.is_symlink() and not path.exists()]:
        link.unlink()
    assert finish(start(again)) == 0, words(again)
    assert outcome(again).tensors == outcome(whole).tensors


@pytest.mark.slow
def test_a_first_step_that_shows_nothing_is_not_held_against_the_towers_that_look(tmp_path: Path) -> None:
    def project(folder: Path, *, spec: str) -> Path:
        path = _project(folder, spec=spec)
        lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        text = [{"question": f"How much is {at} and {at}?", "answer": str(2 * at)} for at in range(len(lines) * 3)]
        (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text), encoding="utf-8")
        return path

    spec = SPEC.replace("[{path: train.jsonl}]", "[{path: text.jsonl}, {path: train.jsonl}]").replace(
        "global_batch: 4", "global_batch: 1"
    )
    spec = spec.replace("steps: 4", "steps: 12").replace("seed: 7", f"seed: {_seed_that_begins_with_text()}")
    where = run_to_end(make_job(tmp_path, spec=spec, project=project))
    first, *_, last = _audits(where)
    assert first["towers"]["vision"] == {"tensors": 20, "reached": 0}
    assert first["towers"]["language"]["reached"] == 28
    assert first["no_image"]
    assert last["towers"] == {tower: {"tensors": count, "reached": count} for tower, count in TOWERS.items()}


@pytest.mark.slow
def test_pairs_are_learnt_and_no_image_is_decoded_in_the_process_that_trains(tmp_path: Path) -> None:
    """Neither for the reference nor for validation nor for a step."""

    def project(folder: Path, *, spec: str) -> Path:
        path = _project(folder, spec=spec)
        for name in ("train", "validation"):
            rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            write_jsonl(
                folder / f"{name}.jsonl",
                [row | {"chosen": (right := row.pop("answer")), "rejected": f"no {right}"} for row in rows],
            )
        return path

    def decoding_nothing() -> None:
        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("an image was decoded in the process that trains")

        setattr(image_check, "decode", never)  # noqa: B010

    fields = "fields: {prompt: question, chosen: chosen, rejected: rejected, images: image}"
    spec = SPEC.replace("train.jsonl}", f"train.jsonl, {fields}}}").replace(
        "validation.jsonl}", f"validation.jsonl, {fields}}}"
    )
    spec = spec.replace("steps: 4", "steps: 2") + "objective: {kind: dpo, reference: cached}\n"
    where = run_to_end(make_job(tmp_path, spec=spec, project=project), decoding_nothing)
    *_, told = (line for line in read_lines(where.metrics) if line.get("event") == "reference")
    assert (told["done"], told["total"]) == (11, 11)
    assert read_steps(where.metrics)[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def _seed_that_begins_with_text() -> int:
    """Of 24 rows of text and 8 with images, in the order that a run takes them; two of the first twelve show
    something."""
    from finefit.data.order import rows_of_step

    for seed in range(1000):
        rows = [rows_of_step(step, num_rows=32, global_batch=1, seed=seed)[0] for step in range(12)]
        if rows[0] < 24 and sum(row >= 24 for row in rows) >= 2:
            return seed
    raise AssertionError
