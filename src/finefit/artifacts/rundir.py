"""Where everything in a run directory lies. Paths are computed, never stored: the directory can be copied anywhere."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from finefit.errors import DataError, RunError
from finefit.facts.files import read_file

_STAGE = re.compile(r"(\d+)-.+")


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
    def begun(self) -> Path:
        """What a stage of a pipeline stands on, written when its work begins."""
        return self.path / "begun.json"

    @property
    def done(self) -> Path:
        """Of a stage of a pipeline: written last."""
        return self.path / "done.json"

    @property
    def order(self) -> Path:
        return self.path / "order.json"

    @property
    def made(self) -> Path:
        return self.path / "made.json"

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def answers(self) -> Path:
        """What a model has said while a stage is made, as it came: a stage that is killed does not ask for it again."""
        return self.path / "answers.jsonl"

    @property
    def making_log(self) -> Path:
        return self.path / "logs" / "making.log"

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
    def routing(self) -> Path:
        """Where the tokens of each data set go, of a mixture whose routers were trained; drawn in `routing_map`."""
        return self.path / "routing.json"

    @property
    def routing_map(self) -> Path:
        return self.path / "routing.svg"

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
            raise DataError(
                f"the prepared rows {path.name} are missing or have changed since this run began",
                "start again with --new",
            )
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
        """Those that are there, in their order; what else lies among them is somebody else's."""
        folder = self.path / "stages"
        found = (
            [(int(m[1]), p) for p in folder.iterdir() if (m := _STAGE.fullmatch(p.name)) and p.is_dir()]
            if folder.is_dir()
            else []
        )
        return [StageDir(path) for _, path in sorted(found)]

    @property
    def state(self) -> Path:
        """Where the stages of a pipeline stand."""
        return self.path / "stages.json"

    def making(self, number: int, name: str) -> StageDir:
        """Where a stage is made before it is whole, out of sight."""
        return StageDir(self.path / "stages" / f".making-{number}-{name}")


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
        return [
            path
            for path in (self.items, *sorted(self.folder.glob(f"{escape(self.checkpoint)}.items.*.jsonl")))
            if path.exists()
        ]

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


def is_pipeline(path: Path) -> bool:
    """Whether this is the directory of a pipeline's run, whose stages are runs or folders of their own."""
    return is_run(path) and (path / "stages.json").is_file()


def open_run(path: Path) -> RunDir:
    """One run: its directory, or `runs/medical-1/sft` for a stage of a pipeline."""
    found = find_run(path)
    if not is_run(found) and (
        inside := [
            str(path / one.name) for one in sorted(found.glob("*/")) if is_run(one) and not one.name.startswith(".")
        ]
    ):
        raise RunError(
            f"{path} is no run directory: it holds {len(inside)} of them, and one is meant here",
            f"name one of them: {', '.join(inside)}",
        )
    if not is_run(found):
        raise RunError(f"{path} is no run directory: it holds no run.json", "runs lie under runs/<name>-<n>")
    if is_pipeline(found):
        names = ", ".join(str(path / name) for name in _places(found))
        raise RunError(f"{path} is a pipeline, and one run is meant here", f"name one of its stages: {names}")
    return RunDir(found)


def find_run(path: Path) -> Path:
    """The folder that is meant: `runs/medical-1/sft` is that of a stage, wherever it lies, and `runs/medical-1/scores/base` one within it. Any other
    path is itself."""
    if path.exists() and not (
        is_pipeline(path.parent) and path.name in _places(path.parent)
    ):  # a stage may be called `logs`
        return path
    for parent in path.parents:
        if is_pipeline(parent):
            stage, *rest = path.relative_to(parent).parts
            places = _places(parent)
            if stage not in places:
                raise RunError(f"{parent} has no stage {stage}", f"its stages are {', '.join(places)}")
            return Path(os.path.normpath(parent / places[stage])).joinpath(*rest)
    return path


def _places(pipeline: Path) -> dict[str, str]:
    """Of the stages, by their names, relative to the run directory."""
    try:
        return {
            str(stage["name"]): str(stage["place"])
            for stage in json.loads((pipeline / "stages.json").read_bytes())["stages"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{pipeline / 'stages.json'} cannot be read: {error}", "start again with --new") from None


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
