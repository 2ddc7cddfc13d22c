"""Results that are remembered equal those that torch computes: in their metadata, in what shares memory, and in whole
rehearsals, event by event."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from finefit.rehearse import known_results
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.generation import rehearse_answers
from finefit.rehearse.rehearsal import rehearse
from finefit.rehearse.trace import Trace
from finefit.spec.models import Lora
from finefit.spec.schema import AdamW, Dpo
from tests.families import family_config
from tests.rehearse.conftest import FULL, make_cfg, make_config
from tests.slow_cases import slow_but

PROCESSOR: dict[str, Any] = {"device": "cpu", "capability": (0, 0), "precision": "fp32"}
FUSED = {"kernels": "fused", "recompute": 1, "loss_chunk": 128, "micro_batch": 2}
CASES: dict[str, StepConfig] = {
    "adapters, fused": make_cfg(levers=FUSED, accumulates=True, validation=(100, 50)),
    "adapters with dropout": make_cfg(tuning=Lora(kind="lora", rank=8, dropout=0.1), is_quick=True),
    "4 bits, pairs": make_cfg(tuning=Lora(kind="lora", rank=8, base_bits=4), objective=Dpo(kind="dpo")),
    "8 bits": make_cfg(tuning=Lora(kind="lora", rank=8, base_bits=8)),
    "full, 8-bit moments": make_cfg(tuning=FULL, optimizer=AdamW(lr=1e-4, kind="adamw_8bit"), levers={"recompute": 2}),
    "packed, Hopper": make_cfg(capability=(9, 0), levers={"packing": True, "micro_batch": 3}),
    "offloaded tiles": make_cfg(levers={"recompute": 2, "offload": True, "mlp_tiles": 4}),
    "full on the processor": make_cfg(tuning=FULL, **PROCESSOR),
    "complex rotations": make_cfg(family_config("deepseek_v2")),
    "experts": make_cfg(family_config("qwen3_next"), tokens=64, supervised=32),
    "states": make_cfg(family_config("falcon_h1"), tokens=64, supervised=32),
}


def _traces(cfg: StepConfig) -> list[Trace]:
    answers = rehearse_answers(cfg, rows=2, prompt_tokens=40, new_tokens=20)
    return [_ordered(rehearse(cfg).trace), _ordered(answers.trace)]


def _ordered(trace: Trace) -> Trace:
    """Sorts what is freed together: autocast frees its casts in the order of their addresses."""
    together = [list(same) for _, same in groupby(trace.events, key=lambda event: event[1] and event)]
    return replace(trace, events=[event for events in together for event in sorted(events)])


@pytest.mark.parametrize("cfg", slow_but(("adapters, fused", "4 bits, pairs", "complex rotations"), CASES))
def test_a_rehearsal_with_remembered_results_is_the_same_event_by_event(
    cfg: StepConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = _traces(cfg), _traces(cfg)
    monkeypatch.setattr(known_results, "run", lambda func, args, kwargs: func(*args, **kwargs))
    computed = _traces(cfg)
    assert again == computed
    assert first == computed


class _Remembering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return known_results.run(func, args, kwargs or {})


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a new tensor": lambda x, y: x @ y,
    "in 16 bits": lambda x, y: (x + y.t()).to(torch.bfloat16),
    "1 is not 1.0": lambda x, _: torch.full_like(x, 1, dtype=None).add(1),
    "a view": lambda x, _: x.view(2, 2, 6)[:, 1:].transpose(0, 2),
    "a view of a view": lambda x, _: x[1:].t()[2:].unsqueeze(0),
    "several views": lambda x, _: torch.split(x, 2),
    "several tensors": lambda x, _: torch.sort(x),
    "an argument": lambda x, y: x.mul_(y.t()),
    "a view of an argument that is written": lambda x, _: x[1:].zero_(),
    "a tensor that is made": lambda _, y: torch.arange(y.shape[0]),
    "strides of its own": lambda x, _: x.new_empty_strided((2, 3), (5, 1)),
    "many tensors": lambda x, y: torch._foreach_mul([x, y], 2.0),
    "many that are written": lambda x, y: torch._foreach_add_([x, y], 1.0),
    "none of several": lambda x, _: torch.native_dropout(x, 0.1, True),
    "complex": lambda x, _: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).conj() * 2).flatten(1),
    "negated by its view": lambda x, _: torch.view_as_complex(x.view(4, 3, 2)).conj().imag + 1,
}


def _seen(operation: Callable[[Tensor, Tensor], Any]) -> list[tuple[Any, ...]]:
    """Metadata of the arguments and results, and which of them share memory."""
    x, y = torch.empty(4, 6), torch.empty(6, 4)
    out = operation(x, y)
    leaves = [out] if isinstance(out, Tensor) else list(out or ())
    storages = [tensor.untyped_storage()._cdata for tensor in (x, y, *leaves)]
    return [
        (
            type(tensor),
            *(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()),
            *(tensor.requires_grad, tensor.is_neg(), storages.index(tensor.untyped_storage()._cdata)),
            *(tensor is x, tensor is y, torch._C._dispatch_key_set(tensor)),
            sorted(name for name in vars(tensor)),
        )
        for tensor in (x, y, *leaves)
    ]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_gives_what_torch_gives(operation: Callable[[Tensor, Tensor], Any]) -> None:
    with FakeTensorMode():
        computed = _seen(operation)
    for _ in range(2):  # the second time they are remembered
        with FakeTensorMode() as mode, _Remembering():  # type: ignore[no-untyped-call]
            assert _seen(operation) == computed
            made = torch.empty(1)
    assert isinstance(made, FakeTensor)
    assert made.fake_mode is mode, "not that of the rehearsal that computed it"


def test_most_operations_of_a_rehearsal_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make_cfg(make_config(layers=3), levers=FUSED)
    rehearse(cfg)
    dispatch, count = FakeTensorMode.dispatch, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return dispatch(*args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    trace = rehearse(cfg).trace
    assert count < trace.num_operations() / 20


def test_what_metadata_do_not_determine_is_computed_every_time() -> None:
    for _ in range(2):
        with FakeTensorMode(), _Remembering():  # type: ignore[no-untyped-call]
            x = torch.empty(4, 6)
            x.t_()
            assert x.shape == (6, 4)
            x.resize_(2, 2)
            assert x.shape == (2, 2)
            assert torch.empty(0).set_(x.untyped_storage()).shape == (24,)
            assert torch.tensor(3.0).item() == 3.0
            with pytest.raises(RuntimeError):
                x.sum().item()
