"""Tokens behind a batch of prompts: all prompts pass the model once, then each step gives every row one token, the likeliest unless told otherwise.

Prompts are padded on the right and pass without a mask, as training rows do: attention is causal, so no row sees its padding, and the fast kernels
stay open. What padding leaves in the cache is masked from then on; prompts of one length, and a single one, never meet a mask. Models that see read
whole prompts by their sight, with what their images show. Nothing in `prefill`, `behold` and `follow` is read on the host: a rehearsal runs the same.
B rows, T tokens, S slots of the cache, H hidden, V words of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel

from finefit.model.attention import can_pack
from finefit.model.sight import bare, sight_in
from finefit.model.sight.tiles import as_taken
from finefit.objective.batch import Extra
from finefit.step.forward import logits_after

_LOOK_STEPS = {"cpu": 1, "cuda": 8}
"""Steps between two looks at what was written: a look waits for the card."""

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which prepares itself for every new length: each token meets one."""

Choose = Callable[[Tensor, int, Tensor], Tensor]
"""(rows_B, step, logits_BV) -> tokens_B: the next token of each row; `rows_B` are their numbers among the prompts."""
Look = Callable[[NDArray[np.int64], Sequence[int]], Extra]
"""(input_ids_BT, lengths) -> what a model that sees is given beside its prompts, on the host."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True, kw_only=True)
class Context:
    """What the model has read so far, and where each row's next token goes."""

    cache: DynamicCache
    positions_B1: Tensor
    """Of the next tokens in their rows."""
    is_own_BS: Tensor | None
    """Which slots of the cache hold a token of the row, with room for those to come; None: all do."""
    slots: int
    unsaid_B1H: Tensor | None = None
    """Of a model that sees, behind the prompts' last tokens: what its first tokens are picked from."""

    def keep(self, rows: Sequence[int]) -> None:
        """These alone go on."""
        self.cache.batch_select_indices(torch.tensor(rows))  # on the host: layers may lie on several cards
        index = torch.tensor(rows, device=self.positions_B1.device)
        self.positions_B1 = self.positions_B1[index]
        self.is_own_BS = None if self.is_own_BS is None else self.is_own_BS[index]


