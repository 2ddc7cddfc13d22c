"""Run directories that something has gone wrong with, and every verb that reads one, in the test's own process."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.reading import MAX_RECORD_BYTES
from finefit.artifacts.records import PipelineState, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir
from finefit.cli import FAULT, main
from finefit.review.items import RunTarget, review_set_of_runs
from finefit.review.session import open_session
from finefit.web.linked_pages import LinkedPages
from finefit.web.runs import Runs
from finefit.web.watch import watch_app
from tests.clients import client_of
from tests.conftest import SPEC, make_project, write_jsonl
from tests.forks import start_server
from tests.pairs import DPO, make_pairs_project
from tests.runs import spoil

RUN = Path("runs/tiny-1")
COPY = Path("copies/tiny-1")
"""A second run, for what compares two: nothing happens to it."""
READERS = (
    ("watch", RUN, "--json"),
    ("watch", RUN),
    ("compare", RUN, "--json"),
    ("review", RUN, "--results", "--json"),
    ("run", RUN, "--dry-run", "--json"),
    ("run", "spec.yaml", "--dry-run", "--json"),
    ("report", RUN, "--out", "report.md", "--json"),
    ("chat", RUN, "--max-new-tokens", "4", "--json"),
)
"""They change nothing. A chat is told `SAID`."""
WRITERS = (("eval", RUN, "--json"), ("run", RUN, "--json"))
LESS_USED = (
    ("compare", RUN, COPY, "--json"),
    ("compare", COPY, RUN, "--html", "page.html"),
    ("review", RUN, "--export", "verdicts.csv", "--json"),
    ("review", RUN, COPY, "--results"),
    ("report", RUN, "--out", "report.html", "--json"),
    ("run", "spec.yaml", "--json"),
)
"""The last trains again where the run is no longer known for what it was."""
STAGES = Path("runs/chain-1")
"""The same of a pipeline."""
STAGED = """\
name: chain
seed: 7
device: cpu
defaults: {optimizer: {lr: 1e-2}, global_batch: 4, levers: {micro_batch: 2}, save: {every: 2 steps, keep: 2}}
stages:
  sft:
    kind: train
    model: {kind: folder, path: model}
    tuning: {kind: lora, rank: 4, alpha: 8}
    data: {train: [{path: train.jsonl}]}
    schedule: {steps: 4}
  pairs:
    kind: make_pairs
    method:
      kind: sampled
      model: {kind: stage, name: sft}
      task: {kind: python, path: task.py}
      samples: 2
      max_new_tokens: 8
      temperature: 1.0
    train: [{path: asked.jsonl}]
  scores:
    kind: evaluate
    models: {base: {kind: folder, path: model}, sft: {kind: stage, name: sft}}
    data: {test: {path: test.jsonl}}
    evaluate: [{task: json_match, max_new_tokens: 8}]
"""
SCORER = """\
METRICS = {"length": "mean"}

def extract(answer):
    return answer

def score(found, reference):
    return {"length": len(set(found)) / 50}
"""
STAGE_READERS = (
    ("watch", STAGES, "--json"),
    ("run", STAGES, "--dry-run", "--json"),
    ("run", "spec.yaml", "--dry-run", "--json"),
    ("compare", STAGES / "scores", "--json"),
    ("review", STAGES / "scores/sft", "--results", "--json"),
    ("report", STAGES / "scores/sft", "--out", "report.md", "--json"),
    ("chat", STAGES / "sft", "--max-new-tokens", "4", "--json"),
)
_LONGEST_SECONDS = 400
_UNEQUAL = ("seconds", "peak_bytes", "loaded_bytes", "predicted_bytes", "wait_seconds", "waited_share", "at", "bytes")
"""Of two equal runs."""
EXPORT = ("export", RUN, "--to", "adapter", "--prompts", "1", "--out", "taken", "--json")
ASKED_OF_THE_PAGE = ("state", "series", "items?task=json_match&checkpoint=checkpoint-12", "plan", "log")
SAID = "add 3 and 4\n"


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def told(self) -> tuple[str, str]:
        """Problem and remedy of an error, as `--json` has them, or by lines: the remedy is the last."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(self.out)["error"]
            return found["problem"], found["remedy"]
        problem, _, remedy = self.err.rpartition("error: ")[2].strip().rpartition("\n")
        return problem, remedy

    @property
    def content(self) -> Any:
        """What it says, without the time and memory that it took."""
        try:
            return _without_costs(json.loads(self.out))
        except ValueError:
            return self.out


