"""F11 on a CPU: out of memory, planted where a card runs out. The same rows again at half the micro-batch, the same
global batch, the same loss."""

import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.processes import RankEnv
from finefit.artifacts.records import Levers, read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage, TrainState
from finefit.errors import Resumable, is_out_of_memory
from finefit.objective.batch import Batch
from finefit.spec.schema import DeepSpeed
from finefit.step.engine import Engine, SingleProcessEngine
from finefit.step.engine_choice import require_possible
from finefit.step.optimize import optimizer_step
from finefit.train import context, loop, oom_recovery, worker
from finefit.train.batches import capacity_under
from finefit.train.context import LeverChanges
from finefit.train.ranks import ONE_RANK
from finefit.train.worker import work
from tests.conftest import make_model, make_model_folder, make_project, write_jsonl
from tests.faults import (
    TRAINING,
    Job,
    Reference,
    at_step,
    events,
    failure_of,
    finish,
    make_job,
    make_reference,
    outcome,
    run_to_end,
    send_self,
    start,
)
from tests.ranks import as_ranks
from tests.slow_cases import slow_but
from tests.step.rank_group import make_stage

STOPPED = 3
TRAINED = "adapter_model.safetensors"
STILL = re.sub(r", dropout: 0.1", "", TRAINING)
"""Without an adapter's dropout: numbers then do not depend on how rows are cut."""
PAIR = STILL + "engine: {kind: ddp, devices: 2}\n"
UNPULLED = "{micro_batch: 4, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1}"
Fault = Callable[[Levers, Batch], bool]


def still_project(folder: Path, **rest: Any) -> Path:
    path = make_project(folder, **rest)
    make_model_folder(folder / "model", dropout=0.0)
    return path


