"""`finefit plan` as a user meets it: a verdict and an exit code, from a spec and a card's name alone."""

from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.forecasts import Forecast, Suggestion
from tests.cli.conftest import Finefit, process, processor_seconds, rewrite
from tests.forecasts import make_forecast

CARD = ("--card", "RTX 4090")
KEYS = {
    *("fits", "card", "budget_bytes", "peak_bytes", "allocated_bytes", "reserved_bytes", "peak_instant", "components"),
    *("levers", "accumulation", "step_seconds", "tokens_per_second", "suggestions", "gradients", "stages", "cards"),
}
SHAPE = """\
# what would a small one take
name: shape
model:
  kind: shape
  config: {model_type: llama, vocab_size: 32000, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
tuning: {kind: lora, rank: 8}  # eight is enough
data: {train: [{path: nowhere.jsonl}], max_tokens: 1024}
optimizer: {lr: 1e-4}
global_batch: 32
levers: {micro_batch: 32, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1}  # by hand
"""  # noqa: E501
TOO_SMALL = ("--card", "2GiB")
"""For SHAPE with its levers."""
SMALL: dict[str, dict[str, Any]] = {"10MiB": {"fits": False, "budget_bytes": 10 << 20}}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by the tests of this file, empty at its start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def known_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not matter what a rehearsal finds: 10MiB is too small, every other card is large enough."""

    def forecast(_spec: object, _base: object, cards: tuple[str, ...], _lengths: object) -> tuple[Forecast, ...]:
        return tuple(make_forecast(card=card, disk_bytes=1 << 16, **SMALL.get(card, {})) for card in cards)

    monkeypatch.setattr("finefit.plan.stage_forecasts.forecast", forecast)


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "shape.yaml"
    path.write_text(SHAPE, encoding="utf-8")
    return path


def test_the_document_of_a_plan_has_every_promised_key(folder: Path, finefit: Finefit) -> None:
    answer = finefit("plan", "spec.yaml", *CARD, "--json")
    assert answer.code == 0
    document = answer.document
    assert document.keys() >= KEYS
    assert document["fits"] is True
    assert sum(document["components"].values()) == document["allocated_bytes"]
    assert (
        document["allocated_bytes"] <= document["reserved_bytes"] <= document["peak_bytes"] <= document["budget_bytes"]
    )
    assert (document["levers"]["micro_batch"], document["accumulation"]) == (2, 2)
    assert document["gradients"]["reached"] == document["gradients"]["trainable"] == 28
    assert document["stages"].keys() == {"sft"}
    assert [card["card"] for card in document["cards"]] == ["RTX 4090"]
    assert not (folder / "runs").exists()


def test_the_same_plan_again_is_answered_at_once(folder: Path, finefit: Finefit) -> None:
    first = finefit("plan", "spec.yaml", *CARD, "--json")
    began = processor_seconds()
    again = process("plan", "spec.yaml", *CARD, "--json", cwd=folder)
    assert processor_seconds() - began < 2
    assert (again.code, again.document) == (0, first.document)


@pytest.mark.usefixtures("folder")
def test_an_unknown_card_is_told_with_the_nearest(finefit: Finefit) -> None:
    answer = finefit("plan", "spec.yaml", "--card", "RTX 4900")
    assert answer.code == 2
    assert "card 'RTX 4900' is not known" in answer.err
    assert "RTX 4090" in answer.err


def test_a_model_folder_without_config_is_a_mistake(folder: Path, finefit: Finefit) -> None:
    (folder / "model/config.json").unlink()
    answer = finefit("plan", "spec.yaml", *CARD)
    assert answer.code == 2
    assert "has no config.json" in answer.err


@pytest.mark.usefixtures("folder")
def test_what_does_not_fit_is_exit_code_1_with_changes_that_bring_it_nearer(finefit: Finefit) -> None:
    answer = finefit("plan", "spec.yaml", "--card", "10MiB")
    assert answer.code == 1
    assert answer.out.startswith("sft does not fit: ")
    assert "the card ends here" in answer.out
    assert "levers.micro_batch=1" in answer.out


@pytest.mark.usefixtures("folder", "known_forecasts")
def test_several_cards_give_a_row_each_and_one_that_fits_is_enough(finefit: Finefit) -> None:
    answer = finefit("plan", "spec.yaml", *CARD, "--card", "10MiB", "--card", "cpu@0.10/h")
    assert answer.code == 0
    head, *rows = answer.out.splitlines()
    assert head.startswith("card")
    assert [row.split("  ")[0] for row in rows] == ["RTX 4090", "10MiB", "cpu"]
    assert [" yes " in row for row in rows] == [True, False, True]


def test_a_shape_is_planned_without_data_or_weights(shape: Path, finefit: Finefit) -> None:
    answer = finefit("plan", shape.name, *TOO_SMALL, "--set", "levers=auto")
    assert answer.code == 0
    assert "assumed from data.max_tokens, since nowhere.jsonl does not exist" in answer.out
    assert [path.name for path in shape.parent.iterdir()] == [shape.name]


def test_a_shape_cannot_be_run(folder: Path, finefit: Finefit) -> None:
    (folder / "shape.yaml").write_text(SHAPE.replace("nowhere", "train"), encoding="utf-8")
    answer = finefit("run", "shape.yaml")
    assert answer.code == 2
    assert "a model of kind shape has no weights to train" in answer.err


def test_an_applied_suggestion_is_written_into_the_spec_and_makes_it_fit(shape: Path, finefit: Finefit) -> None:
    refused = finefit("plan", shape.name, *TOO_SMALL, "--json")
    assert refused.code == 1
    first = refused.document["suggestions"][0]
    assert first["fits"]
    assert first["is_exact"]
    answer = finefit("plan", shape.name, *TOO_SMALL, "--apply", "1")
    assert answer.code == 0
    assert f"wrote {', '.join(first['changes'])} to shape.yaml" in answer.out
    text = shape.read_text(encoding="utf-8")
    for kept in ("# what would a small one take", "# eight is enough", "# by hand", "[{path: nowhere.jsonl}]"):
        assert kept in text
    fixed = finefit("plan", shape.name, *TOO_SMALL, "--json")
    assert fixed.code == 0
    assert fixed.document["peak_bytes"] <= fixed.document["budget_bytes"]


def test_a_suggestion_that_is_not_there_leaves_the_spec_alone(shape: Path, finefit: Finefit) -> None:
    answer = finefit("plan", shape.name, *TOO_SMALL, "--apply", "99")
    assert answer.code == 2
    assert "--apply 1 to --apply" in answer.err
    assert shape.read_text(encoding="utf-8") == SHAPE


@pytest.mark.parametrize(
    ("own", "change", "problem"),
    [
        ("", "evaluate.0.batch=auto", "evaluate is in shape.yaml"),
        (
            "tuning: {kind: full}\n",
            "tuning={kind: lora, rank: 64}",
            "would have a different effect in child.yaml",
        ),
    ],
)
def test_a_suggestion_that_cannot_stand_above_a_base_is_not_written(
    own: str, change: str, problem: str, shape: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list is replaced as a whole; a LoRA above another keeps what that one says."""
    rewrite(shape, ("rank: 8", "rank: 8, alpha: 3"), ("max_tokens", "test: {path: nowhere.jsonl}, max_tokens"))
    with shape.open("a", encoding="utf-8") as file:
        file.write("evaluate: [{task: rouge, batch: 4096}]\n")
    child = shape.with_name("child.yaml")
    child.write_text(f"base: shape.yaml\nname: a\n{own}", encoding="utf-8")
    suggestion = Suggestion(changes=(change,), saves_bytes=1, peak_bytes=1, fits=True, is_exact=True, price="")
    monkeypatch.setattr("finefit.plan.stage_forecasts.forecast", lambda *_: (make_forecast(suggestions=(suggestion,)),))
    before = child.read_text(encoding="utf-8")
    answer = finefit("plan", child.name, *TOO_SMALL, "--apply", "1")
    assert (answer.code, child.read_text(encoding="utf-8")) == (2, before)
    assert problem in answer.err


