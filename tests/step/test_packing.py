"""Packed rows give the loss and the gradients of padded ones, in every model type that may be packed and under every
other lever."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from finefit.artifacts.records import Levers
from finefit.data.collate import collate, lengths_of, pack, supervised_counts_of
from finefit.data.examples import Example
from finefit.data.order import capacity_of
from finefit.errors import ModelError
from finefit.model.attention import PACKABLE, can_pack, choose_attention
from finefit.model.load import make_trainable
from finefit.objective.batch import Batch
from finefit.spec.models import Tuning
from finefit.step.forward import autocast_for, bind
from finefit.step.levers import apply_levers
from tests.micro_batches import micro_batches
from tests.step.conftest import FULL, TUNINGS, Taken, take_gradients

VOCABULARY = 64
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "sliding_window": 32,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTHS: dict[str, Any] = {
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "n_inner": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
SHARED_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
"""Their keys and values are made for every head."""
LENGTHS = (7, 19, 3, 11, 2, 30)
PLAIN = Levers(micro_batch=2)
PULLED = {
    "none": PLAIN,
    "recomputed": replace(PLAIN, recompute=2),
    "attention kept": replace(PLAIN, recompute=2, keep_attention=True),
    "offloaded": replace(PLAIN, recompute=2, offload=True),
    "loss in chunks": replace(PLAIN, loss_chunk=5),
    "mlp in tiles": replace(PLAIN, mlp_tiles=3),
    "everything": replace(PLAIN, recompute=1, keep_attention=True, offload=True, loss_chunk=7, mlp_tiles=2),
}


def tiny_config(kind: str) -> PretrainedConfig:
    """As small as the type allows, with every kind of layer that it has by default."""
    usual = AutoConfig.for_model(kind)
    given = TINY | {name: value for name, value in WIDTHS.items() if hasattr(usual, name)}
    if kinds := list(dict.fromkeys(getattr(usual, "layer_types", None) or ())):
        given["layer_types"] = (kinds * 2)[:2]
    return AutoConfig.for_model(kind, num_key_value_heads=4 if kind in SHARED_LATENT else 2, **given)


def _model(kind: str, tuning: Tuning = FULL, *, packing: bool = True) -> nn.Module:
    """Weights and adapters so far from zero that every row makes a difference to every other that sees it."""
    config = tiny_config(kind)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        config, attn_implementation=choose_attention("cpu", (0, 0), "fp32", config, packing=packing)
    )
    for parameter in base.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(5)
    model: nn.Module = make_trainable(base, tuning, name="tiny")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def _examples(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[Example]:
    chance = torch.Generator().manual_seed(seed)

    def example(length: int) -> Example:
        tokens = torch.randint(3, VOCABULARY, (length,), generator=chance).tolist()
        return Example(tuple(tokens), (False, *(at % 3 != 1 for at in range(2, length)), True))

    return [example(length) for length in lengths]


def _packs(examples: Sequence[Example], micro_batch: int) -> list[Batch]:
    longest, supervised = int(lengths_of(examples).max()), int(supervised_counts_of(examples).max())
    capacity = capacity_of(micro_batch=micro_batch, longest=longest, supervised=supervised, rows_per_step=len(examples))
    return micro_batches(examples, micro_batch=micro_batch, pad=0, capacity=capacity)


def _assert_packs_alike(model: nn.Module, levers: Levers = PLAIN) -> None:
    examples, forward = _examples(), bind(model, loss_chunk=levers.loss_chunk)
    padded = take_gradients(model, micro_batches(examples, micro_batch=2, pad=0), forward=forward)
    batches = _packs(examples, 2)
    assert len(batches) == 2 < len(examples) / 2
    _assert_near(take_gradients(model, batches, forward=forward), padded)


def _assert_near(left: Taken, right: Taken) -> None:
    """In fp32, up to the order of sums; gradients against the largest of their tensor."""
    torch.testing.assert_close(left.outcome.loss, right.outcome.loss, rtol=1e-5, atol=1e-6)
    assert left.gradients.keys() == right.gradients.keys()
    for name, wanted in right.gradients.items():
        scale = float(wanted.abs().max())
        torch.testing.assert_close(
            left.gradients[name], wanted, rtol=0, atol=2e-4 * scale + 1e-6, msg=f"the gradients of {name} differ"
        )


# loss and gradients


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("levers", PULLED.values(), ids=PULLED)
def test_packing_leaves_loss_and_gradients_equal_beside_every_other_lever(tuning: Tuning, levers: Levers) -> None:
    model = _model("qwen3", tuning)
    apply_levers(model, levers)
    _assert_packs_alike(model, levers)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "deepseek_v3", "phi3"])
def test_packing_leaves_loss_and_gradients_equal_in_models_of_every_make(kind: str) -> None:
    _assert_packs_alike(_model(kind))


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_a_model_type_that_may_be_packed_gives_every_row_what_it_gives_it_alone(kind: str) -> None:
    model, examples = _model(kind).eval(), _examples()
    forward = bind(model)
    with torch.no_grad():
        alone_N = torch.cat([forward(collate([example], pad=0)) for example in examples])
        packed_N = forward(pack(examples))
        blind_N = forward(replace(pack(examples), packed=None))
    torch.testing.assert_close(packed_N, alone_N, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(blind_N, alone_N, rtol=1e-2, atol=1e-2), (
        "rows that see one another make no difference: the comparison says nothing"
    )
    assert can_pack(tiny_config(kind), max(LENGTHS)) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_rows_of_any_lengths_give_the_same_gradient_packed_and_padded(lengths: list[int], micro_batch: int) -> None:
    model, examples = _SHARED, _examples(lengths, seed=sum(lengths))
    _assert_near(
        take_gradients(model, _packs(examples, micro_batch)),
        take_gradients(model, micro_batches(examples, micro_batch=micro_batch, pad=0)),
    )


_SHARED = _model("llama")


def test_a_row_is_what_it_is_whatever_its_neighbours() -> None:
    forward = bind(_SHARED)
    (row,) = _examples([17])
    found = []
    for seed in (1, 2):
        before, after = _examples([5, 9], seed=seed), _examples([4], seed=seed)
        *_, logprobs_N, _ = torch.split(
            forward(pack([*before, row, *after])), supervised_counts_of([*before, row, *after]).tolist()
        )
        found.append(logprobs_N)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert len(found[0]) == sum(row.supervised)


# what attention is given


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_rows_that_are_not_packed_pass_the_attention_of_before_bit_for_bit(kind: str) -> None:
    batch = collate(_examples([40, 50, 9]), pad=0)  # longer than the window, so that a mask is made
    aware, plain = (bind(_model(kind, packing=packing))(batch) for packing in (True, False))
    assert torch.equal(aware, plain)


def test_no_mask_is_made_for_packed_rows_and_the_positions_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search waits for the device, and the mask grows with the square of the pack."""
    seen: list[Tensor | None] = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["attn_mask"])
        return scaled_dot_product_attention(*args, **kwargs)

    def searched(_: Tensor) -> Tensor:
        raise AssertionError("the positions are searched")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", searched)
    bind(_model("gemma3_text"))(pack(_examples()))
    assert seen == [None] * (2 * len(LENGTHS))


