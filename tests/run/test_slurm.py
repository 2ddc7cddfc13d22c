"""SLURM jobs: the script that sbatch would get, submitted to a program of that name, and tasks as ranks by submitit's
executor for one machine."""

import os
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from finefit.errors import DataError, FinefitError, Interrupted, ModelError, RunError, SpecError
from finefit.run import slurm
from finefit.run.slurm import RankTask, open_executor, parameters, require_inputs, submit
from finefit.spec.load import load_spec, parse_spec
from finefit.spec.schema import Spec

TEXT = """
name: legal
model: {kind: folder, path: model}
tuning: {kind: lora}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-4}
engine: {kind: deepspeed, devices: 4}
launcher: {kind: slurm, nodes: 2, partition: long, minutes: 90, account: law, options: {constraint: h100, cpus-per-task: "8"}}
"""  # noqa: E501


def spec(*overrides: str) -> Spec:
    return parse_spec(TEXT, where="spec.yaml", overrides=overrides)


def nothing() -> int:
    return 0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs with the names of SLURM's; what sbatch is given stands beside them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {
        "sbatch": f'cp "$1" {programs}/submitted.sh; echo Submitted batch job 4711',
        "srun": "exit 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def test_the_script_asks_for_a_task_and_a_card_for_each_rank_and_to_be_warned_and_queued_again(
    cluster: Path, tmp_path: Path
) -> None:
    sent = submit(spec(), RankTask(nothing, nothing), folder=tmp_path / "jobs")
    lines = (cluster / "submitted.sh").read_text().splitlines()
    for line in (
        "#SBATCH --job-name=legal",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=90",
        "#SBATCH --partition=long",
        "#SBATCH --account=law",
        "#SBATCH --constraint=h100",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@300",
        "#SBATCH --open-mode=append",
    ):
        assert line in lines
    assert any(line.startswith("srun ") and "submitit.core._submit" in line for line in lines)
    assert (sent.job, sent.log.name) == ("4711", "4711_0_log.out")
    assert sent.script.read_text() == (cluster / "submitted.sh").read_text()


def test_a_job_on_processors_asks_for_no_card_and_a_short_one_is_warned_halfway() -> None:
    asked = parameters(spec("device=cpu", "launcher.minutes=2"))
    assert "gpus_per_node" not in asked
    assert asked["slurm_signal_delay_s"] == 60


def test_cards_that_are_counted_by_the_card_are_a_task_each_and_one_process_is_one() -> None:
    one = parse_spec(TEXT.replace("engine: {kind: deepspeed, devices: 4}", ""), where="x")
    assert parameters(one)["tasks_per_node"] == 1
    asked = parameters(spec("card=8xA100-40GB", "engine={kind: auto}"))
    assert (asked["tasks_per_node"], asked["gpus_per_node"]) == (8, 8)


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ("data.train.0.path=gone.jsonl", DataError, "gone.jsonl does not exist"),
        ("model.path=gone", ModelError, "gone"),
        ("model={kind: shape, config: {model_type: llama}}", ModelError, "has no weights to train"),
        ("tuning.adapter=gone", ModelError, "gone"),
        (
            "engine={kind: deepspeed, devices: 2, config: gone.json}",
            SpecError,
            "engine.config: gone.json cannot be read",
        ),
        ("card=8xA100-40GB", SpecError, r"card: 8xA100-40GB and engine\.devices: 2 contradict each other"),
        (
            'launcher.options={"gpus_per_node": "8"}',
            SpecError,
            r"launcher\.options\.gpus_per_node is set by engine\.devices",
        ),
    ],
)
def test_what_is_wrong_is_refused_before_a_job_waits(
    project: Path, override: str, kind: type[FinefitError], words: str
) -> None:
    queued = ("launcher={kind: slurm}", "engine={kind: ddp, devices: 2}")
    require_inputs(load_spec(project, queued), project.parent)
    with pytest.raises(kind, match=words):
        require_inputs(load_spec(project, (*queued, override)), project.parent)


def test_a_machine_without_slurm_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError) as caught:
        submit(spec(), RankTask(nothing, nothing), folder=tmp_path / "jobs")
    assert caught.value.problem == "launcher.kind is slurm, but there is no sbatch and no srun on this machine"
    assert "--set 'launcher={kind: local}'" in caught.value.remedy


@pytest.mark.usefixtures("cluster")
def test_a_missing_submitit_is_told_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(RunError) as caught:
        open_executor(tmp_path)
    assert "pip install 'finefit[slurm]'" in caught.value.remedy


class Played:
    """A rank that waits for the warning, stops as a run does, and finishes when it has come back."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def __call__(self) -> int:
        rank = int(os.environ["RANK"])
        note = self.folder / f"{self.name}-{rank}"
        warned: list[int] = []
        signal.signal(slurm.WARNING, lambda *_: warned.append(1))
        note.write_text(
            f"{os.environ['WORLD_SIZE']} {os.environ['LOCAL_WORLD_SIZE']} {os.environ['MASTER_PORT']} {os.getpid()}"
        )
        if self.name == "again":
            return 0
        while not warned:
            time.sleep(0.05)
        if rank != 0:
            return Interrupted.exit_code
        raise Interrupted(f"stopped by {slurm.WARNING.name} after step 3 of 9; the checkpoint is written")


def wait_for(*paths: Path) -> list[str]:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, [path.name for path in paths]
        time.sleep(0.1)
    return [path.read_text() for path in paths]


@pytest.mark.slow
def test_a_warned_job_saves_is_queued_again_and_does_not_start_another_run(tmp_path: Path) -> None:
    executor = open_executor(tmp_path / "jobs", cluster="local")
    executor.update_parameters(tasks_per_node=2, timeout_min=5)
    job = executor.submit(RankTask(Played(tmp_path, "call"), Played(tmp_path, "again")))
    first, second = wait_for(tmp_path / "call-0", tmp_path / "call-1")
    assert first.split()[:3] == second.split()[:3]
    assert first.split()[:2] == ["2", "2"]
    for words in (first, second):
        psutil.Process(int(words.split()[3])).send_signal(slurm.WARNING)
    wait_for(tmp_path / "again-0", tmp_path / "again-1")
    assert job.results() == [0, 0]
    assert "stopped by SIGUSR2 after step 3 of 9" in (job.stdout() or "")


def test_only_the_schedulers_warning_is_a_reason_to_come_back_and_never_to_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped() -> int:
        raise Interrupted("stopped by SIGTERM after step 3 of 9")

    monkeypatch.setattr(
        "submitit.helpers.TorchDistributedEnvironment", lambda: type("There", (), {"export": lambda *_, **__: None})()
    )
    with pytest.raises(Interrupted):
        RankTask(stopped, nothing)()
    assert RankTask(lambda: 1, lambda: 2)() == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # by the scheduler's own will
    assert RankTask(lambda: 1, lambda: 2)() == 2
