"""The lengths that a forecast stands on: counted where it can be done, else the worst that the spec allows."""

from pathlib import Path

import pytest

from finefit.artifacts.records import Lengths
from finefit.pipeline.forecasting import lengths_of
from finefit.spec.load import load_spec
from tests.conftest import make_rows, write_jsonl

SHAPE = "model={kind: shape, config: {model_type: llama}}"


def _lengths(spec_path: Path, *overrides: str) -> Lengths:
    return lengths_of(load_spec(spec_path, overrides), spec_path.parent)


def test_rows_are_counted_by_split(project: Path) -> None:
    assert _lengths(project) == Lengths(
        num_rows=22,
        longest=77,
        mean=1453 / 22,
        supervised=32,
        mean_supervised=605 / 22,
        source="counted",
        validation=(68, 31),
        prompt=52,
    )


def test_a_repeated_row_counts_as_often_as_it_is_seen(project: Path) -> None:
    assert _lengths(project, "data.train.0.weight=3").num_rows == 66


@pytest.mark.parametrize("name", ["validation", "test"])
def test_held_out_rows_that_are_not_there_yet_are_not_waited_for(project: Path, name: str) -> None:
    (project.parent / f"{name}.jsonl").unlink()
    found = _lengths(project)
    assert (found.num_rows, found.source) == (22, "counted")
    assert (found.validation is None, found.prompt is None) == (name == "validation", name == "test")


def _no_file(folder: Path) -> str:
    (folder / "train.jsonl").unlink()
    return "train.jsonl is not there"


def _no_tokenizer(_: Path) -> str:
    return "the model comes without a tokenizer"


def _no_row(folder: Path) -> str:
    unanswered, longer = make_rows(2)
    unanswered["messages"].pop()
    longer["messages"][0]["content"] *= 9
    write_jsonl(folder / "train.jsonl", [unanswered, longer])
    return "no row can be used"


@pytest.mark.parametrize(
    ("spoil", "overrides"),
    [(_no_file, ()), (_no_tokenizer, (SHAPE,)), (_no_row, ("data.bad_rows=drop",))],
    ids=["no file", "no tokenizer", "no row"],
)
def test_what_cannot_be_counted_is_assumed_to_be_the_worst(project: Path, spoil: object, overrides: tuple[str, ...]) -> None:
    assert callable(spoil)
    reason = spoil(project.parent)
    found = _lengths(project, "data.max_tokens=100", *overrides)
    assert found.source == f"assumed from data.max_tokens, since {reason}"
    assert (found.num_rows, found.longest, found.mean, found.supervised, found.mean_supervised) == (None, 100, 100.0, 99, 99.0)
