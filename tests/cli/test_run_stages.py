"""`finefit run` of a pipeline, as a user meets it."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from finefit.artifacts.records import PipelineState, read_record
from finefit.artifacts.rundir import RunDir, find_run, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.run.cache_inputs import tree_digest
from finefit.spec.models import FolderModel, Lora
from tests.cli.conftest import Finefit, Finished, process, started
from tests.conftest import make_model_folder
from tests.pipelines import calls, make_scripts, make_trainings

SLOW = """
import time
Path(target).with_name("begun.txt").touch()
while not (Path(__file__).parent / "go").exists():
    time.sleep(0.05)
"""
DIES_AT_THE_SECOND = """
import os
die = Path(__file__).parent / "die"
if "two" in words and die.exists():
    die.unlink()
    os.kill(os.getpid(), 9)
"""
WAIT_SECONDS = 280.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline of scripts; the working directory."""
    spec = make_scripts(tmp_path / "project")
    monkeypatch.chdir(spec.parent)
    return spec.parent


def _until(happened: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.01)


def _make_slow(folder: Path) -> None:
    """Every script waits until it may go on."""
    script = folder / "add.py"
    script.write_text(script.read_text() + SLOW)


def _statuses(folder: Path) -> list[str]:
    return [state.status for state in read_record(RunDir(folder / "runs/chain-1").state, PipelineState).stages]


def test_a_dry_run_tells_the_graph_and_starts_nothing(folder: Path, finefit: Finefit) -> None:
    answer = finefit("run", "spec.yaml", "--dry-run")
    assert answer.code == 0
    rows = [line.split(maxsplit=3) for line in answer.out.splitlines()[2:5]]
    assert [row[:3] for row in rows] == [
        ["first", "python", "-"],
        ["second", "python", "first"],
        ["third", "python", "second"],
    ]
    assert [row[3].split(maxsplit=2)[2].strip() for row in rows] == [
        "not made yet",
        "because first runs",
        "because second runs",
    ]
    assert not (folder / "runs").exists()


def test_a_run_is_told_stage_by_stage_and_the_second_has_nothing_to_do(folder: Path, finefit: Finefit) -> None:
    first = finefit("run", "spec.yaml")
    assert first.code == 0
    assert "stage 2/3  second (python): not made yet" in first.out
    assert "  second.txt: 1 files, 12 bytes" in first.out
    assert "memory in its processes: before 0.00 GiB, peak 0." in first.out
    assert calls(folder) == ["first", "second", "third"]
    places = [line.split()[1] for line in first.out.splitlines() if line.startswith(("first  ", "second  "))][-2:]
    assert [sorted(path.name for path in Path(place).iterdir()) for place in places] == [["first.txt"], ["second.txt"]]
    again = finefit("run", "spec.yaml")
    assert "runs/chain-1 is already finished; --new starts another run" in again.out
    assert "is already finished" in finefit("run", "runs/chain-1").out
    document = finefit("run", "spec.yaml", "--dry-run", "--json").document
    assert document["run"] == "runs/chain-1"
    assert [(stage["stage"], stage["needs"], stage["action"]) for stage in document["stages"]] == [
        ("first", [], "done"),
        ("second", ["first"], "done"),
        ("third", ["second"], "done"),
    ]
    forced = finefit("run", "spec.yaml", "--from", "second", "--json").document
    assert forced["status"] == "finished"
    assert [stage["why"] for stage in forced["stages"]] == ["nothing has changed", "requested", "requested"]
    assert calls(folder) == ["second", "third"]
    assert finefit("run", "spec.yaml", "--only", "third", "--force", "third").code == 0
    assert finefit("run", "spec.yaml", "--force", "all").code == 0
    assert calls(folder) == ["third", "first", "second", "third"]


@pytest.mark.parametrize(
    ("option", "name"),
    [("--from", "fourth"), ("--only", "fourth"), ("--force", "fourth"), ("--from", "all"), ("--only", "all")],
)
def test_a_stage_that_is_not_there_is_told_with_those_that_are(
    folder: Path, finefit: Finefit, option: str, name: str
) -> None:
    answer = finefit("run", "spec.yaml", option, name)
    assert (answer.code, answer.err) == (2, f"error: chain has no stage {name}\nits stages are first, second, third\n")
    assert not (folder / "runs").exists()


