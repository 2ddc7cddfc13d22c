"""Where everything in a run directory lies. Paths are computed, never stored: the directory can be copied anywhere."""

import re
from dataclasses import dataclass
from pathlib import Path

from finefit.artifacts.records import Run, read_record
from finefit.errors import RunError


@dataclass(frozen=True, slots=True)
class StageDir:
    """`stages/<n>-<name>`: a worker's only argument."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    @property
    def stage(self) -> Path:
        return self.path / "stage.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def memory(self) -> Path:
        return self.path / "memory.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def prepared(self, name: str) -> Path:
        return self.path / "data" / name

    def eval_request(self, task: str, checkpoint: str) -> Path:
        return self.path / "evals" / task / f"{checkpoint}.request.json"

    def eval_items(self, task: str, checkpoint: str) -> Path:
        return self.path / "evals" / task / f"{checkpoint}.items.jsonl"

    def eval_result(self, task: str, checkpoint: str) -> Path:
        return self.path / "evals" / task / f"{checkpoint}.json"


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def spec_yaml(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def spec_json(self) -> Path:
        return self.path / "spec.json"

    @property
    def facts(self) -> Path:
        return self.path / "facts.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def log(self) -> Path:
        return self.path / "logs" / "run.log"

    def stage(self, number: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{number}-{name}")

    def stages(self) -> list[StageDir]:
        return [StageDir(p) for p in sorted((self.path / "stages").iterdir(), key=lambda p: int(p.name.split("-")[0]))]


def is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def open_run(path: Path) -> RunDir:
    if not is_run(path):
        raise RunError(f"{path} is no run directory: it holds no run.json", "runs lie under runs/<name>-<n>")
    return RunDir(path)


def runs_named(root: Path, name: str) -> list[RunDir]:
    """Runs of one name, oldest first."""
    pattern = re.compile(rf"^{re.escape(name)}-(\d+)$")
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := pattern.match(p.name)) and is_run(p)]
    return [RunDir(path) for _, path in sorted(found)]


def newest_with_digest(root: Path, name: str, digest: str) -> RunDir | None:
    return next((r for r in reversed(runs_named(root, name)) if read_record(r.run, Run).digest == digest), None)


def next_number(root: Path, name: str) -> int:
    taken = [int(r.path.name.rsplit("-", 1)[1]) for r in runs_named(root, name)]
    return max(taken, default=0) + 1
