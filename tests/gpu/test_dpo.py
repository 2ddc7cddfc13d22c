"""DPO on a card: it starts at ln 2 in every precision, wherever the reference comes from, and learns."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from finefit.artifacts.atomic import read_lines, read_steps
from tests.faults import make_job
from tests.pairs import DPO, make_pairs_project

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CARD = DPO.replace("device: cpu", "device: cuda").replace(", dropout: 0.1", "")
REFERENCES = {"from the model": CARD, "kept": CARD.replace("kind: dpo}", "kind: dpo, reference: cached}")}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_run_starts_at_ln_2_and_learns_what_is_preferred(reference: str, precision: str, tmp_path: Path) -> None:
    where = make_job(
        tmp_path, spec=REFERENCES[reference] + f"precision: {precision}\n", project=make_pairs_project
    ).fresh()
    done = subprocess.run(
        [sys.executable, "-m", "finefit.train.worker", str(where.path)], stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0
    lines = list(read_lines(where.metrics))
    (at_start,) = (line for line in lines if line.get("event") == "dpo_start")
    assert abs(at_start["found"] - math.log(2)) <= (1e-6 if reference == "from the model" else at_start["allowed"])
    assert len(read_steps(where.metrics)) == 18
    validated = [line for line in lines if line.get("event") == "validated"]
    assert validated[-1]["validation_loss"] < validated[0]["validation_loss"] < math.log(2)
    assert validated[-1]["margin"] > validated[0]["margin"] > 0