def test_one_stage_alone_is_refused_before_a_run_appears(folder: Path, finefit: Finefit) -> None:
    answer = finefit("run", "spec.yaml", "--only", "third")
    assert answer.code == 2
    assert "stage third depends on first, second, whose output for the current spec does not exist" in answer.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "first"), "--from first selects several stages, but --only third selects one"),
        (("--force", "first"), "--force first repeats another stage than the one that --only third runs"),
    ],
)
def test_one_stage_alone_does_not_go_with_others(
    folder: Path, finefit: Finefit, words: tuple[str, str], told: str
) -> None:
    assert finefit("run", "spec.yaml").code == 0
    calls(folder)
    for target in ("spec.yaml", "runs/chain-1"):
        answer = finefit("run", target, *words, "--only", "third")
        assert answer.code == 2
        assert told in answer.err
    assert (calls(folder), _statuses(folder)) == ([], ["done"] * 3)


def test_a_run_and_a_dry_run_say_the_same_of_what_was_taken_away(folder: Path, finefit: Finefit) -> None:
    finefit("run", "spec.yaml")
    calls(folder)
    (folder / "runs/chain-1/stages/2-second/output/second.txt").unlink()
    document = finefit("run", "spec.yaml", "--dry-run", "--json").document
    assert [stage["action"] for stage in document["stages"]] == ["done", "run", "run"]
    assert finefit("run", "spec.yaml").code == 0
    assert calls(folder) == ["second"]


def test_a_run_and_a_dry_run_say_the_same_of_a_command_that_was_killed(folder: Path, finefit: Finefit) -> None:
    (folder / "add.py").write_text((folder / "add.py").read_text() + DIES_AT_THE_SECOND)
    assert finefit("run", "spec.yaml").code == 0
    (folder / "die").touch()
    assert finefit("run", "spec.yaml", "--from", "first").code == 3
    calls(folder)
    for target in ("spec.yaml", "runs/chain-1"):
        same = finefit("run", target, "--from", "first", "--dry-run", "--json").document
        assert [stage["action"] for stage in same["stages"]] == ["done", "run", "run"]
        other = finefit("run", target, "--force", "first", "--dry-run", "--json").document
        assert (other["stages"][0]["action"], other["stages"][0]["why"]) == ("run", "requested")
    assert finefit("run", "spec.yaml", "--from", "first").code == 0
    assert calls(folder) == ["second", "third"]


@pytest.mark.usefixtures("folder")
def test_one_stage_alone_in_a_new_run_shows_where_those_lie_that_it_stands_on(finefit: Finefit) -> None:
    assert finefit("run", "spec.yaml").code == 0
    change = 'stages.third.arguments=["{before}", "{output}/third.txt", "3"]'
    answer = finefit("run", "spec.yaml", "--only", "third", "--set", change)
    assert answer.code == 0
    assert "stage first (python) is reused: made by chain-1" in answer.out
    document = finefit("watch", "runs/chain-2", "--json").document
    assert [(stage["status"], stage["place"]) for stage in document["stages"]] == [
        ("done", "runs/chain-1/stages/1-first/output"),
        ("done", "runs/chain-1/stages/2-second/output"),
        ("done", "runs/chain-2/stages/3-third/output"),
    ]
    assert all(Path(stage["place"]).is_dir() for stage in document["stages"])
    assert find_run(Path("runs/chain-2/second/output")) == Path("runs/chain-1/stages/2-second/output")
    assert document["status"] == "finished"


SCORED = """\
  scores: {kind: evaluate, models: {a: {kind: folder, path: m}, b: {kind: folder, path: m}}, data: {test: {path: t.jsonl}}, evaluate: [{task: rouge}]}
"""  # noqa: E501