def prefill(model: nn.Module, input_ids_BT: Tensor, lengths: Sequence[int], *, max_new_tokens: int) -> Context:
    """Reads all prompts but their last tokens, which `follow` is given first: so no logits are made here that nobody wants. `lengths`: what of each
    row is its own."""
    width, device = input_ids_BT.shape[1], input_ids_BT.device
    lengths_B1 = torch.tensor(lengths, device=device).unsqueeze(1)
    cache = DynamicCache(config=causal_of(model).config.get_text_config(decoder=True))
    context = Context(cache=cache, positions_B1=lengths_B1, is_own_BS=None, slots=width)
    if width:
        model(input_ids=input_ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if min(lengths) < width:
        context.is_own_BS = _own(lengths, width, max_new_tokens, device)
    return context


def behold(
    model: nn.Module, input_ids_BT: Tensor, lengths: Sequence[int], extra: Extra, *, max_new_tokens: int
) -> Context:
    """Reads whole prompts with their images, by the model's sight: in some families the last token is seen by those before it. `extra` lies on the
    device. The cache keeps all tokens in every layer: one that slides would push out a row's own tokens and keep its padding."""
    causal, sight = causal_of(model), sight_in(model)
    assert sight is not None
    width, device = input_ids_BT.shape[1], input_ids_BT.device
    cache = DynamicCache()
    hidden_BTH = sight.read(
        causal.base_model, input_ids_BT, extra, past_key_values=cache, use_cache=True
    ).last_hidden_state
    last_B = torch.tensor([row * width + length - 1 for row, length in enumerate(lengths)], device=hidden_BTH.device)
    positions_B1 = torch.tensor(extra.host.get("next_positions", lengths), device=device).unsqueeze(1)
    unsaid_B1H = hidden_BTH.flatten(0, 1).index_select(0, last_B).unsqueeze(1)
    is_own_BS = _own(lengths, width, max_new_tokens, device) if min(lengths) < width else None
    return Context(cache=cache, positions_B1=positions_B1, is_own_BS=is_own_BS, slots=width, unsaid_B1H=unsaid_B1H)


def _own(lengths: Sequence[int], width: int, max_new_tokens: int, device: torch.device) -> Tensor:
    slots_S, lengths_B1 = (
        torch.arange(width + max_new_tokens, device=device),
        torch.tensor(lengths, device=device).unsqueeze(1),
    )
    return (slots_S < lengths_B1) | (slots_S >= width)


def _likeliest(logits_BV: Tensor) -> Tensor:
    return logits_BV.argmax(-1)


def follow(
    model: nn.Module, context: Context, tokens_B: Tensor, pick: Callable[[Tensor], Tensor] = _likeliest
) -> Tensor:
    """The next token of each row behind these, as it is picked from the logits; behind prompts that were beheld, whatever these are."""
    if sight_in(model) is not None:
        return pick(_said(model, context, tokens_B)[:, -1])
    context.slots += 1
    mask = None if context.is_own_BS is None else context.is_own_BS[:, None, None, : context.slots]
    with sdpa_kernel(_KERNELS):
        output = model(
            input_ids=tokens_B.unsqueeze(1),
            position_ids=context.positions_B1,
            attention_mask=mask,
            past_key_values=context.cache,
            use_cache=True,
            logits_to_keep=1,
        )
    context.positions_B1 = context.positions_B1 + 1
    return pick(output.logits[:, -1])


def _said(model: nn.Module, context: Context, tokens_B: Tensor) -> Tensor:
    """Logits_B1V of a model that sees."""
    causal = causal_of(model)
    hidden_B1H, context.unsaid_B1H = context.unsaid_B1H, None
    if hidden_B1H is None:
        hidden_B1H = _heard(causal, context, tokens_B)
    return logits_after(causal, hidden_B1H)


def _heard(causal: PreTrainedModel, context: Context, tokens_B: Tensor) -> Tensor:
    sight = sight_in(causal)
    assert sight is not None
    context.slots += 1
    told: dict[str, Any] = {
        "position_ids": context.positions_B1,
        "attention_mask": _masks(context, causal),
        "past_key_values": context.cache,
    }
    with sdpa_kernel(_KERNELS):
        output = sight.read(causal.base_model, tokens_B.unsqueeze(1), None, use_cache=True, **told)
    context.positions_B1 = context.positions_B1 + 1
    hidden_B1H: Tensor = output.last_hidden_state
    return hidden_B1H


def _masks(context: Context, causal: PreTrainedModel) -> Tensor | dict[str, Tensor | None] | None:
    """As the language tower takes them: one for each kind of layer where it has several, else one."""
    text = causal.config.get_text_config(decoder=True)
    own = None if context.is_own_BS is None else context.is_own_BS[:, None, None, : context.slots]
    window = getattr(text, "sliding_window", None)
    if window is None:
        return _taken({_FULL: own}, text, causal.dtype)[_FULL]
    masks = _taken({_FULL: own, _SLIDING: _near(context, window)}, text, causal.dtype)
    return masks if getattr(text, "layer_types", None) else masks[_SLIDING]


def _near(context: Context, window: int) -> Tensor | None:
    """Of a row's own tokens the last `window`."""
    slots, own_BS = context.slots, context.is_own_BS
    if slots <= window:
        return None if own_BS is None else own_BS[:, None, None, :slots]
    if own_BS is None:
        return (torch.arange(slots, device=context.positions_B1.device) >= slots - window)[None, None, None]
    behind_BS = own_BS[:, :slots].flip(1).cumsum(1).flip(1)  # own tokens from here to the last one
    return (own_BS[:, :slots] & (behind_BS <= window))[:, None, None]


def _taken(masks: dict[str, Tensor | None], text: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor | None]:
    return {**masks, **as_taken({kind: mask for kind, mask in masks.items() if mask is not None}, text, dtype)}


def likeliest(_rows_B: Tensor, _step: int, logits_BV: Tensor) -> Tensor:
    return _likeliest(logits_BV)


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    pad: int,
    device: str,
    choose: Choose,
    look: Look | None = None,
) -> list[list[int]]:
    """What follows each prompt, up to and with the first stop token. `look`: for a model that sees, what the prompts show."""
    longest = max(map(len, prompts)) + max_new_tokens
    how: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stops": frozenset(stops),
        "device": device,
        "choose": choose,
    }
    with torch.inference_mode():
        if look is not None:
            return _step_by_step(_beheld(model, prompts, look, pad, device, max_new_tokens), model, prompts, **how)
        if can_pack(causal_of(model).config, longest) is None:
            context = prefill(
                model, *_padded_right([prompt[:-1] for prompt in prompts], pad, device), max_new_tokens=max_new_tokens
            )
            return _step_by_step(context, model, prompts, **how)
        return _by_transformers(model, prompts, pad=pad, **how)


