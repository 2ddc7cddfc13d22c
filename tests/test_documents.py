"""Figures in documents are those of the committed results."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.speed_table import GOALS, misses, rendered
from bench.stages import STAGES
from bench.time_model import HELD_OUT
from finefit.plan.target import MARGIN, MARGIN_BYTES
from finefit.spec.load import load_any
from finefit.spec.pipeline import Pipeline
from tools.make_plan_listings import listings, said

ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_and_the_plot_of_memory_are_made_from_the_committed_results(tmp_path: Path) -> None:
    document, picture = tmp_path / "memory.md", tmp_path / "memory.svg"
    document.write_text((ROOT / "docs/memory.md").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "bench/memory_table.py"), str(document), str(picture)], check=True)
    assert document.read_text(encoding="utf-8") == (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert picture.read_text() == (ROOT / "docs/memory.svg").read_text()


OFF = {
    "llama-3.1-8b-8L-r16-nf4-4x2048-re8-chunk1024-fused",
    "qwen2.5-0.5b-24L-full-4x1024-re24-chunk1024-fused",
    "qwen2.5-7b-8L-r128-2x2048-re4-chunk2048-adam8",
}
"""Fused kernels with recomputed layers reserve over 2 % more than predicted, which the margin covers; the third
reserves less. Whoever fixes one removes it here."""


def test_the_committed_forecasts_meet_their_goals_but_for_those_that_the_document_names() -> None:
    rows = json.loads((ROOT / "bench/results/memory.json").read_text())
    errors = {
        key: {row["config"]: abs(row["predicted"][key] / row["measured"][key] - 1) for row in rows}
        for key in ("allocated_bytes", "reserved_bytes")
    }
    peaks = {row["config"]: row["predicted"]["peak_bytes"] / row["measured"]["device_bytes"] - 1 for row in rows}
    assert len(rows) >= 40
    assert max(errors["allocated_bytes"].values()) < 0.005
    assert sum(errors["reserved_bytes"].values()) / len(rows) < 0.005
    assert {name for name, error in errors["reserved_bytes"].items() if error >= 0.02} == OFF
    assert max(errors["reserved_bytes"].values()) < 0.035
    assert {name for name, error in peaks.items() if error < 0} == {
        "llama-3.1-8b-8L-r16-nf4-4x2048-re8-chunk1024-fused"
    }  # see there
    assert sum(peaks.values()) / len(peaks) < 0.02
    assert all(row["capped"]["fits"] for row in rows if row["capped"])
    assert sum(bool(row["capped"]) for row in rows) == 62
    allocated, reserved = (
        f"{sum(errors[key].values()) / len(rows):.{digits}%}"
        for key, digits in (("allocated_bytes", 3), ("reserved_bytes", 2))
    )
    claim = f"On {len(rows)} configurations measured on an H200, predictions were off by {allocated} in allocated"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{claim} and {reserved} in reserved memory on average".replace("%", " %") in text


def test_vision_language_models_took_the_predicted_memory() -> None:
    """Of more than one shape, with adapters in the language model alone and in all towers."""
    rows = {
        row["config"]: row
        for row in json.loads((ROOT / "bench/results/memory.json").read_text())
        if "-img" in row["config"]
    }
    off = {
        key: max(abs(row["predicted"][key] / row["measured"][key] - 1) for row in rows.values())
        for key in ("allocated_bytes", "reserved_bytes")
    }
    over = [row["predicted"]["peak_bytes"] / row["measured"]["device_bytes"] - 1 for row in rows.values()]
    slow = [row["measured"]["step_seconds"] / row["predicted"]["step_seconds"] for row in rows.values()]
    shapes = {"qwen2.5-vl-3b": 5, "llava-1.5-7b": 4, "smolvlm-2b": 2, "gemma-3-4b-it": 2, "paligemma-3b-448": 2}
    assert {shape: sum(name.startswith(shape) for name in rows) for shape in shapes} == shapes
    assert sum("-towers-" in name for name in rows) == 8
    assert off["reserved_bytes"] < 0.005
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert (
        f"off by {off['allocated_bytes']:.2%} at most, reserved memory by {off['reserved_bytes']:.2%}".replace(
            "%", " %"
        )
        in text
    )
    assert f"less than predicted each time ({100 * min(over):.1f} to {100 * max(over):.1f} %)" in text
    assert f"Vision-language models take {min(slow):.1f} to {max(slow):.1f} times the predicted time" in text


def test_the_document_says_how_many_steps_took_the_predicted_time() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "bench/results/memory.json").read_text())
    slow = [row["measured"]["step_seconds"] / row["predicted"]["step_seconds"] for row in rows]
    assert f"within 10 % ({sum(abs(1 / share - 1) <= 0.1 for share in slow)} of {len(rows)} rows)" in text
    assert f"such steps take up to {max(slow):.1f} times the predicted time" in text


def test_the_error_of_predicted_times_stands_in_the_document_with_that_of_shapes_never_seen() -> None:
    """And what the cost model predicts is what the results of memory, mixtures and speed say."""
    found = json.loads((ROOT / "bench/results/time_model.json").read_text())
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for words, part in found["summary"].items():
        before, now = part["earlier_error"], part["error"]
        shares = " | ".join(f"{100 * share:.1f} %" for one in (before, now) for share in (one["mean"], one["worst"]))
        assert f"| {words} | {now['num']} | {shares} | {now['within_15']} |" in text
        errors = [abs(row["error"]) for row in found["cases"] if words in ("all", _part(row))]
        assert now["mean"] == pytest.approx(sum(errors) / len(errors), abs=1e-4)
    told = {row["config"]: row["predicted_seconds"] for row in found["cases"] if row["file"] == "memory.json"}
    rows = json.loads((ROOT / "bench/results/memory.json").read_text())
    assert {row["config"]: row["predicted"]["step_seconds"] for row in rows} == told
    assert {row["shape"] for row in found["cases"] if row["is_held_out"]} == HELD_OUT


def _part(row: dict[str, Any]) -> str:
    return "held out" if row["is_held_out"] else "calibration"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "bench/systems").glob("*.yaml")))
def test_the_specs_of_the_five_systems_are_specs(name: str) -> None:
    from finefit.spec.load import load_spec

    assert load_spec(ROOT / "bench/systems" / name).model.kind == "shape"


def test_the_committed_figures_of_preparation_meet_their_goals_and_stand_in_the_document() -> None:
    found = json.loads((ROOT / "bench/results/data.json").read_text())
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    million, scaling = found["million"], found["scaling"]
    whole_bytes = million["peak_bytes"] + 2 * million["peak_bytes_of_each_of_two_children"]
    assert min(case["of_bare"] for case in found["speed"]) >= 0.8
    assert min(case["fill_of_packs"] for case in found["packing"]) >= 0.97
    assert million["rows"] == 1_000_000
    assert whole_bytes < 2 << 30
    for case in found["speed"]:
        figures = (
            f"{case['rows']:,} | {case['tokens']:,} | {case['bare_seconds']} s | {case['prepare_seconds']} s | "
            f"{case['of_bare']:.2f}"
        )
        assert f"| {case['file']} | {figures} |" in text
    for case in found["packing"]:
        shares = " | ".join(f"{case[key]:.1%}" for key in ("fill_of_packs", "padded_grouped", "padded_as_they_come"))
        assert f"| {case['file']} | {case['mean']:.0f} | {case['longest']:,} | {shares} |" in text
    assert f"{scaling['seconds_of_2']} s where one takes {scaling['seconds_of_1']} s ({scaling['rows']:,} rows" in text
    assert f"take {million['seconds']} s with two processes, and {whole_bytes / 2**30:.2f} GiB" in text


def test_the_measured_exports_are_those_of_the_committed_results_and_none_is_refused() -> None:
    text = (ROOT / "docs/export.md").read_text()
    found = json.loads((ROOT / "bench/results/export.json").read_text())
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `") and " MiB | " in line]
    assert [row[0].strip("| `") for row in rows] == list(found["formats"])
    for (_, size, kl, same, answers, score, made, proved), one in zip(rows, found["formats"].values(), strict=True):
        assert one["problems"] == []
        assert size == f"{one['bytes'] / 2**20:.0f} MiB"
        assert [f"{float(part):.1e}" for part in re.findall(r"[\d.]+e-\d+", kl)] == [f"{v:.1e}" for v in one["kl"]]
        assert same == f"{one['agreement'][0]:.1%}".replace("%", " %")
        assert answers == f"{one['same_answers']} of {found['prompts']}"
        value, low, high = (100 * part for part in one["score"]["exported"])
        assert score == f"{value:.1f} % ({low:.0f} to {high:.0f})"
        assert one["score"]["exported"][0] >= one["score"]["trained"][1]
        assert (made, proved.rstrip(" |")) == (f"{one['make_seconds']:.0f} s", f"{one['proof_seconds']:.0f} s")


def test_the_table_of_speeds_is_made_from_the_committed_results_and_every_goal_is_met() -> None:
    rows = json.loads((ROOT / "bench/results/speed.json").read_text())
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert rendered(text, rows) == text
    ours = {row["case"]: row for row in rows if row["tool"] == "finefit"}
    assert ours.keys() >= GOALS.keys()
    assert {name: misses(row) for name, row in ours.items() if misses(row)} == {}
    for peer in (row for row in rows if row["tool"] != "finefit"):
        assert ours[peer["case"]]["tokens_per_second"] > peer["tokens_per_second"]
        assert ours[peer["case"]]["reserved_bytes"] < peer["reserved_bytes"]
        assert abs(ours[peer["case"]]["loss"] - peer["loss"]) < 1e-5  # six digits of a loss of about 12


def test_no_committed_step_took_more_than_its_forecast_with_its_margin() -> None:
    for row in json.loads((ROOT / "bench/results/speed.json").read_text()):
        if row["tool"] == "finefit":
            predicted, recomputed = row["predicted_reserved_bytes"], row["levers"]["recompute"]
            one_input = row["host_bytes"] // recomputed if row["levers"]["offload"] else 0
            assert row["reserved_bytes"] <= predicted * (1 + MARGIN) + MARGIN_BYTES + one_input, row["case"]


def test_packed_steps_took_the_predicted_memory_and_less_time_than_padded_ones() -> None:
    found = json.loads((ROOT / "bench/results/packing.json").read_text())["cases"]
    shares = []
    for case in found.values():
        for rows in ("worst", "short_rows"):
            assert case[rows]["reserved_bytes"] == case["predicted"]["reserved_bytes"]
        shares.append(case["speed"]["packed"]["seconds"] / case["speed"]["grouped"]["seconds"])
    assert f"take {shares[0]:.2f} and {shares[1]:.2f} of the time" in (ROOT / "docs/performance.md").read_text(
        encoding="utf-8"
    )


def test_memory_of_generation_was_predicted_within_five_per_cent_and_the_document_says_what_was_measured() -> None:
    found = json.loads((ROOT / "bench/results/generation.json").read_text())
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    batched = found["batched"]
    cases = [
        batched["finefit"],
        batched["finefit_planned"],
        found["long"],
        found["long_in_tiles"],
        found["seeing"],
        found["seeing_large"],
    ]
    assert len(found["errors"]) == len(cases)
    assert max(abs(error) for error in found["errors"].values()) < 0.05
    for case in cases:
        assert f"| {case['reserved_bytes'] / 2**30:.2f} GiB | {case['predicted_bytes'] / 2**30:.2f} GiB" in text
    for side in ("transformers", "finefit", "finefit_planned"):
        assert f"{batched[side]['seconds']:.1f} s" in text
        assert f"({batched[side]['new_tokens_per_second']:.0f}" in text


GIB = 2**30


def test_mixtures_took_the_memory_that_the_document_says_however_tokens_were_routed() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    cases = json.loads((ROOT / "bench/results/moe.json").read_text())["cases"]
    assert len(cases) == 11
    for case in cases:
        predicted, even, collapsed = case["predicted"], case["even"], case["collapsed"]
        off = {key: predicted[key] / even[key] - 1 for key in ("allocated_bytes", "reserved_bytes", "step_seconds")}
        assert (even["allocated_bytes"], even["reserved_bytes"]) == (
            collapsed["allocated_bytes"],
            collapsed["reserved_bytes"],
        )
        assert abs(off["allocated_bytes"]) < 0.0005
        assert abs(off["reserved_bytes"]) < 0.005
        held = (
            f"{even['allocated_bytes'] / GIB:.3f} | {off['allocated_bytes']:+.3%} | "
            f"{even['reserved_bytes'] / GIB:.3f} | {off['reserved_bytes']:+.2%}"
        )
        assert f"| {case['config']} | {held} | {even['step_seconds']:.3f} | {off['step_seconds']:+.0%} |" in text
    slow = max(
        case[name]["step_seconds"] / case["predicted"]["step_seconds"]
        for case in cases
        for name in ("even", "collapsed")
    )
    assert f"mixtures of experts up to {slow:.1f} times" in text


def test_the_measured_step_of_two_experts_stands_in_their_document() -> None:
    first = json.loads((ROOT / "bench/results/moe.json").read_text())["cases"][0]
    assert first["config"] == "qwen2-0.5b-of-2-24L-full-4x1024-re0-chunk1024"
    figures = (
        f"{first['even']['allocated_bytes'] / GIB:.2f} GiB allocated and "
        f"{first['even']['reserved_bytes'] / GIB:.2f} reserved"
    )
    assert figures in (ROOT / "docs/rmoe.md").read_text(encoding="utf-8")


def test_two_experts_need_what_the_documents_say_before_any_activation() -> None:
    """Weights, gradients and two moments in fp32, of Qwen2-0.5B with its MLP so many times in every layer: as the
    recipe builds it, and as the original did, with the base as shared expert and a head of its own."""
    base, head, mlp, hidden = 494_032_768, 151_936 * 896, 3 * 896 * 4864, 896

    def needed(experts: int, *, is_original: bool) -> str:
        more = head + 24 * (mlp + hidden) if is_original else 0
        return f"{round(16 * (base + 24 * ((experts - 1) * mlp + experts * hidden) + more) / GIB)} GiB"

    figures = {needed(2, is_original=False), needed(2, is_original=True), needed(32, is_original=True)}
    assert figures == {"12 GiB", "19 GiB", "159 GiB"}
    for name in ("rmoe", "troubleshooting"):
        text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        assert not {figure for figure in figures if figure not in text}


def test_what_real_abstracts_gave_stands_in_the_document() -> None:
    found = json.loads((ROOT / "bench/results/pubmedqa.json").read_text())
    text = (ROOT / "docs/medical.md").read_text(encoding="utf-8")
    for name, row in found["scores"]["scores"].items():
        wrong, margin = row["hallucination"]["preferred_wrong"], row["hallucination"]["margin"]
        rate = f"{100 * wrong['value']:.1f} % | {100 * wrong['low']:.1f} to {100 * wrong['high']:.1f}"
        assert f"| {name} | {rate} | {margin['value']:.2f} | {margin['low']:.2f} to {margin['high']:.2f} |" in text
    assert {change["p"] for change in found["differences"]["table"]["hallucination"]} == {1.0}
    assert "did not move (p 1)" in text
    assert 1.9 < sum(found["minutes"].values()) / 60 < 2.1
    assert "other work beside it, two hours;" in text
    test = found["pairs"]["pairs"]["test"]
    assert f"AUC of {test['length_auc']['words']:.2f} and by single words with {test['words_auc']:.2f}" in text


def test_what_the_medical_twin_gave_stands_in_the_document() -> None:
    found = json.loads((ROOT / "bench/results/medical_twin.json").read_text())
    text = (ROOT / "docs/medical.md").read_text(encoding="utf-8")
    for name, row in found["scores"]["scores"].items():
        wrong = row["hallucination"]["preferred_wrong"]
        assert (
            f"| {name} | {100 * wrong['value']:.1f} % | {100 * wrong['low']:.1f} to {100 * wrong['high']:.1f} |\n"
            in text
        )
    fall = next(change for change in found["differences"]["table"]["hallucination"] if change["second"] == "dpo")
    assert (
        f"{-100 * fall['value']:.1f} points less ({-100 * fall['high']:.1f} to {-100 * fall['low']:.1f}), p "
        f"{fall['p']:g}."
    ) in text
    assert f"({sum(found['minutes'].values()):.0f} minutes, of which {found['minutes']['dpo']:.0f} for DPO;" in text


def test_the_pipeline_on_real_abstracts_is_a_spec() -> None:
    assert isinstance(load_any(ROOT / "bench/pubmedqa/spec.yaml"), Pipeline)


PRINTED = {
    "plan bench/systems/amr.yaml --card 'RTX 4090'": ("docs/memory.md",),
    "plan bench/systems/moe-2.yaml --card A100-80GB": ("docs/memory.md",),
}


@pytest.mark.parametrize("command", PRINTED)
def test_a_plan_in_the_documents_is_what_its_command_says(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are quickly made; `tools/make_plan_listings.py` renews all of them."""
    monkeypatch.chdir(ROOT)
    expected = said(command)
    for document in PRINTED[command]:
        printed = {
            shlex.join(shlex.split(name)): text
            for name, text in listings((ROOT / document).read_text(encoding="utf-8")).items()
        }
        assert printed[command] == expected


