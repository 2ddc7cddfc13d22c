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
    evaluate: [{task: rouge, base: false}]
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
        ("  pairs: {kind", "  sft: {kind", "stages.sft: given twice, first at spec.yaml:16"),
        ("lr: 5e-6}", "lrr: 5e-6}", "spec.yaml:14 stages.dpo.optimizer.lrr: there is no such key; did you mean `lr`?"),
        ("rank: 8", "rank: high", 'spec.yaml:6 stages.dpo.tuning.rank: "high" is text'),
        ("kind: make_pairs", "kind: make_pears", "accepted: `train`, `evaluate`, `compare`, `make_pairs`"),
        ("objective: {kind: dpo}", "objective: {kind: dpo}\n    tuning: {kind: full}", "put a stage of kind merge_adapter between"),
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


@pytest.mark.parametrize("outputs", ["[/etc/passwd]", "[../rows.jsonl]", "[a, a]", "[]"])
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
        ("stage://pairs/test.jsonl", "stage:///test.jsonl", "stage scores has stage:///test.jsonl at data.test.path, which names no stage"),
        ("scores:sft", "scores:stf", "stage table wants scores:stf, and stf is no model of stage scores; it has sft, dpo"),
        ('["scores:sft", dpo]', "[sft]", "stage table wants the scores of stage sft, which is scored on nothing"),
        ("dpo]", '"dpo:base"]', "stage table wants dpo:base, and no task of stage dpo scores the starting model"),
        ("dpo]", '"dpo:bets"]', "stage table wants dpo:bets, which is no checkpoint"),
        (
            "task: hallucination}]",
            'task: {kind: summary, sections: ["stage://pairs/test.jsonl"]}}]',
            "stage scores has stage://pairs/test.jsonl at evaluate.0.task.sections.0, where no path stands",
        ),
    ],
)
def test_what_another_stage_will_never_have_is_refused_by_name(old: str, new: str, words: str) -> None:
    assert words in refusal(old, new)


@pytest.mark.parametrize("path", ["stage://pairs/*.jsonl", "stage://pairs", "stage://pairs/report.json", "stage://sft/model.safetensors"])
def test_patterns_folders_and_files_that_the_spec_cannot_know_of_are_taken(path: str) -> None:
    assert pipeline(MEDICAL.replace("stage://pairs/test.jsonl", path)).order()


@pytest.mark.parametrize("of", ["scores", "scores:dpo", "dpo", "dpo:final", "dpo:best", "dpo:40", "dpo:checkpoint-40"])
def test_whatever_will_be_scored_can_be_compared(of: str) -> None:
    assert pipeline(MEDICAL.replace('["scores:sft", dpo]', f'["{of}"]')).order()


