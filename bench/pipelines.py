"""What the stages of a pipeline have made and scored that are done, from its run directory.

finefit recipes medical-sft-dpo-twin --to twin && finefit run twin/spec.yaml python -m bench.pipelines
runs/medical-sft-dpo-twin-1 bench/results/medical_twin.json

finefit recipes rmoe-twin --to twin && finefit run twin/spec.yaml python -m bench.pipelines runs/rmoe-twin-1
bench/results/rmoe_twin.json

    finefit run bench/pubmedqa/spec.yaml                                # with the first 300 records of PubMedQA beside it: see there
    python -m bench.pipelines runs/pubmedqa-1 bench/results/pubmedqa.json
"""  # noqa: E501

import json
import os
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finefit.artifacts.records import FinishedStage, PipelineState, read_record
from finefit.artifacts.rundir import RunDir


def collected(run: RunDir) -> dict[str, Any]:
    places = {stage.name: run.path / stage.place for stage in read_record(run.state, PipelineState).stages}
    records = {name: place / "done.json" for name, place in places.items() if (place / "done.json").exists()}
    done = {name: read_record(record, FinishedStage) for name, record in records.items()}
    ended = max(record.stat().st_mtime for record in records.values())
    return {
        "pipeline": run.path.name,
        "machine": f"{os.cpu_count()} CPU cores",
        "date": datetime.fromtimestamp(ended, UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("finefit", "torch", "transformers", "peft")},
        "minutes": {name: round(stage.seconds / 60, 1) for name, stage in done.items()},
        "pairs": {name: stage.summary["splits"] for name, stage in done.items() if stage.kind == "make_pairs"},
        "scores": {name: _metrics(stage.summary["scores"]) for name, stage in done.items() if stage.kind == "evaluate"},
        "differences": {name: stage.summary["tasks"] for name, stage in done.items() if stage.kind == "compare"},
    }


def _metrics(scores: dict[str, Any]) -> dict[str, Any]:
    return {
        model: {task: {"n": found["n"], **found["metrics"]} for task, found in tasks.items()}
        for model, tasks in scores.items()
    }


def main(run: Path, out: Path) -> None:
    out.write_text(json.dumps(collected(RunDir(run)), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