def test_the_excerpt_of_a_plan_in_the_readme_is_from_the_listing() -> None:
    document = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    listing = listings(document)['plan bench/systems/amr.yaml --card "RTX 4090"'].splitlines()
    excerpt = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1].strip("\n").splitlines()
    assert len(excerpt) > 5
    assert [line for line in excerpt if line not in listing] == []


def test_every_file_that_a_document_names_exists() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    for document in documents:
        text = document.read_text(encoding="utf-8")
        named = re.findall(r"`((?:tests|bench|tools|examples)/[\w/.-]+)`", text)
        assert [path for path in named if not (ROOT / path).exists()] == [], document.name
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        assert [link for link in links if not (document.parent / link).exists()] == [], document.name


def test_the_card_was_back_where_it_was_after_every_stage() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    stages = json.loads((ROOT / "bench/results/stages.json").read_text())["stages"]
    assert [*stages] == [*STAGES]
    for name, row in stages.items():
        assert abs(row["after_bytes"] - row["before_bytes"]) < 1 << 20
        assert row["before_bytes"] < row["loaded_bytes"] < row["peak_bytes"]
        held = [row[key] for key in ("before_bytes", "loaded_bytes", "peak_bytes", "after_bytes")]
        if "planned" in row:
            assert row["peak_bytes"] - row["before_bytes"] <= row["planned"]["peak_bytes"]
            assert abs(row["planned"]["reserved_bytes"] / row["reserved_bytes"] - 1) < 0.01
            held += [
                row["reserved_bytes"],
                row["planned"]["reserved_bytes"],
                row["peak_bytes"] - row["before_bytes"],
                row["planned"]["peak_bytes"],
            ]
        assert f"| {name} | {' | '.join(f'{value / GIB:.2f}' for value in held)} |" in text
    tuned = stages["tuned"]
    figures = (
        f"planned {tuned['planned']['reserved_bytes'] / GIB:.2f} GiB, reserved {tuned['reserved_bytes'] / GIB:.2f}"
    )
    assert figures in (ROOT / "docs/rmoe.md").read_text(encoding="utf-8")
