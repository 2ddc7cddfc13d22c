"""Every event of a run in words, as reviewed in `tests/snapshots/events.txt`."""

from pathlib import Path
from typing import Any

from finefit.report.live import describe_event
from tests.snapshots import Transcript

EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "resumed", "step": 3, "checkpoint": "checkpoint-3"},
    {"event": "rejected", "note": "checkpoint-6 is skipped: damaged"},
    {"event": "not_finite", "step": 4, "found": "loss nan"},
    {"event": "rolled_back", "step": 3},
    {"event": "left_out", "step": 4},
    {"event": "validated", "step": 3, "validation_loss": 5.5},
    {"event": "validated", "step": 3, "validation_loss": 1.5, "perplexity": 4.4817},
    {"event": "validated", "step": 3, "validation_loss": 0.5, "rewards_chosen": 0.2, "accuracy": 0.75, "margin": 1.25},
    {"event": "validation_not_finite", "step": 3, "found": "nan"},
    {
        "event": "oom_recovered",
        "step": 4,
        "before": {"micro_batch": 4, "offload": False},
        "after": {"micro_batch": 2, "offload": False},
        "found": "CUDA",
    },
    {
        "event": "validation_oom_recovered",
        "step": 4,
        "before": {"micro_batch": 1, "loss_chunk": None},
        "after": {"micro_batch": 1, "loss_chunk": 1024},
        "found": "CUDA",
    },
    {
        "event": "levers_timed",
        "step": 0,
        "before": {"micro_batch": 1, "recompute": 21, "offload": False},
        "after": {"micro_batch": 4, "recompute": 28, "offload": False},
        "rows": 4,
        "candidates": [{"seconds": 1.5}, {"seconds": 0.9}, {"seconds": None}],
    },
    {"event": "validation_left_out", "step": 4, "found": "CUDA"},
    {"event": "spike", "step": 4, "found": 9.5, "usual": 1.25},
    {"event": "stalled", "seconds": 612.3, "allowed_seconds": 600.0, "since": "step 4"},
    {"event": "tracker_failed", "tracker": "mlflow", "found": "mlflow is not installed: pip install mlflow"},
    {
        "event": "tracker_failed",
        "tracker": "wandb",
        "lost_lines": 1200,
        "found": "its process ended with 1",
        "log": "logs/tracker-wandb.log",
    },
    {"event": "tracker_failed", "tracker": "wandb", "lost_lines": 2, "found": "", "log": "logs/tracker-wandb.log"},
    {
        "event": "audited",
        "step": 2,
        "tensors": 9,
        "reached": 8,
        "zero": ["a", "b", "c", "d", "e"],
        "idle": ["x.experts.{0,3}.up"],
    },
    {"event": "audited", "step": 2, "tensors": 9, "reached": 9, "faint": ["a", "b", "c"]},
    {"event": "loss_scale", "step": 4, "scale": 32768.0},
    {"event": "dpo_start", "found": 0.6931471824645996, "allowed": 1e-05},
    {"event": "dpo_start", "found": "nan", "allowed": 1e-05},
    {"event": "measured", "step": 1, "measured_bytes": 11 << 30, "predicted_bytes": 10 << 30, "error": -0.0909},
    {"event": "worst_does_not_fit", "step": 1},
    {
        "event": "routed",
        "step": 4,
        "held_out": True,
        "experts": ["base", "law", "code", "health"],
        "first": {"rows.jsonl": [0.1, 0.5, 0.15, 0.25], "more.jsonl": [1.0, 0.0, 0.0, 0.0]},
    },
    {"event": "amended", "step": 3, "changes": ["save.keep: 2 -> 3"], "note": ""},
)


def test_every_event_is_described(tmp_path: Path) -> None:
    transcript = Transcript(folder=tmp_path)
    for line in EVENTS:
        words = describe_event(line)
        assert words is not None, line
        transcript.note(line["event"], words)
    transcript.check("events")
