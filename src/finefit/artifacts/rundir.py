"""Where everything in a run directory lies. Paths are computed, never stored: the directory can be copied anywhere."""

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from finefit.errors import DataError, RunError
from finefit.facts.files import read_file


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
    def eval_stage(self) -> Path:
        """In the place of `stage`, where nothing is trained."""
        return self.path / "eval.json"

    @property
    def evals(self) -> Path:
        """Scores as they came in, which trackers are fed from; the records themselves lie under evals/."""
        return self.path / "evals.jsonl"

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

    def metrics_of(self, rank: int) -> Path:
        """Those of the run are the first rank's; what another one has seen stands beside its log."""
        return self.metrics if rank == 0 else self._logs / f"rank-{rank}.metrics.jsonl"

    def memory_of(self, rank: int) -> Path:
        return self.memory if rank == 0 else self._logs / f"rank-{rank}.memory.jsonl"

    def result_of(self, rank: int) -> Path:
        """Of the other ranks only failures are written."""
        return self.result if rank == 0 else self._logs / f"rank-{rank}.failure.json"

    @property
    def _logs(self) -> Path:
        return self.run / "logs"

    @property
    def reference(self) -> Path:
        """The starting model's log-probabilities, where they are computed before the first step."""
        return self.path / "reference.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def prepared(self, name: str) -> Path:
        return self.path / "data" / name

    def verified(self, name: str, sha256: Mapping[str, str]) -> Path:
        """A prepared file, as it was when the run began."""
        path = self.prepared(name)
        if not path.exists() or read_file(path, self.path).sha256 != sha256[name]:
            raise DataError(f"the prepared rows {path.name} are missing or have changed since this run began", "start again with --new")
        return path

    def evaluation(self, task: str, checkpoint: str, limit: int | None = None) -> "EvalPaths":
        return EvalPaths(self.path / "evals" / task, checkpoint, limit)

    def evaluations(self) -> list["EvalPaths"]:
        """Those that have been asked for, in the order in which they were asked for last."""
        requests = sorted((self.path / "evals").glob("*/*.request.json"), key=lambda p: p.stat().st_mtime_ns)
        return [_eval_paths(path) for path in requests]


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
    def check(self) -> Path:
        return self.path / "check.json"

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def log(self) -> Path:
        return self.path / "logs" / "run.log"

    def log_of(self, rank: int) -> Path:
        return self.log if rank == 0 else self.log.with_name(f"rank-{rank}.log")

    def stage(self, number: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{number}-{name}")

    def stages(self) -> list[StageDir]:
        return [StageDir(p) for p in sorted((self.path / "stages").iterdir(), key=lambda p: int(p.name.split("-")[0]))]


@dataclass(frozen=True, slots=True)
class EvalPaths:
    """`evals/<task>/<checkpoint>.json` and what belongs to it. A sample has a result of its own beside that of all items, and shares the answers."""

    folder: Path
    checkpoint: str
    limit: int | None

    @property
    def _stem(self) -> str:
        return self.checkpoint if self.limit is None else f"{self.checkpoint}.sample-{self.limit}"

    @property
    def request(self) -> Path:
        return self.folder / f"{self._stem}.request.json"

    @property
    def result(self) -> Path:
        return self.folder / f"{self._stem}.json"

    @property
    def failure(self) -> Path:
        return self.folder / f"{self._stem}.failure.json"

    @property
    def items(self) -> Path:
        return self.folder / f"{self.checkpoint}.items.jsonl"

    @property
    def warnings(self) -> Path:
        """What befell the processes that answered, line by line."""
        return self.folder / f"{self.checkpoint}.warnings.jsonl"

    @property
    def verdicts(self) -> Path:
        """A judge's, line by line."""
        return self.folder / f"{self.checkpoint}.verdicts.jsonl"

    def items_of(self, part: int) -> Path:
        """Of one of the processes that share the items; the first writes where a single one would."""
        return self.items if part == 0 else self.folder / f"{self.checkpoint}.items.{part}.jsonl"

    def failure_of(self, part: int) -> Path:
        return self.failure if part == 0 else self.folder / f"{self._stem}.part-{part}.failure.json"

    def answered(self) -> list[Path]:
        """Every file of items that there is, however many processes wrote them."""
        return [path for path in (self.items, *sorted(self.folder.glob(f"{escape(self.checkpoint)}.items.*.jsonl"))) if path.exists()]

    def _files(self) -> tuple[Path, ...]:
        """The request last: what a kill leaves half done is found by it."""
        return (self.result, self.failure, *self.answered(), self.warnings, self.verdicts, self.request)

    def forget(self) -> None:
        for path in self._files():
            path.unlink(missing_ok=True)

    @property
    def earlier(self) -> Path:
        """What was asked otherwise, out of sight until all items are scored anew."""
        return self.folder / f".earlier-{self.checkpoint}"

    def set_aside(self) -> None:
        self._move(self._files())

    def set_result_aside(self) -> None:
        """The answers stay."""
        self._move((self.result,))

    def _move(self, files: Iterable[Path]) -> None:
        place = self.earlier / str(time.time_ns())
        place.mkdir(parents=True)
        for path in files:
            if path.exists():
                path.rename(place / path.name)


def _eval_paths(request: Path) -> EvalPaths:
    checkpoint, sample, limit = request.name.removesuffix(".request.json").partition(".sample-")
    return EvalPaths(request.parent, checkpoint, int(limit) if sample else None)


def is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def open_run(path: Path) -> RunDir:
    if not is_run(path):
        raise RunError(f"{path} is no run directory: it holds no run.json", "runs lie under runs/<name>-<n>")
    return RunDir(path)


def _numbered(root: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"^{re.escape(name)}-(\d+)$")
    return sorted((int(m[1]), p) for p in root.iterdir() if (m := pattern.match(p.name))) if root.is_dir() else []


def runs_named(root: Path, name: str) -> list[RunDir]:
    """Runs of one name, oldest first."""
    return [RunDir(path) for _, path in _numbered(root, name) if is_run(path)]


def newest_with_digest(root: Path, name: str, digest: str) -> RunDir | None:
    return next((r for r in reversed(runs_named(root, name)) if _digest_of(r) == digest), None)


def _digest_of(run: RunDir) -> str | None:
    """The digest alone: a run of another version of finefit, or a damaged one, is another run, and shall not stand in the way of this one."""
    try:
        return str(json.loads(run.run.read_bytes())["digest"])
    except (ValueError, KeyError, TypeError):
        return None


def next_number(root: Path, name: str) -> int:
    """After every entry of that name, be it a run or not."""
    return max((number for number, _ in _numbered(root, name)), default=0) + 1
