"""A stage asks several models the same: each in a run directory of its own, nothing twice, and under the names of the
spec."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import Run, StageJob, WiredModel, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalRequest, EvalResult, EvalStage
from finefit.compare.comparison import compare
from finefit.errors import DataError, SpecError
from finefit.facts.files import sha256_of
from finefit.report.stage_summary import summary_lines
from finefit.run import evaluate_stage, evaluation
from finefit.run.evaluate_stage import composed
from finefit.run.launch import launch
from finefit.spec.models import FolderModel, Lora, ShapeModel
from finefit.spec.stages import EvaluateStage, Gate
from finefit.stages import gate
from finefit.stats.intervals import wilson
from tests.cli.conftest import files_with_times
from tests.conftest import make_model, make_model_folder, write_jsonl
from tests.evals import make_item, make_result
from tests.pairs import make_pairs
from tests.runs import HIT, make_run

ASKED: tuple[dict[str, Any], ...] = ({"task": "hallucination"},)


def make_adapter(folder: Path, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(make_model(), config).save_pretrained(folder)
    return folder


def wired(folder: Path, adapter: Path | None = None, *, chosen_by: Path | None = None) -> WiredModel:
    model = FolderModel(kind="folder", path=str(folder))
    return WiredModel(
        model=model,
        adapter=None if adapter is None else str(adapter),
        gate=None if chosen_by is None else str(chosen_by),
    )


def make_job(
    folder: Path, models: dict[str, WiredModel], *, asked: tuple[dict[str, Any], ...] = ASKED, **data: Any
) -> StageJob:
    """`models` by the names that the tables have."""
    questions = {"test": {"path": "test.jsonl"}, **data}
    named = {name: one.model.model_dump() for name, one in models.items()}
    stage = EvaluateStage.model_validate({"kind": "evaluate", "models": named, "data": questions, "evaluate": asked})
    found = {f"models.{name}": one for name, one in models.items()}
    return StageJob(
        name="scores",
        pipeline="tiny",
        seed=7,
        device="cpu",
        precision="fp32",
        base=str(folder),
        stage=stage,
        models=found,
    )


def make_place(folder: Path) -> Path:
    """A stage's folder in the run of a pipeline."""
    run = folder / "runs" / "tiny-1"
    (run / "stages" / "2-scores").mkdir(parents=True)
    (run / "stages.json").write_text(json.dumps({"version": 1, "stages": []}), encoding="utf-8")
    write_record(
        run / "run.json",
        Run(name="tiny", digest="1" * 64, finefit="0.7", created="2026-01-01", kind="pipeline", status="running"),
    )
    return run / "stages" / "2-scores"


def scored(job: StageJob, place: Path, *, tick: Any = lambda: None, say: Any = lambda _: None) -> dict[str, Any]:
    with run_lock(place.parent.parent / "run.lock") as lock:
        return dict(json.loads(json.dumps(evaluate_stage.score(job, place, lock=lock, tick=tick, say=say))))


def result_of(place: Path, model: str, task: str = "hallucination") -> EvalResult:
    return read_record(StageDir(place / model / "stages" / "1-eval").evaluation(task, model).result, EvalResult)


class Stopped(Exception):
    """Whatever ended the process that launched."""


