"""A spec with stages: what stands on what, defaults, and graphs that cannot be walked."""

from pathlib import Path

import pytest

from finefit.errors import SpecError
from finefit.spec.load import load_spec, parse_any, pipeline_from_json, spec_to_json, whole_text
from finefit.spec.schema import FolderModel, Lora, Spec
from finefit.spec.stages import Pipeline, TrainStage, needs

MEDICAL = """\
name: medical
seed: 7
card: 12GiB
defaults:
  model: {kind: embedded, name: smollm2-135m}
  tuning: {kind: lora, rank: 8}
  optimizer: {lr: 1e-4, weight_decay: 0.1}
stages:
  dpo:
    kind: train
    model: {kind: stage, name: sft}
    data: {train: [{path: stage://pairs/train.jsonl}]}
    objective: {kind: dpo}
    optimizer: {lr: 5e-6}
  sft:
    kind: train
    data: {train: [{path: rows.jsonl}]}
  pairs: {kind: make_pairs, train: [{path: rows.jsonl}], test: {path: held.jsonl}}
  scores:
    kind: evaluate
    models: {sft: {kind: stage, name: sft}, dpo: {kind: stage, name: dpo}}
    data: {test: {path: stage://pairs/test.jsonl}}
    evaluate: [{task: hallucination}]
  table: {kind: compare, of: ["scores:sft", dpo]}
"""


def pipeline(text: str, *overrides: str) -> Pipeline:
    found = parse_any(text, where="spec.yaml", overrides=overrides)
    assert isinstance(found, Pipeline)
    return found


def refusal(old: str, new: str) -> str:
    assert old in MEDICAL
    with pytest.raises(SpecError) as caught:
        pipeline(MEDICAL.replace(old, new, 1))
    return str(caught.value)


def test_every_stage_comes_behind_those_that_it_stands_on_else_as_written() -> None:
    found = pipeline(MEDICAL)
    assert found.order() == ("pairs", "sft", "dpo", "scores", "table")
    assert needs(found.stages["dpo"]) == ("pairs", "sft")
    assert needs(found.stages["table"]) == ("scores", "dpo")


def test_defaults_stand_below_every_training_key_by_key() -> None:
    dpo = pipeline(MEDICAL).stages["dpo"]
    assert isinstance(dpo, TrainStage)
    assert isinstance(dpo.tuning, Lora)
    assert (dpo.tuning.rank, dpo.optimizer.lr, dpo.optimizer.weight_decay) == (8, 5e-6, 0.1)
    assert dpo.model.kind == "stage"


def test_an_override_reaches_one_stage_or_the_defaults_of_all() -> None:
    found = pipeline(MEDICAL, "stages.dpo.schedule.epochs=3", "defaults.tuning.rank=4")
    dpo, sft = found.stages["dpo"], found.stages["sft"]
    assert isinstance(dpo, TrainStage)
    assert isinstance(sft, TrainStage)
    assert (dpo.schedule.epochs, sft.schedule.epochs) == (3, 1)
    assert dpo.tuning == sft.tuning == Lora(kind="lora", rank=4)


def test_a_training_is_a_spec_of_its_own_with_what_is_said_of_all_stages() -> None:
    found = pipeline(MEDICAL).spec_of("dpo", model=FolderModel(kind="folder", path="there"), tuning=Lora(kind="lora", rank=8, adapter="a"))
    assert isinstance(found, Spec)
    assert (found.name, found.seed, found.card, found.objective.kind) == ("medical-dpo", 7, "12GiB", "dpo")
    assert Spec.model_validate_json(spec_to_json(found)) == found


def test_a_pipeline_is_read_again_as_it_was_written() -> None:
    found = pipeline(MEDICAL)
    assert pipeline_from_json(spec_to_json(found)) == found


def test_a_base_may_hold_stages(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(MEDICAL)
    (tmp_path / "spec.yaml").write_text("base: base.yaml\nstages:\n  dpo: {optimizer: {lr: 1e-6}}\n")
    dpo = pipeline(whole_text(tmp_path / "spec.yaml")).stages["dpo"]
    assert isinstance(dpo, TrainStage)
    assert (dpo.optimizer.lr, dpo.objective.kind) == (1e-6, "dpo")


def test_one_training_is_meant_where_a_plain_spec_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(MEDICAL)
    with pytest.raises(SpecError, match="has stages"):
        load_spec(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{kind: stage, name: sft}", "{kind: stage, name: dpo}", "in a circle: dpo -> dpo"),
        (
            "stage://pairs/train.jsonl",
            "stage://pears/train.jsonl",
            "stage dpo stands on stage pears, which is not there; the stages are dpo, sft",
        ),
        ('of: ["scores:sft", dpo]', "of: [pairs]", "stage table wants the scores of stage pairs, and make_pairs makes none"),
        ("{kind: stage, name: sft}", "{kind: stage, name: pairs}", "stage dpo wants the model of stage pairs, and make_pairs makes none"),
        ("  pairs: {kind", "  DPO: {kind", "stages dpo and DPO would write into one folder"),
        ("  pairs: {kind", "  sft: {kind", "stages.sft: given twice, first at spec.yaml:15"),
        ("lr: 5e-6}", "lrr: 5e-6}", "spec.yaml:14 stages.dpo.optimizer.lrr: there is no such key; did you mean `lr`?"),
        ("rank: 8", "rank: high", 'spec.yaml:6 stages.dpo.tuning.rank: "high" is text'),
        ("kind: make_pairs", "kind: make_pears", "accepted: `train`, `evaluate`, `compare`, `make_pairs`"),
        ("objective: {kind: dpo}", "objective: {kind: dpo}\n    tuning: {kind: full}", "put a stage of kind merge_adapter between"),
        ("objective: {kind: dpo}", "objective: {kind: dpo}\n    tuning: {rank: 16}", "whose tuning.rank is 8, not 16"),
        ("evaluate: [{task: hallucination}]", "evaluate: []", "evaluate"),
    ],
)
def test_a_graph_that_cannot_be_walked_is_refused_by_name(old: str, new: str, words: str) -> None:
    assert words in refusal(old, new)


def test_stages_that_stand_on_each_other_are_told_as_a_circle() -> None:
    words = refusal("train: [{path: rows.jsonl}], test", "train: [{path: stage://dpo/rows.jsonl}], test")
    assert "in a circle: dpo -> pairs -> dpo" in words


@pytest.mark.parametrize("outputs", ["[/etc/passwd]", "[../rows.jsonl]", "[a, a]", "[]"])
def test_a_script_declares_what_it_leaves_in_its_own_folder(outputs: str) -> None:
    with pytest.raises(SpecError, match="outputs"):
        pipeline(f"name: x\nstages:\n  clean: {{kind: python, script: clean.py, outputs: {outputs}}}\n")
