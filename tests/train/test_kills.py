"""F1, F2, F3: kill -9 at any time. The same call again resumes, and the end is the one of a run that nobody killed."""

import random
import resource
import signal
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import pytest
from tqdm import tqdm

from finefit.artifacts.rundir import StageDir
from finefit.train import saver
from tests.faults import (
    KILLS,
    Operation,
    Reference,
    assert_only_whole_checkpoints,
    at_operation,
    die_at_operation,
    finish,
    hidden,
    outcome,
    record_operations,
    send_self,
    start,
    words,
)

STAGES_OF_A_SAVE = (
    "before the first file",
    "between files",
    "before the manifest",
    "before a file is durable",
    "before it is visible",
    "visible, not yet durable",
    "before it is called best",
    "before it is called final",
    "before an old one is hidden",
    "while an old one is removed",
)


def kill_at_random_times(reference: Reference, kills: int, seed: int) -> int:
    """How many runs it took: each is killed again and again until it comes through."""
    chance, done, runs = random.Random(seed), 0, 0
    while done < kills:
        where, runs = reference.job.fresh(), runs + 1
        while True:
            code = finish(start(where), kill_after=chance.uniform(0, reference.seconds) if done < kills else None)
            if code != -signal.SIGKILL:
                break
            done += 1
            assert_only_whole_checkpoints(where)
        assert code == 0, words(where)
        assert outcome(where) == reference.outcome
    return runs


def test_runs_killed_at_random_times_end_bit_identical(lora: Reference, count: Callable[[str], None]) -> None:
    runs = kill_at_random_times(lora, KILLS, seed=1)
    count(f"F1  LoRA: {KILLS} kills at random times over {runs} runs, {KILLS} bit-identical")


def test_whole_models_killed_at_random_times_end_bit_identical(full: Reference, count: Callable[[str], None]) -> None:
    kills = KILLS // 4
    runs = kill_at_random_times(full, kills, seed=2)
    count(f"F1  full: {kills} kills at random times over {runs} runs, {kills} bit-identical")


def stage_of(operation: Operation) -> str | None:
    """The stage of a save that a kill just before this operation strikes; None for mere reading."""
    match operation:
        case Operation("os.mkdir", path) if path.startswith(".staging-"):
            return "before the first file"
        case Operation("write", path) if path.endswith("finefit_manifest.json"):
            return "before the manifest"
        case Operation("write", path) if path.startswith(".staging-"):
            return "between files"
        case Operation("fsync", path) if path.startswith(".staging-"):
            return "before a file is durable"
        case Operation("os.rename", path) if path.startswith(".staging-") and "/" not in path:
            return "before it is visible"
        case Operation("fsync", "."):
            return "visible, not yet durable"
        case Operation("os.symlink" | "os.rename", path) if path.startswith(".best."):
            return "before it is called best"
        case Operation("os.symlink" | "os.rename", path) if path.startswith(".final."):
            return "before it is called final"
        case Operation("os.rename", path) if path.startswith("checkpoint-"):
            return "before an old one is hidden"
        case Operation("os.remove" | "os.rmdir", path) if not path.endswith(".tmp"):
            return "while an old one is removed"
    return None


def points_inside_saves(operations: list[Operation], wanted: int, seed: int) -> list[int]:
    """One for each stage of a save, and others drawn from all operations."""
    chance = random.Random(seed)
    inside = {
        stage: [at for at, operation in enumerate(operations) if stage_of(operation) == stage]
        for stage in STAGES_OF_A_SAVE
    }
    chosen = [chance.choice(inside[stage]) for stage in STAGES_OF_A_SAVE]
    others = sorted(set(chain.from_iterable(inside.values())) - set(chosen))
    return (chosen + chance.sample(others, max(0, wanted - len(chosen))))[:wanted]


def kill_at_operations(reference: Reference, points: Iterable[int]) -> None:
    for point in points:
        where = reference.job.fresh()
        place = f"before operation {point}: {reference.operations[point]}"
        assert finish(start(where, partial(die_at_operation, where.checkpoints, point))) == -signal.SIGKILL, place
        assert_only_whole_checkpoints(where)
        assert finish(start(where)) == 0, place + words(where)
        assert outcome(where) == reference.outcome, place


def test_runs_killed_inside_a_save_end_bit_identical(lora: Reference, count: Callable[[str], None]) -> None:
    points = points_inside_saves(lora.operations, KILLS, seed=3)
    kill_at_operations(lora, points)
    stages = {stage_of(lora.operations[point]) for point in points}
    assert stages == set(STAGES_OF_A_SAVE)
    count(
        f"F2  LoRA: {len(points)} kills inside a save, at all of its {len(stages)} stages, {len(points)} bit-identical"
    )


