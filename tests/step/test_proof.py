"""A frozen tensor that moves by one bit is found and named."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from finefit.errors import FinefitError
from finefit.step import proof
from finefit.step.proof import frozen_digest, frozen_sums, require_unmoved
from finefit.step.state import make_optimizer
from tests.conftest import make_model
from tests.step.conftest import ADAMW, FULL, LORA, cut, step, tuned, unequal_examples

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)


class Frozen(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def digest(*values: float, dtype: torch.dtype = torch.float32) -> str:
    return frozen_digest(Frozen(a=torch.tensor(values, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 1023])
def test_equal_bytes_are_equal_digests_and_any_flipped_bit_is_seen(dtype: torch.dtype, size: int) -> None:
    whole = torch.randint(0, 2, (size,), dtype=torch.uint8).to(dtype)
    seen = {frozen_digest(Frozen(a=whole.clone()))}
    assert seen == {frozen_digest(Frozen(a=whole.clone()))}
    for at in {0, size // 2, size - 1}:
        moved = whole.clone()
        moved.view(torch.uint8)[at * whole.element_size()] ^= 1
        seen.add(frozen_digest(Frozen(a=moved)))
    assert len(seen) == 1 + len({0, size // 2, size - 1})


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_words_that_change_places_are_seen(words: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(words))
    is_same = proof._checksum(torch.tensor(order)) == proof._checksum(torch.tensor(words))
    assert bool(is_same) is (order == words)


@given(st.integers(0, 2**64 - 1))
def test_words_whose_products_are_each_others_complement_are_told_apart(word: int) -> None:
    """A shift that fills with the sign would make one of them."""
    product = (word ^ proof._ODD) * proof._FACTOR % 2**64
    other = (2**64 - 1 - product) * pow(proof._FACTOR, -1, 2**64) % 2**64 ^ proof._ODD
    first, second = (torch.tensor([w - 2**64 if w >= 2**63 else w]) for w in (word, other))
    assert int(proof._checksum(first)) != int(proof._checksum(second))


def test_a_sign_of_zero_a_kind_and_a_shape_are_told_apart() -> None:
    assert digest(0.0) != digest(-0.0)
    assert digest(0.0, dtype=torch.float16) != digest(0.0, dtype=torch.bfloat16)
    assert digest(0.0) != digest(0.0, 0.0)
    flat = torch.zeros(4)
    assert frozen_digest(Frozen(a=flat)) != frozen_digest(Frozen(a=flat.view(2, 2)))
    assert frozen_digest(Frozen(a=flat)) != frozen_digest(Frozen(b=flat))


def test_tensors_that_change_places_are_seen() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    assert frozen_digest(Frozen(a=a, b=b)) != frozen_digest(Frozen(a=b, b=a))


def test_pieces_are_summed_alike_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(1000)
    expected = int(proof._checksum(whole))
    for piece in (8, 64, 1024):
        monkeypatch.setattr(proof, "_PIECE_BYTES", piece)
        assert int(proof._checksum(whole)) == expected


def test_a_tensor_need_not_begin_at_a_word_nor_be_contiguous() -> None:
    base = torch.arange(101, dtype=torch.int16)
    assert int(proof._checksum(base[1:100])) == int(proof._checksum(base[1:100].clone()))
    matrix = torch.randn(5, 7)
    assert int(proof._checksum(matrix.t())) == int(proof._checksum(matrix.t().contiguous()))


@pytest.mark.parametrize(
    "change", [lambda p: p.view(-1)[-1].add_(1), lambda p: p.mul_(-1), lambda p: p.copy_(p.flip(0))]
)
def test_a_frozen_tensor_that_moved_is_named(change: Callable[[Tensor], Tensor]) -> None:
    model = tuned(LORA)
    before = frozen_sums(model)
    with torch.no_grad():
        change(model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"))
    with pytest.raises(
        FinefitError,
        match=r"^1 of 20 frozen tensors changed during training: \S*layers.1.mlp.up_proj.base_layer.weight$",
    ):
        require_unmoved(before, model)


def test_training_moves_no_frozen_tensor_and_what_is_trained_does_not_matter() -> None:
    model = tuned(LORA)
    before = frozen_sums(model)
    step(model, make_optimizer(model, ADAMW), cut(unequal_examples(), 4))
    assert require_unmoved(before, model) is True
    assert all("lora_" not in name for name in before)


def test_a_tensor_that_is_no_longer_frozen_is_told() -> None:
    model = tuned(LORA)
    before = frozen_sums(model)
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(FinefitError, match=r"1 of 20 frozen tensors changed .*model.norm.weight"):
        require_unmoved(before, model)


def test_where_nothing_is_frozen_nothing_is_claimed() -> None:
    model = tuned(FULL)
    assert frozen_sums(model) == {}
    assert require_unmoved({}, model) is None


def test_two_loads_of_one_model_have_one_digest() -> None:
    first, second, other = (make_model(seed=seed).requires_grad_(False) for seed in (0, 0, 1))
    assert frozen_digest(first) == frozen_digest(second) != frozen_digest(other)
