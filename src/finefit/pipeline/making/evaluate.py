"""The stage that scores: every model answers the same rows, in processes of its own and in a run directory of its own below the stage's folder.

What is answered already is not asked again, so a stage that was killed goes on at its next item.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finefit.artifacts.evaluations import EvalResult
from finefit.artifacts.lock import run_lock
from finefit.artifacts.pipelines import Order, WiredModel
from finefit.artifacts.rundir import RunDir
from finefit.pipeline.bare import EARLIER, STAGING, Asked, Bare, open_at, wired_bare
from finefit.pipeline.evaluating import Rooms, Say, Tick, evaluate, prompt_grids_of, prompt_tokens_of, request_of
from finefit.pipeline.making.gated import GateModel, require_experts, require_known_prompts, score_gate
from finefit.pipeline.making.score_table import summary_of
from finefit.pipeline.making.score_table import told as lines
from finefit.pipeline.questions import plain_spec, prepare_questions, without_rows
from finefit.pipeline.scoring import recorded, require_readable
from finefit.pipeline.taskfiles import moved_task
from finefit.spec.models import Lora, Model, Tuning
from finefit.spec.rows import Data, Source
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.stages import EvaluateStage, Questions

__all__ = ["lines", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hands:
    """What answering needs of whoever called."""

    lock: int
    tick: Tick
    say: Say


def score(order: Order, place: Path, *, lock: int, tick: Tick, say: Say) -> dict[str, Any]:
    """`place`: the stage's folder; `lock`: what the processes that answer inherit. All models are opened before the first is asked."""
    stage = order.stage
    assert isinstance(stage, EvaluateStage)
    models = {name: order.models[f"models.{name}"] for name in stage.models}
    require_experts(models, stage.evaluate)
    _forget(place.glob(f"{STAGING}*"))  # what a kill left
    evaluations = tuple(_found_anywhere(one, Path(order.base)) for one in stage.evaluate)
    runs = _opened(order, place, {name: wired for name, wired in models.items() if wired.gate is None}, evaluations)
    gates = [
        GateModel(name=name, folder=Path(wired.gate), place=place / name)
        for name, wired in models.items()
        if wired.gate is not None
    ]
    for gate in gates:
        require_known_prompts(gate, runs)
    hands = _Hands(lock=lock, tick=tick, say=say)
    scored = {
        name: _answered(run, evaluations, hands, f"{at} of {len(runs)}")
        for at, (name, run) in enumerate(runs.items(), 1)
    }
    scored |= {gate.name: score_gate(gate, runs, evaluations) for gate in gates}
    _forget(earlier for earlier in place.glob(f"{EARLIER}*") if not (earlier / "reviews").exists())
    return summary_of({name: scored[name] for name in models})


def _found_anywhere(evaluation: Evaluation, base: Path) -> Evaluation:
    """Its files are found from any run directory."""
    return moved_task(evaluation, lambda path: str((base / path).resolve()))


def _opened(
    order: Order, place: Path, models: Mapping[str, WiredModel], evaluations: tuple[Evaluation, ...]
) -> dict[str, RunDir]:
    """A run directory for each, with rows that its tasks can read."""
    assert isinstance(order.stage, EvaluateStage)
    runs = {
        name: open_at(asked, place / name)
        for name, asked in _asked(order, order.stage.data, models, evaluations).items()
    }
    for name, run in runs.items():
        require_readable(run, [request_of(run, name, one) for one in evaluations])
    return runs


def _asked(
    order: Order, data: Questions, models: Mapping[str, WiredModel], evaluations: tuple[Evaluation, ...]
) -> dict[str, Asked]:
    asks, base = _asks(order, data, evaluations), Path(order.base)
    bare = _loaded_alike([wired_bare(name, wired, asks) for name, wired in models.items()])
    prepared = {
        one.name: prepare_questions(data.test, asks.model_copy(update={"model": one.model}), one.tokenizer, base=base)
        for one in bare
    }
    return {
        one.name: Asked(
            bare=one, prepared=prepared[one.name], base=base, device=order.device, precision=order.precision
        )
        for one in bare
    }


def _asks(order: Order, data: Questions, evaluations: tuple[Evaluation, ...]) -> Spec:
    spec = plain_spec(Data(train=(Source(path=""),), **data.how()), seed=order.seed, evaluations=evaluations)
    return spec.model_copy(update={"data": without_rows(spec.data, form_base=Path(order.base))})


def _loaded_alike(models: Sequence[Bare]) -> list[Bare]:
    """A model that others here lay an adapter over is loaded in the same bits as theirs: what it scores then differs by the adapter alone."""
    return [
        one if one.weights is not None else replace(one, tuning=_tuning_over(one.model, models) or one.tuning)
        for one in models
    ]


def _tuning_over(model: Model, models: Iterable[Bare]) -> Tuning | None:
    found = [one.tuning for one in models if one.weights is not None and one.model == model]
    bits = {tuning.base_bits for tuning in found if isinstance(tuning, Lora)}
    return found[0] if len(bits) == 1 and bits != {None} else None


def _forget(folders: Iterable[Path]) -> None:
    for folder in list(folders):
        shutil.rmtree(folder)


def _answered(run: RunDir, evaluations: Sequence[Evaluation], hands: _Hands, which: str) -> dict[str, EvalResult]:
    rooms, name = Rooms(run=run, prompt_tokens=prompt_tokens_of(run), prompt_grids=prompt_grids_of(run)), run.path.name
    found = {}
    with run_lock(run.lock), recorded(run):
        for one in evaluations:
            hands.say(f"{name} ({which}): {one.label}")
            request = request_of(run, name, one)
            found[one.label] = evaluate(run, request, base=run.path, lock=hands.lock, tick=hands.tick, size=rooms.find)
    return found
