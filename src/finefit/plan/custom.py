"""What a plan may do with a model of the user's own: rows at a time, and its layers computed again. All else acts on what a language model has."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from finefit.artifacts.forecasts import Room
from finefit.errors import SpecError
from finefit.model.custom_files import Written, written_in
from finefit.plan.search import ASKED, Freedom
from finefit.rehearse.custom import num_layers
from finefit.spec.models import Lora
from finefit.spec.schema import DeepSpeed, Dpo, Evaluation, FullyShard, Router, Spec
from finefit.spec.schema import Levers as AskedLevers
from finefit.spec.tasks import Hallucination, LmEval, Perplexity, TruthfulQa
from finefit.step.custom import twin_of

_ROWS = 8
"""Answered at a time where the spec does not say it: what `generate` takes is not rehearsed, and a batch that is too large is cut."""
_NOT_KNOWN = "acts on what a language model of transformers has"
_FREE = "what a model of your own does with it is its own matter"
_KEYS = ("keep_attention", "loss_chunk", "offload", "mlp_tiles", "kernels", "compile", "update")
_PLAIN = {
    "keep_attention": False,
    "loss_chunk": "none",
    "offload": "none",
    "mlp_tiles": 1,
    "kernels": "torch",
    "compile": False,
    "update": "after",
}


def require_own(spec: Spec, config: dict[str, Any]) -> None:
    """All that a spec asks of a model of the user's own and that cannot be had, at once. Nothing for any other model."""
    found = written_in(config)
    if found is None:
        return
    if odd := [*_odd_training(spec), *_odd_levers(spec), *_odd_tasks(spec.evaluate, found)]:
        problems, remedies = zip(*odd, strict=True)
        raise SpecError(
            "\n".join(f"model.kind custom: {problem}" for problem in problems), "\n".join(dict.fromkeys(remedies))
        )


def _odd_training(spec: Spec) -> Iterable[tuple[str, str]]:
    if isinstance(spec.objective, Dpo | Router):
        remedy = "set objective: {kind: sft}; the loss is your model's own"
        yield f"objective.kind {spec.objective.kind} is computed from a language model's logits", remedy
    if isinstance(spec.engine, FullyShard | DeepSpeed):
        yield f"engine.kind {spec.engine.kind} divides layers that it knows", "set engine.kind: ddp"
    if isinstance(spec.tuning, Lora) and spec.tuning.base_bits is not None:
        yield "tuning.base_bits packs weights while transformers loads them", "leave tuning.base_bits out"
    if spec.data.packing == "best_fit":
        yield "data.packing best_fit is not for inputs that the model makes itself", "set data.packing: none"


def _odd_levers(spec: Spec) -> Iterable[tuple[str, str]]:
    asked = AskedLevers() if spec.levers == "auto" else spec.levers
    for key in _KEYS:
        value = getattr(asked, key)
        if value not in ("auto", _PLAIN[key]):
            yield f"levers.{key} {value} {_NOT_KNOWN}", f"leave levers.{key} out; micro_batch and recompute are there"


def _odd_tasks(evaluations: Iterable[Evaluation], found: Written) -> Iterable[tuple[str, str]]:
    generates = twin_of(found).generates
    for evaluation in evaluations:
        if isinstance(evaluation.task, Hallucination | Perplexity | TruthfulQa | LmEval):
            remedy = "evaluate a task that reads an answer; the validation loss is your model's own"
            yield (
                f"evaluate {evaluation.label} asks how likely given answers are, which only a language model of transformers says",
                remedy,
            )
        elif not generates:
            yield (
                f"evaluate {evaluation.label} needs answers, and {found.file.name} has no generate",
                "give the model a generate, or remove evaluate",
            )


def narrowed(freedom: Freedom, found: Written) -> Freedom:
    """To what `step.custom.pull_own` carries out. There are few candidates: where layers do not repeat, each is rehearsed whole."""
    layers = num_layers(found)
    recompute = freedom.recompute if "recompute" in freedom.fixed else tuple(dict.fromkeys((0, layers // 2, layers)))
    return replace(
        freedom,
        recompute=recompute,
        keep_attention=(False,),
        loss_chunk=(None,),
        offload=(False,),
        mlp_tiles=(1,),
        kernels="torch",
        kernels_reason=ASKED if "kernels" in freedom.fixed else _FREE,
    )


def own_rooms(evaluations: Iterable[Evaluation], *, prompt_tokens: int, devices: int) -> dict[str, Room]:
    """By label."""
    found = {}
    for evaluation in evaluations:
        rows = _ROWS if evaluation.batch == "auto" else evaluation.batch
        found[evaluation.label] = Room(
            rows=rows, tokens=rows * (prompt_tokens + evaluation.max_new_tokens), devices=devices
        )
    return found
