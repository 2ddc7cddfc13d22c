"""Asks the planning process for forecasts, and caches its answers by content: the same question is answered at once.

The process imports torch once, which takes longer than most rehearsals, so one process answers many questions. Nothing
here imports torch."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from finefit import errors
from finefit.artifacts.cache import cached_record, source_digest, uncertainty
from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, Lengths, RehearsalRequest, RehearsalResult
from finefit.artifacts.processes import allocator_setting
from finefit.artifacts.records import read_record, write_record
from finefit.artifacts.stage_records import Subject
from finefit.errors import FinefitError, ModelError
from finefit.facts.cards import parse_card
from finefit.facts.machine import MEMORY_LIMITS, count_cores, read_memory_bytes
from finefit.facts.nvml import read_cards
from finefit.model.resolve_model import model_outline
from finefit.spec.data import Data, HeldOut, Source
from finefit.spec.load import spec_to_json
from finefit.spec.models import Lora, ShapeModel, Tuning
from finefit.spec.schema import AdamW, Dpo, Evaluation, LocalLauncher, NanStop, Save, SlurmLauncher, Spec, Validation

_TAIL_LINES = 12
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel")
_PACKAGES = (
    *("plan", "rehearse", "evaluate", "step", "custom", "moe", "model", "data", "vision", "negatives", "tasks"),
    *("objective", "artifacts", "facts", "spec"),
)
"""Packages of finefit whose source decides a forecast."""
_MAX_CACHED = 500
_UNNAMED = ShapeModel(kind="shape", config={})
_FREE_STEP_BYTES = 64 << 20
"""The free memory of a card changes a little all the time, so it is rounded in cache keys."""
Grids = tuple[tuple[int, ...], ...]
"""Of the images of one row."""


class PlannerProcess:
    """Answers one request after another. If torch crashes, the next request starts a new process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="finefit-plan-")
        self._stderr = Path(self._folder.name) / "stderr"
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: RehearsalRequest) -> RehearsalResult:
        asked, answered = (Path(self._folder.name) / name for name in ("request.json", "result.json"))
        answered.unlink(missing_ok=True)
        write_record(asked, request)
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            print(asked, answered, sep="\t", file=process.stdin, flush=True)
            process.stdout.readline()  # returns when the answer is written, or the process has ended
        if answered.exists():
            return read_record(answered, RehearsalResult)
        code, self._process = self._end(process), None
        raise _planner_failed(code, self._stderr)

    def _start(self) -> "subprocess.Popen[str]":
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        command, pipe = [sys.executable, "-P", "-m", "finefit.plan.worker"], subprocess.PIPE
        with self._stderr.open("w") as stderr:
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, errors="replace", env=environment
            )

    def _end(self, process: "subprocess.Popen[str]") -> int:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return process.wait()

    def __enter__(self) -> "PlannerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if error is not None:  # for example Ctrl-C: nobody waits for the answer
                self._process.kill()
            self._end(self._process)
        self._folder.cleanup()


_shared: ContextVar[PlannerProcess | None] = ContextVar("shared planner", default=None)


@contextmanager
def shared_planner() -> Iterator[None]:
    """One process answers every request made inside."""
    if _shared.get() is not None:
        yield
        return
    with PlannerProcess() as planner:
        before = _shared.set(planner)
        try:
            yield
        finally:
            _shared.reset(before)


def rehearse(request: RehearsalRequest) -> RehearsalResult:
    with shared_planner():
        planner = _shared.get()
        assert planner is not None
        return planner.ask(request)


def _planner_failed(code: int, stderr: Path) -> FinefitError:
    tail = "\n".join(stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:])
    if code < 0:
        return ModelError(
            f"the rehearsal was ended by {signal.Signals(-code).name} inside torch; its last lines:\n{tail}",
            "please report it with the model's config.json",
        )
    return FinefitError(
        f"the rehearsal ended with code {code}, which is a bug in finefit:\n{tail}", "please report it with these lines"
    )


# Forecasts


def forecast(
    spec: Spec,
    base: Path,
    cards: tuple[str, ...],
    lengths: Lengths,
    *,
    budget_bytes: int | None = None,
    nodes: int | None = None,
) -> tuple[Forecast, ...]:
    """One for each card. `budget_bytes` limits how much of a card may be used; `nodes` overrides the launcher's number
    for ranks that were started already."""
    request = RehearsalRequest(
        spec=spec_to_json(_relevant(spec, nodes)),
        config=model_outline(spec.model, base).config,
        cards=cards,
        lengths=lengths,
        budget_bytes=budget_bytes,
        visible=visible_cards(),
        allocator=allocator_setting(os.environ),
    )
    return tuple(replace(found, uncertainty=uncertainty(found.card)) for found in _answer(request).forecasts)


def eval_limits_here(
    subject: Subject, base: Path, evaluations: tuple[Evaluation, ...], prompt_tokens: int, grids: Grids = ()
) -> dict[str, EvalBatchLimit]:
    """By label, on the device that the subject gets and with what is free there now. `base`: where the model's path
    starts."""
    config, card = model_outline(subject.model, base).config, "cpu" if subject.device == "cpu" else "auto"
    (limits,) = eval_limits_on(
        (card,),
        config,
        subject.tuning,
        evaluations,
        precision=subject.precision,
        prompt_tokens=prompt_tokens,
        grids=grids,
    )
    return limits


