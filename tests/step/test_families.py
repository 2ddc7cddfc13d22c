"""Rows of a batch do not see each other in any family: not by attention, nor by the state of a recurrence, nor by the
padding behind the shorter ones. Models of recurrences are not packed."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from finefit.data.collate import collate
from finefit.data.examples import Example
from finefit.errors import ModelError
from finefit.model.attention import can_pack
from finefit.model.load import make_trainable
from finefit.plan.forecast import decide_packing
from finefit.spec.models import Lora
from finefit.step.forward import bind
from tests.families import FAMILIES, RECURRENT, family_config, make_family

SHORT, LONG = 11, 29


def _example(length: int, *, seed: int) -> Example:
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 200, (length,), generator=chance).tolist()
    return Example(tuple(tokens), (False, *[True] * (length - 1)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_loss_of_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    model = make_trainable(make_family(kind), Lora(kind="lora", rank=2), name="tiny").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_B" in name else 0.2)
    forward, row = bind(model), _example(SHORT, seed=0)

    def losses(*others: Example) -> Tensor:
        return -forward(collate([row, *others], pad=1))[: SHORT - 1].detach()

    alone = losses()
    assert alone.std() > 0.1  # or nothing would be seen
    for other in (_example(LONG, seed=1), _example(LONG, seed=2), _example(SHORT - 3, seed=3)):
        torch.testing.assert_close(losses(other), alone, rtol=1e-4, atol=1e-4)
    first = _example(LONG, seed=1)
    behind = Example(first.tokens + row.tokens, first.supervised + row.supervised)
    leaked = -forward(collate([behind], pad=1))[1 - SHORT :].detach()
    assert not torch.allclose(leaked, alone, rtol=1e-2)  # as it would be if one row just followed the other


@pytest.mark.parametrize("kind", RECURRENT)
def test_models_of_recurrences_are_not_packed_and_packing_is_refused_by_the_layers_that_forbid_it(kind: str) -> None:
    config = family_config(kind)
    problem = can_pack(AutoConfig.for_model(**config), LONG)
    assert problem is not None
    assert problem.endswith("which would see the previous row")
    assert decide_packing("auto", config, LONG, "cuda") == (False, problem)
    with pytest.raises(ModelError, match=r"data\.packing is best_fit, but the model has layers of kind"):
        decide_packing("best_fit", config, LONG, "cuda")
