"""F22: kill -9 of a pipeline, in and between its stages. What was finished is not repeated, what was half done is made again, and the end is that of
a run that nobody killed."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from finefit.artifacts.pipelines import PipelineState
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir
from finefit.errors import WorkerDied
from finefit.pipeline.stage_choice import foretell
from finefit.pipeline.stage_keys import tree_digest
from finefit.pipeline.stage_run import ask, is_finished, open_or_create, open_stages
from finefit.pipeline.staged import carry_out
from finefit.spec.load import load_any
from finefit.spec.stages import Pipeline
from tests.conftest import make_model_folder, write_jsonl
from tests.faults import die_at_operation, record_operations
from tests.pipeline.test_staged import Heard
from tests.stages import calls, make_scripts

KILLS = int(os.environ.get("FINEFIT_STAGE_KILLS", "6"))
RUN = "runs/chain-1"
NAMES = ("first", "second")


@pytest.fixture(autouse=True)
def _no_inhibitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.pipeline.awake._command", lambda: None)


def _prepared(folder: Path) -> RunDir:
    """Two scripts, nothing of them run yet."""
    spec = make_scripts(folder)
    text = spec.read_text(encoding="utf-8").split("  third:")[0]
    spec.write_text(text, encoding="utf-8")
    pipeline = load_any(spec)
    assert isinstance(pipeline, Pipeline)
    return open_or_create(ask(pipeline, folder, spec_text=text, overrides=()), runs=folder / "runs", new=False)


def _die_once_at_the_second(folder: Path) -> None:
    last_words = """
import os
died = Path(__file__).parent / "died"
if "two" in words and not died.exists():
    died.touch()
    os.kill(os.getpid(), 9)
"""
    script = folder / "add.py"
    script.write_text(script.read_text() + last_words)


def _mortal(folder: Path) -> RunDir:
    """Finished; the second stage dies when it is made again."""
    run = _prepared(folder)
    _die_once_at_the_second(folder)
    (folder / "died").touch()
    assert carry_out(run, Heard()).status == "finished"
    (folder / "died").unlink()
    calls(folder)
    return run


def _recorded(folder: Path, trace: Path) -> None:
    record_operations(folder / RUN, trace)
    carry_out(RunDir(folder / RUN), Heard())


def _killed(folder: Path, number: int) -> None:
    die_at_operation(folder / RUN, number)
    carry_out(RunDir(folder / RUN), Heard())


def _exit_code(target: object, *arguments: object) -> int | None:
    """Of a process of its own, forked from one that has loaded all that it needs."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)  # type: ignore[arg-type]
    process.start()
    process.join(120)
    return process.exitcode


def _outputs(run: RunDir) -> dict[str, str]:
    return {name: tree_digest(run.stage(number, name).output) for number, name in enumerate(NAMES, 1)}


def test_a_pipeline_that_is_killed_anywhere_ends_as_one_that_nobody_killed(tmp_path: Path) -> None:
    run = _prepared(tmp_path / "pristine")
    shutil.copytree(tmp_path / "pristine", tmp_path / "whole")
    trace = tmp_path / "operations.txt"
    assert _exit_code(_recorded, tmp_path / "whole", trace) == 0
    operations = trace.read_text().splitlines()
    expected = _outputs(RunDir(tmp_path / "whole" / RUN))
    shown = next(at for at, line in enumerate(operations) if line.startswith("os.rename\tstages/.making-1-first"))
    points = {shown, shown + 1, *random.Random(22).sample(range(len(operations)), KILLS)}
    for number in sorted(points):
        folder = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "pristine", folder)
        assert _exit_code(_killed, folder, number) == -signal.SIGKILL, operations[number]
        run = RunDir(folder / RUN)
        done = {name for at, name in enumerate(NAMES, 1) if run.stage(at, name).done.exists()}
        assert all(
            run.stage(at, name).done.exists() for at, name in enumerate(NAMES, 1) if run.stage(at, name).path.exists()
        ), operations[number]
        calls(folder)
        assert carry_out(run, Heard()).status == "finished"
        assert set(calls(folder)) == set(NAMES) - done, operations[number]
        assert _outputs(run) == expected
        assert is_finished(run)
        assert not [path.name for path in (run.path / "stages").iterdir() if path.name.startswith(".")]


