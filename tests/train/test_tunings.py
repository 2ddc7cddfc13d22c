"""Every kind of tuning, from the spec to the last checkpoint: what is frozen is proved not to have moved, and a killed run ends bit-identical."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import StageResult
from finefit.errors import ModelError
from finefit.model.load import load_base, make_trainable, save_weights
from finefit.spec.models import Lora
from finefit.train import worker
from tests.conftest import make_model_folder
from tests.faults import TRAINING, Job, at_step, finish, make_job, outcome, send_self, start, words

FAULT_OF_OURS = 70
TUNINGS = {
    "nf4": "{kind: lora, rank: 4, alpha: 8, dropout: 0.1, base_bits: 4}",
    "int8": "{kind: lora, rank: 4, alpha: 8, dropout: 0.1, base_bits: 8}",
    "dora": "{kind: lora, rank: 4, alpha: 8, dora: true, rank_stabilised: true}",
    "bf16": "{kind: lora, rank: 4, alpha: 8, weights: bf16}",
    "subset": "{kind: subset, trainable: [layers.*.mlp, norm]}",
    "adapter": "{kind: lora, rank: 4, alpha: 8, adapter: first}",
}


def spec(tuning: str) -> str:
    """Six steps, the third of which is saved; levers are fixed, since nothing here is about planning."""
    levers = "{micro_batch: 2, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1, adapter_inputs: fp32}"
    return re.sub(
        r"levers: .*\n", f"levers: {levers}\n", re.sub(r"tuning: .*\n", f"tuning: {tuning}\n", TRAINING)
    ).replace("epochs: 3", "epochs: 1")


def make_first(folder: Path) -> Path:
    """An adapter to go on from, away from zero, beside the model that `make_project` will write once more."""
    base = load_base(make_model_folder(folder / "model", dropout=0.1), device="cpu", dtype=torch.float32)
    model = make_trainable(base, Lora(kind="lora", rank=4, alpha=8), name="model")
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_weights(model, folder / "first")
    return folder / "first"


@pytest.fixture(scope="module", params=TUNINGS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    if request.param in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "adapter":
        make_first(folder)
    return make_job(folder, spec=spec(TUNINGS[request.param]))


def run(job: Job) -> StageDir:
    where = job.fresh()
    assert finish(start(where)) == 0, words(where)
    return where


def test_a_killed_run_ends_bit_identical_and_the_frozen_part_has_not_moved(job: Job) -> None:
    whole = run(job)
    assert read_record(whole.result, StageResult).frozen_unchanged is True
    losses = [loss for _, loss, *_ in outcome(whole).steps]
    assert losses[-1] < losses[0]
    where = job.fresh()
    assert finish(start(where, lambda: at_step(5, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    assert finish(start(where)) == 0, words(where)
    assert outcome(where) == outcome(whole)
    assert read_record(where.result, StageResult).frozen_unchanged is True


def test_of_a_whole_model_nothing_is_frozen_and_nothing_claimed(full: Any) -> None:
    assert read_record(run(full.job).result, StageResult).frozen_unchanged is None


def test_a_frozen_tensor_that_moves_is_a_fault_of_ours_by_name(lora: Any) -> None:
    where = lora.job.fresh()

    def prepare() -> None:
        really: Callable[..., Any] = getattr(worker, "make_trainable")  # noqa: B009 a name that the worker imports

        def loose(*args: Any, **kwargs: Any) -> Any:
            model = really(*args, **kwargs)
            moved = model.get_parameter("base_model.model.model.norm.weight")
            at_step(7, lambda: moved.data.view(-1)[3].add_(1e-6))
            return model

        setattr(worker, "make_trainable", loose)  # noqa: B010

    assert finish(start(where, prepare)) == FAULT_OF_OURS
    failure = read_record(where.result, StageResult).failure
    assert failure is not None
    assert failure.problem == "1 of 20 frozen tensors changed during training: base_model.model.model.norm.weight"


def test_training_goes_on_from_where_the_adapter_is(tmp_path: Path) -> None:
    first = load_file(make_first(tmp_path) / "adapter_model.safetensors")
    where = run(make_job(tmp_path, spec=spec(TUNINGS["adapter"]).replace("lr: 1e-2", "lr: 1e-9")))
    last = load_file(where.checkpoints / "final" / "adapter_model.safetensors")
    assert first.keys() == last.keys()
    assert all(torch.allclose(first[name], last[name], atol=1e-6) for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_an_adapter_that_the_spec_does_not_describe_is_told_before_a_run_directory_appears(tmp_path: Path) -> None:
    make_first(tmp_path)
    with pytest.raises(ModelError, match=r"tuning.rank is 8, the adapter has 4"):
        make_job(tmp_path, spec=spec(TUNINGS["adapter"].replace("rank: 4", "rank: 8")))
    assert not list((tmp_path / "runs").glob("*"))
