from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, GptOssConfig, LlamaConfig
from transformers.models.gpt_oss import modeling_gpt_oss

from finefit.data.collate import collate
from finefit.data.examples import Example
from finefit.model.attention import choose_attention
from finefit.step.forward import bind
from finefit.vision.attention import has_varlen
from tests.families import make_family

LLAMA = LlamaConfig()
VOLTA, TURING, AMPERE, ADA, HOPPER = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("capability", [AMPERE, ADA, HOPPER])
def test_halves_on_ampere_and_newer_have_the_fast_kernels(capability: tuple[int, int], precision: str) -> None:
    assert choose_attention("cuda", capability, precision, LLAMA) == "sdpa"
    assert choose_attention("cuda", capability, precision, LLAMA, packing=True) == "sdpa_by_row"


@pytest.mark.parametrize(
    ("capability", "precision"),
    [(TURING, "fp16"), (VOLTA, "fp16"), (TURING, "fp32"), (AMPERE, "fp32"), (HOPPER, "fp32"), (TURING, "bf16")],
)
def test_older_cards_and_fp32_have_their_heads_repeated(capability: tuple[int, int], precision: str) -> None:
    assert choose_attention("cuda", capability, precision, LLAMA) == "sdpa_repeated"
    assert choose_attention("cuda", capability, precision, LLAMA, packing=True) == "sdpa_repeated_by_row"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_cpu_takes_shared_heads_in_any_precision(precision: str) -> None:
    assert choose_attention("cpu", (0, 0), precision, LLAMA) == "sdpa"


def test_scores_that_are_capped_have_the_models_own_attention() -> None:
    assert choose_attention("cuda", HOPPER, "fp16", Gemma2Config()) == "eager"


@pytest.mark.parametrize(
    ("dtypes", "takes"),
    [
        ((torch.bfloat16,) * 3, True),
        ((torch.float16,) * 3, True),
        ((torch.float32,) * 3, False),
        ((torch.float16, torch.float16, torch.bfloat16), False),
        ((torch.bfloat16, torch.float32, torch.bfloat16), False),
    ],
)
def test_the_kernel_for_packed_rows_takes_three_tensors_of_one_half(
    dtypes: tuple[torch.dtype, ...], takes: bool
) -> None:
    query, key, value = (torch.zeros(1, 2, 4, 64, dtype=dtype) for dtype in dtypes)
    assert has_varlen(query, key, value, 256) is takes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_sees_what_autocast_will_make_of_its_inputs(dtype: torch.dtype) -> None:
    wide = torch.zeros(1, 2, 4, 64)
    with torch.autocast("cpu", dtype=dtype):
        assert has_varlen(wide, wide, wide, 256)
    assert not has_varlen(wide, wide, wide, 256)


@pytest.mark.parametrize(
    ("width", "widest", "takes"),
    [(64, 256, True), (60, 256, False), (256, 256, True), (256, 192, False), (64, 0, False)],
)
def test_widths_that_the_kernel_has_no_backward_for_are_left_to_others(width: int, widest: int, takes: bool) -> None:
    tensor = torch.zeros(1, 2, 4, width, dtype=torch.float16)
    assert has_varlen(tensor, tensor, tensor, widest) is takes


WINDOW, TOKENS = 5, 16


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, window: int | None) -> Tensor:
    """By its definition, one query after another: the sink takes its share of the attention and adds nothing."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    found = torch.zeros_like(query)
    for head in range(heads):
        for at in range(query.shape[2]):
            first = 0 if window is None else max(0, at - window + 1)
            seen, shared = slice(first, at + 1), head // groups
            scores = query[0, head, at] @ key[0, shared, seen].T * query.shape[3] ** -0.5
            shares = torch.softmax(torch.cat([scores, sinks_H[head : head + 1]]), 0)[:-1]
            found[0, head, at] = shares @ value[0, shared, seen]
    return found


@pytest.mark.parametrize(("layer", "window"), [(0, WINDOW), (1, None)])
def test_attention_with_sinks_is_what_its_definition_says_within_the_window_too(
    layer: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family("gpt_oss", sliding_window=WINDOW).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    plain, seen = modeling_gpt_oss.eager_attention_forward, []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain(module, query, key, value, *args, **kwargs)
        seen.append((query, key, value, module.sinks, answer[0]))
        return answer

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", attend)
    example = Example(tuple(range(20, 20 + TOKENS)), (False, *[True] * (TOKENS - 1)))
    with torch.no_grad():
        bind(model)(collate([example], pad=1))
    query, key, value, sinks_H, found = seen[layer]
    torch.testing.assert_close(found.transpose(1, 2), _with_sinks(query, key, value, sinks_H, window))


def test_a_model_whose_attention_has_sinks_keeps_its_own_on_every_device() -> None:
    for device, capability in (("cpu", (0, 0)), ("cuda", HOPPER)):
        assert choose_attention(device, capability, "bf16", GptOssConfig(), packing=True) == "eager"