def test_nothing_is_applied_to_a_plan_that_fits(folder: Path, finefit: Finefit) -> None:
    before = (folder / "spec.yaml").read_text(encoding="utf-8")
    answer = finefit("plan", "spec.yaml", *CARD, "--apply", "1")
    assert answer.code == 2
    assert "the plan fits as it is" in answer.err
    assert (folder / "spec.yaml").read_text(encoding="utf-8") == before


def test_the_card_of_the_spec_is_the_one_that_is_planned_for(folder: Path, finefit: Finefit) -> None:
    rewrite(folder / "spec.yaml", ("device: cpu", "device: cpu\ncard: RTX 4090"))
    assert finefit("plan", "spec.yaml", "--json").document["card"] == "RTX 4090"


# `finefit plan` of a spec with stages: the whole pipeline, before any of it has run.

STAGES = """\
name: med
device: cpu
defaults:
  tuning: {kind: lora, rank: 4, alpha: 8}
  optimizer: {lr: 1e-2}
  global_batch: 4
stages:
  sft: {kind: train, model: {kind: folder, path: model}, data: {train: [{path: train.jsonl}]}}
  pairs: {kind: make_pairs, train: [{path: train.jsonl}]}
  dpo:
    kind: train
    model: {kind: stage, name: sft}
    objective: {kind: dpo}
    data: {train: [{path: stage://pairs/train.jsonl}], max_tokens: 128}
  merged: {kind: merge_adapter, model: {kind: stage, name: dpo}}
"""
BY_HAND = """\
# by whom
name: large
stages:
  rows: {kind: python, script: rows.py, outputs: [rows.jsonl]}
  big:
    kind: train
    model:
      kind: shape
      config: {model_type: llama, vocab_size: 32000, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
    tuning: {kind: lora, rank: 8}  # eight is enough
    data: {train: [{path: stage://rows/rows.jsonl}], max_tokens: 1024}
    optimizer: {lr: 1e-4}
    global_batch: 32
    levers: {micro_batch: 32, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1}
"""  # noqa: E501


