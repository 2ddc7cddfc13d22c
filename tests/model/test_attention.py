import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from finefit.model.attention import choose_attention
from finefit.vision.attention import has_varlen

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
