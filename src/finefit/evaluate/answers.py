"""Greedy, batched generation. Prompts come from the renderer that made the training rows."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import GenerationConfig

from finefit.data.render import Renderer


def answers(
    model: nn.Module, renderer: Renderer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch: int, device: str
) -> Iterator[tuple[int, str]]:
    """(index, answer) for every prompt, longest first: what would not fit in memory fails at once, and padding is little."""
    order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at]))
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(renderer.stop_tokens),
        pad_token_id=renderer.pad,
        use_cache=True,
    )
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        yield from zip(chosen, _generate(model, renderer, [prompts[at] for at in chosen], config, device), strict=True)


def _generate(model: nn.Module, renderer: Renderer, prompts: Sequence[Sequence[int]], config: GenerationConfig, device: str) -> list[str]:
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    input_ids_BT = torch.tensor([[renderer.pad] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)], device=device)
    mask_BT = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=device)
    with torch.inference_mode():
        output_BT = model.generate(input_ids=input_ids_BT, attention_mask=mask_BT, generation_config=config)  # type: ignore[operator]
    return [renderer.decode_answer(tokens) for tokens in output_BT[:, width:].tolist()]
