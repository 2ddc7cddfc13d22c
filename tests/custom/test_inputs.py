"""A model of the user's own in the step: its inputs depend on the row and its seed alone, its loss is a sum, and
recomputation leaves it as it is."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from finefit.artifacts.records import Levers
from finefit.custom.inputs import CustomCollate, blank_rows
from finefit.custom.model import CustomFamily, custom_family_of, load_custom
from finefit.data.examples import Example
from finefit.errors import ModelError, SpecError
from finefit.model.load import make_trainable
from finefit.model.resolve_model import custom_source
from finefit.objective.batch import Batch, seed_of
from finefit.objective.losses import custom_loss
from finefit.spec.models import CustomModel, FolderModel, Full, Lora
from finefit.spec.schema import AdamW, Sft
from finefit.step.forward import bind, make_objective
from finefit.step.levers import apply_levers, layers_of
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer
from finefit.train.batches import require_sum
from tests.custom_models import CODE, CONFIG
from tests.step.conftest import unequal_examples

torch.set_num_threads(1)

LORA = Lora(kind="lora", rank=2)


def made(folder: Path, code: str = CODE, tuning: Any = LORA) -> tuple[nn.Module, CustomCollate]:
    """With adapters away from zero, so that every factor gets a gradient."""
    (folder / "my_model.py").write_text(code, encoding="utf-8")
    asked = CustomModel(
        kind="custom", file="my_model.py", config=CONFIG, tokenizer=FolderModel(kind="folder", path="t")
    )
    model = make_trainable(load_custom(asked, folder, device="cpu", dtype=torch.float32, seed=1), tuning, name="m")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model, CustomCollate(source=custom_source(asked, folder), pad=0)


def own(model: nn.Module) -> CustomFamily:
    found = custom_family_of(model)
    assert found is not None
    return found


def cut(compose: CustomCollate, examples: Sequence[Example], micro_batch: int) -> list[Batch]:
    seeds = [seed_of(7, 3, at) for at in range(len(examples))]
    return [
        compose(examples[at : at + micro_batch], seeds[at : at + micro_batch])
        for at in range(0, len(examples), micro_batch)
    ]


def gradients(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    optimizer, taken = make_optimizer(model, AdamW(lr=1e-3), device="cpu"), {}

    def decide(_: torch.Tensor) -> bool:
        taken.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return False

    forward = bind(model)
    objective = make_objective(Sft(kind="sft"), LORA, model, forward)
    outcome = optimizer_step(
        batches, forward=forward, objective=objective, optimizer=optimizer, clip=None, decide=decide
    )
    return float(outcome.loss), taken


def assert_same(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        largest = float(gradient.abs().max())  # what nearly cancels out is exact to this, not to itself
        torch.testing.assert_close(gradient, other[1][name], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("tuning", [LORA, Full(kind="full")], ids=lambda t: t.kind)
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradients(tuning: Any, tmp_path: Path) -> None:
    model, compose = made(tmp_path, tuning=tuning)
    examples = unequal_examples()
    whole = gradients(model, cut(compose, examples, len(examples)))
    assert min(gradient.abs().max() for gradient in whole[1].values()) > 1e-6
    for micro_batch in (1, 3):
        assert_same(gradients(model, cut(compose, examples, micro_batch)), whole)


def test_what_is_drawn_for_a_row_depends_on_seed_step_and_row_alone(tmp_path: Path) -> None:
    _, compose = made(tmp_path)
    examples = unequal_examples()[:3]
    together, *alone = (
        compose(examples, [5, 6, 7]),
        *(compose([example], [seed]) for example, seed in zip(examples, (5, 6, 7), strict=True)),
    )
    for at, one in enumerate(alone):
        assert one.extra is not None
        assert together.extra is not None
        length = len(examples[at].tokens)
        assert torch.equal(one.extra.tensors["seen"][0], together.extra.tensors["seen"][at, :length])
    other = compose(examples, [5, 6, 8])
    assert other.extra is not None
    assert other.extra.identity != together.extra.identity  # type: ignore[union-attr]
    assert compose(examples, [5, 6, 7]).extra.identity == together.extra.identity  # type: ignore[union-attr]
    seeds = {seed_of(run, step, row) for run in (1, 2) for step in (1, 2, "validation") for row in (1, 2)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_batch_is_counted_by_its_tokens_and_divided_by_what_the_model_counts(tmp_path: Path) -> None:
    _, compose = made(tmp_path)
    examples = unequal_examples()
    batch = compose(examples, range(len(examples)))
    assert batch.num_rows == len(examples)
    assert batch.num_tokens == sum(len(e.tokens) for e in examples)
    assert custom_loss.count(batch) == batch.num_supervised == sum(sum(e.supervised[1:]) for e in examples)


@pytest.mark.parametrize("recompute", [1, 2])
def test_recomputed_layers_leave_loss_and_gradients_as_they_are(recompute: int, tmp_path: Path) -> None:
    model, compose = made(tmp_path)
    batches = cut(compose, unequal_examples(), 4)
    kept = gradients(model, batches)
    calls: list[int] = []
    for at, layer in enumerate(layers_of(model)):
        layer.get_submodule("norm").register_forward_hook(lambda *_, at=at: calls.append(at))
    apply_levers(model, Levers(micro_batch=4, recompute=recompute))
    assert_same(gradients(model, batches), kept)
    expected = {0: 2 * len(batches), 1: (2 if recompute == 2 else 1) * len(batches)}
    assert {at: calls.count(at) for at in (0, 1)} == expected
    calls.clear()
    apply_levers(model, Levers(micro_batch=4))
    assert_same(gradients(model, batches), kept)
    assert {at: calls.count(at) for at in (0, 1)} == {0: len(batches), 1: len(batches)}


def test_levers_that_such_a_model_cannot_have_are_refused_by_name(tmp_path: Path) -> None:
    model, _ = made(tmp_path)
    with pytest.raises(ModelError, match=r"levers.recompute is 3, but my_model.py has 2 layers"):
        apply_levers(model, Levers(micro_batch=1, recompute=3))
    with pytest.raises(SpecError, match=r"levers.loss_chunk 8, levers.kernels fused cannot be applied to my_model.py"):
        apply_levers(model, Levers(micro_batch=1, loss_chunk=8, kernels="fused"))


def test_a_sum_is_proved_and_a_mean_is_refused(tmp_path: Path) -> None:
    examples = unequal_examples()[:2]
    mean = CODE.replace('reduction="sum")', 'reduction="mean")')
    miscounted = CODE.replace("return int((inputs", "return 1 + int((inputs")
    for code, words in (
        (CODE, None),
        (mean, r"has a loss of .* for 2 rows together and of .* for each alone"),
        (miscounted, r"counts \d+ for 2 rows together and \d+ for each alone"),
    ):
        model, compose = made(tmp_path, code)
        (both,), parts = cut(compose, examples, 2), cut(compose, examples, 1)
        if words is None:
            require_sum(own(model), bind(model), both, parts, tolerance=1e-5)
        else:
            with pytest.raises(ModelError, match=words):
                require_sum(own(model), bind(model), both, parts, tolerance=1e-3)


def test_what_fails_in_the_loss_is_told_by_line_and_a_lack_of_memory_is_left_as_it_is(tmp_path: Path) -> None:
    place = "    def loss(self, inputs):\n"
    line = CODE.split(place)[0].count("\n") + 2
    model, compose = made(tmp_path, CODE.replace(place, place + "        raise ValueError('no such thing')\n"))
    batch = compose(unequal_examples()[:1], [0])
    with pytest.raises(ModelError, match=rf"my_model.py:{line} failed in loss: ValueError: no such thing"):
        bind(model)(batch)
    model, compose = made(
        tmp_path, CODE.replace(place, place + "        raise torch.OutOfMemoryError('CUDA out of memory')\n")
    )
    with pytest.raises(torch.OutOfMemoryError):
        bind(model)(batch)


def test_blank_rows_are_as_large_as_asked_and_hold_nothing() -> None:
    first, second = blank_rows(2, tokens=5, supervised=2, sizes=((8, 6),))
    assert first.supervised.tolist() == [False, False, False, True, True]
    assert not first.tokens.any()
    assert [image.size for image in first.images] == [(8, 6)]
    assert not np.asarray(second.images[0]).any()
    assert first.seed != second.seed
    assert replace(first, seed=1).is_prompt is False