def _stop(*_: object, **__: object) -> Any:
    raise Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    job: StageJob
    place: Path
    summary: dict[str, Any]
    launched: list[list[str]]
    """Of each of two commands, the models that were asked."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    make_model_folder(folder / "model")
    make_adapter(folder / "adapter", seed=1)
    write_jsonl(folder / "test.jsonl", make_pairs(6, seed=2))
    return folder


@pytest.fixture(scope="module")
def stage(project: Path) -> Stage:
    """Ended when the first model has answered, and begun again; not to be changed."""
    job = make_job(project, {"plain": wired(project / "model"), "tuned": wired(project / "model", project / "adapter")})
    place, launched = make_place(project), [list[str](), list[str]()]

    def counted(module: str, argument: Path, **settings: Any) -> int:
        launched[_is_scored(place, "plain")].append(argument.name.partition(".")[0])
        return launch(module, argument, **settings)

    def tick() -> None:
        if _is_scored(place, "plain"):
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "launch", counted)
        with pytest.raises(Stopped):
            scored(job, place, tick=tick)
        assert read_record(RunDir(place / "plain").run, Run).status == "failed"
        summary = scored(job, place)
    return Stage(job=job, place=place, summary=summary, launched=launched)


def _is_scored(place: Path, model: str) -> bool:
    return StageDir(place / model / "stages" / "1-eval").evaluation("hallucination", model).result.exists()


def test_every_model_has_a_run_of_its_own_under_the_name_of_the_spec(stage: Stage) -> None:
    assert stage.launched == [["plain"], ["tuned"]]  # one that was ended goes on with what was not asked yet
    assert stage.summary["models"] == ["plain", "tuned"]
    for name in ("plain", "tuned"):
        run = read_record(RunDir(stage.place / name).run, Run)
        assert (run.kind, run.status) == ("eval", "finished")
        assert (result_of(stage.place, name).checkpoint, result_of(stage.place, name).n) == (name, 6)
    subjects = [
        read_record(StageDir(stage.place / name / "stages/1-eval").eval_stage, EvalStage).subject
        for name in ("plain", "tuned")
    ]
    assert [subject.weights is None for subject in subjects] == [True, False]
    assert [(subject.precision, subject.seed) for subject in subjects] == [("fp32", 7), ("fp32", 7)]
    plain, tuned = (
        [item.counts["margin"] for item in result_of(stage.place, name).items] for name in ("plain", "tuned")
    )
    assert plain != tuned  # the adapter is part of the model


def test_the_rate_of_wrong_answers_that_are_preferred_is_told_with_wilsons_interval(stage: Stage) -> None:
    items = result_of(stage.place, "plain").items
    assert all(sorted(one.is_right for one in item.candidates) == [False, True] for item in items)  # a pair's two sides
    expected = wilson(sum(item.counts["preferred_wrong"] == 1 for item in items), 6)
    found = stage.summary["scores"]["plain"]["hallucination"]["metrics"]["preferred_wrong"]
    assert (found["value"], found["low"], found["high"]) == (expected.value, expected.low, expected.high)
    first, second = summary_lines("evaluate", stage.summary)
    interval = f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%}, n 6)"
    assert first == f"plain  hallucination preferred_wrong {interval}"
    assert second.startswith("tuned  hallucination preferred_wrong ")


def test_what_is_scored_is_not_asked_again_nor_written_anew(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "launch", _stop)
    before = files_with_times(stage.place)
    assert scored(stage.job, stage.place) == stage.summary
    after = files_with_times(stage.place)
    assert {name for name in after if after[name] != before.get(name)} <= {
        f"{model}/{file}" for model in ("plain", "tuned") for file in ("run.json", "run.lock")
    }


def test_the_models_of_a_stage_are_compared_item_by_item_and_differ_by_what_they_are(stage: Stage) -> None:
    found = compare([str(stage.place / name) for name in ("plain", "tuned")])
    assert [side.name for side in found.sides] == ["plain", "tuned"]
    assert found.is_one_variable, found.verdict
    assert "declared" in found.verdict
    (task,) = found.tasks
    assert (task.task, task.pairings[0].n) == ("hallucination", 6)
    assert {change.metric for change in task.pairings[0].changes} == {"preferred_wrong", "margin"}


# without asking anybody


def test_rows_of_other_content_are_other_answers_and_the_earlier_ones_stay_out_of_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_folder(tmp_path / "model")
    place = make_place(tmp_path)
    monkeypatch.setattr(evaluate_stage, "evaluate", _stop)
    digests = []
    for seed in (1, 1, 2):
        write_jsonl(tmp_path / "test.jsonl", make_pairs(3, seed=seed))
        with pytest.raises(Stopped):
            scored(make_job(tmp_path, {"plain": wired(tmp_path / "model")}), place)
        digests.append(read_record(RunDir(place / "plain").run, Run).digest)
    assert digests[0] == digests[1] != digests[2]
    (earlier,) = place.glob(".earlier-plain-*")
    assert read_record(RunDir(earlier).run, Run).digest == digests[0]


def test_a_base_is_loaded_in_the_bits_of_the_adapters_that_are_laid_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = make_model_folder(tmp_path / "model"), make_model_folder(tmp_path / "other", seed=1)
    write_jsonl(tmp_path / "test.jsonl", make_pairs(3))
    trained = make_run(tmp_path / "sft", overrides=["tuning.base_bits=4"])
    adapter = make_adapter(trained.stages()[0].checkpoints / "checkpoint-6")
    place = make_place(tmp_path)
    monkeypatch.setattr(evaluate_stage, "evaluate", _stop)
    with pytest.raises(Stopped):
        scored(make_job(tmp_path, {"base": wired(model), "sft": wired(model, adapter), "other": wired(other)}), place)
    bits = {}
    for name in ("base", "sft", "other"):
        tuning = read_record(StageDir(place / name / "stages/1-eval").eval_stage, EvalStage).subject.tuning
        bits[name] = tuning.base_bits if isinstance(tuning, Lora) else None
    assert bits == {"base": 4, "sft": 4, "other": None}


def test_what_a_stage_has_made_is_called_as_the_stage_and_half_made_folders_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path)
    model = make_model_folder(place.parent / "1-mixture" / "output")
    write_jsonl(tmp_path / "test.jsonl", make_pairs(3))
    (place / ".staging-mixed-abc").mkdir()
    monkeypatch.setattr(evaluate_stage, "evaluate", _stop)
    with pytest.raises(Stopped):
        scored(make_job(tmp_path, {"mixed": wired(model)}), place)
    assert read_record(StageDir(place / "mixed/stages/1-eval").eval_stage, EvalStage).subject.model_name == "mixture"
    assert [path.name for path in place.iterdir()] == ["mixed"]


def test_rows_that_a_task_cannot_read_are_told_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_folder(tmp_path / "model")
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": "say 7", "completion": "7"}])
    monkeypatch.setattr(evaluation, "launch", _stop)
    with pytest.raises(DataError, match=r"test\.jsonl:1"):
        scored(make_job(tmp_path, {"plain": wired(tmp_path / "model")}), make_place(tmp_path))


# the choice among experts


@pytest.fixture(scope="module")
def chosen(project: Path, stage: Stage) -> Path:
    """A gate over the two models that are scored: the more polite a prompt is, the more it is one for `plain`."""
    folder = project / "gate"
    folder.mkdir()
    for name, end in (("tuned", ""), ("plain", " please" * 4)):
        write_jsonl(
            project / f"of-{name}.jsonl",
            [{"prompt": f"say {number}{end}", "completion": "yes"} for number in range(40)],
        )
    model = {"kind": "folder", "path": str(project / "model")}
    sources = {name: {"path": f"of-{name}.jsonl"} for name in ("plain", "tuned")}
    made = Gate.model_validate(
        {"kind": "gate", "base": model, "experts": dict.fromkeys(sources, model), "data": sources, "epochs": 60}
    )
    gate.make(replace(stage.job, name="choice", stage=made, models={"base": wired(project / "model")}), folder)
    return folder


def test_a_gate_scores_what_the_experts_answered_that_it_chose(
    project: Path, stage: Stage, chosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {
        "gate": wired(project / "model", chosen_by=chosen),
        **{name: stage.job.models[f"models.{name}"] for name in ("plain", "tuned")},
    }
    monkeypatch.setattr(evaluation, "launch", _stop)  # nothing is asked anew
    job = make_job(project, models)
    summary = scored(job, stage.place)
    assert summary["models"] == ["gate", "plain", "tuned"]
    answered = {name: result_of(stage.place, name) for name in models}
    by = [item.answered_by for item in answered["gate"].items]
    assert set(by) == {"plain", "tuned"}
    for at, (name, item) in enumerate(zip(by, answered["gate"].items, strict=True)):
        assert name is not None
        assert replace(item, answered_by=None) == answered[name].items[at]
    assert summary["scores"]["gate"]["hallucination"]["answered_by"] == {
        name: by.count(name) for name in dict.fromkeys(by)
    }
    subject = read_record(
        StageDir(stage.place / "gate/stages/1-eval").evaluation("hallucination", "gate").request, EvalRequest
    ).subject
    assert isinstance(subject.model, ShapeModel)
    assert subject.model_name == "a gate over plain, tuned"

    before = files_with_times(stage.place / "gate")
    assert scored(job, stage.place) == summary
    assert files_with_times(stage.place / "gate") == before
    assert summary_lines("evaluate", summary)[0].endswith(
        ", n 6); " + ", ".join(f"{by.count(name)} by {name}" for name in dict.fromkeys(by))
    )
    found = compare([str(stage.place / name) for name in ("plain", "gate")])
    assert ([side.name for side in found.sides], found.verdict) == (
        ["plain", "gate"],
        "only declared settings differ: model",
    )


def test_a_gate_whose_expert_is_not_among_the_models_is_refused_before_anybody_is_asked(
    project: Path, chosen: Path, tmp_path: Path
) -> None:
    models = {"plain": wired(project / "model"), "gate": wired(project / "model", chosen_by=chosen)}
    with pytest.raises(
        SpecError,
        match=r"models\.gate chooses among plain, tuned and generates no answers itself; tuned is not among the models",
    ):
        scored(make_job(project, models), make_place(tmp_path))


def test_a_gate_does_not_choose_by_prompts_of_another_template(
    project: Path, stage: Stage, chosen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before anybody is asked."""
    monkeypatch.setattr(evaluation, "launch", _stop)
    record = json.loads((chosen / "gate.json").read_text(encoding="utf-8"))
    (tmp_path / "gate.json").write_text(json.dumps(record | {"template_sha256": "0" * 64}), encoding="utf-8")
    (tmp_path / "gate.safetensors").symlink_to(chosen / "gate.safetensors")
    models = {
        "other": wired(project / "model", chosen_by=tmp_path),
        **{name: stage.job.models[f"models.{name}"] for name in ("plain", "tuned")},
    }
    with pytest.raises(SpecError, match=r"models\.other was trained with another template"):
        scored(make_job(project, models), make_place(tmp_path))