@pytest.fixture
def stages(folder: Path) -> Path:
    path = folder / "stages.yaml"
    path.write_text(STAGES, encoding="utf-8")
    return path


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "large.yaml"
    path.write_text(BY_HAND, encoding="utf-8")
    return path


def test_a_plan_shows_every_stage_before_any_of_them_has_run(stages: Path, finefit: Finefit) -> None:
    answer = finefit("plan", stages.name, *CARD)
    assert answer.code == 0
    first, _, *rows = answer.out.splitlines()
    assert first == "med: all 4 stages fit on RTX 4090"
    assert [row.split()[:2] for row in rows[:4]] == [
        ["sft", "train"],
        ["pairs", "make_pairs"],
        ["dpo", "train"],
        ["merged", "merge_adapter"],
    ]
    assert rows[4].startswith("in all: time about ")
    assert rows[4].endswith(" without pairs, merged; 0.1 MiB of disk at most")
    assert "dpo: rows assumed from data.max_tokens, since stage://pairs/train.jsonl is not made yet" in answer.out
    assert "trained tensors get a gradient" in answer.out  # the fullest in full
    assert not (stages.parent / "runs").exists()
    document = finefit("plan", stages.name, *CARD, "--json").document
    assert document.keys() >= KEYS
    assert list(document["stages"]) == ["sft", "pairs", "dpo", "merged"]
    assert all(document["stages"][name].keys() >= KEYS - {"stages", "cards"} for name in ("sft", "dpo"))
    assert document["fits"] is True
    assert document["stage"] in ("sft", "dpo")
    assert document["peak_bytes"] == document["stages"][document["stage"]]["peak_bytes"]
    assert document["total_seconds"] == pytest.approx(
        sum(document["stages"][name]["total_seconds"] for name in ("sft", "dpo"))
    )
    assert document["disk_bytes"] == sum(stage["disk_bytes"] for stage in document["stages"].values())
    assert document["stages"]["pairs"] == {
        **dict.fromkeys(("parameters", "trainable_parameters", "host_bytes", "total_seconds")),
        "kind": "make_pairs",
        "fits": True,
        "disk_bytes": 0,
        "notes": [],
    }
    assert [card["card"] for card in document["cards"]] == ["RTX 4090"]
    only = finefit("plan", stages.name, *CARD, "--stage", "dpo")
    assert "dpo fits: " in only.out
    assert "sft fits: " not in only.out


