"""What experts must have in common with their base, their gate and their router is asked when the spec is read."""

import pytest

from finefit.errors import SpecError
from finefit.spec.load import pipeline_from_json, spec_to_json
from finefit.spec.stages import Pipeline
from tests.spec.test_spec_stages import pipeline

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
        (
            "[{task: rouge}]",
            "[{task: {kind: lm_eval, tasks: [arc]}}]",
            "lm_eval brings items of its own, whose prompts models.by_gate cannot see",
        ),
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
        (
            "{test: {path: t.jsonl}}",
            "{test: {path: t.jsonl}, template: plain}",
            'data.template "plain", and stage gate, whose gate models.by_gate is, learns from rows that are built with template "chat"; make them',
        ),
        (
            "thin: {path: b.jsonl}}",
            "thin: {path: b.jsonl}}\n    template_options: {enable_thinking: true}",
            'stage gate, whose gate models.by_gate is, learns from rows that are built with template_options {"enable_thinking": true}; make them',
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
    """Of an expert whose MLPs are trained, and of one that is trained as `tuning` says, and merged if that leaves an adapter."""
    trained = f"  law: {{kind: train, tuning: {MLPS}}}\n  {'thin' if is_merged else 'maths'}: {{kind: train, tuning: {tuning}}}\n"
    merged = "  maths: {kind: merge_adapter, model: {kind: stage, name: thin}}\n" if is_merged else ""
    return pipeline(MIXED + trained + merged + MIX.format(base=M, law=LAW, maths=MATHS, more=more))


@pytest.mark.parametrize(
    "more", ["", ", merge: average", ", router: {kind: select_one, expert: maths}"], ids=["mixture", "average", "one"]
)
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
        (
            "{kind: subset, trainable: [layers.*.mlp, norm, layers.0, '0.*']}",
            False,
            "trains tuning.trainable: norm, layers.0, 0.*; give it",
        ),
        (
            "{kind: lora}",
            True,
            "stage thin, by which expert maths and the base differ, trains tuning.targets: all-linear; give it tuning: {kind: subset",
        ),
        ("{kind: lora, targets: [down_proj, q_proj]}", True, "trains tuning.targets: q_proj; give it"),
        (
            "{kind: lora, targets: {language: [o_proj]}}",
            True,
            "targets: [gate_proj, up_proj, down_proj] and a stage of kind merge_adapter behind it",
        ),
    ],
    ids=["full", "attention", "some", "all-linear", "query", "tower"],
)
def test_an_expert_that_learns_outside_of_its_mlps_is_refused_before_it_is_trained(
    tuning: str, is_merged: bool, words: str, more: str
) -> None:
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
    ("more", "words"),
    [
        ("shared: base", "shared: an average has no router"),
        (
            "routing: top_1",
            "routing: an average has no router and nothing to choose among; leave it out, or set merge: mixture",
        ),
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
    """Of an expert whose rows are built with `of_law` and of one whose rows are taken as they are; `more` is said of the router."""
    tuning = "{kind: lora, targets: [up_proj]}" if is_merged else MLPS
    law = f"  {'thin' if is_merged else 'law'}: {{kind: train, tuning: {tuning}, data: {{train: [{{path: a.jsonl}}]{of_law}}}}}\n"
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
        f"stage mix starts its router from rows as they are, and stage {trained}, where expert law learns, builds its rows with "
        in str(caught.value)
    )


@pytest.mark.parametrize(("of_law", "more"), [("", ""), (FORM, FORM), ("", FORM)])
def test_a_router_may_start_from_rows_as_its_experts_had_them_or_as_it_says(of_law: str, more: str) -> None:
    assert centroids(of_law, more)


def test_a_base_that_has_learnt_what_its_experts_have_not_is_refused() -> None:
    stages = f"  warm: {{kind: train, tuning: {{kind: full}}}}\n  law: {{kind: train, tuning: {MLPS}}}\n"
    with pytest.raises(SpecError, match="stage warm, by which expert law and the base differ, trains all weights"):
        pipeline(MIXED + stages + MIX.format(base="{kind: stage, name: warm}", law=LAW, maths=M, more=""))
