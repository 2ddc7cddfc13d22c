"""A token of a causal language model depends on the tokens up to it: on none after it, and not on how many follow."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from finefit.errors import ModelError
from finefit.model.loadable import SEEING_AHEAD, require_causal
from tests.tiny_types import CAUSAL, tiny_config

USUAL = ("llama", "gpt2", "gemma2", "mamba", "opt", "roberta", "qwen3_moe")
NOT_BUILT = (
    *("blt", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant"),
    *("musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text"),
)
"""Types of which `tiny_config` makes no model that runs alone."""
_KEPT = 7


def _earlier_logits(kind: str) -> list[Tensor]:
    """The logits of the first tokens of a row, of the row with other later tokens, and of these tokens alone."""
    torch.manual_seed(0)
    config = tiny_config(kind)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    ids_1T = torch.randint(5, 100, (1, 12))
    other_1T = torch.cat([ids_1T[:, :_KEPT], torch.ones_like(ids_1T[:, _KEPT:])], 1)
    with torch.no_grad():
        rows = (ids_1T, other_1T, ids_1T[:, :_KEPT])
        return [model(input_ids=row, use_cache=False).logits[:, :_KEPT] for row in rows]


def _is_causal(kind: str) -> bool:
    row, *others = _earlier_logits(kind)
    return all(torch.allclose(row, other, rtol=0, atol=1e-5) for other in others)


@pytest.mark.parametrize("kind", USUAL)
def test_no_token_depends_on_later_ones(kind: str) -> None:
    assert _is_causal(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*CAUSAL} - {*USUAL, *SEEING_AHEAD, *NOT_BUILT}))
def test_no_token_depends_on_later_ones_in_any_type_that_is_not_refused(kind: str) -> None:
    assert _is_causal(kind)


@pytest.mark.parametrize("kind", SEEING_AHEAD)
def test_a_model_that_sees_what_it_has_to_predict_is_refused(kind: str) -> None:
    assert not _is_causal(kind)
    with pytest.raises(ModelError, match=f"{kind} reads later tokens"):
        require_causal(tiny_config(kind))
