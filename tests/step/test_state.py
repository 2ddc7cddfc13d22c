from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from finefit.errors import RunError
from finefit.model.load import restore_weights, save_weights
from finefit.spec.models import Lora, Tuning
from finefit.step.state import make_optimizer, optimizer_tensors, restore_state, save_state, state_bytes
from tests.step.conftest import ADAMW, FULL, LORA, TUNINGS, cut, step, trainable, tuned, unequal_examples


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    batches = cut(unequal_examples(), 2)
    return [step(model, optimizer, batches).loss.item() for _ in range(steps)]


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        **{name: p.detach().clone() for name, p in model.named_parameters()},
        **optimizer_tensors(model, optimizer),
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_restored_run_goes_on_bit_for_bit_dropout_included(kind: str, device: str, tmp_path: Path) -> None:
    """`device` chooses the update: over lists on a CPU, one kernel on a card, which runs on a CPU's tensors too."""
    tuning: Tuning = Lora(kind="lora", rank=4, alpha=8, dropout=0.2) if kind == "lora" else FULL
    model = tuned(tuning, dropout=0.1)
    optimizer = make_optimizer(model, ADAMW, device=device)
    torch.manual_seed(3)
    _train(model, optimizer, 2)
    save_weights(model, tmp_path)
    save_state(tmp_path, model, optimizer)
    losses = _train(model, optimizer, 2)

    other = tuned(tuning, dropout=0.1)
    fresh = make_optimizer(other, ADAMW, device=device)
    torch.manual_seed(99)
    restore_weights(other, tmp_path)
    restore_state(tmp_path, other, fresh)
    assert _train(other, fresh, 2) == losses
    wanted, found = _everything(model, optimizer), _everything(other, fresh)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    model = tuned(LORA)
    optimizer = make_optimizer(model, ADAMW)
    _train(model, optimizer, 1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_state(tmp_path / name, model, optimizer)
    a, b = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


def test_a_state_from_before_the_first_step_leaves_no_moments_behind(tmp_path: Path) -> None:
    model = tuned(FULL)
    optimizer = make_optimizer(model, ADAMW)
    save_state(tmp_path, model, optimizer)
    _train(model, optimizer, 1)
    restore_state(tmp_path, model, optimizer)
    assert optimizer_tensors(model, optimizer) == {}


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (FULL, LORA, "not trained here"),
        (LORA, FULL, "not trained here"),
        (LORA, Lora(kind="lora", rank=8, alpha=8), "another shape"),
        (LORA, Lora(kind="lora", rank=4, alpha=8, targets=("q_proj",)), "not trained here"),
    ],
)
def test_a_foreign_optimizer_state_is_refused_and_changes_nothing(
    theirs: Tuning, ours: Tuning, reason: str, tmp_path: Path
) -> None:
    foreign = tuned(theirs)
    foreign_optimizer = make_optimizer(foreign, ADAMW)
    _train(foreign, foreign_optimizer, 1)
    save_state(tmp_path, foreign, foreign_optimizer)
    model = tuned(ours)
    optimizer = make_optimizer(model, ADAMW)
    with pytest.raises(RunError, match=reason):
        restore_state(tmp_path, model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_state_bytes_before_the_first_step_are_those_of_the_moments_after_it(tuning: Tuning) -> None:
    model = tuned(tuning)
    before = state_bytes(model)
    optimizer = make_optimizer(model, ADAMW)
    _train(model, optimizer, 1)
    moments = {name: t for name, t in optimizer_tensors(model, optimizer).items() if not name.endswith("/step")}
    assert before == sum(t.numel() * t.element_size() for t in moments.values())
    assert len(moments) == 2 * len(trainable(model))


def test_tables_that_all_parameters_share_are_saved(tmp_path: Path) -> None:
    """8-bit AdamW keeps one table for all of them; a safetensors file refuses tensors that share memory."""
    model = tuned(LORA)
    optimizer = make_optimizer(model, ADAMW)
    table = torch.arange(256.0)
    for parameter in trainable(model).values():
        moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
        optimizer.state[parameter] = {"step": 3, "qmap1": table, "qmap2": table, **moments}
    save_state(tmp_path, model, optimizer)
    saved = {name.rsplit("/", 1)[1] for name in optimizer_tensors(model, optimizer)}
    assert saved == {"step", "qmap1", "qmap2", "state1", "state2"}
