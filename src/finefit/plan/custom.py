"""What a plan may choose for a custom model: micro_batch and recompute. All other levers act on parts of a language
model."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.custom.inputs import meta_twin
from finefit.errors import SpecError
from finefit.model.resolve_model import CustomSource, custom_source_in
from finefit.plan.search import ASKED, SearchSpace
from finefit.spec.models import Lora
from finefit.spec.schema import DeepSpeed, Dpo, Evaluation, Fsdp2, Router, Spec
from finefit.spec.schema import LeverSettings as AskedLevers
from finefit.spec.tasks import Hallucination, LmEval, Perplexity, TruthfulQa

_ROWS = 8
"""Answered at a time by default: the memory of `generate` is not rehearsed, and a batch that is too large is cut."""
_NOT_KNOWN = "acts on parts of a transformers language model"
_FREE = "a custom model chooses its own kernels"
_OFF = {
    "keep_attention": False,
    "loss_chunk": "none",
    "offload": "none",
    "mlp_tiles": 1,
    "kernels": "torch",
    "compile": False,
    "update": "after",
}


def require_custom(spec: Spec, config: dict[str, Any]) -> None:
    """Reports all settings that a custom model does not support, at once. Nothing for any other model."""
    found = custom_source_in(config)
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
    if isinstance(spec.engine, Fsdp2 | DeepSpeed):
        yield f"engine.kind {spec.engine.kind} shards only known layers", "set engine.kind: ddp"
    if isinstance(spec.tuning, Lora) and spec.tuning.base_bits is not None:
        yield "tuning.base_bits packs weights while transformers loads them", "leave tuning.base_bits out"
    if spec.data.packing == "best_fit":
        yield "data.packing best_fit does not apply to inputs that the model makes itself", "set data.packing: none"


def _odd_levers(spec: Spec) -> Iterable[tuple[str, str]]:
    asked = AskedLevers() if spec.levers == "auto" else spec.levers
    for key, off in _OFF.items():
        value = getattr(asked, key)
        if value not in ("auto", off):
            yield f"levers.{key} {value} {_NOT_KNOWN}", f"leave levers.{key} out; micro_batch and recompute are there"


def _odd_tasks(evaluations: Iterable[Evaluation], found: CustomSource) -> Iterable[tuple[str, str]]:
    generates = meta_twin(found).generates
    for evaluation in evaluations:
        if isinstance(evaluation.task, Hallucination | Perplexity | TruthfulQa | LmEval):
            problem = "asks for likelihoods of given answers, which only a transformers language model computes"
            remedy = "evaluate a task that reads an answer; the validation loss is your model's own"
            yield f"evaluate {evaluation.label} {problem}", remedy
        elif not generates:
            problem = f"needs answers, and {found.file.name} has no generate"
            yield f"evaluate {evaluation.label} {problem}", "give the model a generate, or remove evaluate"


def narrowed(space: SearchSpace, found: CustomSource) -> SearchSpace:
    """To what the levers do with a custom model. There are few candidates: where layers do not repeat, each is
    rehearsed whole."""
    layers = len(meta_twin(found).layers())
    recompute = space.recompute if "recompute" in space.fixed else tuple(dict.fromkeys((0, layers // 2, layers)))
    return replace(
        space,
        recompute=recompute,
        keep_attention=(False,),
        loss_chunk=(None,),
        offload=(False,),
        mlp_tiles=(1,),
        kernels="torch",
        kernels_reason=ASKED if "kernels" in space.fixed else _FREE,
    )


def custom_eval_limits(
    evaluations: Iterable[Evaluation], *, prompt_tokens: int, devices: int
) -> dict[str, EvalBatchLimit]:
    """By label."""
    found = {}
    for evaluation in evaluations:
        rows = _ROWS if evaluation.batch == "auto" else evaluation.batch
        tokens = rows * (prompt_tokens + evaluation.max_new_tokens)
        found[evaluation.label] = EvalBatchLimit(rows=rows, tokens=tokens, devices=devices)
    return found
