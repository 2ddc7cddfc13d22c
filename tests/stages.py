"""Pipelines of scripts, which cost no training, and of tiny trainings."""

from pathlib import Path

from tests.conftest import make_project

ADD = """\
import sys
from pathlib import Path

source, target, *words = sys.argv[1:]
with open(Path(__file__).parent / "calls.txt", "a") as calls:
    calls.write(Path(target).name + "\\n")
Path(target).write_text(Path(source).read_text() + "".join(word + "\\n" for word in words))
"""
SCRIPTS = """\
name: chain
device: cpu
stages:
  first:
    kind: python
    script: add.py
    inputs: {raw: raw.txt}
    arguments: ["{raw}", "{output}/first.txt", one]
    outputs: [first.txt]
  second:
    kind: python
    script: add.py
    inputs: {before: stage://first/first.txt}
    arguments: ["{before}", "{output}/second.txt", two]
    outputs: [second.txt]
  third:
    kind: python
    script: add.py
    inputs: {before: stage://second/second.txt}
    arguments: ["{before}", "{output}/third.txt", three]
    outputs: [third.txt]
"""
TRAININGS = """\
name: chain
seed: 7
device: cpu
defaults:
  data: {train: [{path: train.jsonl}], test: {path: test.jsonl}}
  optimizer: {lr: 1e-2}
  global_batch: 4
  levers: {micro_batch: 2}
  save: {every: 2 steps, keep: 2}
stages:
  whole:
    kind: train
    model: {kind: folder, path: model}
    tuning: {kind: full}
  sft:
    kind: train
    model: {kind: stage, name: whole}
    tuning: {kind: lora, rank: 4, alpha: 8}
    schedule: {epochs: 10}
  more:
    kind: train
    model: {kind: stage, name: sft}
    tuning: {kind: lora, rank: 4, alpha: 8}
"""


def make_scripts(folder: Path, *, spec: str = SCRIPTS) -> Path:
    """A pipeline of three scripts, each adding a word to what the one before has written; every call is noted in calls.txt."""
    folder.mkdir(parents=True)
    (folder / "raw.txt").write_text("raw\n", encoding="utf-8")
    (folder / "add.py").write_text(ADD, encoding="utf-8")
    path = folder / "spec.yaml"
    path.write_text(spec, encoding="utf-8")
    return path


def make_trainings(folder: Path) -> Path:
    """Whole weights, then an adapter over them, then that adapter trained on."""
    return make_project(folder, spec=TRAININGS, rows=12)


def calls(folder: Path) -> list[str]:
    """What the scripts have been called for, and forgotten."""
    path = folder / "calls.txt"
    found = path.read_text(encoding="utf-8").split() if path.exists() else []
    path.unlink(missing_ok=True)
    return [name.removesuffix(".txt") for name in found]
