"""A spec with stages: what stands on what, defaults, and graphs that cannot be walked."""

from pathlib import Path

import pytest

from finefit.errors import SpecError
from finefit.pipeline.stage_paths import paths_of
from finefit.spec.load import load_spec, parse_any, pipeline_from_json, spec_to_json, whole_text
from finefit.spec.models import FolderModel, Lora
from finefit.spec.schema import Spec
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
    evaluate: [{task: hallucination, base: false}]
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
    found = pipeline(MEDICAL).spec_of(
        "dpo", model=FolderModel(kind="folder", path="there"), tuning=Lora(kind="lora", rank=8, adapter="a")
    )
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
        (
            'of: ["scores:sft", dpo]',
            "of: [pairs]",
            "stage table wants the scores of stage pairs, and make_pairs makes none",
        ),
        (
            "{kind: stage, name: sft}",
            "{kind: stage, name: pairs}",
            "stage dpo wants the model of stage pairs, and make_pairs makes none",
        ),
        ("  pairs: {kind", "  DPO: {kind", "stages dpo and DPO would write into one folder"),
        (
            "  pairs: {kind",
            "  all: {kind",
            "a stage cannot be called all, which means every stage in --force all; give it another name",
        ),
        ("  pairs: {kind", "  sft: {kind", "stages.sft: given twice, first at spec.yaml:16"),
        ("lr: 5e-6}", "lrr: 5e-6}", "spec.yaml:14 stages.dpo.optimizer.lrr: there is no such key; did you mean `lr`?"),
        ("rank: 8", "rank: high", 'spec.yaml:6 stages.dpo.tuning.rank: "high" is text'),
        ("kind: make_pairs", "kind: make_pears", "accepted: `train`, `evaluate`, `compare`, `make_pairs`"),
        (
            "objective: {kind: dpo}",
            "objective: {kind: dpo}\n    tuning: {kind: full}",
            "put a stage of kind merge_adapter between",
        ),
        ("objective: {kind: dpo}", "objective: {kind: dpo}\n    tuning: {rank: 16}", "whose tuning.rank is 8, not 16"),
        ("evaluate: [{task: hallucination}]", "evaluate: []", "evaluate"),
        (
            "objective: {kind: dpo}",
            "objective: {kind: dpo}\n    tuning: {adapter: theirs}",
            "stage dpo goes on with the adapter of stage sft, and tuning.adapter names another, theirs",
        ),
    ],
)
def test_a_graph_that_cannot_be_walked_is_refused_by_name(old: str, new: str, words: str) -> None:
    assert words in refusal(old, new)


def test_stages_that_stand_on_each_other_are_told_as_a_circle() -> None:
    words = refusal("train: [{path: rows.jsonl}], test", "train: [{path: stage://dpo/rows.jsonl}], test")
    assert "in a circle: dpo -> pairs -> dpo" in words


@pytest.mark.parametrize("outputs", ["[/etc/passwd]", "[../rows.jsonl]", "[a, a]", "[a, ./a]", "[a/b, a//b/]", "[]"])
def test_a_script_declares_what_it_leaves_in_its_own_folder(outputs: str) -> None:
    with pytest.raises(SpecError, match="outputs"):
        pipeline(f"name: x\nstages:\n  clean: {{kind: python, script: clean.py, outputs: {outputs}}}\n")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "stage://pairs/test.jsonl",
            "stage://pairs/validation.jsonl",
            "stage scores wants validation.jsonl of stage pairs, which will not be there: it makes train.jsonl, test.jsonl, report.json",
        ),
        ("stage://pairs/test.jsonl", "stage://pairs/t?st.json", "stage scores wants t?st.json of stage pairs"),
        ("stage://pairs/test.jsonl", "stage://pairs/../sft/rows.jsonl", "leads out of the stage's own folder"),
        ("stage://pairs/test.jsonl", "stage://sft//etc/passwd", "leads out of the stage's own folder"),
        (
            "stage://pairs/test.jsonl",
            "stage:///test.jsonl",
            "stage scores has stage:///test.jsonl at data.test.path, which names no stage",
        ),
        (
            "scores:sft",
            "scores:stf",
            "stage table wants scores:stf, and stf is no model of stage scores; it has sft, dpo",
        ),
        ('["scores:sft", dpo]', "[sft]", "stage table wants the scores of stage sft, which is scored on nothing"),
        ("dpo]", '"dpo:base"]', "stage table wants dpo:base, and no task of stage dpo scores the starting model"),
        ("dpo]", '"dpo:bets"]', "stage table wants dpo:bets, which is no checkpoint"),
        (
            '["scores:sft", dpo]',
            "[scores], task: rouge",
            "no two of what stage table compares are scored on rouge (scores:sft on hallucination, scores:dpo on hallucination); ",
        ),
        (
            "task: hallucination, base: false}",
            "task: rouge, base: false}",
            "no two of what stage table compares are scored on one task (scores:sft on hallucination, dpo:final on rouge); give their stages one",
        ),
        (
            '["scores:sft", dpo]',
            '["scores:sft"]',
            "stage table compares scores:sft with nothing; name another beside it",
        ),
        (
            '["scores:sft", dpo]',
            '[dpo, "dpo:final"]',
            "stage table compares dpo:final with nothing; name another beside it",
        ),
        (
            '["scores:sft", dpo]',
            "[dpo]",
            "no two of what stage table compares are scored on one task (dpo:final on hallucination, dpo:base on nothing)",
        ),
        (
            "task: hallucination}]",
            'task: {kind: summary, sections: ["stage://pairs/test.jsonl"]}}]',
            "stage scores has stage://pairs/test.jsonl at evaluate.0.task.sections.0, where no path stands",
        ),
    ],
)
def test_what_another_stage_will_never_have_is_refused_by_name(old: str, new: str, words: str) -> None:
    assert words in refusal(old, new)


