"""`finefit plan` of a spec with stages: the whole pipeline, before any of it has run."""

from pathlib import Path

import pytest

from tests.cli.conftest import Finefit
from tests.cli.test_plan import KEYS

CARD = ("--card", "RTX 4090")
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
"""
TOO_SMALL = ("--card", "2GiB")


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
    assert "dpo: rows assumed from data.max_tokens, since stage://pairs/train.jsonl is yet to be made" in answer.out
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
    assert f"large.yaml now says {', '.join(first['changes'])}" in answer.out
    text = by_hand.read_text(encoding="utf-8")
    assert all(kept in text for kept in ("# by whom", "# eight is enough"))
    fixed = finefit("plan", by_hand.name, *TOO_SMALL, "--card", "1GiB")
    assert fixed.code == 0
    head, fits, small = fixed.out.splitlines()
    assert head.split()[:2] == ["card", "fits"]
    assert fits.split()[:3] == ["2GiB", "yes", "big"]
    assert small.split()[:3] == ["1GiB", "no", "big"]
    assert small.endswith("does not fit: big")


def test_a_disk_that_does_not_hold_all_stages_is_part_of_the_verdict_here_and_not_elsewhere(
    stages: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.facts.files.free_bytes", lambda _: 1 << 15)
    refused = finefit("plan", stages.name, "--card", "cpu")
    assert refused.code == 1
    assert refused.out.startswith("med does not fit on the disk: its stages leave up to 0.1 MiB, 0.1 MiB are free\n")
    assert "stages fit" not in refused.out
    document = finefit("plan", stages.name, "--card", "cpu", "--json").document
    assert (document["fits"], document["free_disk_bytes"], document["does_not_fit"]) == (False, 1 << 15, [])
    both = finefit("plan", stages.name, "--card", "cpu", *CARD)
    assert both.code == 0
    here, there = both.out.splitlines()[1:]
    assert here.endswith("does not fit: the disk")
    assert there.split()[:3] == ["RTX", "4090", "yes"]
    assert finefit("plan", stages.name, *CARD).code == 0


def test_host_memory_that_does_not_hold_what_is_made_is_told(
    stages: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.pipeline.outlooks.read_memory_bytes", lambda _: 1 << 29)
    refused = finefit("plan", stages.name, "--card", "cpu")
    assert refused.code == 1
    assert refused.out.startswith("med does not fit on cpu: merged needs about 1.00 GiB of host memory\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--stage", "dqo"), "there is no stage dqo"),
        (("--stage", "pairs"), "stage pairs trains nothing"),
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
