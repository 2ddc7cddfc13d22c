"""What is asked and answered by each method, and that the last result is found again."""

from typing import get_args

import pytest

from finefit.data.tasks import NoResult
from finefit.data.tasks.amr.notation import parse
from finefit.data.tasks.amr.subtasks import Method, concepts, last_result, prompt_of, relations, skeleton, target_of

GRAPH = parse('(w / want-01 :polarity - :ARG0 (b / boy :quant 2) :ARG1 (g / go-02 :ARG0 b :name "Salt Lake"))')
WRITTEN = '(w / want-01 :polarity - :ARG0 (b / boy :quant 2) :ARG1 (g / go-02 :ARG0 b :name "Salt Lake"))'
METHODS: tuple[Method, ...] = get_args(Method)


def test_the_skeleton_has_concepts_for_variables_and_for_what_is_met_again() -> None:
    assert skeleton(GRAPH) == '(want-01 :polarity - :ARG0 (boy :quant 2) :ARG1 (go-02 :ARG0 (boy) :name "Salt Lake"))'


def test_concepts_stand_in_the_order_of_their_writing_each_as_often_as_it_has_nodes() -> None:
    assert concepts(GRAPH) == ["want-01", "boy", "go-02"]
    assert concepts(parse("(c / cat :mod (c2 / cat))")) == ["cat", "cat"]


def test_relations_name_concepts_on_both_sides_and_constants_as_they_are() -> None:
    assert relations(GRAPH) == [
        ("want-01", ":polarity", "-"),
        ("want-01", ":ARG0", "boy"),
        ("want-01", ":ARG1", "go-02"),
        ("boy", ":quant", "2"),
        ("go-02", ":ARG0", "boy"),
        ("go-02", ":name", '"Salt Lake"'),
    ]


CONCEPTS = "concept_1 | want-01\nconcept_2 | boy\nconcept_3 | go-02"
RELATIONS = "\n".join(" | ".join(relation) for relation in relations(GRAPH))
TARGETS = {
    "baseline": WRITTEN,
    "mtup2": f"Task 1: {skeleton(GRAPH)}\nTask 2: {WRITTEN}",
    "mtup3a": f"[STEP 1: CONCEPTS]\n{CONCEPTS}\n[STEP 2: AMR_NO_VAR]\n{skeleton(GRAPH)}\n[STEP 3: AMR_WITH_VAR]\n{WRITTEN}",
    "mtup3b": f"[STEP 1: CONCEPTS]\n{CONCEPTS}\n[STEP 2: RELATIONS]\n{RELATIONS}\n[STEP 3: AMR_WITH_VAR]\n{WRITTEN}",
    "mtup4": (
        f"[STEP 1: CONCEPTS]\n{CONCEPTS}\n[STEP 2: RELATIONS]\n{RELATIONS}\n"
        f"[STEP 3: AMR_NO_VAR]\n{skeleton(GRAPH)}\n[STEP 4: AMR_WITH_VAR]\n{WRITTEN}"
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_answer_of_a_method_is_its_sub_tasks_one_behind_the_other(method: Method) -> None:
    assert target_of(GRAPH, method) == TARGETS[method]


@pytest.mark.parametrize("method", METHODS)
def test_the_last_result_is_found_in_what_was_built(method: Method) -> None:
    assert (
        last_result(target_of(GRAPH, method), method) == WRITTEN if method in ("baseline", "mtup2") else f"\n{WRITTEN}"
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_prompt_names_every_label_that_the_answer_must_have_and_the_sentence_last(method: Method) -> None:
    prompt = prompt_of("The boys do not want to go.", method)
    assert prompt.endswith("\nSentence: The boys do not want to go.")
    labels = [line.split("]")[0] + "]" for line in TARGETS[method].splitlines() if line.startswith("[STEP")]
    labels += [line[:7] for line in TARGETS[method].splitlines() if line.startswith("Task")]
    assert all(f"\n{label} " in prompt for label in labels)
    assert len(labels) == (0 if method == "baseline" else int(method[4]))


def test_every_method_asks_in_words_of_its_own() -> None:
    assert len({prompt_of("x", method) for method in METHODS}) == len(METHODS)


def test_of_a_model_that_does_not_stop_the_first_sentence_counts() -> None:
    answer = "Task 1: (a)\nTask 2: (a / a)\nTask 1: (b)\nTask 2: (b / b)"
    assert last_result(answer, "mtup2").startswith("(a / a)")


def test_a_label_may_be_written_in_bold_or_in_small_letters() -> None:
    assert last_result("**Task 1:** (a)\n**task 2:** (a / a)", "mtup2") == "(a / a)"


def test_an_answer_without_the_last_label_has_no_result_although_it_holds_a_graph() -> None:
    with pytest.raises(NoResult, match=r"the answer has no `Task 2:`"):
        last_result("Task 1: (a / a)", "mtup2")
    with pytest.raises(NoResult, match="the answer is empty"):
        last_result(" \n", "mtup4")
