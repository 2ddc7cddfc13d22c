"""Generates the tokens after a batch of prompts: all prompts pass the model once, then each step gives every row one
token, the likeliest or a sampled one.

Prompts are padded on the right and pass without a mask, as training rows do: attention is causal, so no row sees its
padding, and the fast kernels can be used. What padding leaves in the cache is masked from then on; prompts of one
length never need a mask. Vision-language models read whole prompts with their images through their `VisionForward`.
`prefill`, `vision_prefill` and `decode_step` read nothing on the host, so a rehearsal can run them. B rows, T tokens, S
slots of the cache, H hidden, V words of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel

from finefit.model.attention import can_pack
from finefit.objective.batch import Extra
from finefit.step.forward import logits_after
from finefit.vision import vision_forward_in, without_adapter
from finefit.vision.tiles import as_attention_masks

_STEPS_PER_CHECK = {"cpu": 1, "cuda": 8}
"""Steps between two checks for stop tokens: a check waits for the GPU."""
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Excludes cuDNN's kernels, which need a preparation for every new length, and each token is a new length."""
ChooseTokens = Callable[[Tensor, int, Tensor], Tensor]
"""(rows_B, step, logits_BV) -> tokens_B: the next token of each row; `rows_B` are their numbers among the prompts."""
MakeImageInputs = Callable[[NDArray[np.int64], Sequence[int]], Extra]
"""(input_ids_BT, lengths) -> the image inputs of a vision-language model, on the host."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True, kw_only=True)
class DecodeState:
    """What the model has read so far, and where each row's next token goes."""

    cache: DynamicCache
    positions_B1: Tensor
    """Positions of the next tokens within their rows."""
    is_own_BS: Tensor | None
    """Which slots of the cache hold a token of the row, future ones included; None if all do."""
    slots: int
    last_hidden_B1H: Tensor | None = None
    """In a vision-language model, the hidden state of the prompts' last tokens, from which the first new tokens are
    chosen."""

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(rows))  # on the host: layers may lie on several cards
        index = torch.tensor(rows, device=self.positions_B1.device)
        self.positions_B1 = self.positions_B1[index]
        self.is_own_BS = None if self.is_own_BS is None else self.is_own_BS[index]


