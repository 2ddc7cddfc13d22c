"""What a stage would refuse when it begins is refused before anything runs, in the words of the stage itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finefit.errors import FindingError
from finefit.pipeline.examined import require_examined
from finefit.preflight.stages import Named
from finefit.spec.load import parse_any
from finefit.spec.stages import Pipeline
from tests.conftest import make_model_folder, write_jsonl
from tests.forecasts import make_forecast
from tests.made_pairs import grounded
from tests.pipeline.test_making_merge_adapter import make_adapter
from tests.reviews import make_items, make_run

MODEL = {"kind": "folder", "path": "model"}
TRAINED = {"kind": "stage", "name": "sft"}
EXPERTS: dict[str, Any] = {"base": MODEL, "experts": {"vowels": MODEL, "digits": {"kind": "folder", "path": "other"}}}
ROWS = {"vowels": {"path": "vowels.jsonl"}, "digits": {"path": "digits.jsonl"}}
SAMPLED = {"kind": "sampled", "model": TRAINED, "task": "rouge", "max_new_tokens": 4}


def _rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {at}", "completion": "yes"} for at in range(start, start + count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "other", "third")):
        make_model_folder(folder / name, seed=seed)
    return folder


@pytest.fixture
def base(tmp_path: Path, models: Path) -> Path:
    for name in ("model", "other", "third"):
        (tmp_path / name).symlink_to(models / name)
    write_jsonl(tmp_path / "vowels.jsonl", _rows(12))
    write_jsonl(tmp_path / "digits.jsonl", _rows(12, start=100))
    write_jsonl(tmp_path / "facts.jsonl", grounded(12, seed=1))
    write_jsonl(tmp_path / "more.jsonl", grounded(6, seed=2))
    return tmp_path


def examined(base: Path, stage: dict[str, Any], done: Path | None = None) -> tuple[Named, ...]:
    train = {
        "kind": "train",
        "model": MODEL,
        "data": {"train": [{"path": "facts.jsonl"}]},
        "optimizer": {"lr": 0.01},
        "global_batch": 4,
    }
    script = {"kind": "python", "script": "write.py", "outputs": ["rows.jsonl"]}
    tuning = {"kind": "lora", "rank": 4, "alpha": 8}
    document = {
        "name": "p",
        "device": "cpu",
        "stages": {"sft": {**train, "tuning": tuning}, "script": script, "it": stage},
    }
    pipeline = parse_any(json.dumps(document), where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    return require_examined(
        pipeline,
        base,
        {"sft": (make_forecast(),)},
        runs=base / "runs",
        names=("it",),
        done=lambda name: done if name == "script" else None,
    )


def refused(base: Path, stage: dict[str, Any]) -> str:
    with pytest.raises(FindingError) as error:
        examined(base, stage)
    return str(error.value)


def gate(**more: Any) -> dict[str, Any]:
    return {"kind": "gate", **EXPERTS, "data": ROWS, **more}


def mixture(**router: Any) -> dict[str, Any]:
    return {"kind": "build_moe", **EXPERTS, "router": {"kind": "centroids", "data": ROWS, **router}}


def pairs(**more: Any) -> dict[str, Any]:
    return {"kind": "make_pairs", "train": [{"path": "facts.jsonl"}], **more}


SOUND: dict[str, dict[str, Any]] = {
    "a gate": gate(),
    "a mixture": mixture(),
    "pairs by rules": pairs(test={"path": "more.jsonl"}),
    "pairs that are sampled": pairs(method=SAMPLED, test={"path": "more.jsonl"}),
}


@pytest.mark.parametrize("stage", SOUND.values(), ids=SOUND)
def test_sound_rows_are_no_finding(stage: dict[str, Any], base: Path) -> None:
    assert examined(base, stage) == ()


# gates and routers


def test_a_row_that_a_gate_cannot_read_is_told_with_its_place(base: Path) -> None:
    write_jsonl(base / "digits.jsonl", [*_rows(9), {"prompt": "why?"}])
    assert refused(base, gate()).startswith("stage it: digits.jsonl:10 ")


def test_plain_text_is_told_to_be_nothing_that_a_gate_chooses_by(base: Path) -> None:
    write_jsonl(base / "digits.jsonl", [{"text": f"once upon {at}"} for at in range(9)])
    assert refused(base, gate()).startswith(
        "stage it: digits.jsonl:1 is plain text, and a gate chooses by what is asked"
    )


def test_prompts_that_cannot_be_divided_are_told_as_the_gate_tells_them(base: Path) -> None:
    for name in ROWS:
        write_jsonl(base / f"{name}.jsonl", [{"prompt": "Why?", "completion": str(at)} for at in range(9)])
    words = refused(base, gate())
    assert words.startswith("stage it: all 18 prompts ask the same")
    assert "validation" not in words


def test_rows_too_long_to_start_a_router_are_told(base: Path) -> None:
    assert refused(base, mixture(max_tokens=4)).startswith(
        "stage it: no row of expert vowels can start its router; the first: vowels.jsonl:"
    )


def test_rows_too_few_to_start_a_router_are_told(base: Path) -> None:
    write_jsonl(base / "digits.jsonl", _rows(1))
    assert refused(base, mixture()).startswith("stage it: expert digits has 1 different rows to start its router from")


def test_experts_with_the_same_rows_are_told(base: Path) -> None:
    write_jsonl(base / "digits.jsonl", _rows(12))
    assert refused(base, mixture()).startswith("stage it: vowels and digits have the same rows")


def test_rows_of_a_copy_that_is_collapsed_are_not_looked_at(base: Path) -> None:
    write_jsonl(base / "again.jsonl", [{"prompt": "why?"}])
    experts = {"experts": {**EXPERTS["experts"], "again": MODEL}, "copies": "collapse"}
    stage = mixture(data={**ROWS, "again": {"path": "again.jsonl"}}) | experts
    assert examined(base, stage) == ()
    assert "again" in refused(
        base, stage | {"experts": {**EXPERTS["experts"], "again": {"kind": "folder", "path": "third"}}}
    )


# pairs


def _words_that_are_none(base: Path) -> None:
    (base / "words.yaml").write_text("[just, a, list]\n")


def _nothing_to_change(base: Path) -> None:
    write_jsonl(base / "facts.jsonl", [{"prompt": f"q{at}", "completion": "a"} for at in range(5)])


def _empty(base: Path) -> None:
    (base / "facts.jsonl").write_text("")


def _same(base: Path) -> None:
    write_jsonl(base / "more.jsonl", grounded(12, seed=1)[3:5])


def _texts(base: Path) -> None:
    write_jsonl(base / "more.jsonl", [{"text": "once upon a time"}])


def _no_adapter(base: Path) -> None:
    (base / "adapter").mkdir()


def _nothing(_: Path) -> None: ...


TEST = {"test": {"path": "more.jsonl"}}
REFUSED: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "words that are none": (
        _words_that_are_none,
        pairs(method={"kind": "rules", "words": "words.yaml"}),
        "words.yaml holds other than lists of words",
    ),
    "rows that give no pair": (_nothing_to_change, pairs(), "no pair could be made for train of 5 rows"),
    "an empty file": (_empty, pairs(), "facts.jsonl holds no rows"),
    "fields that are not there": (
        _nothing,
        pairs(train=[{"path": "facts.jsonl", "fields": {"prompt": "nope", "answer": "no"}}]),
        "facts.jsonl",
    ),
    "rows in two splits": (
        _same,
        pairs(**TEST),
        "rows that are held out stand in another split too: more.jsonl:1 (test) asks what",
    ),
    "rows in two splits, sampled": (
        _same,
        pairs(method=SAMPLED, **TEST),
        "rows that are held out stand in another split too: more.jsonl:1",
    ),
    "a task that scores no written answer": (
        _nothing,
        pairs(method={**SAMPLED, "task": "hallucination"}),
        "method.task hallucination does not say",
    ),
    "no row to ask of one split": (
        _texts,
        pairs(method=SAMPLED, **TEST),
        "no pair could be made for test of 1 rows: 1 is plain text",
    ),
    "verdicts of no run": (
        _nothing,
        {"kind": "make_pairs", "method": {"kind": "verdicts", "of": ["model"]}},
        "model is neither a run directory nor",
    ),
    "verdicts of other rows": (
        _nothing,
        {"kind": "make_pairs", "method": {"kind": "verdicts", "of": ["vowels.jsonl"]}},
        "vowels.jsonl:1 is no judged pair of two answers",
    ),
    "a folder that is no adapter": (
        _no_adapter,
        {"kind": "merge_adapter", "model": MODEL, "adapter": "adapter"},
        "adapter/adapter_config.json",
    ),
    "an adapter that is not there": (
        _nothing,
        {"kind": "merge_adapter", "model": MODEL, "adapter": "absent"},
        "absent",
    ),
}


@pytest.mark.parametrize(("spoil", "stage", "words"), REFUSED.values(), ids=REFUSED)
def test_what_the_stage_would_refuse_is_refused_before(
    spoil: Callable[[Path], None], stage: dict[str, Any], words: str, base: Path
) -> None:
    spoil(base)
    first = refused(base, stage).splitlines()[0]
    assert first.startswith("stage it: ")
    assert words in first


def test_a_run_that_nobody_has_judged_is_told(base: Path) -> None:
    make_run(base / "judged-1", {"checkpoint-3": make_items(3, "left")}, final="checkpoint-3")
    words = refused(base, {"kind": "make_pairs", "method": {"kind": "verdicts", "of": ["judged-1"]}})
    assert words.startswith("stage it: judged-1 has no reviews")


def test_an_adapter_that_is_one_is_no_finding(base: Path) -> None:
    make_adapter(base / "adapter", base / "model")
    assert examined(base, {"kind": "merge_adapter", "model": MODEL, "adapter": "adapter"}) == ()


def test_pairs_far_behind_rows_that_give_none_are_found(base: Path) -> None:
    """A few rows show that there will be pairs; only all of them show that there will be none."""
    write_jsonl(
        base / "facts.jsonl", [*({"prompt": f"q{at}", "answer": "a"} for at in range(400)), *grounded(12, seed=1)]
    )
    assert examined(base, pairs()) == ()


# what is not there


def test_a_file_that_is_missing_is_told_once(base: Path) -> None:
    (base / "digits.jsonl").unlink()
    assert refused(base, gate()).splitlines()[:-1] == ["stage it: digits.jsonl is not there"]


def test_rows_of_another_stage_are_read_as_soon_as_they_are_there(base: Path) -> None:
    (base / "write.py").write_text("")
    stage = pairs(train=[{"path": "stage://script/rows.jsonl"}])
    (found,) = examined(base, stage)
    assert found[1].problem == "stage://script/rows.jsonl is yet to be made: nothing is known of the rows"
    (base / "made").mkdir()
    write_jsonl(base / "made" / "rows.jsonl", [{"prompt": f"q{at}", "completion": "a"} for at in range(5)])
    with pytest.raises(FindingError, match="stage it: no pair could be made for train of 5 rows"):
        examined(base, stage, base / "made")
