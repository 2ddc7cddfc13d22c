"""A spec with stages: what stands on what, defaults, and graphs that cannot be walked."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from finefit.errors import SpecError
from finefit.spec.load import load_spec, parse_any, pipeline_from_json, spec_to_json, whole_text
from finefit.spec.models import CustomModel, FolderModel, Lora
from finefit.spec.pipeline import Pipeline, needs
from finefit.spec.schema import Spec
from finefit.spec.stages import TrainStage, paths_of
from tests.custom_models import SPEC

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
            "stage dpo depends on stage pears, which",
        ),
        (
            'of: ["scores:sft", dpo]',
            "of: [pairs]",
            "stage table needs the scores of stage pairs, but a make_pairs stage makes none",
        ),
        ("{kind: stage, name: sft}", "{kind: stage, name: pairs}", "stage dpo needs the model of stage pairs"),
        ("  pairs: {kind", "  DPO: {kind", "stages dpo and DPO would write into one folder"),
        ("  pairs: {kind", "  all: {kind", "a stage cannot be called all, which means every stage in --force all"),
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
            "stage dpo continues the adapter of stage sft, but tuning.adapter names another, theirs",
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
            "it produces train.jsonl, test.jsonl, report.json",
        ),
        ("stage://pairs/test.jsonl", "stage://pairs/t?st.json", "stage scores needs t?st.json of stage pairs"),
        ("stage://pairs/test.jsonl", "stage://pairs/../sft/rows.jsonl", "is outside of that stage's folder"),
        ("stage://pairs/test.jsonl", "stage://sft//etc/passwd", "is outside of that stage's folder"),
        ("stage://pairs/test.jsonl", "stage:///test.jsonl", "stage scores has stage:///test.jsonl at data.test.path"),
        ("scores:sft", "scores:stf", "stage table needs scores:stf, but stf is not a model of stage scores; it has"),
        ('["scores:sft", dpo]', "[sft]", "stage table needs the scores of stage sft, which has no evaluation"),
        ("dpo]", '"dpo:base"]', "stage table needs dpo:base, but no task of stage dpo scores the starting model"),
        ("dpo]", '"dpo:bets"]', "stage table needs dpo:bets, which is not a checkpoint"),
        ('["scores:sft", dpo]', "[scores], task: rouge", "no two are scored on rouge (scores:sft on hallucination"),
        ("task: hallucination, base: false}", "task: rouge, base: false}", "hallucination, dpo:final on rouge)"),
        ('["scores:sft", dpo]', '["scores:sft"]', "stage table compares scores:sft with nothing; name another beside"),
        ('["scores:sft", dpo]', '[dpo, "dpo:final"]', "stage table compares dpo:final with nothing; name another"),
        ('["scores:sft", dpo]', "[dpo]", "stage table compares models of which no two are scored on one task"),
        (
            "task: hallucination}]",
            'task: {kind: summary, sections: ["stage://pairs/test.jsonl"]}}]',
            "stage scores has stage://pairs/test.jsonl at evaluate.0.task.sections.0, which is not a path",
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


PAIRS = (
    "name: x\nstages: {{pairs: {{kind: make_pairs, method: {{kind: rules{method}}}, train: [{{path: "
    "a.jsonl{weight}}}], test: {{path: b.jsonl}}}}}}\n"
)


@pytest.mark.parametrize(
    ("method", "weight", "words"),
    [
        (", shares: {numbr: 1}", "", 'shares.numbr: "numbr" is not accepted; accepted: `entity`, `number`'),
        (", shares: {number: -1}", "", "shares.number: -1 is out of range; give at least 0"),
        (", shares: {entity: 0, number: 0, negation: 0, fabrication: 0}", "", "shares: no rule is left to make pairs"),
        (", per_row: 5", "", "per_row: 5 pairs of a row, each by another rule, but there are 4 (entity, number"),
        (", per_row: 3, shares: {number: 0, entity: 0.0}", "", "there are 2 (negation, fabrication); give at most 2"),
        ("", ", weight: 2", "train.0.weight: a pair is made once; give the weight to the training that reads"),
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
"""  # noqa: E501


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '["{before}"]',
            '["stage://first/first.txt"]',
            "stages.second: arguments: a change of stage://first/first.txt would rerun nothing",
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
            "stages.first: inputs: {output} is the stage's own folder",
        ),
        (
            "stage://first/first.txt",
            "stage://first/typo.txt",
            "it produces first.txt, parts/all; declare it in its outputs",
        ),
        ("stage://first/first.txt", "stage://first/parts/other", "stage second needs parts/other of stage first"),
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