def test_a_gate_does_not_choose_by_prompts_that_are_built_otherwise(
    project: Path, stage: Stage, chosen: Path, tmp_path: Path
) -> None:
    """By content: a copy of the file that its rows were built with is as good."""
    form = "def build(prompt, answer): return f'{prompt} please', answer\n"
    for name, text in (("form.py", form), ("copy.py", form), ("other.py", form.replace("please", "now"))):
        (project / name).write_text(text)
    for file in ("gate.json", "gate.safetensors"):
        (tmp_path / file).write_bytes((chosen / file).read_bytes())
    record = json.loads((tmp_path / "gate.json").read_text())
    built = record | {"form": f"python {sha256_of(project / 'form.py')}"}
    models = {
        "other": wired(project / "model", chosen_by=tmp_path),
        **{name: stage.job.models[f"models.{name}"] for name in ("plain", "tuned")},
    }
    (tmp_path / "gate.json").write_text(json.dumps(built))
    with pytest.raises(
        SpecError,
        match=r"models\.other was trained on rows built with python \w+, but these are built with nothing: ",
    ) as told:
        scored(make_job(project, models), stage.place)
    assert "data.task" in told.value.remedy
    assert not (stage.place / "other").exists()
    place = make_place(tmp_path)
    summary = scored(make_job(project, models, task={"kind": "python", "path": "copy.py"}), place)
    assert summary["models"] == ["other", "plain", "tuned"]
    (tmp_path / "gate.json").write_text(json.dumps(record))
    with pytest.raises(SpecError, match=r"built with nothing, but these are built with python \w+"):
        scored(make_job(project, models, task={"kind": "python", "path": "copy.py"}), place)


def test_scores_of_a_choice_are_reckoned_from_the_items_that_were_chosen() -> None:
    items = {"law": (1.0, 1.0, 0.0, 0.0), "medicine": (0.0, 0.0, 1.0, 1.0)}
    answered = {
        name: make_result(
            name,
            tuple(make_item(at, hit=hit) for at, hit in enumerate(hits)),
            definitions=(HIT,),
            signature={"torch": name, "n": "1"},
        )
        for name, hits in items.items()
    }
    found = composed(answered, ["law", "law", "medicine", "law"])
    expected = wilson(3, 4)
    assert (found.metrics["hit"].value, found.metrics["hit"].low, found.metrics["hit"].high) == (
        expected.value,
        expected.low,
        expected.high,
    )
    assert "of 4 items the gate gave law 3, medicine 1" in found.warnings
    assert found.signature == {
        "torch": "law / medicine",
        "n": "1",
        "answered_by": "one of law, medicine, chosen for each prompt by a gate",
    }
    assert (found.loaded_bytes, found.peak_bytes) == (None, None)