def test_bf16_packs_as_it_pads() -> None:
    forward = bind(_SHARED, autocast=autocast_for("cpu", "bf16"))
    examples = _examples()
    with torch.no_grad():
        alone_N = torch.cat([forward(collate([example], pad=0)) for example in examples])
        torch.testing.assert_close(forward(pack(examples)), alone_N, rtol=0.02, atol=0.05)


def test_heads_that_are_repeated_for_older_cards_are_packed_alike() -> None:
    name = choose_attention("cuda", (7, 5), "fp32", tiny_config("llama"), packing=True)
    models = []
    for chosen in (name, "sdpa"):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=chosen))
    repeated, plain = models
    examples = _examples()
    wanted_N = torch.cat([bind(plain)(collate([example], pad=0)) for example in examples])
    torch.testing.assert_close(bind(repeated)(pack(examples)), wanted_N, rtol=1e-5, atol=1e-5)


# which models may be packed


@pytest.mark.parametrize(
    ("kind", "changes", "longest", "words"),
    [
        ("mamba", {}, 10, "layers of kind linear_attention, which would see the previous row"),
        ("gpt_oss", {}, 10, "of type gpt_oss"),
        ("qwen3_next", {}, 10, "layers of kind linear_attention, which would see the previous row"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, 10, "linear_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, 10, "caps its attention scores"),
        ("mistral", {"sliding_window": 4096}, 4097, "4097 tokens, the model's window 4096"),
        ("gemma3_text", {"sliding_window": 512}, 513, "513 tokens, the model's window 512"),
        (
            "phi3",
            {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 64,
            },
            65,
            "more than 64",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_model_that_cannot_be_packed_is_refused_with_the_reason(
    kind: str, changes: dict[str, Any], longest: int, words: str
) -> None:
    config = AutoConfig.for_model(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    assert words in str(can_pack(config, longest))


@pytest.mark.parametrize(("kind", "longest"), [("mistral", 4096), ("qwen2", 10**6), ("gemma3_text", 4096)])
def test_rows_within_the_window_may_be_packed(kind: str, longest: int) -> None:
    assert can_pack(AutoConfig.for_model(kind), longest) is None


def test_a_packed_row_longer_than_the_window_is_an_error_where_it_would_be_attended() -> None:
    with pytest.raises(ModelError, match="longer than the model's window of 32 tokens"):
        bind(_model("gemma3_text"))(pack(_examples([33, 4])))