def test_whole_models_killed_inside_a_save_end_bit_identical(full: Reference, count: Callable[[str], None]) -> None:
    points = random.Random(4).sample(points_inside_saves(full.operations, KILLS, seed=4), KILLS // 4)
    kill_at_operations(full, points)
    count(f"F2  full: {len(points)} kills inside a save, {len(points)} bit-identical")


@pytest.mark.parametrize("limit", [1, 11_000, 20_000])
def test_a_run_that_dies_within_a_file_ends_bit_identical(lora: Reference, limit: int) -> None:
    """The kernel ends the process at the first byte beyond the limit, which lies in the weights or, when they fit, in the optimizer."""

    def cut() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    where = lora.job.fresh()
    begun = start(where, lambda: at_operation(where.checkpoints, "os.mkdir", r"\.staging-checkpoint-6", cut))
    assert finish(begun) == -signal.SIGXFSZ
    assert max(path.stat().st_size for path in (where.checkpoints / ".staging-checkpoint-6").iterdir()) <= limit
    assert_only_whole_checkpoints(where)
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


@pytest.fixture(scope="module")
def half_removed(lora: Reference) -> StageDir:
    """Killed while an old checkpoint was being removed, with a half-written checkpoint and a half-made link lying about as well."""
    where = lora.job.fresh()
    begun = start(
        where,
        lambda: at_operation(
            where.checkpoints, "os.remove", r"finefit_rng\.safetensors", lambda: send_self(signal.SIGKILL)
        ),
    )
    assert finish(begun) == -signal.SIGKILL
    staging = where.checkpoints / ".staging-checkpoint-12"
    staging.mkdir()
    (staging / "adapter_model.safetensors").write_bytes(b"half")
    (where.checkpoints / ".best.4711.tmp").symlink_to("checkpoint-9")
    return where


def test_runs_killed_during_resume_end_bit_identical(
    lora: Reference, half_removed: StageDir, count: Callable[[str], None]
) -> None:
    """Also the resume of a killed resume."""
    trace = half_removed.run / "operations.txt"
    probe = lora.job.copy(half_removed.run)
    assert finish(start(probe, lambda: record_operations(probe.checkpoints, trace))) == 0
    operations = [Operation(*line.split("\t")) for line in trace.read_text().splitlines()]
    resuming = next(
        at for at, operation in enumerate(operations) if operation == Operation("os.mkdir", ".staging-checkpoint-12")
    )
    points = random.Random(5).sample(range(resuming), KILLS // 4 * 2)
    for first, second in zip(points[::2], points[1::2], strict=True):
        where = lora.job.copy(half_removed.run)
        for point in (first, second):
            assert finish(start(where, partial(die_at_operation, where.checkpoints, point))) == -signal.SIGKILL
            assert_only_whole_checkpoints(where)
        assert finish(start(where)) == 0
        assert outcome(where) == lora.outcome
        assert hidden(where) == []
    count(f"F3  {len(points)} kills during resume, {len(points)} bit-identical")


def test_a_run_killed_between_weights_and_optimizer_of_a_resume_ends_bit_identical(
    lora: Reference, half_removed: StageDir
) -> None:
    where = lora.job.copy(half_removed.run)

    def die(*_: object, **__: object) -> None:
        send_self(signal.SIGKILL)

    assert finish(start(where, lambda: setattr(saver, "restore_state", die))) == -signal.SIGKILL
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_runs_killed_during_rotation_end_bit_identical(lora: Reference, count: Callable[[str], None]) -> None:
    rotation = [
        at
        for at, operation in enumerate(lora.operations)
        if stage_of(operation) in ("before an old one is hidden", "while an old one is removed")
    ]
    points = random.Random(6).sample(rotation, KILLS // 4)
    kill_at_operations(lora, points)
    count(f"F3  {len(points)} kills during rotation, {len(points)} bit-identical")


def test_a_worker_killed_with_the_lock_of_its_progress_bars_in_hand_blocks_no_other(lora: Reference) -> None:
    """That lock is shared by all forks of a process that has shown a bar."""

    def prepare() -> None:
        tqdm.get_lock().acquire()
        send_self(signal.SIGKILL)

    assert finish(start(lora.job.fresh(), prepare)) == -signal.SIGKILL
    where = lora.job.fresh()
    assert finish(start(where)) == 0, words(where)
