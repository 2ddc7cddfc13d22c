"""Where everything in a run directory is. Paths are computed, never stored, so the directory can be copied anywhere."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from finefit.artifacts.atomic import publish
from finefit.artifacts.reading import RESTORE, has_content, is_there, read_document
from finefit.errors import DataError, RunError

RUN_VERSION = 2  # of the records in a run directory; run.json names it
_NUMBERED = re.compile(r"(\d+)-(.+)")


class _Below:
    """The path of a file or folder below a directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: "StageDir | RunDir", _: object) -> Path:
        return owner.path / self._name


@dataclass(frozen=True, slots=True)
class StageDir:
    """`stages/<n>-<name>`: a worker's only argument."""

    path: Path

    stage = _Below("stage.json")
    """The request of a training worker."""
    eval_stage = _Below("eval.json")
    """Takes the place of `stage` if nothing is trained."""
    result = _Below("result.json")
    ledger = _Below("ledger.jsonl")
    metrics = _Below("metrics.jsonl")
    memory = _Below("memory.jsonl")
    evals = _Below("evals.jsonl")
    """Scores in the order of their arrival, for trackers; the records themselves are under evals/."""
    checkpoints = _Below("checkpoints")
    tokenizer = _Below("tokenizer")
    reference = _Below("reference.safetensors")
    """The starting model's log-probabilities, if they are computed before the first step."""
    routing = _Below("routing.json")
    """The experts to which a mixture routes the tokens of each data set after its routers were trained; drawn in
    `routing_map`."""
    routing_map = _Below("routing.svg")
    begun = _Below("begun.json")
    """What a stage of a pipeline depends on, written when it starts."""
    done = _Below("done.json")
    """Written last, for a stage of a pipeline."""
    job = _Below("job.json")
    """The request of the worker of a stage without training."""
    outcome = _Below("outcome.json")
    output = _Below("output")
    answers = _Below("answers.jsonl")
    """A model's answers as they arrive, so that a killed stage does not request them again."""
    requests = _Below("requests")
    """Files that ask a training for something after its current step: `save`, `validate`."""
    log = _Below("logs/stage.log")
    """The log of a stage that does not train; a training uses the log of its run."""

    @property
    def run(self) -> Path:
        return self.path.parent.parent

    def metrics_of(self, rank: int) -> Path:
        """The first rank's metrics are those of the run; the others' are beside their logs."""
        return self.metrics if rank == 0 else self.run / "logs" / f"rank-{rank}.metrics.jsonl"

    def memory_of(self, rank: int) -> Path:
        return self.memory if rank == 0 else self.run / "logs" / f"rank-{rank}.memory.jsonl"

    def result_of(self, rank: int) -> Path:
        """Ranks other than the first write only failures."""
        return self.result if rank == 0 else self.run / "logs" / f"rank-{rank}.failure.json"

    def prepared(self, name: str) -> Path:
        return self.path / "data" / name

    def verified(self, name: str, sha256: Mapping[str, str]) -> Path:
        """A prepared file, verified to be unchanged since the run began."""
        path = self.prepared(name)
        if not has_content(path, sha256[name]):
            problem = f"the prepared rows {path.name} are missing or have changed since this run began"
            raise DataError(problem, "start again with --new")
        return path

    def evaluation(self, task: str, checkpoint: str, limit: int | None = None) -> "EvalPaths":
        return EvalPaths(self.path / "evals" / task, checkpoint, limit)

    def evaluations(self) -> list["EvalPaths"]:
        """All requested evaluations, the latest request last."""
        requests = sorted((self.path / "evals").glob("*/*.request.json"), key=lambda p: p.lstat().st_mtime_ns)
        named = ((p.parent, p.name.removesuffix(".request.json").partition(".sample-")) for p in requests)
        return [EvalPaths(task, name, int(limit) if sample else None) for task, (name, sample, limit) in named]


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    spec_yaml = _Below("spec.yaml")
    spec_json = _Below("spec.json")
    facts = _Below("facts.json")
    plan = _Below("plan.json")
    check = _Below("check.json")
    run = _Below("run.json")
    state = _Below("stages.json")
    """The states of a pipeline's stages."""
    lock = _Below("run.lock")
    log = _Below("logs/run.log")

    def log_of(self, rank: int) -> Path:
        return self.log if rank == 0 else self.log.with_name(f"rank-{rank}.log")

    def stage(self, number: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{number}-{name}")

    def stages(self) -> list[StageDir]:
        """Existing stages in their order; other entries are ignored."""
        entries = (self.path / "stages").glob("*-*/")
        found = [(int(m[1]), p) for p in entries if (m := _NUMBERED.fullmatch(p.name))]
        return [StageDir(path) for _, path in sorted(found)]

    def unfinished(self, number: int, name: str) -> StageDir:
        """The hidden folder in which a stage is made."""
        return StageDir(self.path / "stages" / f".unfinished-{number}-{name}")


class _Beside:
    """A file that belongs to an evaluation's result. With `by_sample`, each sample has its own; otherwise all samples
    share one."""

    def __init__(self, suffix: str, *, by_sample: bool) -> None:
        self._suffix, self._by_sample = suffix, by_sample

    def __get__(self, owner: "EvalPaths", _: object) -> Path:
        return owner.beside(self._suffix, by_sample=self._by_sample)


@dataclass(frozen=True, slots=True)
class EvalPaths:
    """`evals/<task>/<checkpoint>.json` and the files that belong to it. A sample has its own result and shares the
    answers."""

    folder: Path
    checkpoint: str
    limit: int | None

    request = _Beside(".request.json", by_sample=True)
    result = _Beside(".json", by_sample=True)
    failure = _Beside(".failure.json", by_sample=True)
    items = _Beside(".items.jsonl", by_sample=False)
    warnings = _Beside(".warnings.jsonl", by_sample=False)
    """Warnings of the processes that answered, line by line."""
    verdicts = _Beside(".verdicts.jsonl", by_sample=False)
    """A judge's verdicts, line by line."""

    def beside(self, suffix: str, *, by_sample: bool) -> Path:
        sample = f".sample-{self.limit}" if by_sample and self.limit is not None else ""
        return self.folder / f"{self.checkpoint}{sample}{suffix}"

    def items_of(self, part: int) -> Path:
        """The items of one of the processes that share them; the first writes where a single process would."""
        return self.items if part == 0 else self.beside(f".items.{part}.jsonl", by_sample=False)

    def failure_of(self, part: int) -> Path:
        return self.failure if part == 0 else self.beside(f".part-{part}.failure.json", by_sample=True)

    def answered(self) -> list[Path]:
        """Every existing file of items, whatever the number of processes."""
        paths = (self.items, *sorted(self.folder.glob(f"{escape(self.checkpoint)}.items.*.jsonl")))
        return [path for path in paths if path.exists()]

    @property
    def earlier(self) -> Path:
        """Hidden results of other settings, until all items are scored again."""
        return self.folder / f".earlier-{self.checkpoint}"

    def set_aside(self, *, with_answers: bool = True) -> None:
        files = [self.result]
        if with_answers:  # the request last: what a kill leaves behind is found by it
            files += [self.failure, *self.answered(), self.warnings, self.verdicts, self.request]
        place = self.earlier / str(time.time_ns())
        place.mkdir(parents=True)
        for path in files:
            if path.exists():
                path.rename(place / path.name)


def is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def is_pipeline(path: Path) -> bool:
    """Whether this is the directory of a run with several stages, which are runs or folders themselves."""
    return is_run(path) and is_there(path / "stages.json")


def open_run(path: Path) -> RunDir:
    """One run: its directory, or `runs/medical-1/sft` for a stage of a pipeline."""
    found = open_any_run(path)
    if is_pipeline(found.path):
        names = ", ".join(str(path / name) for name in _places(found.path))
        raise RunError(f"{path} is a pipeline, but one run is needed here", f"name one of its stages: {names}")
    return found


def names_checkpoint(target: str) -> bool:
    """Whether it is `RUN:CHECKPOINT`; the name of a folder may itself contain a colon."""
    return ":" in target and not Path(target).is_dir()


def open_target(target: str, checkpoint: str | None = None) -> tuple[RunDir, str | None]:
    """Opens `RUN` or `RUN:CHECKPOINT`; `checkpoint` is the default if the target names none."""
    path, _, named = target.rpartition(":") if names_checkpoint(target) else (target, "", checkpoint)
    return open_run(Path(path)), named


def open_any_run(path: Path) -> RunDir:
    """A run of one training, of an evaluation or of a pipeline."""
    found = find_run(path)
    if not is_run(found):
        if inside := [str(path / one.name) for one in _runs_in(found)]:
            problem = f"{path} is not a run directory: it holds {len(inside)} of them, and exactly one is needed"
            raise RunError(problem, f"name one of them: {', '.join(inside)}")
        raise RunError(
            f"{path} is not a run directory: it holds no run.json", "run directories are called runs/<name>-<n>"
        )
    if (other := other_version(found)) is not None:  # its records would be misread, one after the other
        problem = f"{found} is a run directory of {other}; this finefit reads version {RUN_VERSION}"
        remedy = "finish it with the finefit that made it, or start again from its spec file with this one"
        raise RunError(problem, remedy)
    return RunDir(found)


def other_version(run: Path) -> str | None:
    """The version of a run directory that this finefit cannot read, with the finefit that made it."""
    try:
        record = read_document(run / "run.json")
        version, finefit = int(record["version"]), str(record["finefit"])
    except (RunError, ValueError, KeyError, TypeError):
        return None  # reading the record says what is wrong with it
    return None if version == RUN_VERSION else f"version {version}, made by finefit {finefit}"


def find_run(path: Path) -> Path:
    """The folder that a path means: `runs/medical-1/sft` is the stage's folder, wherever it is, and
    `runs/medical-1/scores/base` one within it. Any other path is returned as it is."""
    is_stage = is_pipeline(path.parent) and path.name in _places(path.parent)  # a stage may be called `logs`
    if path.exists() and not is_stage:
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
    """The stages' folders by name, relative to the run directory."""
    path = pipeline / "stages.json"
    try:
        return {str(stage["name"]): str(stage["place"]) for stage in read_document(path)["stages"]}
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {type(error).__name__} {error}", RESTORE) from None


def _numbered(root: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"^{re.escape(name)}-(\d+)$")
    return sorted((int(m[1]), p) for p in root.iterdir() if (m := pattern.match(p.name))) if root.is_dir() else []


def runs_named(root: Path, name: str) -> list[RunDir]:
    """Runs of one name, oldest first."""
    return [RunDir(path) for _, path in _numbered(root, name) if is_run(path)]


def newest_with_digest(root: Path, name: str, digest: str) -> RunDir | None:
    """The newest run with this digest. A damaged run or one of another version counts as a different run and does not
    block this one."""
    for run in reversed(runs_named(root, name)):
        with suppress(RunError, KeyError, TypeError):
            record = read_document(run.run)
            if record["version"] == RUN_VERSION and str(record["digest"]) == digest:
                return run
    return None


def next_number(root: Path, name: str) -> int:
    """One more than the highest number in use, whether that entry is a run or not."""
    return max((number for number, _ in _numbered(root, name)), default=0) + 1


def models_of(place: Path) -> list[Path]:
    """The runs of an evaluation stage's models, in the order of its spec once it is done; empty for other folders."""
    if is_run(place):
        return []
    found = {path.name: path for path in _runs_in(place)}
    done, order = StageDir(place).done, []
    if is_there(done):
        with suppress(KeyError, TypeError):  # of another version
            order = [str(name) for name in read_document(done)["summary"]["models"]]
    return [found[name] for name in dict.fromkeys((*order, *found)) if name in found]


def _runs_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*/")) if is_run(path) and not path.name.startswith(".")]


def evaluation_of(run: Path) -> Path | None:
    """The folder of the evaluation stage that this run of one model belongs to."""
    stage = run.resolve().parent
    return stage if stage.parent.name == "stages" and is_pipeline(stage.parent.parent) else None


def stage_holding(path: Path) -> str | None:
    """The name of the pipeline stage that contains a path."""
    return next(filter(None, map(_stage_name, (path.resolve(), *path.resolve().parents))), None)


def _stage_name(place: Path) -> str | None:
    """None unless this is the folder of a pipeline's stage."""
    if place.parent.name != "stages" or not is_pipeline(place.parent.parent):
        return None
    named = _NUMBERED.fullmatch(place.name)
    return named[2] if named else None


def shown_parts(path: Path) -> tuple[str, ...]:
    """The parts of a path with stages by name: `runs/medical-1/stages/3-dpo` ends in `medical-1`, `dpo`."""
    found: list[str] = []
    for place in (*reversed(path.resolve().parents), path.resolve()):
        name = _stage_name(place)
        if name is not None:
            found.pop()  # `stages`
        found.append(name or place.name or place.anchor)
    return tuple(found)


def short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """The shortest names that differ."""
    parts = {path: shown_parts(path) for path in dict.fromkeys(paths)}
    depth = 1
    while len({found[-depth:] for found in parts.values()}) < len({path.resolve() for path in parts}):
        depth += 1
    return {path: "/".join(found[-depth:]) for path, found in parts.items()}


def put_in_place(staging: Path, runs: Path, name: str) -> Path:
    """Renames a finished directory to runs/<name>-<n>, with the next free number."""
    while True:
        final = runs / f"{name}-{next_number(runs, name)}"
        try:
            return publish(staging, final)
        except OSError:
            if not final.exists():  # otherwise another process took the number
                raise


def stage_of(run: RunDir) -> StageDir:
    """The only stage of a run that is not a pipeline."""
    match run.stages():
        case [where]:
            return where
        case found:
            there = ", ".join(where.path.name for where in found) or "none"
            problem = f"{run.path / 'stages'} should hold one stage and holds {there}: it was changed by hand"
            raise RunError(problem, "start again with --new")