@pytest.mark.parametrize(
    "path", ["stage://pairs/*.jsonl", "stage://pairs", "stage://pairs/report.json", "stage://sft/model.safetensors"]
)
def test_patterns_folders_and_files_that_the_spec_cannot_know_of_are_taken(path: str) -> None:
    assert pipeline(MEDICAL.replace("stage://pairs/test.jsonl", path)).order()


@pytest.mark.parametrize("of", ["scores", "scores:dpo", "dpo", "dpo:final", "dpo:best", "dpo:40", "dpo:checkpoint-40"])
def test_whatever_will_be_scored_can_be_compared(of: str) -> None:
    assert pipeline(MEDICAL.replace('["scores:sft", dpo]', f'["scores:sft", "{of}"], task: hallucination')).order()


@pytest.mark.parametrize("of", ["[dpo]", "[dpo, dpo]", '["dpo:best", "dpo:base"]'])
def test_a_training_alone_is_compared_with_where_it_started(of: str) -> None:
    assert pipeline(MEDICAL.replace('["scores:sft", dpo]', of).replace("hallucination, base: false", "rouge")).order()


PAIRS = "name: x\nstages: {{pairs: {{kind: make_pairs, method: {{kind: rules{method}}}, train: [{{path: a.jsonl{weight}}}], test: {{path: b.jsonl}}}}}}\n"


@pytest.mark.parametrize(
    ("method", "weight", "words"),
    [
        (
            ", shares: {numbr: 1}",
            "",
            'shares.numbr: "numbr" is not accepted; accepted: `entity`, `number`, `negation`, `fabrication`; did you mean `number`?',
        ),
        (", shares: {number: -1}", "", "shares.number: -1 is out of range; give at least 0"),
        (
            ", shares: {entity: 0, number: 0, negation: 0, fabrication: 0}",
            "",
            "shares: no rule is left to make pairs by; give one of them more than 0",
        ),
        (
            ", per_row: 5",
            "",
            "per_row: 5 pairs of a row, each by another rule, and there are 4 (entity, number, negation, fabrication); give at most 4",
        ),
        (", per_row: 3, shares: {number: 0, entity: 0.0}", "", "there are 2 (negation, fabrication); give at most 2"),
        (
            "",
            ", weight: 2",
            "train.0.weight: a pair is made once; give the weight to the training that reads the pairs",
        ),
    ],
    ids=["unknown", "negative", "none", "too many", "too many of those left", "weight"],
)
def test_pairs_that_no_rule_could_make_are_refused_when_the_spec_is_read(method: str, weight: str, words: str) -> None:
    assert pipeline(
        PAIRS.format(method=", per_row: 2, shares: {number: 0, entity: 0, negation: 2}", weight=", weight: 0.5")
    )
    with pytest.raises(SpecError) as caught:
        pipeline(PAIRS.format(method=method, weight=weight))
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["validation", "test"])
def test_a_held_out_row_is_paired_once_too(key: str) -> None:
    with pytest.raises(SpecError, match=rf"{key}\.weight: a pair is made once"):
        pipeline(PAIRS.format(method="", weight=""), f"stages.pairs.{key}={{path: c.jsonl, weight: 3}}")


SCRIPTS = """\
name: scripts
stages:
  first: {kind: python, script: a.py, inputs: {raw: raw.txt}, arguments: ["{raw}", "--to={output}/first.txt"], outputs: [first.txt, parts/all]}
  second: {kind: python, script: a.py, inputs: {before: stage://first/first.txt}, arguments: ["{before}"], outputs: [second.txt]}
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '["{before}"]',
            '["stage://first/first.txt"]',
            "stages.second: arguments: a change of stage://first/first.txt would run nothing again",
        ),
        ('["{before}"]', '["--in=stage://first/first.txt"]', "name it under inputs, and its name in braces here"),
        (
            '["{raw}"',
            '["{rwa}"',
            "stages.first: arguments: {rwa} names no input of this stage; there are {raw}, {output}",
        ),
        (
            "inputs: {raw: raw.txt}",
            "inputs: {raw: raw.txt, output: a.txt}",
            "stages.first: inputs: {output} is the stage's own folder already",
        ),
        (
            "stage://first/first.txt",
            "stage://first/typo.txt",
            "it makes first.txt, parts/all; declare it in its outputs",
        ),
        ("stage://first/first.txt", "stage://first/parts/other", "stage second wants parts/other of stage first"),
    ],
)
def test_a_script_is_given_what_it_names_and_what_will_be_there(old: str, new: str, words: str) -> None:
    assert old in SCRIPTS
    with pytest.raises(SpecError) as caught:
        pipeline(SCRIPTS.replace(old, new, 1))
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["parts", "parts/all", "parts/all/deeper.txt", "**/x.txt"])
def test_a_folder_that_a_script_declares_holds_whatever_lies_in_it(path: str) -> None:
    assert pipeline(SCRIPTS.replace("stage://first/first.txt", f"stage://first/{path}")).order() == ("first", "second")


def test_a_stage_is_named_wherever_a_path_stands() -> None:
    """Whatever is replaced is looked at when it is asked what has changed, too."""
    stage = pipeline(
        SCRIPTS.replace("script: a.py, inputs: {before", "script: stage://first/parts/all/own.py, inputs: {before")
    ).stages["second"]
    assert [path for _, _, path in paths_of(stage)] == ["stage://first/parts/all/own.py", "stage://first/first.txt"]
    assert needs(stage) == ("first",)
