"""Every kind of tuning, from the spec to the last checkpoint: what is frozen is proved not to have moved, and a killed
run ends bit-identical."""

import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import StageResult
from finefit.errors import ModelError
from finefit.model.family import save_weights
from finefit.model.load import load_base, make_trainable
from finefit.spec.models import Lora
from finefit.spec.schema import Single
from tests.conftest import TEMPLATE, make_model_folder, make_project, make_tokenizer
from tests.faults import (
    FULL,
    TRAINING,
    Job,
    at_step,
    change_model,
    failure_of,
    finish,
    make_job,
    outcome,
    run_to_end,
    send_self,
    start,
    words,
)
from tests.mixtures import make_mixture_project
from tests.train.test_saver import ENGINES, assert_close, run_ranks, sure, tensors, under
from tests.train.test_validation import GATES

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
    levers = (
        "{micro_batch: 2, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1, "
        "adapter_inputs: fp32}"
    )
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


def test_a_killed_run_ends_bit_identical_and_the_frozen_part_has_not_moved(job: Job) -> None:
    whole = run_to_end(job)
    assert read_record(whole.result, StageResult).frozen_unchanged is True
    losses = [loss for _, loss, *_ in outcome(whole).steps]
    assert losses[-1] < losses[0]
    where = job.fresh()
    assert finish(start(where, lambda: at_step(5, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    assert finish(start(where)) == 0, words(where)
    assert outcome(where) == outcome(whole)
    assert read_record(where.result, StageResult).frozen_unchanged is True


def test_of_a_whole_model_nothing_is_frozen_and_nothing_claimed(full: Any) -> None:
    assert read_record(run_to_end(full.job).result, StageResult).frozen_unchanged is None


def test_a_frozen_tensor_that_moves_is_a_fault_of_ours_by_name(lora: Any) -> None:
    where = lora.job.fresh()

    def loosen(model: nn.Module) -> None:
        moved = model.get_parameter("base_model.model.model.norm.weight")
        at_step(7, lambda: moved.data.view(-1)[3].add_(1e-6))

    assert finish(start(where, lambda: change_model(loosen))) == FAULT_OF_OURS
    failure = failure_of(where)
    assert failure.problem == "1 of 20 frozen tensors changed during training: base_model.model.model.norm.weight"


def test_training_goes_on_from_where_the_adapter_is(tmp_path: Path) -> None:
    first = load_file(make_first(tmp_path) / "adapter_model.safetensors")
    where = run_to_end(make_job(tmp_path, spec=spec(TUNINGS["adapter"]).replace("lr: 1e-2", "lr: 1e-9")))
    last = load_file(where.checkpoints / "final" / "adapter_model.safetensors")
    assert first.keys() == last.keys()
    assert all(torch.allclose(first[name], last[name], atol=1e-6) for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_an_adapter_that_the_spec_does_not_describe_is_told_before_a_run_directory_appears(tmp_path: Path) -> None:
    make_first(tmp_path)
    with pytest.raises(ModelError, match=r"tuning.rank is 8, the adapter has 4"):
        make_job(tmp_path, spec=spec(TUNINGS["adapter"].replace("rank: 4", "rank: 8")))
    assert not list((tmp_path / "runs").glob("*"))


# A tokenizer with several chat templates, by name: transformers keeps them in a folder of their own.

TEMPLATES = {"default": TEMPLATE, "tool_use": f"Tools.{TEMPLATE}"}


def _project(folder: Path, *, spec: str) -> Path:
    path = make_project(folder, spec=spec)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder / "model")
    return path


def test_a_checkpoint_has_all_templates_of_its_model(tmp_path: Path) -> None:
    where = run_to_end(make_job(tmp_path, spec=TRAINING.replace("epochs: 3", "epochs: 1"), project=_project))
    assert AutoTokenizer.from_pretrained(where.checkpoints / "final").chat_template == TEMPLATES


# A mixture of experts from the spec to its last checkpoint: a killed run ends bit-identical, and what it leaves is
# read by plain transformers.

TUNINGS_MIXTURES = {"full": "{kind: full}", "routers": "{kind: subset, trainable: [mlp.gate]}"}


@pytest.fixture(scope="module", params=TUNINGS_MIXTURES)
def tuning(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job_mixtures(tuning: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp(tuning), spec=spec(TUNINGS_MIXTURES[tuning]), project=make_mixture_project)


@pytest.fixture(scope="module")
def whole(job_mixtures: Job) -> StageDir:
    return run_to_end(job_mixtures)


def test_every_tensor_is_reached_and_what_is_frozen_stays(tuning: str, whole: StageDir) -> None:
    """Trained whole it learns in six steps, by its routers alone a random one need not."""
    assert read_record(whole.result, StageResult).frozen_unchanged is True
    losses = [loss for _, loss, *_ in outcome(whole).steps]
    assert tuning == "routers" or losses[-1] < losses[0]
    first, second = (line for line in read_lines(whole.metrics) if line.get("event") == "audited")
    assert first["tensors"] == first["reached"]
    assert "zero" not in first.keys() | second.keys()


def test_a_killed_run_ends_bit_identical(job_mixtures: Job, whole: StageDir) -> None:
    where = job_mixtures.fresh()
    assert finish(start(where, lambda: at_step(5, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    assert finish(start(where)) == 0, words(where)
    assert outcome(where) == outcome(whole)


def test_plain_transformers_reads_the_checkpoint_with_equal_logits(whole: StageDir) -> None:
    folder = whole.checkpoints / "final"
    ours, plain = (
        load_base(folder, device="cpu", dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    ids_BT = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids_BT).logits, plain(input_ids=ids_BT).logits, rtol=1e-5, atol=1e-5)


def test_the_trained_part_has_moved_and_no_other(tuning: str, whole: StageDir, job_mixtures: Job) -> None:
    start_folder: Path = job_mixtures.pristine.parent.parent / "model"
    before, after = (
        load_base(f, device="cpu", dtype=torch.float32).state_dict()
        for f in (start_folder, whole.checkpoints / "final")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    if tuning == "routers":
        assert moved == {name for name in before if name.endswith("mlp.gate.weight")}
    else:
        assert moved == {name for name in before if ".shared_expert" not in name}


def test_routers_that_are_trained_in_halves_leave_the_files_of_the_experts_as_they_were(tmp_path: Path) -> None:
    """The mixture is loaded rounded; what is saved is not."""
    job_mixtures = make_job(
        tmp_path, spec=spec(TUNINGS_MIXTURES["routers"]) + "precision: bf16\n", project=make_mixture_project
    )
    where = run_to_end(job_mixtures)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", where.checkpoints / "final")
    )
    moved = {
        name for name in before if before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name])
    }
    assert before.keys() == after.keys()
    assert moved == {name for name in before if name.endswith("mlp.gate.weight")}


def _halved(folder: Path, *, spec: str) -> Path:
    path = make_mixture_project(folder, spec=spec)
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).save_pretrained(folder / "model")
    return path


def test_a_mixture_in_halves_that_is_trained_whole_is_saved_in_fp32_with_all_of_its_tensors(tmp_path: Path) -> None:
    """Also what stands in for a shared expert and is not trained; plain transformers then rounds nothing."""
    where = run_to_end(make_job(tmp_path, spec=spec(TUNINGS_MIXTURES["full"]), project=_halved))
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", where.checkpoints / "final")
    )
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(where.checkpoints / "final").dtype is torch.float32


# A mixture of experts on two ranks is the mixture on one, whether its routers are trained or all of it, however its
# weights are divided.

SPECS = {
    "routers": sure(re.sub(r"tuning: .*\n", GATES, TRAINING)).replace("epochs: 3", "epochs: 1"),
    "full": sure(FULL).replace("epochs: 3", "epochs: 1"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, StageDir]]:
    """By tuning, as one process leaves it."""
    found = {}
    for tuning, spec in SPECS.items():
        job = make_job(
            tmp_path_factory.mktemp(tuning), spec=spec, project=partial(make_mixture_project, family="qwen2")
        )
        found[tuning] = (job, run_to_end(job))
    return found


def weights(where: StageDir) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(where.checkpoints / "final")
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("tuning", "kind"),
    [("routers", "ddp"), ("routers", "fsdp2"), ("routers", "zero2"), ("full", "fsdp2"), ("full", "zero3")],
)
def test_two_ranks_go_on_from_one_and_come_to_what_it_comes_to(
    tuning: str, kind: str, alone: dict[str, tuple[Job, StageDir]]
) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra finefit[deepspeed] is not installed")
    job, reference = alone[tuning]
    where = job.copy(reference.run)
    where.routing.unlink(missing_ok=True)
    under(where, ENGINES[kind], after=3)
    assert run_ranks(where) == 0, words(where)
    assert_close(tensors(where, 6), tensors(reference, 6))
    losses = [[line["loss"] for line in read_steps(found.metrics)] for found in (reference, where)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    if tuning == "routers":
        mine, base = (
            weights(where),
            dict(AutoModelForCausalLM.from_pretrained(reference.run.parents[1] / "model").named_parameters()),
        )
        assert {name for name in base if not torch.equal(mine[name], base[name])} == {
            f"model.layers.{at}.mlp.gate.weight" for at in range(2)
        }
        assert read_record(where.result, StageResult).frozen_unchanged is True
        assert where.routing.exists() == (kind != "fsdp2")
        assert ("routing is not measured: the model is divided" in words(where)) == (kind == "fsdp2")


def test_one_process_goes_on_from_two_ranks(alone: dict[str, tuple[Job, StageDir]]) -> None:
    """Of what they saved, the frozen part came from the base's files."""
    job, reference = alone["routers"]
    where = job.copy(reference.run)
    under(where, ENGINES["fsdp2"], after=0)
    assert run_ranks(where) == 0, words(where)
    under(where, Single(kind="single"), after=3)
    assert finish(start(where)) == 0, words(where)
    assert_close(tensors(where, 6), tensors(reference, 6))
