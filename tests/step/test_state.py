from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from finefit.errors import FinefitError, RunError
from finefit.model.family import save_weights
from finefit.model.saved_weights import restore_weights
from finefit.spec.models import Lora, Tuning
from finefit.step import state
from finefit.step.state import (
    frozen_checksums,
    make_optimizer,
    optimizer_tensors,
    require_frozen_unchanged,
    restore_state,
    save_state,
    state_bytes,
)
from tests.conftest import make_model
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


# A frozen tensor that moves by one bit is found and named.

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)


class Frozen(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def sums(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return frozen_checksums(Frozen(a=torch.tensor(values, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 1023])
def test_equal_bytes_are_equal_checksums_and_any_flipped_bit_is_seen(dtype: torch.dtype, size: int) -> None:
    whole = torch.randint(0, 2, (size,), dtype=torch.uint8).to(dtype)
    seen = {frozen_checksums(Frozen(a=whole.clone()))["a"]}
    assert seen == {frozen_checksums(Frozen(a=whole.clone()))["a"]}
    for at in {0, size // 2, size - 1}:
        moved = whole.clone()
        moved.view(torch.uint8)[at * whole.element_size()] ^= 1
        seen.add(frozen_checksums(Frozen(a=moved))["a"])
    assert len(seen) == 1 + len({0, size // 2, size - 1})


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_words_that_change_places_are_seen(words: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(words))
    is_same = state._checksum(torch.tensor(order)) == state._checksum(torch.tensor(words))
    assert bool(is_same) is (order == words)


@given(st.integers(0, 2**64 - 1))
def test_words_whose_products_are_each_others_complement_are_told_apart(word: int) -> None:
    """A shift that fills with the sign would make one of them."""
    product = (word ^ state._ODD) * state._FACTOR % 2**64
    other = (2**64 - 1 - product) * pow(state._FACTOR, -1, 2**64) % 2**64 ^ state._ODD
    first, second = (torch.tensor([w - 2**64 if w >= 2**63 else w]) for w in (word, other))
    assert int(state._checksum(first)) != int(state._checksum(second))


def test_a_sign_of_zero_a_kind_and_a_shape_are_told_apart() -> None:
    assert sums(0.0) != sums(-0.0)
    assert sums(0.0, dtype=torch.float16) != sums(0.0, dtype=torch.bfloat16)
    assert sums(0.0) != sums(0.0, 0.0)
    flat = torch.zeros(4)
    assert frozen_checksums(Frozen(a=flat)) != frozen_checksums(Frozen(a=flat.view(2, 2)))
    assert frozen_checksums(Frozen(a=flat)) != frozen_checksums(Frozen(b=flat))


def test_tensors_that_change_places_are_seen() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    assert frozen_checksums(Frozen(a=a, b=b)) != frozen_checksums(Frozen(a=b, b=a))


def test_pieces_are_summed_alike_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(1000)
    expected = int(state._checksum(whole))
    for piece in (8, 64, 1024):
        monkeypatch.setattr(state, "_PIECE_BYTES", piece)
        assert int(state._checksum(whole)) == expected


def test_a_tensor_need_not_begin_at_a_word_nor_be_contiguous() -> None:
    base = torch.arange(101, dtype=torch.int16)
    assert int(state._checksum(base[1:100])) == int(state._checksum(base[1:100].clone()))
    matrix = torch.randn(5, 7)
    assert int(state._checksum(matrix.t())) == int(state._checksum(matrix.t().contiguous()))


@pytest.mark.parametrize(
    "change", [lambda p: p.view(-1)[-1].add_(1), lambda p: p.mul_(-1), lambda p: p.copy_(p.flip(0))]
)
def test_a_frozen_tensor_that_moved_is_named(change: Callable[[Tensor], Tensor]) -> None:
    model = tuned(LORA)
    before = frozen_checksums(model)
    with torch.no_grad():
        change(model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"))
    with pytest.raises(
        FinefitError,
        match=r"^1 of 20 frozen tensors changed during training: \S*layers.1.mlp.up_proj.base_layer.weight$",
    ):
        require_frozen_unchanged(before, model)


def test_training_moves_no_frozen_tensor_and_what_is_trained_does_not_matter() -> None:
    model = tuned(LORA)
    before = frozen_checksums(model)
    step(model, make_optimizer(model, ADAMW), cut(unequal_examples(), 4))
    assert require_frozen_unchanged(before, model) is True
    assert all("lora_" not in name for name in before)


def test_a_tensor_that_is_no_longer_frozen_is_told() -> None:
    model = tuned(LORA)
    before = frozen_checksums(model)
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(FinefitError, match=r"1 of 20 frozen tensors changed .*model.norm.weight"):
        require_frozen_unchanged(before, model)


def test_where_nothing_is_frozen_nothing_is_claimed() -> None:
    model = tuned(FULL)
    assert frozen_checksums(model) == {}
    assert require_frozen_unchanged({}, model) is None


def test_two_loads_of_one_model_have_the_same_checksums() -> None:
    first, second, other = (make_model(seed=seed).requires_grad_(False) for seed in (0, 0, 1))
    assert frozen_checksums(first) == frozen_checksums(second) != frozen_checksums(other)