SCRIPTS = """\
name: scripts
stages:
  first: {kind: python, script: a.py, inputs: {raw: raw.txt}, arguments: ["{raw}", "--to={output}/first.txt"], outputs: [first.txt, parts/all]}
  second: {kind: python, script: a.py, inputs: {before: stage://first/first.txt}, arguments: ["{before}"], outputs: [second.txt]}
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('["{before}"]', '["stage://first/first.txt"]', "stages.second: arguments: a change of stage://first/first.txt would run nothing again"),
        ('["{before}"]', '["--in=stage://first/first.txt"]', "name it under inputs, and its name in braces here"),
        ('["{raw}"', '["{rwa}"', "stages.first: arguments: {rwa} names no input of this stage; there are {raw}, {output}"),
        ("inputs: {raw: raw.txt}", "inputs: {raw: raw.txt, output: a.txt}", "stages.first: inputs: {output} is the stage's own folder already"),
        ("stage://first/first.txt", "stage://first/typo.txt", "it makes first.txt, parts/all; declare it in its outputs"),
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
    stage = pipeline(SCRIPTS.replace("script: a.py, inputs: {before", "script: stage://first/parts/all/own.py, inputs: {before")).stages["second"]
    assert [path for _, _, path in paths_of(stage)] == ["stage://first/parts/all/own.py", "stage://first/first.txt"]
    assert needs(stage) == ("first",)


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
            "stage scores: models.by_gate chooses among law, thin and answers nothing itself; thin is not among the models here, or another one",
        ),
        ("models: {law: {kind: stage, name: law}, ", "models: {", "law is not among the models here, or another one"),
        ("[{task: rouge}]", "[{task: {kind: lm_eval, tasks: [arc]}}]", "lm_eval brings items of its own, whose prompts models.by_gate cannot see"),
        (
            "merge_adapter, model: {kind: stage, name: thin}",
            "merge_adapter, model: {kind: stage, name: law}",
            "stage merged merges an adapter, and its",
        ),
        (
            "merge_adapter, model: {kind: stage, name: thin}",
            "merge_adapter, model: {kind: folder, path: m}",
            "stage merged merges an adapter, and its",
        ),
        ("merge_adapter,", "merge_adapter, adapter: a,", "stage merged merges a, and its model has an adapter already"),
        (
            "{test: {path: t.jsonl}}",
            "{test: {path: t.jsonl}, task: amr}",
            "stage gate, whose gate models.by_gate is, learns from rows that are built with task null; make them equal",
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
    assert pipeline(EXPERTS.replace("merge_adapter, model: {kind: stage, name: thin}", "merge_adapter, adapter: a, model: {kind: stage, name: law}"))


@pytest.mark.parametrize(
    ("of_gate", "of_questions"), [("amr", "amr"), ("{kind: python, path: form.py}", "{kind: python, path: copy.py}")], ids=["equal", "files"]
)
def test_a_gate_may_learn_from_rows_that_are_built_as_those_that_it_chooses_by(of_gate: str, of_questions: str) -> None:
    assert pipeline(EXPERTS, f"stages.gate.task={of_gate}", f"stages.scores.data.task={of_questions}")


MLPS = "{kind: subset, trainable: [layers.*.mlp]}"
MIXED = """\
name: mixed
defaults: {model: {kind: folder, path: m}, data: {train: [{path: a.jsonl}]}, optimizer: {lr: 1e-3}}
stages:
"""
MIX = "  mix: {{kind: build_moe, base: {base}, experts: {{law: {law}, maths: {maths}}}{more}}}\n"
M, LAW, MATHS = "{kind: folder, path: m}", "{kind: stage, name: law}", "{kind: stage, name: maths}"


def mixed(tuning: str, *, is_merged: bool = False, more: str = "") -> Pipeline:
    """Of an expert whose MLPs are trained, and of one that is trained as `tuning` says, and merged if that leaves an adapter."""
    trained = f"  law: {{kind: train, tuning: {MLPS}}}\n  {'thin' if is_merged else 'maths'}: {{kind: train, tuning: {tuning}}}\n"
    merged = "  maths: {kind: merge_adapter, model: {kind: stage, name: thin}}\n" if is_merged else ""
    return pipeline(MIXED + trained + merged + MIX.format(base=M, law=LAW, maths=MATHS, more=more))


@pytest.mark.parametrize("more", ["", ", merge: average", ", router: {kind: select_one, expert: maths}"], ids=["mixture", "average", "one"])
@pytest.mark.parametrize(
    ("tuning", "is_merged", "words"),
    [
        (
            "{kind: full}",
            False,
            "stage maths, by which expert maths and the base differ, trains all weights (tuning.kind: full); give it tuning: {kind: ",
        ),
        (
            "{kind: subset, trainable: [layers.*.self_attn]}",
            False,
            "trains tuning.trainable: layers.*.self_attn; give it tuning: {kind: subset, trainable",
        ),
        ("{kind: subset, trainable: [layers.*.mlp, norm, layers.0, '0.*']}", False, "trains tuning.trainable: norm, layers.0, 0.*; give it"),
        (
            "{kind: lora}",
            True,
            "stage thin, by which expert maths and the base differ, trains tuning.targets: all-linear; give it tuning: {kind: subset",
        ),
        ("{kind: lora, targets: [down_proj, q_proj]}", True, "trains tuning.targets: q_proj; give it"),
        ("{kind: lora, targets: {language: [o_proj]}}", True, "targets: [gate_proj, up_proj, down_proj] and a stage of kind merge_adapter behind it"),
    ],
    ids=["full", "attention", "some", "all-linear", "query", "tower"],
)
def test_an_expert_that_learns_outside_of_its_mlps_is_refused_before_it_is_trained(tuning: str, is_merged: bool, words: str, more: str) -> None:
    with pytest.raises(SpecError) as caught:
        mixed(tuning, is_merged=is_merged, more=more)
    assert "stage mix is built of models that differ in their MLPs alone" in str(caught.value)
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
    """Of an expert whose rows are built with `of_law` and of one whose rows are taken as they are; `more` is said of the router."""
    tuning = "{kind: lora, targets: [up_proj]}" if is_merged else MLPS
    law = f"  {'thin' if is_merged else 'law'}: {{kind: train, tuning: {tuning}, data: {{train: [{{path: a.jsonl}}]{of_law}}}}}\n"
    merged = "  law: {kind: merge_adapter, model: {kind: stage, name: thin}}\n" if is_merged else ""
    router = f", router: {{kind: centroids, data: {{law: {{path: a.jsonl}}, maths: {{path: b.jsonl}}}}{more}}}"
    return pipeline(MIXED + law + merged + f"  maths: {{kind: train, tuning: {MLPS}}}\n" + MIX.format(base=M, law=LAW, maths=MATHS, more=router))


FORM = ", task: {kind: python, path: form.py}"


@pytest.mark.parametrize(("is_merged", "trained"), [(False, "law"), (True, "thin")], ids=["whole", "merged"])
def test_a_router_that_would_start_from_rows_in_a_form_that_its_experts_do_not_know_is_refused(is_merged: bool, trained: str) -> None:
    with pytest.raises(SpecError) as caught:
        centroids(FORM, "", is_merged=is_merged)
    assert f"stage mix starts its router from rows as they are, and stage {trained}, where expert law learns, builds its rows with " in str(
        caught.value
    )


@pytest.mark.parametrize(("of_law", "more"), [("", ""), (FORM, FORM), ("", FORM)])
def test_a_router_may_start_from_rows_as_its_experts_had_them_or_as_it_says(of_law: str, more: str) -> None:
    assert centroids(of_law, more)


def test_a_base_that_has_learnt_what_its_experts_have_not_is_refused() -> None:
    stages = f"  warm: {{kind: train, tuning: {{kind: full}}}}\n  law: {{kind: train, tuning: {MLPS}}}\n"
    with pytest.raises(SpecError, match="stage warm, by which expert law and the base differ, trains all weights"):
        pipeline(MIXED + stages + MIX.format(base="{kind: stage, name: warm}", law=LAW, maths=M, more=""))