@pytest.mark.slow
def test_a_stage_that_does_not_fit_is_named_and_a_change_is_written_into_it(by_hand: Path, finefit: Finefit) -> None:
    refused = finefit("plan", by_hand.name, *TOO_SMALL)
    assert refused.code == 1
    assert refused.out.startswith("large does not fit on 2GiB: big needs ")
    assert "stages.big.levers." in refused.out
    document = finefit("plan", by_hand.name, *TOO_SMALL, "--json").document
    assert (document["fits"], document["does_not_fit"]) == (False, ["big"])
    first = document["suggestions"][0]
    assert first == document["stages"]["big"]["suggestions"][0]
    assert first["fits"]
    answer = finefit("plan", by_hand.name, *TOO_SMALL, "--apply", "1")
    assert answer.code == 0
    assert f"wrote {', '.join(first['changes'])} to large.yaml" in answer.out
    text = by_hand.read_text(encoding="utf-8")
    assert all(kept in text for kept in ("# by whom", "# eight is enough"))
    fixed = finefit("plan", by_hand.name, *TOO_SMALL, "--card", "1GiB")
    assert fixed.code == 0
    head, fits, small = fixed.out.splitlines()
    assert head.split()[:2] == ["card", "fits"]
    assert fits.split()[:3] == ["2GiB", "yes", "big"]
    assert small.split()[:3] == ["1GiB", "no", "big"]
    assert small.endswith("does not fit: big")


@pytest.mark.usefixtures("known_forecasts")
def test_a_disk_that_does_not_hold_all_stages_is_part_of_the_verdict_here_and_not_elsewhere(
    stages: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.facts.files.free_bytes", lambda _: 1 << 15)
    refused = finefit("plan", stages.name, "--card", "cpu")
    assert refused.code == 1
    assert refused.out.startswith("med does not fit on the disk: it takes up to 0.2 MiB, 0.1 MiB are free\n")
    assert "stages fit" not in refused.out
    document = finefit("plan", stages.name, "--card", "cpu", "--json").document
    assert (document["fits"], document["free_disk_bytes"], document["does_not_fit"]) == (False, 1 << 15, [])
    both = finefit("plan", stages.name, "--card", "cpu", *CARD)
    assert both.code == 0
    here, there = both.out.splitlines()[1:]
    assert here.endswith("does not fit: the disk")
    assert there.split()[:3] == ["RTX", "4090", "yes"]
    assert finefit("plan", stages.name, *CARD).code == 0


@pytest.mark.usefixtures("known_forecasts")
def test_host_memory_that_does_not_hold_what_is_made_is_told(
    stages: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.plan.stage_costs.read_memory_bytes", lambda _: 1 << 29)
    refused = finefit("plan", stages.name, "--card", "cpu")
    assert refused.code == 1
    assert refused.out.startswith("med does not fit on cpu: merged needs about 1.00 GiB of host memory\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--stage", "dqo"), "there is no stage dqo"),
        (("--stage", "pairs"), "stage pairs does not train"),
        (("--measure",), "--measure runs one real step"),
        (("--card", "RTX 4900"), "card 'RTX 4900' is not known"),
    ],
)
def test_what_cannot_be_asked_of_a_pipeline_is_a_mistake(
    arguments: tuple[str, ...], problem: str, stages: Path, finefit: Finefit
) -> None:
    answer = finefit("plan", stages.name, *arguments)
    assert answer.code == 2
    assert problem in answer.err


@pytest.mark.usefixtures("folder")
def test_a_spec_without_stages_has_none_to_name(finefit: Finefit) -> None:
    answer = finefit("plan", "spec.yaml", "--stage", "sft")
    assert answer.code == 2
    assert "--stage sft is for specs with stages" in answer.err
