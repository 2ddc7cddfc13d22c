"""Records of evaluations that tests write by hand."""

from typing import Any

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.stage_records import EvalItem, EvalRequest, EvalResult, Score, Subject
from finefit.spec.models import FolderModel, Full
from finefit.spec.schema import Evaluation
from finefit.stats.metrics import Metric, rate

SUBJECT = Subject(
    model=FolderModel(kind="folder", path="model"),
    model_name="model",
    model_fingerprint="f" * 64,
    tuning=Full(kind="full"),
    device="cpu",
    precision="fp32",
    threads=1,
    seed=7,
    template="chat",
    template_sha256="e" * 64,
    items_sha256="d" * 64,
)
LIMIT = EvalBatchLimit(rows=4, tokens=4096)
ALL_FIELDS = rate("all_fields")


def make_request(checkpoint: str, *, task: Any = "json_match", **more: Any) -> EvalRequest:
    return EvalRequest(
        checkpoint=checkpoint,
        evaluation=Evaluation.model_validate({"task": task, **more}),
        subject=SUBJECT,
        batch_limit=LIMIT,
    )


def make_item(at: int, **scores: float) -> EvalItem:
    item = {"prompt": f"prompt {at}", "reference": "[7]", "answer": f"[{at}]", "extracted": None, "failure": None}
    return EvalItem(item=at, key=f"{at:016x}", place=f"test.jsonl:{at + 1}", counts=scores, scores=scores, **item)  # type: ignore[arg-type]


def make_result(
    checkpoint: str, items: tuple[EvalItem, ...] = (), *, task: str = "json_match", **more: Any
) -> EvalResult:
    metric: Metric = ALL_FIELDS
    defaults: dict[str, Any] = {
        "n": len(items) or 5,
        "available": len(items) or 5,
        "coverage": 1.0,
        "metrics": {"all_fields": Score(value=0.5, low=0.1, high=0.9)},
        "definitions": (metric,),
        "signature": {},
        "seconds": 1.0,
    }
    return EvalResult(task=task, checkpoint=checkpoint, items=items, **defaults | more)
