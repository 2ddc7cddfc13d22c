"""The twin of legal-200k as it ships, but for its model: ZeRO-2 in two processes on long rows, with a tiny random model
instead of the embedded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import EvalResult, Stage, StageResult
from finefit.recipes import copy_recipe, find_recipe
from tests.conftest import make_model_folder

pytest.importorskip("deepspeed")
BUILT = Path.home() / ".cache" / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
"""Where torch keeps what DeepSpeed compiles at its first use on a CPU: a minute of compiling is not repeated by every
test run."""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "finefit", "run", "spec.yaml", *arguments],
        cwd=folder,
        env=os.environ
        | {"OMP_NUM_THREADS": "2", "NO_COLOR": "1", "COLUMNS": "200", "TORCH_EXTENSIONS_DIR": str(BUILT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.slow
def test_the_twin_trains_with_zero_2_in_two_processes_on_long_rows(tmp_path: Path) -> None:
    folder = tmp_path / "twin"
    copy_recipe(find_recipe("legal-200k-twin"), folder)
    make_model_folder(folder / "model")
    spec = folder / "spec.yaml"
    spec.write_text(
        spec.read_text().replace("model: {kind: embedded, name: smollm2-135m}", "model: {kind: folder, path: model}")
    )
    answer = run(folder, "--set", "data.max_tokens=12000")  # the tiny tokenizer has a token for each byte
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = RunDir(folder / "runs" / "legal-200k-twin-1")
    assert read_record(found.run, Run).status == "finished"
    where = stage_of(found)
    stage = read_record(where.stage, Stage)
    assert (stage.engine.kind, stage.num_rows) == ("deepspeed", 12)
    steps = read_steps(where.metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert sum(line["rows"] for line in steps) == 12  # each file is seen once, by one of the ranks
    assert min(line["tokens"] / line["rows"] for line in steps) > 4_000
    (environment,) = (line for line in read_lines(where.metrics) if line.get("event") == "environment")
    assert [rank["rank"] for rank in environment["ranks"]] == [0, 1]
    assert read_record(where.result, StageResult).failure is None
    assert (where.checkpoints / "final" / "adapter_model.safetensors").is_file()
    scored = [read_record(paths.result, EvalResult) for paths in where.evaluations()]
    assert sorted(result.checkpoint for result in scored) == ["base", "checkpoint-2", "checkpoint-3"]
    for result in scored:
        assert (result.task, result.n, list(result.metrics)) == (
            "rouge",
            3,
            ["rouge1", "rouge2", "rougeL", "rougeLsum"],
        )
        assert min(len(item.prompt) for item in result.items) > 4_000  # whole files
    (written,) = where.path.glob("*deepspeed*.json")
    assert json.loads(written.read_text())["zero_optimization"]["stage"] == 2