def run_out(when: Fault, *, where: str = "forward") -> None:
    """From now on, in this process, a micro-batch of which `when` is true does not fit: going forward, or only in
    backward."""
    really_made, really = context.SwitchableForward.change, context.SwitchableForward.__call__
    really_begun: Callable[..., None] = context.SwitchableForward.__init__
    in_force: list[Levers] = []

    def begun(self: context.SwitchableForward, make: Any, levers: Levers, **rest: Any) -> None:
        in_force.append(levers)
        really_begun(self, make, levers, **rest)

    def changed(self: context.SwitchableForward, levers: Levers) -> None:
        in_force.append(levers)
        really_made(self, levers)

    def refuse(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def called(self: context.SwitchableForward, batch: Batch) -> Tensor:
        is_short = when(in_force[-1], batch)
        found = really(self, batch)
        if is_short and where == "forward":
            refuse(found)
        if is_short and found.requires_grad:
            found.register_hook(refuse)  # type: ignore[no-untyped-call]
        return found

    setattr(context.SwitchableForward, "__init__", begun)  # noqa: B010
    setattr(context.SwitchableForward, "__call__", called)  # noqa: B010
    setattr(context.SwitchableForward, "change", changed)  # noqa: B010


def in_training(*, rows: int) -> Fault:
    return lambda _, batch: torch.is_grad_enabled() and batch.num_rows > rows


def in_validation(*, rows: int) -> Fault:
    return lambda _, batch: not torch.is_grad_enabled() and batch.num_rows > rows


def longer_than(tokens: int) -> Fault:
    return lambda _, batch: torch.is_grad_enabled() and batch.input_ids_BT.numel() > tokens


def from_step(number: int, when: Fault) -> Fault:
    """In this process, from optimizer step `number` on."""
    reached: list[bool] = []
    at_step(number, lambda: reached.append(True))
    return lambda levers, batch: bool(reached) and when(levers, batch)


def levers_of(where: StageDir) -> Levers:
    return read_record(where.checkpoints / "final" / "finefit_state.json", TrainState).levers


def largest_difference(left: StageDir, right: StageDir) -> float:
    theirs = load_file(right.checkpoints / "final" / TRAINED)
    return max(
        float((tensor - theirs[name]).abs().max())
        for name, tensor in load_file(left.checkpoints / "final" / TRAINED).items()
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The job of `lora`, begun with a micro-batch of one row."""
    return make_reference(
        make_job(tmp_path_factory.mktemp("single"), spec=TRAINING.replace("micro_batch: 2", "micro_batch: 1"))
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """All four rows of a step at once, no dropout."""
    return make_job(
        tmp_path_factory.mktemp("plain"), spec=STILL.replace("{micro_batch: 2}", UNPULLED), project=still_project
    )


@pytest.fixture(scope="module")
def unfaulted(plain: Job) -> StageDir:
    return run_to_end(plain)


@pytest.mark.parametrize("place", slow_but(["backward"], ["forward", "backward"]))
def test_a_run_rescued_at_its_first_step_is_the_run_that_began_with_the_smaller_micro_batch(
    lora: Reference, single: Reference, place: str
) -> None:
    """Bit for bit, dropout included: weights, optimizer, random numbers, every loss and the rows of every step."""
    where = run_to_end(lora.job, lambda: run_out(in_training(rows=1), where=place))
    assert outcome(where) == single.outcome
    (told,) = events(where, "oom_recovered")
    assert (told["step"], told["before"]["micro_batch"], told["after"]["micro_batch"]) == (1, 2, 1)
    assert "Tried to allocate" in told["found"]
    assert levers_of(where).micro_batch == 1


def test_a_rescue_at_the_longest_batch_changes_neither_rows_nor_loss_nor_weights(
    plain: Job, unfaulted: StageDir
) -> None:
    """Steps before it are bit-identical to those of a run without the fault; what follows is equal to 1e-5."""
    longest = max(line["tokens"] for line in read_lines(unfaulted.metrics) if "tokens" in line)
    where = run_to_end(plain, lambda: run_out(longer_than(longest - 1)))
    (told,) = events(where, "oom_recovered")
    assert told["step"] > 1
    assert (told["before"]["micro_batch"], told["after"]["micro_batch"]) == (4, 2)
    ours, theirs = outcome(where), outcome(unfaulted)
    before = told["step"] - 1
    assert ours.steps[:before] == theirs.steps[:before]
    assert [step for step, *_ in ours.steps] == [step for step, *_ in theirs.steps]
    assert all(abs(a[1] - b[1]) < 1e-5 for a, b in zip(ours.steps, theirs.steps, strict=True))
    assert largest_difference(where, unfaulted) < 1e-5
    counted = [
        [line["supervised_tokens"] for line in read_lines(w.metrics) if "loss" in line] for w in (where, unfaulted)
    ]
    assert counted[0] == counted[1]


def test_what_a_failed_attempt_left_in_the_gradients_is_gone(lora: Reference) -> None:
    """Out of memory in the backward of step 4's second micro-batch, when the first one's gradients are there, ends as
    out of memory in the forward of its first does, when there are none."""

    def early() -> None:
        run_out(from_step(4, in_training(rows=1)))

    def late() -> None:
        met: list[Batch] = []

        def second(levers: Levers, batch: Batch) -> bool:
            if not in_training(rows=1)(levers, batch):
                return False
            met.append(batch)
            return len(met) == 2

        run_out(from_step(4, second), where="backward")

    first, second = run_to_end(lora.job, early), run_to_end(lora.job, late)
    assert [len(events(where, "oom_recovered")) for where in (first, second)] == [1, 1]
    assert outcome(first) == outcome(second)


@pytest.mark.parametrize("killed_at", slow_but([8], [5, 8]))
def test_a_killed_run_goes_on_under_the_corrected_levers_and_ends_bit_identical(
    lora: Reference, killed_at: int
) -> None:
    """Also from a checkpoint that is older than the rescue, and where the memory that was missing is there again."""

    def short() -> None:
        run_out(from_step(4, in_training(rows=1)))

    unkilled = outcome(run_to_end(lora.job, short))
    where = lora.job.fresh()

    def prepare() -> None:
        short()
        at_step(killed_at, lambda: send_self(signal.SIGKILL))

    assert finish(start(where, prepare)) == -signal.SIGKILL
    assert finish(start(where)) == 0
    assert outcome(where) == unkilled
    assert unkilled != lora.outcome
    assert len(events(where, "oom_recovered")) == 1


def changes(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in e["after"].items() if value != e["before"][name]} for e in told]


def test_validation_that_runs_out_shrinks_and_training_does_not_notice(lora: Reference) -> None:
    where = run_to_end(lora.job, lambda: run_out(in_validation(rows=1)))
    ours = outcome(where)
    assert (ours.steps, ours.tensors) == (lora.outcome.steps, lora.outcome.tensors)
    told = events(where, "validation_oom_recovered")  # once: later validations begin with what fitted
    assert [e["step"] for e in told] == [3]
    assert changes(told) == [{"micro_batch": 1}]
    assert events(where, "oom_recovered") == []
    assert levers_of(where).micro_batch == 2


def test_a_validation_that_does_not_fit_row_by_row_is_made_in_chunks_and_tiles_and_training_is_not(
    lora: Reference,
) -> None:
    """No step sees the levers that are pulled for a validation."""

    def tight(levers: Levers, _: Batch) -> bool:
        if torch.is_grad_enabled():
            assert (levers.loss_chunk, levers.mlp_tiles) == (planned.loss_chunk, planned.mlp_tiles)
            return False
        return levers.mlp_tiles < 8

    planned = read_record(lora.job.fresh().stage, Stage).levers
    where = run_to_end(lora.job, lambda: run_out(tight))
    ours = outcome(where)
    assert (ours.steps, ours.tensors) == (lora.outcome.steps, lora.outcome.tensors)
    assert changes(events(where, "validation_oom_recovered")) == [
        {"micro_batch": 1},
        {"loss_chunk": 256},
        {"mlp_tiles": 8},
    ]
    found = [e["validation_loss"] for e in events(where, "validated")]
    wanted = [e["validation_loss"] for e in events(run_to_end(lora.job), "validated")]
    assert len(found) == 6
    assert found == pytest.approx(wanted, abs=1e-5)
    assert levers_of(where) == planned


def test_a_validation_that_never_fits_is_left_out_and_training_does_not_notice(lora: Reference) -> None:
    where = run_to_end(lora.job, lambda: run_out(in_validation(rows=0)))
    ours = outcome(where)
    assert (ours.steps, ours.tensors) == (lora.outcome.steps, lora.outcome.tensors)
    assert [e["step"] for e in events(where, "validation_left_out")] == [3, 6, 9, 12, 15, 18]
    assert len(events(where, "validation_oom_recovered")) == 3  # what is pulled stays pulled: later ones are tried once
    assert events(where, "validated") == []
    state = read_record(where.checkpoints / "final" / "finefit_state.json", TrainState)
    assert (state.step, state.best, state.validation_loss) == (18, None, None)
    assert not (where.checkpoints / "best").exists()


def test_a_save_whose_validation_was_left_out_is_the_newest_and_never_the_best(lora: Reference) -> None:
    """Memory is short from step 8 on: the best of the validated saves stays the best, and is kept."""
    where = run_to_end(lora.job, lambda: run_out(from_step(8, in_validation(rows=0))))
    assert outcome(where).tensors == lora.outcome.tensors
    seen = {e["step"]: e["validation_loss"] for e in events(where, "validated")}
    assert list(seen) == [3, 6]
    state = read_record(where.checkpoints / "final" / "finefit_state.json", TrainState)
    assert state.best is not None
    assert (state.best.step, state.validation_loss) == (min(seen, key=lambda step: seen[step]), None)
    assert (where.checkpoints / "best").resolve().name == f"checkpoint-{state.best.step}"


@pytest.mark.slow
def test_two_real_ranks_of_which_one_cannot_validate_leave_it_out_together(tmp_path: Path) -> None:
    job = make_job(tmp_path / "pair", spec=PAIR, project=still_project)

    def short(rank: int) -> None:
        if rank == 1:
            run_out(in_validation(rows=0))

    free, left_out = as_two(job, lambda _: None), as_two(job, short)
    assert events(left_out, "validation_left_out")
    assert {e["found"] for e in events(left_out, "validation_left_out")} == {"another rank is out of memory"}
    assert events(left_out, "validated") == []
    assert events(free, "validated")
    assert (outcome(left_out).steps, outcome(left_out).tensors) == (outcome(free).steps, outcome(free).tensors)


def test_at_one_row_the_next_exact_levers_are_pulled_one_by_one(plain: Job, unfaulted: StageDir) -> None:
    where = run_to_end(plain, lambda: run_out(lambda levers, _: torch.is_grad_enabled() and levers.mlp_tiles < 8))
    assert changes(events(where, "oom_recovered")) == [
        {"micro_batch": 2},
        {"micro_batch": 1},
        {"recompute": 2},
        {"loss_chunk": 1024},
        {"loss_chunk": 256},
        {"offload": True},
        {"mlp_tiles": 8},
    ]
    assert largest_difference(where, unfaulted) < 1e-5
    assert levers_of(where).mlp_tiles == 8


def test_with_every_lever_pulled_the_run_stops_resumable_and_goes_on_when_there_is_room(
    plain: Job, unfaulted: StageDir
) -> None:
    where = plain.fresh()
    assert finish(start(where, lambda: run_out(from_step(8, in_training(rows=0))))) == STOPPED
    failure = failure_of(where)
    assert failure.exit_code == STOPPED
    assert failure.problem.startswith(
        "step 8 is out of memory with every exact lever pulled, 1 row(s) at a time: CUDA out of memory"
    )
    assert "finefit plan" in failure.remedy or "--set" in failure.remedy
    assert finish(start(where)) == 0
    assert largest_difference(where, unfaulted) < 1e-5
    assert levers_of(where).mlp_tiles == 8


def short_in_update(step: int) -> None:
    """Once, after some of the weights were changed."""
    really, armed, left = SingleProcessEngine.update, list[bool](), [True]
    at_step(step, lambda: armed.extend(left))

    def update(self: SingleProcessEngine, optimizer: torch.optim.Optimizer) -> None:
        if not armed:
            return really(self, optimizer)
        armed.clear()
        left.clear()
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1.0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    setattr(SingleProcessEngine, "update", update)  # noqa: B010


def test_out_of_memory_within_an_update_returns_to_the_last_checkpoint(plain: Job, unfaulted: StageDir) -> None:
    """Weights may be changed by half: they are put back, never trained on."""
    where = run_to_end(plain, lambda: short_in_update(8))
    assert [e["step"] for e in events(where, "rolled_back")] == [6]
    assert largest_difference(where, unfaulted) < 1e-5
    assert outcome(where).steps[:6] == outcome(unfaulted).steps[:6]


def test_out_of_memory_within_an_update_before_the_first_checkpoint_starts_again_under_the_next_levers(
    plain: Job, unfaulted: StageDir
) -> None:
    where = plain.fresh()
    before = read_record(where.stage, Stage).levers
    assert finish(start(where, lambda: short_in_update(2))) == STOPPED
    assert list(where.checkpoints.iterdir()) == []
    (change,) = read_lines(where.path / "lever_changes.jsonl")
    assert change["step"] == 0
    assert change["levers"]["micro_batch"] == before.micro_batch // 2
    assert finish(start(where)) == 0
    assert largest_difference(where, unfaulted) < 1e-5


def test_another_error_is_no_lack_of_memory(lora: Reference) -> None:
    where = lora.job.fresh()

    def prepare() -> None:
        def broken(*_: object) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        setattr(context.SwitchableForward, "__call__", broken)  # noqa: B010

    assert finish(start(where, prepare)) == 70
    assert events(where, "oom_recovered") == []


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                "tried to allocate 9 bytes."
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_a_lack_of_memory_is_known_by_type_or_by_the_words_of_libraries(error: RuntimeError, is_short: bool) -> None:
    assert is_out_of_memory(error) == is_short


class Together:
    """Two ranks in two threads."""

    def __init__(self, size: int = 2) -> None:
        self.size, self._claims = size, [False] * size
        self._all = threading.Barrier(size, timeout=20)

    def seat(self, rank: int) -> "Seat":
        return Seat(self, rank)

    def any(self, rank: int, claim: bool) -> bool:
        self._claims[rank] = claim
        self._all.wait()
        found = any(self._claims)
        self._all.wait()
        return found


class Seat:
    def __init__(self, together: Together, rank: int) -> None:
        self._together, self.rank, self.size = together, rank, together.size
        self.is_first = rank == 0

    def any(self, claim: bool) -> bool:
        return self._together.any(self.rank, claim)

    def gather(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError


class Exchanging(SingleProcessEngine):
    """Counts the exchanges of gradients, which follow the last backward."""

    def __init__(self) -> None:
        self.exchanged = 0
        self.is_short = False

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        if self.is_short and loss.grad_fn is not None:
            self.is_short = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.exchanged += is_last


def ranks_of(folder: Path, *, kind: str = "ddp") -> list[Any]:
    together = Together()
    model = nn.Linear(2, 2)
    return [
        SimpleNamespace(
            engine=Exchanging(),
            ranks=together.seat(rank),
            stage=SimpleNamespace(engine=SimpleNamespace(kind=kind), device="cpu", global_batch=8, name="sft"),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            model=model,
            examples=range(8),
            lever_changes=LeverChanges(folder / str(rank)),
            compose=None,
            saver=SimpleNamespace(last=6, where=StageDir(folder / "stages" / "1-sft")),
        )
        for rank in range(2)
    ]


def both(lives: list[Any], act: Callable[[Any, Engine], str]) -> list[Any]:
    """What each rank's attempt gives, or raises."""
    found: list[Any] = [None, None]

    def work(rank: int) -> None:
        try:
            found[rank] = oom_recovery.attempt(
                lambda engine: act(lives[rank], engine), lives[rank], Levers(micro_batch=4)
            )
        except Resumable as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def two_micro_batches(short_rank: int | None, at: str) -> Callable[[Any, Engine], str]:
    def act(ctx: Any, engine: Engine) -> str:
        loss = torch.zeros((), requires_grad=True) * 2
        short = ctx.ranks.rank == short_rank
        engine.backward(loss, is_last=False)
        if short and at == "before the exchange":
            raise torch.OutOfMemoryError("CUDA out of memory")
        ctx.engine.is_short = short and at == "in its last backward"
        engine.backward(loss, is_last=True)
        if short and at == "in the exchange":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    return act


@pytest.mark.parametrize("short_rank", slow_but([1], [0, 1]))
@pytest.mark.parametrize("place", ["before the exchange", "in its last backward"])
def test_when_one_rank_runs_out_all_ranks_try_again_and_none_exchanges_gradients(
    tmp_path: Path, short_rank: int, place: str
) -> None:
    lives = ranks_of(tmp_path)
    found = both(lives, two_micro_batches(short_rank, place))
    assert all(isinstance(one, oom_recovery.OutOfMemory) for one in found), found
    assert [ctx.engine.exchanged for ctx in lives] == [0, 0]
    assert both(lives, two_micro_batches(None, "")) == ["done", "done"]  # they ask in step again
    assert [ctx.engine.exchanged for ctx in lives] == [1, 1]


def as_two(job: Job, prepare: Callable[[int], None]) -> StageDir:
    """Trained by two processes over gloo; `prepare` is told its rank."""
    where = job.fresh()

    def act(place: RankEnv) -> int:
        prepare(place.rank)
        return work(where, place, is_child_of_ours=False)

    assert [(one.value, one.trace) for one in as_ranks(2, act, deadline_seconds=200)] == [(0, "")] * 2
    return where


def test_two_real_ranks_of_which_one_runs_out_end_as_two_that_began_with_the_smaller_micro_batch(
    tmp_path: Path,
) -> None:
    """Bit for bit, and in backward, where the other rank already waits for its gradients."""
    asked, smaller = (
        make_job(tmp_path / name, spec=PAIR.replace("micro_batch: 2", f"micro_batch: {rows}"), project=still_project)
        for name, rows in (("asked", 2), ("smaller", 1))
    )

    def short(rank: int) -> None:
        if rank == 1:
            run_out(in_training(rows=1), where="backward")

    oom_recovered, begun = as_two(asked, short), as_two(smaller, lambda _: None)
    assert outcome(oom_recovered) == outcome(begun)
    (told,) = events(oom_recovered, "oom_recovered")
    assert (told["step"], told["after"]["micro_batch"], told["found"]) == (1, 1, "another rank is out of memory")


def test_two_ranks_take_the_same_next_levers(tmp_path: Path) -> None:
    left, right = ranks_of(tmp_path)
    assert (
        oom_recovery.next_levers(Levers(micro_batch=4), left)
        == oom_recovery.next_levers(Levers(micro_batch=4), right)
        == Levers(micro_batch=2)
    )


def test_a_rank_that_runs_out_within_the_exchange_ends_resumable_with_its_correction_written(tmp_path: Path) -> None:
    """The other one waits for gradients that never come; only an end can free it."""
    lives = ranks_of(tmp_path)
    (tmp_path / "1").mkdir()
    found = both(lives, two_micro_batches(1, "in the exchange"))
    assert found[0] == "done"
    assert isinstance(found[1], Resumable)
    assert "step 6 with micro_batch 2" in found[1].remedy
    state = SimpleNamespace(step=6, levers=Levers(micro_batch=4))
    assert LeverChanges(tmp_path / "1").at(state) == Levers(micro_batch=2)  # type: ignore[arg-type]


def test_a_sharded_rank_that_runs_out_ends_resumable_instead_of_asking(tmp_path: Path) -> None:
    """Its peers wait for its weights, not for its word."""
    lives = ranks_of(tmp_path, kind="fsdp2")
    (tmp_path / "0").mkdir()
    found = both(lives, two_micro_batches(0, "before the exchange"))
    assert isinstance(found[0], Resumable)
    assert found[1] == "done"


def test_a_micro_batch_larger_than_a_step_is_halved_from_what_the_step_has(tmp_path: Path) -> None:
    ctx = ranks_of(tmp_path)[0]
    assert oom_recovery.next_levers(Levers(micro_batch=64), ctx) == Levers(
        micro_batch=2
    )  # 8 rows of a step over 2 ranks


def test_an_update_inside_backward_keeps_its_rows_together(tmp_path: Path) -> None:
    ctx = ranks_of(tmp_path)[0]
    ctx.model = _Layered()
    levers = Levers(micro_batch=4, update="inside")
    assert oom_recovery.next_levers(levers, ctx) == replace(levers, loss_chunk=1024)


class _Layered(nn.Module):
    """Without a layer that can be computed again."""


def test_the_capacity_of_a_pack_follows_the_micro_batch() -> None:
    ctx: Any = SimpleNamespace(examples=_Counted([7, 12], [3, 5]), stage=SimpleNamespace(global_batch=4))
    before, after = (capacity_under(ctx, Levers(micro_batch=rows, packing=True)) for rows in (4, 2))
    assert before is not None
    assert after is not None
    assert (before.tokens, after.tokens) == (48, 24)
    assert (before.supervised, after.supervised) == (20, 10)


class _Counted:
    def __init__(self, lengths: list[int], supervised: list[int]) -> None:
        self.lengths, self.supervised_counts = torch.tensor(lengths).numpy(), torch.tensor(supervised).numpy()

    def __len__(self) -> int:
        return len(self.lengths)


def test_corrections_come_into_force_at_their_step_and_stay(tmp_path: Path) -> None:
    lever_changes = LeverChanges(tmp_path)
    lever_changes.add(4, Levers(micro_batch=2))
    lever_changes.add(9, Levers(micro_batch=1))
    again = LeverChanges(tmp_path)

    def at(step: int) -> int:
        state: Any = SimpleNamespace(step=step, levers=Levers(micro_batch=4))
        return again.at(state).micro_batch

    assert [at(step) for step in (0, 3, 4, 8, 9, 20)] == [4, 4, 2, 2, 1, 1]


def test_under_zero_3_no_lever_is_pulled_that_it_cannot_carry_out() -> None:
    levers = Levers(micro_batch=1, recompute=2, loss_chunk=256)
    stage = make_stage(engine=DeepSpeed(kind="deepspeed", devices=2, stage=3))
    pulled = []
    ctx: Any = SimpleNamespace(stage=stage, model=make_model(), ranks=ONE_RANK, examples=[0], compose=None)
    while (following := oom_recovery.next_levers(levers, ctx)) is not None:
        require_possible(replace(stage, levers=following))
        pulled.append(levers := following)
    assert pulled == [Levers(micro_batch=1, recompute=2, loss_chunk=256, offload=True)]
    ctx.stage = replace(stage, engine=DeepSpeed(kind="deepspeed", devices=2, stage=2))
    assert oom_recovery.next_levers(levers, ctx) == replace(levers, mlp_tiles=8)


# The worst batch, measured as on a card: by the memory of this process.


def count_steps(taken: Path) -> None:
    """From now on this process compares its memory with the plan, and writes a line for each step that it computes."""

    def counted(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **rest: Any) -> Any:
            with taken.open("a") as file:
                file.write(f"{name}\n")
            return really(*args, **rest)

        return step

    setattr(worker, "measured_card", lambda *_, **__: "a card of tests")  # noqa: B010
    for module in (loop, oom_recovery):
        setattr(module, "optimizer_step", counted(module.__name__, optimizer_step))  # noqa: B010


def even_project(folder: Path, **rest: Any) -> Path:
    """All rows are equally long, so every step is as large as any."""
    path = still_project(folder, **rest)
    content = [f"{number} and {number}" for number in range(10, 32)]
    turns = [(("user", text), ("assistant", "x" * 9)) for text in content]
    rows = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
    write_jsonl(path.parent / "train.jsonl", rows)
    return path


def uneven_from_step(number: int) -> None:
    """From this step on only the shortest rows follow, as in data where the first rows happen to be the longest."""
    really = oom_recovery.holds_worst_batch
    asked: list[int] = []

    def holds(*given: Any) -> bool:
        asked.append(1)
        return really(*given) and len(asked) < number

    setattr(loop, "holds_worst_batch", holds)  # noqa: B010


def test_a_first_step_that_was_the_worst_batch_is_not_computed_again(tmp_path: Path) -> None:
    """No later step is as large, so nothing is measured, and no step is computed beyond those of the training."""
    spec = re.sub(r"epochs: \d+", "steps: 3", STILL.replace("{micro_batch: 2}", UNPULLED))
    taken = tmp_path / "taken"

    def prepare() -> None:
        count_steps(taken)
        uneven_from_step(2)

    where = run_to_end(make_job(tmp_path, spec=spec, project=even_project), prepare)
    assert taken.read_text().split() == [loop.__name__] * 3
    assert events(where, "measured") == []


@pytest.mark.parametrize(
    ("project", "steps", "repeated", "after"),
    [(even_project, 3, 0, 2), (even_project, 1, 1, 1), (still_project, 3, 1, 1)],
    ids=["even rows", "one step", "uneven rows"],
)
def test_the_worst_batch_is_computed_again_only_where_no_other_step_is_as_large(
    tmp_path: Path, project: Callable[..., Path], steps: int, repeated: int, after: int
) -> None:
    spec = re.sub(r"epochs: \d+", f"steps: {steps}", STILL.replace("{micro_batch: 2}", UNPULLED))
    taken = tmp_path / "taken"
    where = run_to_end(make_job(tmp_path, spec=spec, project=project), lambda: count_steps(taken))
    computed = taken.read_text().split()
    assert (computed.count(loop.__name__), computed.count(oom_recovery.__name__)) == (steps, repeated)
    (told,) = events(where, "measured")
    assert (told["step"], told["predicted_bytes"]) == (after, read_record(where.stage, Stage).predicted_bytes)
    last = list(read_lines(where.path / "memory.jsonl"))[-1]
    assert 0 < told["measured_bytes"] <= last["peak_bytes"]
    assert told["error"] == round(told["predicted_bytes"] / told["measured_bytes"] - 1, 5)