def _beheld(
    model: nn.Module, prompts: Sequence[Sequence[int]], look: Look, pad: int, device: str, max_new_tokens: int
) -> Context:
    input_ids_BT, lengths = _padded_right(prompts, pad, "cpu")
    extra = look(input_ids_BT.numpy(), lengths).moved(lambda tensor: tensor.to(device))
    return behold(model, input_ids_BT.to(device), lengths, extra, max_new_tokens=max_new_tokens)


def _step_by_step(
    context: Context,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: frozenset[int],
    device: str,
    choose: Choose,
) -> list[list[int]]:
    """Rows that have ended leave the batch once they are half of it."""
    tokens_B = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    written: list[list[int]] = [[] for _ in prompts]
    batch = list(range(len(prompts)))
    rows_B = torch.arange(len(prompts), device=device)
    steps = 0
    while steps < max_new_tokens:
        block = []
        for ahead in range(min(_LOOK_STEPS[device], max_new_tokens - steps)):
            tokens_B = follow(model, context, tokens_B, partial(choose, rows_B, steps + ahead))
            block.append(tokens_B)
        steps += len(block)
        for row, tokens in zip(batch, torch.stack(block, 1).tolist(), strict=True):
            written[row] += tokens
        going = [at for at, row in enumerate(batch) if stops.isdisjoint(written[row])]
        if not going:
            break
        if 2 * len(going) <= len(batch):
            context.keep(going)
            kept = torch.tensor(going, device=device)
            tokens_B, rows_B, batch = tokens_B[kept], rows_B[kept], [batch[at] for at in going]
    return [ended(tokens, stops) for tokens in written]


def _by_transformers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: frozenset[int],
    pad: int,
    device: str,
    choose: Choose,
) -> list[list[int]]:
    """For models that are not known to follow their positions alone: padded on the left, as their own code expects it."""
    width = max(map(len, prompts))
    input_ids_BT = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stops), pad_token_id=pad, use_cache=True
    )
    chosen = [_Chosen(choose, width)]
    output_BT = model.generate(
        input_ids=input_ids_BT, attention_mask=mask_BT, generation_config=config, logits_processor=chosen
    )  # type: ignore[operator]
    return [ended(tokens, stops) for tokens in output_BT[:, width:].tolist()]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A processor of logits that leaves `generate` nothing to choose: all rows stay in its batch, in their order."""

    choose: Choose
    width: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows_B = torch.arange(len(scores), device=scores.device)
        tokens_B = self.choose(rows_B, input_ids.shape[1] - self.width, scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B.unsqueeze(1), 0.0)


def ended(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """Up to and with the first stop token."""
    end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[: end + 1])


def _padded_right(rows: Sequence[Sequence[int]], pad: int, device: str) -> tuple[Tensor, list[int]]:
    lengths = [len(row) for row in rows]
    width = max(lengths)
    padded = [[*row, *[pad] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device).reshape(len(rows), width), lengths


def causal_of(model: nn.Module) -> PreTrainedModel:
    """The model itself, below whatever adapts it."""
    causal = bare(model)
    assert isinstance(causal, PreTrainedModel)
    return causal