# What experts must have in common with their base, their gate and their router is asked when the spec is read.

EXPERTS = """\
name: experts
defaults: {model: {kind: folder, path: m}, data: {train: [{path: a.jsonl}]}, optimizer: {lr: 1e-3}}
stages:
  law: {kind: train, tuning: {kind: full}}
  thin: {kind: train, tuning: {kind: lora}}
  merged: {kind: merge_adapter, model: {kind: stage, name: thin}}
  gate:
    kind: gate
    base: {kind: folder, path: m}
    experts: {law: {kind: stage, name: law}, thin: {kind: stage, name: thin}}
    data: {law: {path: a.jsonl}, thin: {path: b.jsonl}}
  scores:
    kind: evaluate
    models: {law: {kind: stage, name: law}, thin: {kind: stage, name: thin}, by_gate: {kind: stage, name: gate}}
    data: {test: {path: t.jsonl}}
    evaluate: [{task: rouge}]
"""
"""Of a gate whose experts are a whole model and an adapter."""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "models: {law: {kind: stage, name: law}, thin: {kind: stage, name: thin}",
            "models: {law: {kind: stage, name: law}, thin: {kind: stage, name: merged}",
            "stage scores has models.by_gate, which chooses among law, thin and generates no answers itself; thin is",
        ),
        (
            "models: {law: {kind: stage, name: law}, ",
            "models: {",
            "law is missing among the models here, or is a different model",
        ),
        (
            "[{task: rouge}]",
            "[{task: {kind: lm_eval, tasks: [arc]}}]",
            "evaluates lm_eval, which brings items whose prompts models.by_gate cannot see",
        ),
        (
            "merge_adapter, model: {kind: stage, name: thin}",
            "merge_adapter, model: {kind: stage, name: law}",
            "stage merged merges an adapter, but its",
        ),
        (
            "merge_adapter, model: {kind: stage, name: thin}",
            "merge_adapter, model: {kind: folder, path: m}",
            "stage merged merges an adapter, but its",
        ),
        ("merge_adapter,", "merge_adapter, adapter: a,", "stage merged merges a, but its model already has an adapter"),
        (
            "{test: {path: t.jsonl}}",
            "{test: {path: t.jsonl}, task: amr}",
            "the gate models.by_gate learns in stage gate from rows with task null; make them equal",
        ),
        (
            "{test: {path: t.jsonl}}",
            "{test: {path: t.jsonl}, template: plain}",
            'data.template "plain", but the gate models.by_gate learns in stage gate from rows with template "chat"',
        ),
        (
            "thin: {path: b.jsonl}}",
            "thin: {path: b.jsonl}}\n    template_options: {enable_thinking: true}",
            'stage gate from rows with template_options {"enable_thinking": true}; make them',
        ),
    ],
)
def test_models_that_do_not_fit_where_they_are_named_are_refused(old: str, new: str, words: str) -> None:
    assert pipeline(EXPERTS).order()
    assert old in EXPERTS
    with pytest.raises(SpecError) as caught:
        pipeline(EXPERTS.replace(old, new, 1))
    assert words in str(caught.value)


def test_an_adapter_of_ones_own_can_be_merged_into_a_model_without_one() -> None:
    assert pipeline(
        EXPERTS.replace(
            "merge_adapter, model: {kind: stage, name: thin}",
            "merge_adapter, adapter: a, model: {kind: stage, name: law}",
        )
    )


@pytest.mark.parametrize(
    ("of_gate", "of_questions"),
    [("amr", "amr"), ("{kind: python, path: form.py}", "{kind: python, path: copy.py}")],
    ids=["equal", "files"],
)
def test_a_gate_may_learn_from_rows_that_are_built_as_those_that_it_chooses_by(of_gate: str, of_questions: str) -> None:
    assert pipeline(EXPERTS, f"stages.gate.task={of_gate}", f"stages.scores.data.task={of_questions}")


@pytest.mark.parametrize("template", ["{enable_thinking: true}", "{enable_thinking: false}", "{style: short}"])
def test_a_gate_may_be_asked_by_the_template_that_it_has_learnt_from(template: str) -> None:
    of_both = (f"stages.gate.template_options={template}", f"stages.scores.data.template_options={template}")
    assert pipeline(EXPERTS, *of_both)
    assert pipeline(EXPERTS, "stages.gate.template=plain", "stages.scores.data.template=plain", *of_both)


def test_a_template_option_that_is_written_as_it_is_anyway_makes_no_difference() -> None:
    assert pipeline(EXPERTS, "stages.gate.template_options={enable_thinking: false}")


