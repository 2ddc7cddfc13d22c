"""Two ranks that train a model that sees, one of which has no image: together they are one process, and each is told what its own rows reached."""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finefit.artifacts.launcher import Place
from finefit.objective.sft import sft
from finefit.spec.schema import AdamW
from finefit.step.engine import ALONE, LiveEngine
from finefit.step.engines.ddp import Copies
from finefit.step.forward import bind
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer
from finefit.train.audit import Audit
from finefit.train.ranks import ONE_RANK, Ranks, joined, open_store
from tests.ranks import as_ranks
from tests.seeing import shown, trained

FAMILY, ROWS = "llava", (1, 0)
COUNTS = {"language": 28, "vision": 12, "projector": 4}
Left = tuple[list[float], dict[str, Tensor], list[dict[str, Any]]]
"""Losses, weights, and what was told by the audit."""


def _train(ranks: Ranks, engine: LiveEngine, rows: tuple[int, ...]) -> Left:
    torch.set_num_threads(1)
    model, told = trained(FAMILY), list[dict[str, Any]]()
    optimizer = engine.prepare(model, partial(make_optimizer, spec=AdamW(lr=1e-2, eps=1e-4), device="cpu"))
    forward, audit = bind(model), Audit(model, engine, ranks, lambda **line: told.append(line))
    losses = []
    for step in range(3):
        batches = [shown(FAMILY, ROWS, only=(row,), seed=step) for row in rows]
        outcome = optimizer_step(
            batches,
            forward=forward,
            objective=audit.watched(sft),
            optimizer=optimizer,
            clip=1.0,
            decide=partial(audit.decide, step + 1, lambda: None),
            count=20,
            engine=engine,
        )
        losses.append(float(outcome.loss))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, told


def _as_rank(place: Place) -> Left:
    with joined(place, open_store(place, patience=timedelta(seconds=120)), device="cpu") as ranks:
        return _train(ranks, Copies(ranks), (place.rank,))


def test_ranks_with_and_without_images_train_as_one_process_does() -> None:
    losses, weights, told = _train(ONE_RANK, ALONE, (0, 1))
    assert [line["ranks"] for line in told] == [[COUNTS]] * 2
    ended = as_ranks(2, _as_rank, deadline_seconds=300)
    assert [(end.error, end.trace) for end in ended] == [(None, "")] * 2
    for end in ended:
        found, own, lines = end.value
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        for name, tensor in weights.items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
        assert [line["ranks"] for line in lines] == [[COUNTS, {"language": 28}]] * 2
        assert all(
            line["towers"] == {name: {"tensors": count, "reached": count} for name, count in COUNTS.items()}
            for line in lines
        )


def test_steps_that_show_nothing_leave_the_audit_waiting_for_one_that_does() -> None:
    model, told = trained(FAMILY), list[dict[str, Any]]()
    optimizer = make_optimizer(model, AdamW(lr=1e-2, eps=1e-4), device="cpu")
    forward, audit = bind(model), Audit(model, ALONE, ONE_RANK, lambda **line: told.append(line))
    for step, row in enumerate((1, 1, 0, 1, 0, 0)):
        optimizer_step(
            [shown(FAMILY, ROWS, only=(row,))],
            forward=forward,
            objective=audit.watched(sft),
            optimizer=optimizer,
            clip=None,
            decide=partial(audit.decide, step + 1, lambda: None),
        )
    assert [(line["step"], line["towers"]["vision"]["reached"], "blind" in line) for line in told] == [
        (1, 0, True),
        (2, 0, True),
        (3, 12, False),
        (4, 0, True),
        (5, 12, False),
    ]