def eval_limits_on(
    cards: tuple[str, ...],
    config: dict[str, Any],
    tuning: Tuning,
    evaluations: tuple[Evaluation, ...],
    *,
    precision: Literal["auto", "bf16", "fp16", "fp32"],
    prompt_tokens: int,
    grids: Grids = (),
) -> tuple[dict[str, EvalBatchLimit], ...]:
    """By label, on each card, for a model that need not exist yet. `grids`: of the prompt with the most image
    tokens."""
    spec = Spec(
        name="plan",
        precision=precision,
        model=_UNNAMED,
        tuning=_without_adapter_path(tuning),
        data=Data(train=(Source(path=""),), test=Source(path="")),
        optimizer=AdamW(lr=1.0),
        evaluate=tuple(_relevant_evaluation(one.model_copy(update={"name": one.label})) for one in evaluations),
    )
    lengths = Lengths(
        num_rows=None,
        longest=2,
        mean=2.0,
        supervised=1,
        mean_supervised=1.0,
        source="nothing is trained",
        prompt=prompt_tokens,
        prompt_grids=grids,
    )
    request = RehearsalRequest(
        spec=spec_to_json(spec),
        config=config,
        cards=cards,
        lengths=lengths,
        visible=visible_cards(),
        allocator=allocator_setting(os.environ),
        only_eval_limits=True,
    )
    return _answer(request).eval_limits


def _answer(request: RehearsalRequest) -> RehearsalResult:
    """From the cache, or by the planning process; a failure is never cached."""
    result = cached_record(
        "forecasts",
        _key(request),
        RehearsalResult,
        lambda: rehearse(request),
        is_worth_keeping=lambda made: made.failure is None,
        max_entries=_MAX_CACHED,
    )
    if result.failure is not None:
        kind: type[FinefitError] = getattr(errors, result.failure.kind, FinefitError)
        raise kind(result.failure.problem, result.failure.remedy)
    return result


def _relevant(spec: Spec, nodes: int | None) -> Spec:
    """The spec with everything that a forecast does not depend on made equal, so that the cache finds it. Row lengths
    are passed separately."""
    nodes = nodes or (spec.launcher.nodes if isinstance(spec.launcher, SlurmLauncher) else 1)
    several = nodes > 1  # who starts them makes no difference
    update = {
        "name": "plan",
        "seed": 0,
        "card": "auto",
        "device": "auto",
        "on_nan": NanStop(kind="stop"),
        "model": _UNNAMED,
        "data": Data(
            train=(Source(path=""),),
            validation=spec.data.validation and HeldOut(path=""),
            test=spec.data.test and Source(path=""),
            packing=spec.data.packing,
        ),
        "optimizer": AdamW(lr=1.0, kind=spec.optimizer.kind, clip=None if spec.optimizer.clip is None else 1.0),
        "evaluate": tuple(_relevant_evaluation(evaluation) for evaluation in spec.evaluate),
        "validation": Validation(),
        "save": Save(keep=spec.save.keep),
        "tuning": _without_adapter_path(spec.tuning),
        "launcher": SlurmLauncher(kind="slurm", nodes=nodes) if several else LocalLauncher(kind="local"),
        "trackers": (),
    }
    if isinstance(spec.objective, Dpo):
        update["objective"] = spec.objective.model_copy(update={"beta": 1.0})
    return spec.model_copy(update=update)


def _without_adapter_path(tuning: Tuning) -> Tuning:
    """The spec gives an adapter's shape, so its path makes no difference."""
    has_adapter = isinstance(tuning, Lora) and tuning.adapter is not None
    return tuning.model_copy(update={"adapter": "somewhere"}) if has_adapter else tuning


def _relevant_evaluation(evaluation: Evaluation) -> Evaluation:
    same = {"limit": None, "sources": (), "base": True, "judge": None, "checkpoints": "final"}
    return evaluation.model_copy(update=same)


def _key(request: RehearsalRequest) -> list[object]:
    """Everything that the answer depends on. This machine matters only for cards that are here."""
    here: list[object] = []
    if any(card.is_auto or card.is_cpu for card in map(parse_card, request.cards)):
        free = [(card.name, (card.free_bytes or 0) // _FREE_STEP_BYTES) for card in read_cards()[0]]
        machine = [free, count_cores(), read_memory_bytes(MEMORY_LIMITS)]
        here = [machine, request.visible, request.allocator]
    asked = [request.spec, request.config, request.cards, repr(request.lengths), request.only_eval_limits]
    libraries = [(name, _version(name)) for name in _LIBRARIES]
    return [*asked, request.budget_bytes, *here, libraries, source_digest(*_PACKAGES)]


def visible_cards() -> tuple[int, ...] | None:
    """The indices in CUDA_VISIBLE_DEVICES; None where it is not set, or names cards in another way."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(map(int, named)) if all(part.isdigit() for part in named) else None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
