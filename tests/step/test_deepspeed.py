"""The DeepSpeed JSON of a stage, what an engine refuses, and which one a stage gets."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from finefit.artifacts.records import Finding, Levers
from finefit.artifacts.stage_records import Stage
from finefit.errors import FinefitError, RunError, SpecError
from finefit.spec.models import Lora
from finefit.spec.schema import AdamW, AutoEngine, Ddp, DeepSpeed, Fsdp2, Single
from finefit.step.deepspeed import DEEPSPEED_FILE, config_contradictions, deepspeed_config, open_config
from finefit.step.engine import SINGLE_PROCESS, DdpEngine, FsdpEngine
from finefit.step.engine_choice import engine_problems, loads_on, make_engine
from finefit.train.ranks import ONE_RANK
from tests.step.conftest import FULL, LORA
from tests.step.rank_group import make_stage


class _Two:
    rank, size, is_first = 0, 2, True

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def zero(stage: Literal[2, 3] = 2, config: str | None = None) -> DeepSpeed:
    return DeepSpeed(kind="deepspeed", devices=2, stage=stage, config=config)


def problems_of(stage: Stage) -> list[Finding]:
    return list(engine_problems(stage.engine, stage.tuning, stage.optimizer, stage.levers))


DDP, FSDP2 = Ddp(kind="ddp", devices=2), Fsdp2(kind="fsdp2", devices=2)
AGREEING: dict[str, Any] = {
    "train_batch_size": 7,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "offload_optimizer": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}},
    "steps_per_print": 1000,
}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_json_says_the_stage_and_leaves_every_number_to_finefit(stage: Literal[2, 3]) -> None:
    config = deepspeed_config(make_stage(engine=zero(stage)), {})
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 0.0
    assert not {"optimizer", "scheduler", "fp16", "bf16"} & config.keys()


def test_a_file_that_agrees_is_kept_for_what_the_spec_does_not_say() -> None:
    config = deepspeed_config(make_stage(engine=zero()), AGREEING)
    assert config["steps_per_print"] == 1000
    assert config["zero_optimization"]["allgather_partitions"] is True
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert not {"optimizer", "bf16", "train_batch_size"} & config.keys()


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"train_batch_size": 8}, "train_batch_size is 8, global_batch is 7"),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu is 2, levers.micro_batch is 1"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps is 3, what global_batch comes to is 4"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, optimizer.clip is 0.5"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, precision fp16 is false"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true, precision bf16 is false"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, engine.stage is 2"),
        ({"optimizer": {"type": "Lion"}}, 'optimizer.type is "Lion", optimizer.kind is "AdamW"'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "optimizer.params.lr is 1.0, optimizer.lr is 0.01"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is set"),
        ({"elasticity": {"enabled": True}}, "elasticity is set"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            'zero_optimization.offload_optimizer.device is "cpu"',
        ),
    ],
)
def test_a_file_that_contradicts_the_spec_is_refused_by_name(own: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as refused:
        deepspeed_config(make_stage(engine=zero()), own)
    assert named in refused.value.problem


def test_all_contradictions_are_told_at_once() -> None:
    own = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 3},
    }
    assert len(list(config_contradictions(make_stage(engine=zero()), own))) == 4


def test_the_json_lies_in_the_stage_directory_and_is_read_from_there(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(AGREEING))
    stage = make_stage(engine=zero(config="own.json"))
    first = open_config(tmp_path, stage, tmp_path, writes=True)
    assert json.loads((tmp_path / DEEPSPEED_FILE).read_text()) == first
    (tmp_path / "own.json").unlink()
    assert open_config(tmp_path, stage, tmp_path, writes=False) == first


def test_a_file_that_is_missing_or_no_json_is_an_error_with_its_name(tmp_path: Path) -> None:
    stage = make_stage(engine=zero(config="own.json"))
    with pytest.raises(SpecError, match=r"there is no .*own.json"):
        open_config(tmp_path, stage, tmp_path, writes=True)
    for text, said in (("{", "own.json is not JSON"), ("[]", "own.json holds list instead of an object")):
        (tmp_path / "own.json").write_text(text)
        with pytest.raises(SpecError, match=said):
            open_config(tmp_path, stage, tmp_path, writes=True)


@pytest.mark.parametrize(
    ("changes", "named", "remedy"),
    [
        (
            {"engine": FSDP2, "optimizer": AdamW(kind="adamw_8bit", lr=1e-3)},
            "optimizer.kind adamw_8bit",
            "optimizer.kind=adamw",
        ),
        ({"engine": FSDP2, "tuning": Lora(kind="lora", experts=True)}, "tuning.experts", "engine.kind: ddp"),
        ({"engine": FSDP2, "tuning": Lora(kind="lora", base_bits=4)}, "tuning.base_bits 4", "engine.kind: ddp"),
        ({"engine": zero(3), "tuning": Lora(kind="lora", base_bits=8)}, "tuning.base_bits 8", "engine.kind: ddp"),
        (
            {"engine": zero(2), "tuning": Lora(kind="lora", weights="bf16")},
            "tuning.weights bf16",
            "tuning.weights=fp32",
        ),
        (
            {"engine": zero(3), "levers": Levers(micro_batch=1, kernels="fused")},
            "levers.kernels fused",
            "levers.kernels=torch",
        ),
        (
            {"engine": zero(3), "levers": Levers(micro_batch=1, recompute=1, keep_attention=True)},
            "levers.keep_attention",
            "keep_attention=false",
        ),
        ({"engine": zero(3), "levers": Levers(micro_batch=1, mlp_tiles=4)}, "levers.mlp_tiles 4", "levers.mlp_tiles=1"),
        (
            {"engine": DDP, "levers": Levers(micro_batch=1, update="inside")},
            "levers.update inside",
            "levers.update=after",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name_with_what_mends_it(
    changes: dict[str, Any], named: str, remedy: str, tmp_path: Path
) -> None:
    stage = make_stage(**changes)
    (finding,) = problems_of(stage)
    assert finding.level == "error"
    assert finding.problem.startswith(named)
    assert remedy in finding.remedy
    with pytest.raises(SpecError, match=named) as refused:
        make_engine(stage, _Two(), folder=tmp_path, run=tmp_path)
    assert refused.value.remedy == finding.remedy


def test_no_remedy_names_the_engine_that_there_is() -> None:
    inside = make_stage(engine=DDP, levers=Levers(micro_batch=1, update="inside"))
    assert not any("ddp" in finding.remedy for finding in problems_of(inside))


@pytest.mark.parametrize("tuning", [LORA, FULL], ids=lambda t: t.kind)
@pytest.mark.parametrize(
    "engine",
    [Single(kind="single"), Ddp(kind="ddp", devices=2), Fsdp2(kind="fsdp2", devices=2), zero(2), zero(3)],
)
def test_nothing_else_is_refused(engine: Any, tuning: Any) -> None:
    assert problems_of(make_stage(engine=engine, tuning=tuning)) == []


def test_a_stage_gets_the_engine_that_it_names(tmp_path: Path) -> None:
    made = {
        name: make_engine(make_stage(engine=engine), peers, folder=tmp_path, run=tmp_path)
        for name, engine, peers in (
            ("single", Single(kind="single"), ONE_RANK),
            ("one rank", Fsdp2(kind="fsdp2", devices=1), ONE_RANK),
            ("ddp", Ddp(kind="ddp", devices=2), _Two()),
            ("fsdp2", Fsdp2(kind="fsdp2", devices=2), _Two()),
        )
    }
    assert made["single"] is SINGLE_PROCESS
    assert made["one rank"] is SINGLE_PROCESS
    assert isinstance(made["ddp"], DdpEngine)
    assert isinstance(made["fsdp2"], FsdpEngine)


def test_several_ranks_without_an_engine_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="one of 2 ranks"):
        make_engine(make_stage(), _Two(), folder=tmp_path, run=tmp_path)
    with pytest.raises(FinefitError, match="auto"):
        make_engine(make_stage(engine=AutoEngine(kind="auto")), _Two(), folder=tmp_path, run=tmp_path)


def test_weights_that_are_divided_are_loaded_on_the_host_first() -> None:
    card = replace(make_stage(engine=Fsdp2(kind="fsdp2", devices=2)), device="cuda")
    assert loads_on(card, num_ranks=2) == "cpu"
    assert loads_on(card, num_ranks=1) == "cuda"
    assert loads_on(replace(card, engine=zero(3)), num_ranks=2) == "cpu"
    assert loads_on(replace(card, engine=zero(2)), num_ranks=2) == "cuda"


def test_accumulation_is_counted_over_the_ranks_of_all_nodes() -> None:
    stage = make_stage(engine=zero())
    assert not list(config_contradictions(stage, {"gradient_accumulation_steps": 4}))  # 7 rows, 2 ranks
    assert not list(config_contradictions(replace(stage, num_ranks=4), {"gradient_accumulation_steps": 2}))


@pytest.mark.parametrize("place", ["a pipe", "a folder", "a deep nesting", "a huge file"])
def test_a_users_file_that_cannot_be_one_is_refused_at_once(tmp_path: Path, place: str) -> None:
    path = tmp_path / "own.json"
    match place:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a deep nesting":
            path.write_text("[" * 100_000)
        case _:
            path.touch()
            os.truncate(path, 1 << 40)
    with pytest.raises(SpecError, match=r"engine\.config: .*own\.json") as caught:
        open_config(tmp_path, make_stage(engine=zero(config="own.json")), tmp_path, writes=True)
    assert caught.value.remedy


def test_a_damaged_record_of_the_stage_is_named(tmp_path: Path) -> None:
    (tmp_path / DEEPSPEED_FILE).write_text("{")
    with pytest.raises(RunError, match=DEEPSPEED_FILE):
        open_config(tmp_path, make_stage(engine=zero()), tmp_path, writes=False)
