"""What each verb prints, against its reviewed file in `tests/snapshots/` (`python -m tests.renew_snapshots`)."""

from pathlib import Path

import pytest
from rich.console import Console

from finefit.preflight.machine import check_machine
from finefit.report.check import show_machine
from finefit.review.items import RunTarget, review_set_of_runs
from finefit.review.session import open_session
from tests.cli.conftest import Finefit
from tests.cli.test_doctor import HEALTHY, _with_versions
from tests.cli.test_plan import SHAPE
from tests.reviews import make_items
from tests.reviews import make_run as make_reviewed_run
from tests.runs import make_run
from tests.snapshots import Transcript

MEASURED = {
    r"\d+:\d\d since": "<time> since",
    r"\d[\d.,]* tok/s": "<speed> tok/s",
    r"\d+\.\d% of the time": "<share> of the time",
    r"\d+\.\d\d GiB": "<memory> GiB",
    r"\b\d\.\d{4}\b": "#.####",
    r"perplexity [\d.]+": "perplexity <value>",
    r"on [^\n]*(?:cpu|CPU|Processor|processor)[^\n]*": "on <machine>",
}
"""What differs between machines and runs."""


def _record(transcript: Transcript, finefit: Finefit, *commands: str) -> None:
    for command in commands:
        arguments = command.split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "100")
            answer = finefit(*arguments)
        transcript.add(arguments, answer.code, answer.out + answer.err)


def test_plan(tmp_path: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape.yaml").write_text(SHAPE, encoding="utf-8")
    transcript = Transcript(folder=tmp_path)
    _record(transcript, finefit, "plan shape.yaml --card A100-80GB", "plan shape.yaml --card 2GiB --set seeds=3")
    transcript.check("plan")


def test_check(folder: Path, finefit: Finefit) -> None:
    transcript = Transcript(
        folder=folder, hidden={r"memory .*": "memory      <memory>", r"[\d.]+ GiB are free": "<disk> are free"}
    )
    _record(
        transcript, finefit, "check spec.yaml", "check spec.yaml --set schedule.warmup=0.99 --set schedule.epochs=1"
    )
    transcript.check("check")


def test_doctor(tmp_path: Path) -> None:
    transcript = Transcript(folder=tmp_path)
    for found in (HEALTHY, _with_versions(torch=None, deepspeed=None)):
        console = Console(width=100, force_terminal=False)
        with console.capture() as captured:
            show_machine(found, check_machine(found), console)
        transcript.add(["doctor"], 0 if found is HEALTHY else 1, captured.get())
    transcript.check("doctor")


def test_compare(tmp_path: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hits, misses = (1, 0, 1, 1, 0, 1, 1, 0, 1, 1), (1, 0, 0, 1, 0, 0, 1, 1, 1, 0)
    make_run(tmp_path / "a-1", results={"checkpoint-6": hits})
    make_run(tmp_path / "b-1", results={"checkpoint-6": misses}, overrides=["tuning.rank=16", "name=other"])
    transcript = Transcript(folder=tmp_path)
    _record(transcript, finefit, "compare a-1 b-1 --show 1", "compare a-1 a-1", "compare a-1 b-1 --task rouge")
    transcript.check("compare")


def test_review(tmp_path: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a-1", "b-1"):
        make_reviewed_run(tmp_path / name, {"checkpoint-8": make_items(6, name)}, final="checkpoint-8")
    review_set = review_set_of_runs([RunTarget.parse("a-1"), RunTarget.parse("b-1")])
    with open_session(review_set, Path("a-1"), seed=1) as session:
        for preferred in ("a-1", "a-1", "b-1"):
            item = session.turn("ann").item
            assert item is not None
            first = item.answers[0].startswith(preferred)
            session.judge("ann", item.handle, "1" if first else "2", reasons=[["fabricated"], []])
    transcript = Transcript(folder=tmp_path)
    _record(
        transcript,
        finefit,
        "review a-1 b-1 --results",
        "review a-1 b-1 --export all.csv --export-pairs pairs.jsonl",
        "review a-1 b-1 c-1",
        "review a-1 --answers all.csv",
    )
    transcript.check("review")


def test_run(finished: Path, finefit: Finefit) -> None:
    """The commands of a finished run; `run.txt` also shows what a changed spec and a mistake give."""
    transcript = Transcript(folder=finished, hidden=MEASURED)
    _record(transcript, finefit, "run spec.yaml", "run spec.yaml --set seeds=3", "run missing.yaml")
    transcript.check("run")


def test_eval(finished: Path, finefit: Finefit) -> None:
    transcript = Transcript(folder=finished, hidden=MEASURED)
    _record(transcript, finefit, "eval runs/tiny-1", "eval runs/tiny-1 --checkpoint 7", "eval runs/tiny-1 --by speed")
    transcript.check("eval")


def test_watch(finished: Path, finefit: Finefit) -> None:
    transcript = Transcript(folder=finished, hidden=MEASURED)
    _record(transcript, finefit, "watch runs/tiny-1", "watch runs/tiny-9")
    transcript.check("watch")


def test_recipes(tmp_path: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transcript = Transcript(folder=tmp_path)
    _record(transcript, finefit, "recipes", "recipes demo --to my-demo", "recipes nothing")
    transcript.check("recipes")


def test_mistakes(folder: Path, finefit: Finefit) -> None:
    """What a newcomer mistypes, verb by verb."""
    (folder / "other.yaml").write_text("base_model: a/b\nsequence_len: 2048\nlora_r: 8\n", encoding="utf-8")
    transcript = Transcript(folder=folder)
    _record(
        transcript,
        finefit,
        "check train.jsonl",
        "check other.yaml",
        "check sepc.yaml",
        "check /dev/zero",
        "check spec.yaml --set optimizer.lr=2",
        "check spec.yaml --set learning_rate=1e-4",
        "plan spec.yaml --card MI300X",
        "run spec.yaml --set data.train.0.path=trian.jsonl",
        "eval spec.yaml",
        "eval runs/tiny-1",
    )
    transcript.check("mistakes")