MLPS = "{kind: subset, trainable: [layers.*.mlp]}"
MIXED = """\
name: mixed
defaults: {model: {kind: folder, path: m}, data: {train: [{path: a.jsonl}]}, optimizer: {lr: 1e-3}}
stages:
"""
MIX = "  mix: {{kind: build_moe, base: {base}, experts: {{law: {law}, maths: {maths}}}{more}}}\n"
M, LAW, MATHS = "{kind: folder, path: m}", "{kind: stage, name: law}", "{kind: stage, name: maths}"


def mixed(tuning: str, *, is_merged: bool = False, more: str = "") -> Pipeline:
    """Of an expert whose MLPs are trained, and of one that is trained as `tuning` says, and merged if that leaves an
    adapter."""
    trained = (
        f"  law: {{kind: train, tuning: {MLPS}}}\n  {'thin' if is_merged else 'maths'}: {{kind: train, tuning: "
        f"{tuning}}}\n"
    )
    merged = "  maths: {kind: merge_adapter, model: {kind: stage, name: thin}}\n" if is_merged else ""
    return pipeline(MIXED + trained + merged + MIX.format(base=M, law=LAW, maths=MATHS, more=more))


@pytest.mark.parametrize(
    "more", ["", ", merge: average", ", router: {kind: select_one, expert: maths}"], ids=["mixture", "average", "one"]
)
@pytest.mark.parametrize(
    ("tuning", "is_merged", "words"),
    [
        ("{kind: full}", False, "stage maths, by which expert maths and the base differ, trains all weights"),
        ("{kind: subset, trainable: [layers.*.self_attn]}", False, "trains tuning.trainable: layers.*.self_attn"),
        (
            "{kind: subset, trainable: [layers.*.mlp, norm, layers.0, '0.*']}",
            False,
            "norm, layers.0, 0.*; give it",
        ),
        (
            "{kind: lora}",
            True,
            "stage thin, by which expert maths and the base differ, trains tuning.targets: all",
        ),
        ("{kind: lora, targets: [down_proj, q_proj]}", True, "trains tuning.targets: q_proj; give it"),
        ("{kind: lora, targets: {language: [o_proj]}}", True, "targets: [gate_proj, up_proj, down_proj] followed by a"),
    ],
    ids=["full", "attention", "some", "all-linear", "query", "tower"],
)
def test_an_expert_that_learns_outside_of_its_mlps_is_refused_before_it_is_trained(
    tuning: str, is_merged: bool, words: str, more: str
) -> None:
    with pytest.raises(SpecError) as caught:
        mixed(tuning, is_merged=is_merged, more=more)
    assert "stage mix is built from models that differ only in their MLPs" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tuning", "is_merged", "more"),
    [
        ("{kind: subset, trainable: [mlp, layers.0.mlp.*, '*.mlp.up_proj', down_proj]}", False, ""),
        ("{kind: lora, targets: [gate_proj, mlp.up_proj, layers.1.mlp.down_proj]}", True, ", merge: average"),
        ("{kind: full}", False, ", router: {kind: select_one, expert: law}"),
    ],
    ids=["subset", "merged", "left out"],
)
def test_an_expert_that_learns_in_its_mlps_or_is_left_out_is_taken(tuning: str, is_merged: bool, more: str) -> None:
    assert mixed(tuning, is_merged=is_merged, more=more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("shared: base", "shared: an average has no router"),
        ("routing: top_1", "routing: an average has no router and nothing to choose among; leave it out, or set"),
        ("top_k: 1", "top_k: an average has no router"),
        ("routing: weighted_sum, shared: base", "routing, shared: an average has no router"),
        ("router: {kind: select_one, expert: law}", "router: an average has no router"),
    ],
)
def test_what_is_said_of_a_mixture_is_refused_of_an_average(more: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        mixed(MLPS, more=f", merge: average, {more}")
    assert words in str(caught.value)
    assert mixed(MLPS, more=", shared: base, routing: weighted_sum")


def test_an_average_is_read_again_with_all_that_it_leaves_out_written_down() -> None:
    found = mixed(MLPS, more=", merge: average")
    assert pipeline_from_json(spec_to_json(found)) == found


@pytest.mark.parametrize(
    ("base", "law", "maths"),
    [
        ("{kind: stage, name: warm}", LAW, MATHS),
        (LAW, "{kind: stage, name: warm}", MATHS),
        ("{kind: stage, name: mean}", LAW, MATHS),
        ("{kind: folder, path: stage://warm}", LAW, MATHS),
    ],
    ids=["trained before all", "the start among the experts", "a mean of them", "by its folder"],
)
def test_what_base_and_experts_have_in_common_may_be_trained_in_full(base: str, law: str, maths: str) -> None:
    stages = f"""\
  warm: {{kind: train, tuning: {{kind: full}}}}
  law: {{kind: train, model: {{kind: stage, name: warm}}, tuning: {MLPS}}}
  maths: {{kind: train, model: {{kind: stage, name: law}}, tuning: {MLPS}}}
  mean: {{kind: build_moe, merge: average, base: {{kind: stage, name: warm}}, experts: {{law: {LAW}, maths: {MATHS}}}}}
"""
    assert pipeline(MIXED + stages + MIX.format(base=base, law=law, maths=maths, more=""))


def centroids(of_law: str, more: str, *, is_merged: bool = False) -> Pipeline:
    """Of an expert whose rows are built with `of_law` and of one whose rows are taken as they are; `more` is said of
    the router."""
    tuning = "{kind: lora, targets: [up_proj]}" if is_merged else MLPS
    law = (
        f"  {'thin' if is_merged else 'law'}: {{kind: train, tuning: {tuning}, data: {{train: [{{path: "
        f"a.jsonl}}]{of_law}}}}}\n"
    )
    merged = "  law: {kind: merge_adapter, model: {kind: stage, name: thin}}\n" if is_merged else ""
    router = f", router: {{kind: centroids, data: {{law: {{path: a.jsonl}}, maths: {{path: b.jsonl}}}}{more}}}"
    return pipeline(
        MIXED
        + law
        + merged
        + f"  maths: {{kind: train, tuning: {MLPS}}}\n"
        + MIX.format(base=M, law=LAW, maths=MATHS, more=router)
    )


FORM = ", task: {kind: python, path: form.py}"


@pytest.mark.parametrize(("is_merged", "trained"), [(False, "law"), (True, "thin")], ids=["whole", "merged"])
def test_a_router_that_would_start_from_rows_in_a_form_that_its_experts_do_not_know_is_refused(
    is_merged: bool, trained: str
) -> None:
    with pytest.raises(SpecError) as caught:
        centroids(FORM, "", is_merged=is_merged)
    assert (
        f"stage mix starts its router from unchanged rows, but stage {trained}, where expert law learns, "
        "builds its rows with "
    ) in str(caught.value)


@pytest.mark.parametrize(("of_law", "more"), [("", ""), (FORM, FORM), ("", FORM)])
def test_a_router_may_start_from_rows_as_its_experts_had_them_or_as_it_says(of_law: str, more: str) -> None:
    assert centroids(of_law, more)


def test_a_base_that_has_learnt_what_its_experts_have_not_is_refused() -> None:
    stages = f"  warm: {{kind: train, tuning: {{kind: full}}}}\n  law: {{kind: train, tuning: {MLPS}}}\n"
    with pytest.raises(SpecError, match="stage warm, by which expert law and the base differ, trains all weights"):
        pipeline(MIXED + stages + MIX.format(base="{kind: stage, name: warm}", law=LAW, maths=M, more=""))


# A model of the user's own in a spec: of several stages it is trained and evaluated, and what takes models apart
# refuses it by name.

TRAIN: dict[str, Any] = {key: SPEC[key] for key in ("tuning", "optimizer", "schedule", "global_batch")} | {
    "kind": "train",
    "data": {"train": [{"path": "train.jsonl"}]},
}


def custom_pipeline(**stages: dict[str, Any]) -> Pipeline:
    return Pipeline.model_validate_json(json.dumps({"name": "own", "stages": stages}))


def test_a_spec_names_file_and_tokenizer_and_the_entry_is_build_by_default() -> None:
    spec = Spec.model_validate_json(json.dumps(SPEC))
    assert isinstance(spec.model, CustomModel)
    assert (spec.model.entry, spec.model.weights) == ("build", None)
    with pytest.raises(ValidationError, match="tokenizer"):
        CustomModel.model_validate({"kind": "custom", "file": "my_model.py"})


def test_a_stage_goes_on_with_the_model_of_another() -> None:
    found = custom_pipeline(
        first=TRAIN | {"model": SPEC["model"], "tuning": {"kind": "full"}},
        second=TRAIN | {"model": {"kind": "stage", "name": "first"}},
    )
    assert found.order() == ("first", "second")


@pytest.mark.parametrize("model", [SPEC["model"], {"kind": "stage", "name": "first"}], ids=["named", "trained"])
def test_what_takes_models_apart_refuses_one_of_the_users_own(model: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"stage merged needs models of transformers"):
        custom_pipeline(
            first=TRAIN | {"model": SPEC["model"]},
            merged={"kind": "merge_adapter", "model": model, "adapter": "a" if model["kind"] == "custom" else None},
        )
