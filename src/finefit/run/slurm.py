"""Submits a run as a SLURM job, through submitit: its tasks are the ranks, and each does what `finefit run` does under
torchrun, so the run directory is created where the GPUs are. Before the time limit, and when the job is preempted,
SLURM sends a warning: the ranks save together, and the job is queued again."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finefit.errors import Interrupted, RunError, SpecError
from finefit.facts.cards import parse_card
from finefit.model.resolve_model import read_stub, resolve_start
from finefit.plan.prepared_data import find_sources
from finefit.plan.target import devices_of, require_same_count
from finefit.run.create import engine_sha256
from finefit.spec.models import HubModel
from finefit.spec.schema import SlurmLauncher, Spec

if TYPE_CHECKING:
    from submitit import Executor
    from submitit.core.utils import DelayedSubmission

WARNING = signal.SIGUSR2
"""The signal that submitit requests from SLURM, since NCCL may use SIGUSR1."""
_NOTICE_SECONDS = 300
"""Time between warning and end: enough for a long step and its checkpoint."""
_MAX_REQUEUES = 1000
"""A job that saves a checkpoint each time may be queued again as often as needed."""
_OURS = {
    "nodes": "launcher.nodes",
    "ntasks-per-node": "engine.devices",
    "gpus-per-node": "engine.devices",
    "time": "launcher.minutes",
    "partition": "launcher.partition",
    "account": "launcher.account",
    "job-name": "name",
    "signal": "finefit itself",
    "requeue": "finefit itself",
    "output": "finefit itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    job: str
    log: Path
    """The log of the first rank."""
    script: Path


@dataclass(frozen=True, slots=True)
class RankTask:
    """The callable of each task: it returns the exit code of ranks other than the first, and raises the error of the
    first."""

    call: Callable[[], int]
    again: Callable[[], int]
    """The call for a requeued job, which never starts another run."""

    def __call__(self) -> int:
        from submitit.helpers import TorchDistributedEnvironment

        queue_again: Any = signal.getsignal(WARNING)  # submitit's own handler, which requeues the job
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        has_returned = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0  # also after a node failure
        try:
            return (self.again if has_returned else self.call)()
        except Interrupted as stop:
            if WARNING.name not in stop.problem:
                raise
            print(stop, flush=True)
            queue_again(WARNING, None)
            return Interrupted.exit_code

    def checkpoint(self) -> "DelayedSubmission":
        """Returns the task that submitit starts when the job runs again: the same command, which resumes where it
        stopped."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(RankTask(self.again, self.again))


def submit(spec: Spec, task: RankTask, *, folder: Path) -> Submitted:
    """`folder`: on a file system that all nodes share."""
    executor = open_executor(folder)
    executor.update_parameters(**parameters(spec))
    job = executor.submit(task)
    return Submitted(job=job.job_id, log=job.paths.stdout, script=job.paths.submission_file)


def open_executor(folder: Path, *, cluster: str = "slurm") -> "Executor":
    if cluster == "slurm":
        require_scheduler()
    try:
        import submitit
    except ImportError:
        problem = "launcher.kind is slurm, which needs the package submitit"
        raise RunError(problem, "install it: pip install 'finefit[slurm]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    limit = {f"{cluster}_max_num_timeout": _MAX_REQUEUES}
    return submitit.AutoExecutor(folder=folder, cluster=cluster, **limit)


def require_scheduler() -> None:
    if absent := [program for program in ("sbatch", "srun") if shutil.which(program) is None]:
        remedy = "run the command on a login node of the cluster, or use --set 'launcher={kind: local}' to run here"
        raise RunError(f"launcher.kind is slurm, but there is no {' and no '.join(absent)} on this machine", remedy)


def parameters(spec: Spec) -> dict[str, Any]:
    """Returns the parameters in submitit's form."""
    launcher, card = spec.launcher, parse_card(spec.card)
    assert isinstance(launcher, SlurmLauncher)
    require_same_count(card, spec.engine)
    devices = devices_of(spec.engine) or card.count
    options = {name: name.replace("_", "-") for name in launcher.options}
    if twice := [f"launcher.options.{name} is set by {_OURS[key]}" for name, key in options.items() if key in _OURS]:
        raise SpecError("\n".join(twice), "remove it from launcher.options")
    named = {"slurm_partition": launcher.partition, "slurm_account": launcher.account}
    on_cpu = spec.device == "cpu" or card.is_cpu
    return {
        "name": spec.name,
        "nodes": launcher.nodes,
        "tasks_per_node": devices,
        "timeout_min": launcher.minutes,
        "stderr_to_stdout": True,
        "slurm_signal_delay_s": min(_NOTICE_SECONDS, launcher.minutes * 30),
        "slurm_additional_parameters": {"requeue": True, **launcher.options},
        **({} if on_cpu else {"gpus_per_node": devices}),
        **{name: value for name, value in named.items() if value is not None},
    }


def require_inputs(spec: Spec, base: Path) -> None:
    """Reports errors that need no GPU to find before a job waits for one. `base`: the folder that relative paths start
    from."""
    parameters(spec)
    find_sources(spec.data, base)
    engine_sha256(spec.engine, base)
    if isinstance(spec.model, HubModel):
        read_stub(spec.model, base)  # weights are downloaded where they are needed
    else:
        resolve_start(spec.model, spec.tuning, base)