SAMPLED = """\
name: chain
device: cpu
stages:
  first:
    kind: make_pairs
    method: {kind: sampled, model: {kind: folder, path: model}, task: {kind: python, path: task.py}, samples: 3, max_new_tokens: 24, temperature: 1.0}
    train: [{path: train.jsonl}]
"""
DIES_ONCE = """
import os
from pathlib import Path

METRICS = {"vowels": "mean"}

def extract(answer):
    return answer

def score(found, reference):
    died = Path(__file__).parent / "died"
    if found != reference and not died.exists():  # of answers: references are looked at before any is asked for
        died.touch()
        os.kill(os.getpid(), 9)
    return {"vowels": sum(letter in "aeiou" for letter in found) / 50}
"""


def test_what_a_model_has_answered_before_its_stage_was_killed_is_not_asked_for_again(tmp_path: Path) -> None:
    """The task's own script kills it when the first answer is scored: all have been given then. One of them is put in another's place, which a model
    that is asked again would not say."""
    make_model_folder(tmp_path / "model", seed=3)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"say {at}", "answer": "a e"} for at in range(6)])
    (tmp_path / "task.py").write_text(DIES_ONCE)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SAMPLED)
    pipeline = load_any(spec)
    assert isinstance(pipeline, Pipeline)
    run = open_or_create(ask(pipeline, tmp_path, spec_text=SAMPLED, overrides=()), runs=tmp_path / "runs", new=False)
    with pytest.raises(WorkerDied, match="stage first: the worker was ended by SIGKILL"):
        carry_out(run, Heard())
    journal = run.making(1, "first").answers
    batch = json.loads(journal.read_text(encoding="utf-8").splitlines()[0])
    batch["answers"][0][1] = ours = "aeiou" * 9
    journal.write_text(json.dumps(batch) + "\n", encoding="utf-8")
    (choice,) = foretell(open_stages(run))
    assert choice.reason == "begun and not finished: it goes on"
    assert carry_out(run, Heard()).status == "finished"
    pairs = run.stage(1, "first").output / "train.jsonl"
    assert ours in pairs.read_text(encoding="utf-8")
    assert carry_out(run, Heard(), forced=["first"]).status == "finished"
    assert ours not in pairs.read_text(encoding="utf-8")


def test_a_stage_that_was_whole_and_not_shown_yet_is_not_made_again(tmp_path: Path) -> None:
    run = _prepared(tmp_path / "project")
    assert carry_out(run, Heard()).status == "finished"
    expected = _outputs(run)
    run.stage(1, "first").path.rename(run.making(1, "first").path)
    calls(tmp_path / "project")
    assert foretell(open_stages(run))[0].reason == "begun and not finished: it goes on"
    assert carry_out(run, Heard()).status == "finished"
    assert calls(tmp_path / "project") == []
    assert _outputs(run) == expected


def test_a_command_that_asks_for_stages_anew_goes_on_when_it_was_killed_and_is_given_again(tmp_path: Path) -> None:
    run = _mortal(tmp_path / "project")
    with pytest.raises(WorkerDied):
        carry_out(run, Heard(), forced=NAMES)
    assert calls(tmp_path / "project") == ["first", "second"]
    assert carry_out(run, Heard(), forced=NAMES).status == "finished"
    assert calls(tmp_path / "project") == ["second"]
    assert (
        carry_out(run, Heard(), forced=NAMES).status == "finished"
    )  # another command, since that one has come to its end
    assert calls(tmp_path / "project") == ["first", "second"]


def test_a_command_that_asks_for_other_stages_is_another_command(tmp_path: Path) -> None:
    run = _mortal(tmp_path / "project")
    with pytest.raises(WorkerDied):
        carry_out(run, Heard(), forced=NAMES)
    calls(tmp_path / "project")
    assert carry_out(run, Heard(), forced=["first"]).status == "finished"
    assert calls(tmp_path / "project") == ["first"]
    assert not [path.name for path in (run.path / "stages").iterdir() if path.name.startswith(".")]


def test_the_death_of_a_stages_process_is_told_and_the_same_call_goes_on(tmp_path: Path) -> None:
    run = _prepared(tmp_path / "project")
    _die_once_at_the_second(tmp_path / "project")
    with pytest.raises(WorkerDied, match="stage second: the worker was ended by SIGKILL"):
        carry_out(run, Heard())
    assert read_record(run.run, Run).status == "stopped"
    assert [state.status for state in read_record(run.state, PipelineState).stages] == ["done", "stopped"]
    calls(tmp_path / "project")
    heard = Heard()
    assert carry_out(run, heard).status == "finished"
    assert calls(tmp_path / "project") == heard.begun == ["second"]
    assert heard.ended == [("first", "done"), ("second", "run")]
