"""Packed rows on a card: what the kernel for rows of any length computes, takes and waits for. Run with `pytest -m gpu`
on a machine that has one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finefit.artifacts.records import Levers
from finefit.data.collate import collate, pack
from finefit.data.examples import Example
from finefit.data.order import capacity_of
from finefit.model.attention import choose_attention, flash_packed
from finefit.model.load import make_trainable
from finefit.objective.batch import Batch, Packed
from finefit.objective.losses import sft_loss
from finefit.rehearse.fake_kernels import device_kernels
from finefit.spec.models import Full
from finefit.spec.schema import AdamW
from finefit.step.forward import autocast_for, bind
from finefit.step.levers import apply_levers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer
from finefit.vision.attention import has_varlen
from tests.gpu.test_fake_kernels import Make, assert_near, measured, predicted
from tests.gpu.waiting import waiting_forbidden
from tests.micro_batches import micro_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no CUDA device that has the kernel for rows of any length",
    ),
]

SHAPES = [(32, 8, 128), (9, 3, 64), (16, 16, 96), (8, 4, 160)]
"""Heads, heads of keys and values, width."""
LENGTHS = (700, 1, 33, 512, 129, 5, 2000)
VOCABULARY = 1000


def _packed(lengths: tuple[int, ...], device: str) -> Packed:
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    return Packed(position_ids_BT=positions, boundaries_R1=boundaries, lengths=lengths)


def _heads(heads: int, kv_heads: int, width: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as a model makes them: (1, heads, tokens, width), laid out by tokens."""
    torch.manual_seed(0)
    made = [
        torch.randn(1, tokens, count, width, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    ]
    return [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in made]


def _through(attend: Callable[[Tensor, Tensor, Tensor], Tensor], given: list[Tensor]) -> list[Tensor]:
    """The answer and the gradients of query, key and value."""
    answer = attend(*given)
    chance = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(answer.shape, device="cuda", generator=chance)
    gradients = torch.autograd.grad((answer.float() * weights).sum(), given)
    return [answer.detach(), *gradients]


def _row_by_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = zip(*(torch.split(tensor, list(LENGTHS), dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat(
        [scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.11, enable_gqa=True) for q, k, v in parts], dim=2
    ).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_every_row_what_it_gives_it_alone(shape: tuple[int, int, int]) -> None:
    """Against fp32, no further from it than attention in bf16 row by row is."""
    packed = _packed(LENGTHS, "cuda")
    given = _heads(*shape, sum(LENGTHS), torch.bfloat16)
    query, key, value = given
    assert has_varlen(query, key, value, 256)
    found = _through(lambda q, k, v: flash_packed(q, k, v, packed, dropout=0.0, scaling=0.11), given)
    alone = _through(_row_by_row, given)
    exact = _through(_row_by_row, _heads(*shape, sum(LENGTHS), torch.float32))
    for name, ours, theirs, wanted in zip(("answer", "query", "key", "value"), found, alone, exact, strict=True):
        error, usual = ((tensor.float() - wanted).norm() / wanted.norm() for tensor in (ours, theirs))
        assert error <= 1.5 * usual + 1e-4, f"{name}: {error:.2e}, row by row {usual:.2e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(1024,) * 4, (40,) * 100], ids=["long rows", "many rows"])
def test_the_kernel_takes_what_was_predicted(shape: tuple[int, int, int], lengths: tuple[int, ...]) -> None:
    heads, kv_heads, width = shape
    kernels = replace(device_kernels("cuda", torch.cuda.get_device_capability(), "bf16"), workspace_bytes=0)
    module = nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    on_card = _packed(lengths, "cuda")

    def run(attend: Callable[..., Tensor], packed_of: Callable[[], Packed]) -> Callable[[Make], Any]:
        def step(make: Make) -> Any:
            query = make(1, sum(lengths), heads, width).transpose(1, 2).requires_grad_()
            key, value = (make(1, sum(lengths), kv_heads, width).transpose(1, 2).requires_grad_() for _ in range(2))
            answer = attend(query, key, value, packed_of())
            answer.backward(torch.ones_like(answer))  # type: ignore[no-untyped-call]
            return query, key, value

        return step

    def fake() -> Packed:
        return Packed(
            position_ids_BT=torch.empty(0),
            boundaries_R1=torch.empty(len(lengths) + 1, dtype=torch.int32),
            lengths=lengths,
        )

    expected = predicted(
        run(lambda q, k, v, packed: kernels.attention(module, q, k, v, None, packed=packed)[0], fake), kernels
    )
    seen = measured(
        run(lambda q, k, v, packed: flash_packed(q, k, v, packed, dropout=0.0, scaling=None), lambda: on_card)
    )
    assert_near(expected, seen)


def _config(kind: str) -> LlamaConfig | Qwen3Config:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    return LlamaConfig(**sizes) if kind == "llama" else Qwen3Config(**sizes)


def _model(kind: str, levers: Levers) -> nn.Module:
    config = _config(kind)
    config._attn_implementation = choose_attention(
        "cuda", torch.cuda.get_device_capability(), "bf16", config, packing=True
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config) if isinstance(config, LlamaConfig) else Qwen3ForCausalLM(config)
    for parameter in base.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(3)
    model: nn.Module = make_trainable(base.cuda(), Full(kind="full"), name="tiny")
    apply_levers(model, levers)
    return model


def _examples(lengths: tuple[int, ...]) -> list[Example]:
    chance = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, VOCABULARY, (length,), generator=chance).tolist() for length in lengths]
    return [Example(tuple(row), (False, *[at % 2 == 0 for at in range(len(row) - 2)], True)) for row in rows]


def _gradients(
    model: nn.Module, batches: list[Batch], levers: Levers, *, precision: str = "bf16"
) -> tuple[float, dict[str, Tensor]]:
    found: dict[str, Tensor] = {}

    def note(_: Tensor) -> bool:
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return False

    outcome = optimizer_step(
        [batch.moved(lambda tensor: tensor.cuda()) for batch in batches],
        forward=bind(model, loss_chunk=levers.loss_chunk, autocast=autocast_for("cuda", precision)),
        objective=sft_loss,
        optimizer=make_optimizer(model, AdamW(lr=1e-3), device="cuda"),
        clip=None,
        decide=note,
    )
    return float(outcome.loss), found


PULLED = {
    "none": Levers(micro_batch=2),
    "recomputed": Levers(micro_batch=2, recompute=3),
    "attention kept": Levers(micro_batch=2, recompute=3, keep_attention=True),
    "offloaded, loss in chunks": Levers(micro_batch=2, recompute=3, offload=True, loss_chunk=100),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("levers", PULLED.values(), ids=PULLED)
def test_packed_and_padded_rows_give_the_same_gradient_up_to_the_rounding_of_bf16(kind: str, levers: Levers) -> None:
    """The distance between the two is that of bf16 from fp32, not more."""
    model, examples = _model(kind, levers), _examples((300, 17, 120, 64, 9, 250, 3))
    capacity = capacity_of(micro_batch=2, longest=300, supervised=150, rows_per_step=len(examples))
    packs, padded = (micro_batches(examples, micro_batch=2, pad=1, capacity=given) for given in (capacity, None))
    assert len(packs) < len(padded)
    exact_loss, exact = _gradients(model, padded, levers, precision="fp32")
    padded_loss, usual = _gradients(model, padded, levers)
    packed_loss, found = _gradients(model, packs, levers)
    assert abs(packed_loss - exact_loss) <= 2 * abs(padded_loss - exact_loss) + 2e-3 * abs(exact_loss)
    for name, wanted in exact.items():
        ours, theirs = ((gradients[name] - wanted).norm() / wanted.norm() for gradients in (found, usual))
        assert ours <= 1.5 * theirs + 1e-3, f"{name}: {ours:.2e} packed, {theirs:.2e} padded"


def test_nothing_waits_for_the_card_between_a_packed_batch_and_its_gradients() -> None:
    model = _model("llama", Levers(micro_batch=2))
    batch = pack(_examples((300, 17, 120))).moved(lambda tensor: tensor.cuda())
    forward = bind(model, autocast=autocast_for("cuda", "bf16"))
    sft_loss(forward, batch).total.backward()  # type: ignore[no-untyped-call] # the first one takes workspaces
    with waiting_forbidden():
        sft_loss(forward, batch).total.backward()  # type: ignore[no-untyped-call]


def test_a_row_is_what_it_is_whatever_its_neighbours() -> None:
    forward = bind(_model("llama", Levers(micro_batch=2)), autocast=autocast_for("cuda", "bf16"))
    first, row, last = _examples((40, 200, 90))
    with torch.no_grad():
        alone = forward(collate([row], pad=1).moved(lambda tensor: tensor.cuda()))
        packed = forward(pack([first, row, last]).moved(lambda tensor: tensor.cuda()))
    start, count = sum(first.supervised[1:]), sum(row.supervised[1:])
    torch.testing.assert_close(packed[start : start + count], alone, rtol=0.02, atol=0.1)