def test_what_is_next_stands_on_what_is_done(folder: Path, finefit: Finefit) -> None:
    """Scores that are yet to come cannot be compared; the run goes on by its directory."""
    (folder / "spec.yaml").write_text((folder / "spec.yaml").read_text(encoding="utf-8") + SCORED, encoding="utf-8")
    (folder / "t.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    make_model_folder(folder / "m")
    answer = finefit("run", "spec.yaml", "--only", "first")
    assert answer.code == 0, answer.err
    assert [line.split(maxsplit=1)[-1] for line in answer.out.splitlines() if "finefit " in line] == [
        "finefit run runs/chain-1"
    ]


def test_a_failed_stage_ends_with_its_own_code_and_place(folder: Path, finefit: Finefit) -> None:
    script = folder / "add.py"
    script.write_text("raise OSError('nothing works')\n")
    answer = finefit("run", "spec.yaml")
    assert answer.code == 2
    assert answer.err.startswith("error: stage first: add.py (line 1): OSError: nothing works\n")
    assert _statuses(folder) == ["failed", "waiting", "waiting"]


@pytest.mark.usefixtures("folder")
def test_ranks_from_outside_are_refused(finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    answer = finefit("run", "spec.yaml")
    assert answer.code == 2
    assert "spec.yaml has stages, but this process is rank 0 of 2, started from outside" in answer.err


def test_words_of_stages_have_no_meaning_for_one_training(project: Path, finefit: Finefit) -> None:
    answer = finefit("run", project, "--from", "sft")
    assert answer.code == 2
    assert "tiny is one training" in answer.err


def test_a_pipeline_goes_on_as_it_began(folder: Path, finefit: Finefit) -> None:
    finefit("run", "spec.yaml")
    answer = finefit("run", "runs/chain-1", "--set", "seed=2")
    assert answer.code == 2
    assert "it does not accept --set" in answer.err
    (folder / "raw.txt").write_text("other\n")
    changed = finefit("run", "runs/chain-1")
    assert changed.code == 2
    assert "first.inputs.raw (../../raw.txt): " in changed.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGKILL, -9)])
def test_a_stopped_pipeline_leaves_no_process_and_goes_on_at_its_stage(
    folder: Path, finefit: Finefit, number: signal.Signals, code: int
) -> None:
    _make_slow(folder)
    with started("run", "spec.yaml", cwd=folder) as child:
        making = folder / "runs/chain-1/stages/.unfinished-1-first"
        _until(lambda: (making / "output/begun.txt").exists())
        (worker,) = psutil.Process(child.pid).children()
        child.send_signal(number)
        assert child.wait(60) == code
    _until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    assert _statuses(folder) == ["stopped" if code == 3 else "running", "waiting", "waiting"]
    assert finefit("watch", "runs/chain-1", "--json").document["stages"][0]["status"] == "stopped"
    (folder / "go").touch()
    calls(folder)
    again = finefit("run", "runs/chain-1", "--json")
    assert (again.code, again.document["status"]) == (0, "finished")
    assert calls(folder) == ["first", "second", "third"]
    assert (folder / "runs/chain-1/stages/3-third/output/third.txt").read_text() == "raw\none\ntwo\nthree\n"


@pytest.mark.slow
def test_a_detached_pipeline_can_be_watched_to_its_end(folder: Path, finefit: Finefit) -> None:
    _make_slow(folder)
    detached = process("run", "spec.yaml", "--detach", "--json", cwd=folder)
    assert detached.code == 0
    now = finefit("watch", "runs/chain-1", "--json").document
    assert (now["status"], now["pid"], now["kind"]) == ("running", detached.document["pid"], "pipeline")
    refused = finefit("run", "spec.yaml")
    assert refused.code == 2
    assert f"already being worked on by process {detached.document['pid']}" in refused.err
    (folder / "go").touch()
    shown = finefit("watch", "runs/chain-1").out
    assert "stage third (python) is done: not made yet" in shown
    assert "runs/chain-1 is finished" in shown
    assert calls(folder) == ["first", "second", "third"]