def prefill(model: nn.Module, input_ids_BT: Tensor, lengths: Sequence[int], *, max_new_tokens: int) -> DecodeState:
    """Reads all prompts except their last tokens, which the first `decode_step` gets, so that no needless logits are
    computed here. `lengths` are those of the rows without padding."""
    width, device = input_ids_BT.shape[1], input_ids_BT.device
    lengths_B1 = torch.tensor(lengths, device=device).unsqueeze(1)
    cache = DynamicCache(config=causal_of(model).config.get_text_config(decoder=True))
    state = DecodeState(cache=cache, positions_B1=lengths_B1, is_own_BS=None, slots=width)
    if width:
        model(input_ids=input_ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if min(lengths) < width:
        state.is_own_BS = _own(lengths, width, max_new_tokens, device)
    return state


def vision_prefill(
    model: nn.Module, input_ids_BT: Tensor, lengths: Sequence[int], extra: Extra, *, max_new_tokens: int
) -> DecodeState:
    """Reads whole prompts with their images: in some families earlier tokens attend to the last one. `extra` is on the
    device. The cache keeps all tokens, because a sliding layer would drop a row's own tokens and keep its padding."""
    causal, vision_forward = causal_of(model), vision_forward_in(model)
    assert vision_forward is not None
    width, device = input_ids_BT.shape[1], input_ids_BT.device
    cache = DynamicCache()
    hidden_BTH = vision_forward(
        causal.base_model, input_ids_BT, extra, past_key_values=cache, use_cache=True
    ).last_hidden_state
    last_B = torch.tensor([row * width + length - 1 for row, length in enumerate(lengths)], device=hidden_BTH.device)
    positions_B1 = torch.tensor(extra.host.get("next_positions", lengths), device=device).unsqueeze(1)
    last_hidden_B1H = hidden_BTH.flatten(0, 1).index_select(0, last_B).unsqueeze(1)
    is_own_BS = _own(lengths, width, max_new_tokens, device) if min(lengths) < width else None
    return DecodeState(
        cache=cache, positions_B1=positions_B1, is_own_BS=is_own_BS, slots=width, last_hidden_B1H=last_hidden_B1H
    )


def _own(lengths: Sequence[int], width: int, max_new_tokens: int, device: torch.device) -> Tensor:
    slots_S = torch.arange(width + max_new_tokens, device=device)
    lengths_B1 = torch.tensor(lengths, device=device).unsqueeze(1)
    return (slots_S < lengths_B1) | (slots_S >= width)


def decode_step(
    model: nn.Module,
    state: DecodeState,
    tokens_B: Tensor,
    pick: Callable[[Tensor], Tensor] = lambda logits_BV: logits_BV.argmax(-1),
) -> Tensor:
    """One decode step: the next tokens that `pick` chooses from the logits after `tokens_B`. Right after
    `vision_prefill`, `tokens_B` is ignored."""
    if vision_forward_in(model) is not None:
        return pick(_vision_logits(model, state, tokens_B)[:, -1])
    state.slots += 1
    mask = None if state.is_own_BS is None else state.is_own_BS[:, None, None, : state.slots]
    with sdpa_kernel(_KERNELS):
        output = model(
            input_ids=tokens_B.unsqueeze(1),
            position_ids=state.positions_B1,
            attention_mask=mask,
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=1,
        )
    state.positions_B1 = state.positions_B1 + 1
    return pick(output.logits[:, -1])


def _vision_logits(model: nn.Module, state: DecodeState, tokens_B: Tensor) -> Tensor:
    causal = causal_of(model)
    hidden_B1H, state.last_hidden_B1H = state.last_hidden_B1H, None
    if hidden_B1H is None:
        vision_forward = vision_forward_in(causal)
        assert vision_forward is not None
        state.slots += 1
        more: dict[str, Any] = {"position_ids": state.positions_B1, "attention_mask": _masks(state, causal)}
        with sdpa_kernel(_KERNELS):
            output = vision_forward(
                causal.base_model, tokens_B.unsqueeze(1), None, past_key_values=state.cache, use_cache=True, **more
            )
        state.positions_B1 = state.positions_B1 + 1
        hidden_B1H = output.last_hidden_state
    return logits_after(causal, hidden_B1H)


def _masks(state: DecodeState, causal: PreTrainedModel) -> Tensor | dict[str, Tensor | None] | None:
    """One mask for each kind of layer if the language tower has several kinds, else one mask."""
    text = causal.config.get_text_config(decoder=True)
    own = None if state.is_own_BS is None else state.is_own_BS[:, None, None, : state.slots]
    window = getattr(text, "sliding_window", None)
    if window is None:
        return _taken({_FULL: own}, text, causal.dtype)[_FULL]
    masks = _taken({_FULL: own, _SLIDING: _near(state, window)}, text, causal.dtype)
    return masks if getattr(text, "layer_types", None) else masks[_SLIDING]


def _near(state: DecodeState, window: int) -> Tensor | None:
    """A mask of the last `window` tokens of each row, without padding."""
    slots, own_BS = state.slots, state.is_own_BS
    if slots <= window:
        return None if own_BS is None else own_BS[:, None, None, :slots]
    if own_BS is None:
        return (torch.arange(slots, device=state.positions_B1.device) >= slots - window)[None, None, None]
    behind_BS = own_BS[:, :slots].flip(1).cumsum(1).flip(1)  # own tokens from here to the last one
    return (own_BS[:, :slots] & (behind_BS <= window))[:, None, None]


def _taken(masks: dict[str, Tensor | None], text: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor | None]:
    known = {kind: mask for kind, mask in masks.items() if mask is not None}
    return {**masks, **as_attention_masks(known, text, dtype)}


def likeliest(_rows_B: Tensor, _step: int, logits_BV: Tensor) -> Tensor:
    return logits_BV.argmax(-1)


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    pad: int,
    device: str,
    choose: ChooseTokens,
    make_images: MakeImageInputs | None = None,
) -> list[list[int]]:
    """The tokens up to and including the first stop token. `make_images` makes the prompts' image inputs for a
    vision-language model."""
    longest = max(map(len, prompts)) + max_new_tokens
    new, stop_set = max_new_tokens, frozenset(stops)
    how: dict[str, Any] = {"max_new_tokens": new, "stops": stop_set, "device": device, "choose": choose}
    with torch.inference_mode():
        if make_images is not None:
            input_ids_BT, lengths = _padded_right(prompts, pad, "cpu")
            extra = make_images(input_ids_BT.numpy(), lengths).moved(lambda tensor: tensor.to(device))
            state = vision_prefill(model, input_ids_BT.to(device), lengths, extra, max_new_tokens=new)
        elif can_pack(causal_of(model).config, longest) is None:
            state = prefill(model, *_padded_right([prompt[:-1] for prompt in prompts], pad, device), max_new_tokens=new)
        else:
            return _by_transformers(model, prompts, pad=pad, **how)
        return _step_by_step(state, model, prompts, **how)


