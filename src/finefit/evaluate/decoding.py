"""Tokens behind a batch of prompts: all prompts pass the model once, then each step gives every row one token, the likeliest unless told otherwise.

Prompts are padded on the right and pass without a mask, as training rows do: attention is causal, so no row sees its padding, and the fast kernels
stay open. What padding leaves in the cache is masked from then on; prompts of one length, and a single one, never meet a mask. Nothing in `prefill`
and `follow` is read on the host, so a rehearsal runs the same two.
B rows, T tokens, S slots of the cache, V words of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import peft
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from finefit.model.attention import can_pack

_LOOK_STEPS = {"cpu": 1, "cuda": 8}
"""Steps between two looks at what was written: a look waits for the card."""

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which prepares itself for every new length: each token meets one."""

Choose = Callable[[Tensor, int, Tensor], Tensor]
"""(rows_B, step, logits_BV) -> tokens_B: the next token of each row; `rows_B` are their numbers among the prompts."""


@dataclass(slots=True, kw_only=True)
class Context:
    """What the model has read so far, and where each row's next token goes."""

    cache: DynamicCache
    positions_B1: Tensor
    """Of the next tokens in their rows."""
    is_own_BS: Tensor | None
    """Which slots of the cache hold a token of the row, with room for those to come; None: all do."""
    slots: int

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
        slots_S = torch.arange(width + max_new_tokens, device=device)
        context.is_own_BS = (slots_S < lengths_B1) | (slots_S >= width)
    return context


def _likeliest(logits_BV: Tensor) -> Tensor:
    return logits_BV.argmax(-1)


def follow(model: nn.Module, context: Context, tokens_B: Tensor, pick: Callable[[Tensor], Tensor] = _likeliest) -> Tensor:
    """The next token of each row behind these, as it is picked from the logits."""
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


def likeliest(_rows_B: Tensor, _step: int, logits_BV: Tensor) -> Tensor:
    return _likeliest(logits_BV)


def decode(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stops: Sequence[int], pad: int, device: str, choose: Choose
) -> list[list[int]]:
    """What follows each prompt, up to and with the first stop token."""
    longest = max(map(len, prompts)) + max_new_tokens
    write = _step_by_step if can_pack(causal_of(model).config, longest) is None else _by_transformers
    with torch.inference_mode():
        return write(model, prompts, max_new_tokens=max_new_tokens, stops=frozenset(stops), pad=pad, device=device, choose=choose)


def _step_by_step(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stops: frozenset[int], pad: int, device: str, choose: Choose
) -> list[list[int]]:
    """Rows that have ended leave the batch once they are half of it."""
    context = prefill(model, *_padded_right([prompt[:-1] for prompt in prompts], pad, device), max_new_tokens=max_new_tokens)
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
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stops: frozenset[int], pad: int, device: str, choose: Choose
) -> list[list[int]]:
    """For models that are not known to follow their positions alone: padded on the left, as their own code expects it."""
    width = max(map(len, prompts))
    input_ids_BT = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stops), pad_token_id=pad, use_cache=True)
    chosen = [_Chosen(choose, width)]
    output_BT = model.generate(input_ids=input_ids_BT, attention_mask=mask_BT, generation_config=config, logits_processor=chosen)  # type: ignore[operator]
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
    causal = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    assert isinstance(causal, PreTrainedModel)
    return causal