# trainings


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`finefit run` of three trainings, each going on from the one before; not to be changed."""
    folder = make_trainings(tmp_path_factory.mktemp("trained") / "project").parent
    return Finished(folder, process("run", "spec.yaml", "--json", cwd=folder))


def _weights(folder: Path) -> dict[str, str]:
    found = (folder / "runs/chain-1/stages").glob("*/stages/*/checkpoints/final/*.safetensors")
    return {str(path.relative_to(folder)): tree_digest(path) for path in found}


@pytest.mark.slow
def test_trainings_go_on_from_one_another(trained: Finished) -> None:
    assert (trained.answer.code, trained.answer.document["status"]) == (0, "finished")
    runs = [RunDir(trained.folder / f"runs/chain-1/stages/{place}") for place in ("1-whole", "2-sft", "3-more")]
    whole, sft, more = (read_record(stage_of(run).stage, Stage) for run in runs)
    first, second = (stage_of(run).checkpoints / "final" for run in runs[:2])
    assert whole.tuning.kind == "full"
    assert isinstance(sft.model, FolderModel)
    assert isinstance(more.model, FolderModel)
    assert isinstance(more.tuning, Lora)
    assert more.tuning.adapter is not None
    assert (runs[1].path / sft.model.path).samefile(first)
    assert (runs[2].path / more.model.path).samefile(first)
    assert (runs[2].path / more.tuning.adapter).samefile(second)
    assert len(_weights(trained.folder)) == len({*_weights(trained.folder).values()})


@pytest.mark.slow
def test_what_a_training_held_is_recorded(trained: Finished) -> None:
    for stage in trained.answer.document["stages"]:
        memory = stage["memory"]
        assert memory["before_bytes"] == memory["after_bytes"] == 0
        assert 0 < memory["loaded_bytes"] <= memory["peak_bytes"]
    plan = json.loads((trained.folder / "runs/chain-1/plan.json").read_text())
    assert list(plan["forecasts"]) == ["whole", "sft", "more"]


@pytest.mark.slow
def test_a_stage_is_a_run_of_its_own(trained: Finished, finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.folder)
    assert finefit("watch", "runs/chain-1/sft", "--json").document["status"] == "finished"
    refused = finefit("run", "runs/chain-1/sft", "--set", "schedule.epochs=3")
    assert refused.code == 2
    assert "is a stage of chain-1, and --set would make it a different stage" in refused.err


@pytest.mark.slow
def test_a_pipeline_killed_in_a_training_ends_bit_for_bit_as_one_that_nobody_killed(
    trained: Finished, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(trained.folder, folder, ignore=shutil.ignore_patterns("runs"))
    run = folder / "runs/chain-1/stages"
    with started("run", "spec.yaml", cwd=folder) as child:
        _until(lambda: (run / "2-sft/stages/1-sft/checkpoints/checkpoint-2").exists() or child.poll() is not None)
        child.kill()
    assert not (run / "2-sft/done.json").exists()
    before = (run / "1-whole/done.json").stat().st_mtime_ns
    again = process("run", "spec.yaml", "--json", cwd=folder)
    assert (again.code, [stage["status"] for stage in again.document["stages"]]) == (0, ["done"] * 3)
    assert again.document["stages"][1]["why"] == "begun and not finished: it resumes"
    assert (run / "1-whole/done.json").stat().st_mtime_ns == before
    assert "resumed from checkpoint" in (run / "2-sft/logs/run.log").read_text()
    assert _weights(folder) == _weights(trained.folder)


@pytest.fixture
def again(trained: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was trained; the working directory."""
    shutil.copytree(trained.folder, tmp_path / "project", symlinks=True)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.mark.slow
def test_a_training_that_is_made_again_is_kept_with_what_people_said_of_it(again: Path, finefit: Finefit) -> None:
    stages = again / "runs/chain-1/stages"
    reviews = stages / "3-more/reviews/me.jsonl"
    reviews.parent.mkdir()
    reviews.write_text("{}\n")
    weights = tree_digest(stages / "3-more/stages/1-sft/checkpoints/final")
    answer = finefit("run", "spec.yaml", "--only", "more", "--force", "more")
    assert answer.code == 0
    (kept,) = stages.glob(".earlier-*-3-more")
    assert f"the earlier output is kept as runs/chain-1/stages/{kept.name}" in answer.out
    assert (kept / "reviews/me.jsonl").read_text() == "{}\n"
    assert tree_digest(kept / "stages/1-sft/checkpoints/final") == weights
    assert not reviews.exists()
    assert (stages / "3-more/done.json").exists()
    assert "is already finished" in finefit("run", "spec.yaml").out
    assert kept.exists()


@pytest.mark.slow
def test_a_training_whose_records_were_taken_away_is_made_again(again: Path, finefit: Finefit) -> None:
    stages = again / "runs/chain-1/stages"
    shutil.rmtree(stages / "2-sft/stages")
    (stages / "3-more/stages/1-sft/checkpoints/final/adapter_model.safetensors").unlink()
    document = finefit("run", "spec.yaml", "--dry-run", "--json").document
    assert [(stage["action"], stage["why"]) for stage in document["stages"]] == [
        ("done", "nothing has changed"),
        ("run", "some or all files of chain-1/stages/2-sft are gone"),
        ("run", "because sft runs"),
    ]