def _without_costs(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_costs(one) for key, one in value.items() if key not in _UNEQUAL}
    return [_without_costs(one) for one in value] if isinstance(value, list) else value


def finefit(*words: object) -> Answer:
    """A command that may neither hang nor end as a fault of ours."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"finefit {' '.join(map(str, words))} hangs")

    out, err = io.StringIO(), io.StringIO()
    said = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with _at_most(_LONGEST_SECONDS, hangs), pytest.MonkeyPatch.context() as patch, said[0], said[1]:
        patch.setattr(sys, "argv", ["finefit", *map(str, words)])
        patch.setattr(sys, "stdin", io.StringIO(SAID))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("COLUMNS", "200")
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    answer = Answer(code, out.getvalue(), err.getvalue())
    assert code != FAULT, f"finefit {' '.join(map(str, words))}:\n{answer.err}"
    assert "Traceback" not in answer.out + answer.err
    return answer


def look_at_page(run: Path) -> dict[str, tuple[int, Any]]:
    """What the page of a run, and the list of runs, are answered: status and content by what was asked. None of it may
    be a fault of ours."""
    told: dict[str, tuple[int, Any]] = {}
    for runs in (Runs(run.parent), Runs(run)):
        with LinkedPages("127.0.0.1") as pages, client_of(watch_app(runs, pages)) as client:
            for asked in ("/api/runs", *(f"/api/run/{run.name}/{one}" for one in ASKED_OF_THE_PAGE)):
                response = client.get(asked)
                assert response.status_code < 500, (asked, response.text)
                assert "Traceback" not in response.text
                told[asked] = (response.status_code, response.json())
    return told


@contextlib.contextmanager
def _at_most(seconds: float, hangs: Callable[..., None]) -> Iterator[None]:
    """The timer of the test that this one takes the place of goes on afterwards."""
    before, began = signal.signal(signal.SIGALRM, hangs), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.001), interval)


def make_finished(folder: Path) -> Path:
    """A project with its finished run, which is reviewed, too, and a copy of it."""
    make_project(folder, spec=SPEC.replace("keep: 2", "keep: 3"))
    with contextlib.chdir(folder):
        assert finefit("run", "spec.yaml", "--json").code == 0
        assert finefit("eval", RUN, "--json").code == 0
        with open_session(review_set_of_runs([RunTarget.parse(str(RUN))]), RUN, seed=1) as session:
            while (item := session.turn("ann").item) is not None:
                session.judge("ann", item.handle, "1")
        shutil.copytree(RUN, COPY, symlinks=True)
    return folder


def make_interrupted(folder: Path) -> Path:
    """A run without evaluations, as a kill leaves it after the last but one checkpoint."""
    make_project(folder, spec=re.sub(r"evaluate: .*\n", "", SPEC).replace("keep: 2", "keep: 3"))
    with contextlib.chdir(folder):
        assert finefit("run", "spec.yaml", "--json").code == 0
    _interrupt(RunDir(folder / RUN))
    return folder


def make_pairs_interrupted(folder: Path) -> Path:
    """The same of a DPO run that trains all weights, so its reference is kept in a file."""
    tuning = DPO.replace("{kind: lora, rank: 4, alpha: 8, dropout: 0.1}", "{kind: full}")
    make_pairs_project(folder, spec=tuning.replace("epochs: 3", "epochs: 1"))
    with contextlib.chdir(folder):
        assert finefit("run", "spec.yaml", "--json").code == 0
    _interrupt(RunDir(folder / RUN))
    return folder


def _interrupt(run: RunDir) -> None:
    (where,) = run.stages()
    *_, newest = sorted(where.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shutil.rmtree(newest)
    for path in (where.result, *where.checkpoints.iterdir()):
        if path.is_symlink() or path.is_file():
            path.unlink()
    _be_running(run)


def _be_running(run: RunDir) -> None:
    record = read_record(run.run, Run)
    write_record(run.run, Run(**{**record.__dict__, "status": "running"}))


def make_staged(folder: Path) -> Path:
    """A project with a finished pipeline: a training, answers that are sampled from it, and scores."""
    start_server()
    make_project(folder, spec=STAGED)
    (folder / "task.py").write_text(SCORER)
    write_jsonl(folder / "asked.jsonl", [{"prompt": f"say {at}", "answer": "a e"} for at in range(3)])
    with contextlib.chdir(folder):
        assert finefit("run", "spec.yaml", "--json").code == 0
    return folder


def interrupt_training(staged: Path, folder: Path) -> Path:
    """As a kill leaves it in the middle of the first stage."""
    shutil.copytree(staged, folder, symlinks=True)
    run = RunDir(folder / STAGES)
    training, *others = run.stages()
    training.done.unlink()
    _interrupt(RunDir(training.path))
    _wait(run, {"sft": "running", "pairs": "waiting", "scores": "waiting"})
    for where in others:
        shutil.rmtree(where.path)
    return folder


def interrupt_sampling(staged: Path, folder: Path) -> Path:
    """As a kill leaves it in the middle of the second stage, which has answers already."""
    shutil.copytree(staged, folder, symlinks=True)
    run = RunDir(folder / STAGES)
    _, pairs, scores = run.stages()
    staging = run.unfinished(2, "pairs")
    pairs.path.rename(staging.path)
    shutil.rmtree(staging.output)
    for path in (staging.done, staging.outcome):
        path.unlink()
    shutil.rmtree(scores.path)
    _wait(run, {"pairs": "running", "scores": "waiting"})
    return folder


def _wait(run: RunDir, statuses: dict[str, Any]) -> None:
    state = read_record(run.state, PipelineState)
    stages = tuple(replace(one, status=statuses.get(one.name, one.status)) for one in state.stages)
    write_record(run.state, replace(state, stages=stages))
    _be_running(run)


def weights_of(run: Path) -> str:
    """The digest of the final weights."""
    (where,) = RunDir(run).stages()
    (weights,) = (where.checkpoints / "final").glob("*model.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def has_started_over(run: Path) -> bool:
    """Whether the last process that trained began with the first step."""
    (where,) = RunDir(run).stages()
    events = [line.get("event") for line in read_lines(where.metrics)]
    return bool([event for event in events if event in ("started", "resumed")][-1] == "started")


def files_of(run: Path) -> list[Path]:
    """Relative to the run."""
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file() and not path.is_symlink())


def digests(folder: Path) -> dict[str, str]:
    """Of every file of every checkpoint."""
    found = (path for path in folder.rglob("checkpoints/checkpoint-*/**/*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _outside(path: Path) -> None:
    """A link to the same content elsewhere in the project."""
    other = next(folder for folder in path.parents if folder.name == "runs").parent / "outside"
    shutil.move(path, other)
    path.symlink_to(other)


def _newer(path: Path) -> None:
    try:
        spoil(path, version=99)
    except (ValueError, TypeError):  # no record with a version
        path.write_bytes(b'{"version": 99}\n')


def _sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, MAX_RECORD_BYTES + 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": _cut,
    "a folder": _replaced(Path.mkdir),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link outside": _outside,
    "a pipe": _replaced(os.mkfifo),
    "not UTF-8": lambda path: path.write_bytes(b'{"version": 1, "name": "caf\xe9"}\n'),
    "nested deeply": lambda path: path.write_bytes(b'{"a":' * 100_000 + b"\n"),
    "of another program": lambda path: path.write_bytes(b'{"hello": "world", "steps": [1, 2]}\n'),
    "of a newer version": _newer,
    "too large": _sparse,
}


@contextlib.contextmanager
def copied(project: Path, folder: Path) -> Iterator[Path]:
    """A copy to be damaged; the working directory."""
    shutil.copytree(project, folder, symlinks=True)
    try:
        with contextlib.chdir(folder):
            yield folder / RUN
    finally:
        shutil.rmtree(folder)


def commands(project: Path, folder: Path, verbs: Sequence[Sequence[object]]) -> dict[str, Answer]:
    """What each says where nothing is wrong."""
    with copied(project, folder):
        return {" ".join(map(str, words)): finefit(*words) for words in verbs}


def require_told(answer: Answer, file: Path, told: str) -> None:
    """An error of the user's names the file, or the checkpoint that it lies in, with a reason and a remedy. `file`:
    relative to its run, whose own name stands for what the run is known by."""
    assert answer.code in (1, 2, 3), told
    problem, remedy = answer.told
    names = {file.name, *(part for part in file.parts if part.startswith("checkpoint-"))}
    names |= {RUN.name} if file.name == "run.json" else set()
    names |= {"tokenizer"} if "tokenizer" in file.parts else set()
    names |= {file.name.partition(".")[0]} if "evals" in file.parts else set()  # the checkpoint that it scores
    assert any(name in problem + remedy for name in names), told
    assert len(problem.split()) > 2, told
    assert remedy, told


def require_kept(before: dict[str, str], after: dict[str, str], file: Path) -> None:
    """Every file of a checkpoint but the damaged one."""
    kept = {name: sha256 for name, sha256 in before.items() if name != str(file)}
    assert {name: after.get(name) for name in kept} == kept