def _step_by_step(
    state: DecodeState,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: frozenset[int],
    device: str,
    choose: ChooseTokens,
) -> list[list[int]]:
    """Rows that have ended leave the batch once they make up half of it."""
    tokens_B = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    written: list[list[int]] = [[] for _ in prompts]
    batch = list(range(len(prompts)))
    rows_B = torch.arange(len(prompts), device=device)
    steps = 0
    while steps < max_new_tokens:
        block = []
        for ahead in range(min(_STEPS_PER_CHECK[device], max_new_tokens - steps)):
            tokens_B = decode_step(model, state, tokens_B, partial(choose, rows_B, steps + ahead))
            block.append(tokens_B)
        steps += len(block)
        for row, tokens in zip(batch, torch.stack(block, 1).tolist(), strict=True):
            written[row] += tokens
        going = [at for at, row in enumerate(batch) if stops.isdisjoint(written[row])]
        if not going:
            break
        if 2 * len(going) <= len(batch):
            state.keep(going)
            kept = torch.tensor(going, device=device)
            tokens_B, rows_B, batch = tokens_B[kept], rows_B[kept], [batch[at] for at in going]
    return [until_stop(tokens, stops) for tokens in written]


def _by_transformers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stops: frozenset[int],
    pad: int,
    device: str,
    choose: ChooseTokens,
) -> list[list[int]]:
    """Handles models that may not depend on positions alone: prompts are padded on the left, as transformers
    expects."""
    width = max(map(len, prompts))
    input_ids_BT = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stops), pad_token_id=pad, use_cache=True
    )
    chosen = [_ChosenTokens(choose, width)]
    output_BT = model.generate(
        input_ids=input_ids_BT, attention_mask=mask_BT, generation_config=config, logits_processor=chosen
    )  # type: ignore[operator]
    return [until_stop(tokens, stops) for tokens in output_BT[:, width:].tolist()]


@dataclass(frozen=True, slots=True)
class _ChosenTokens:
    """A logits processor that leaves `generate` no choice: all rows stay in its batch, in their order."""

    choose: ChooseTokens
    width: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows_B = torch.arange(len(scores), device=scores.device)
        tokens_B = self.choose(rows_B, input_ids.shape[1] - self.width, scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B.unsqueeze(1), 0.0)


def until_stop(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[: end + 1])


def _padded_right(rows: Sequence[Sequence[int]], pad: int, device: str) -> tuple[Tensor, list[int]]:
    lengths = [len(row) for row in rows]
    width = max(lengths)
    padded = [[*row, *[pad] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device).reshape(len(rows), width), lengths


def causal_of(model: nn.Module) -> PreTrainedModel:
    """The model without its adapters."""
    causal = without_adapter(model)
    assert isinstance(causal, PreTrainedModel)
    return causal


def uniform_draws(seed: int, row: str, sample: int, *, steps: int) -> list[float]:
    """Draws from 0 to 1, one for each step, whichever rows share the batch. `row` is the number of the prompt."""
    digest = blake2b(f"{seed}\x1e{sample}\x1e{row}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    drawn: list[float] = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).random(steps).tolist()
    return drawn


def sample_by(draws: Sequence[Sequence[float]], *, temperature: float, device: str) -> ChooseTokens:
    """`draws` has one row of draws per prompt, one draw per step."""
    draws_BS = torch.tensor(draws, dtype=torch.float64, device=device)

    def sampled(rows_B: Tensor, step: int, logits_BV: Tensor) -> Tensor:
        """The first word whose cumulative probability exceeds the draw. The sum is in float64, or the tail would be cut
        off."""
        summed_BV = torch.softmax(logits_BV.to(torch.float64) / temperature, dim=-1).cumsum(-1)
        wanted_B1 = draws_BS[rows_B, step].unsqueeze(1) * summed_BV[:, -1:]
        tokens_B: Tensor = torch.searchsorted(summed_BV, wanted_B1, right=True).squeeze(1)
        return tokens_B.clamp_(max=logits_BV.shape[1] - 1)

    return sampled
