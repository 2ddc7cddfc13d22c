"""What is changed in a spec's text is changed there alone."""

import pytest

from finefit.errors import SpecError
from finefit.spec.edit import changed_text
from finefit.spec.load import parse_spec

TEXT = """\
# the first attempt
name: medical  # names the folder
model: {kind: hub, id: "owner/name"}
tuning:
  kind: lora
  rank: 64  # as in the paper
data: {train: [{path: a.jsonl}]}
optimizer: {lr: 1e-4}

levers: auto
# the end
"""


def test_a_value_is_replaced_in_its_line_and_all_else_stays() -> None:
    assert changed_text(TEXT, ["tuning.rank=16"]) == TEXT.replace("rank: 64  #", "rank: 16  #")


def test_no_change_leaves_the_text_as_it_is() -> None:
    assert changed_text(TEXT, []) == TEXT


def test_comments_order_and_quotes_stay() -> None:
    changed = changed_text(TEXT, ["levers.micro_batch=4", "optimizer.kind=adamw_8bit", "data.max_tokens=1024"])
    assert [line.split(":")[0] for line in changed.splitlines() if line[:1].isalpha()] == [
        *("name", "model", "tuning", "data", "optimizer", "levers"),
    ]
    for kept in (
        "# the first attempt",
        "# names the folder",
        "# as in the paper",
        "# the end",
        '"owner/name"',
        "lr: 1e-4",
    ):
        assert kept in changed


def test_a_word_gives_way_to_a_mapping() -> None:
    changed = changed_text(TEXT, ["levers.micro_batch=4", "levers.recompute=all"])
    assert "auto" not in changed
    levers = parse_spec(changed, where="spec.yaml").levers
    assert levers != "auto"
    assert (levers.micro_batch, levers.recompute) == (4, "all")


def test_an_inline_mapping_stays_inline() -> None:
    assert "optimizer: {lr: 1e-4, kind: adamw_8bit}\n" in changed_text(TEXT, ["optimizer.kind=adamw_8bit"])


def test_keys_that_are_not_there_are_made_at_the_end() -> None:
    changed = changed_text(TEXT, ["save.keep=1", "save.every=20 steps"])
    assert parse_spec(changed, where="spec.yaml").save.keep == 1
    assert changed.index("save:") > changed.index("levers:")


@pytest.mark.parametrize(
    "override",
    ["tuning={kind: lora, rank: 64, alpha: 128}", "levers.keep_attention=true", "levers.loss_chunk=none", "seed=7"],
)
def test_a_written_change_means_what_the_override_means(override: str) -> None:
    assert parse_spec(changed_text(TEXT, [override]), where="spec.yaml") == parse_spec(
        TEXT, where="spec.yaml", overrides=(override,)
    )


def test_an_item_of_a_list_is_changed_in_its_place() -> None:
    text = "evaluate:\n- {task: exact_match, batch: 8} # all of them\n- task: json_match\n"
    assert changed_text(text, ["evaluate.0.batch=1", "evaluate.1.batch=2"]) == (
        "evaluate:\n- {task: exact_match, batch: 1} # all of them\n- task: json_match\n  batch: 2\n"
    )


def test_an_item_of_a_list_is_changed_where_it_stands() -> None:
    text = TEXT + "evaluate: [{task: rouge, batch: 8}]\n"
    assert changed_text(text, ["evaluate.0.batch=auto"]) == text.replace("batch: 8", "batch: auto")


def test_an_item_of_a_list_that_stands_in_the_base_is_not_written_beside_it() -> None:
    with pytest.raises(
        SpecError, match=r"evaluate stands in base\.yaml, so evaluate\.0\.batch=auto cannot be written here"
    ):
        changed_text("base: base.yaml\nname: a\n", ["levers.micro_batch=4", "evaluate.0.batch=auto"])
