"""Sends requests to the planning process, and caches its forecasts by content: a repeated request is answered at once.

The process imports torch once, which takes longer than most rehearsals, so one process serves many requests. This
module never imports torch."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from finefit import bounded
from finefit.artifacts.cache import cached_record, host_here, source_digest, time_factor, uncertainty
from finefit.artifacts.forecasts import (
    EvalBatchLimit,
    Forecast,
    Lengths,
    PlanningProgress,
    RehearsalRequest,
    RehearsalResult,
)
from finefit.artifacts.processes import allocator_setting
from finefit.artifacts.stage_records import Subject
from finefit.errors import FinefitError, ModelError
from finefit.facts.cards import CardRequest, find_kind, parse_card
from finefit.facts.machine import MEMORY_LIMITS, count_cores, read_memory_bytes, read_version
from finefit.facts.nvml import Card, numbered, read_cards
from finefit.model.resolve_model import read_stub
from finefit.spec.data import Data, HeldOut, Source
from finefit.spec.load import spec_to_json
from finefit.spec.models import Lora, ShapeModel, Tuning
from finefit.spec.schema import AdamW, Dpo, Evaluation, LocalLauncher, NanStop, SlurmLauncher, Spec, Validation
from finefit.spec.served import Server

Job = Literal[
    "rehearse",
    "count_parameters",
    "fill_mixture_stub",
    "require_same_config",
    "longest_possible_images",
    "prove_loadable",
    "prove_custom_loadable",
]
"""The jobs of the planning process, which are functions of plan/worker.py."""
_TAIL_LINES = 12
_TAIL_BYTES = 64 << 10
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel")
_PACKAGES = (
    *("plan", "rehearse", "evaluate", "step", "custom", "moe", "model", "data", "vision", "negatives", "tasks"),
    *("objective", "artifacts", "facts", "spec"),
)
"""Packages of finefit whose source affects a forecast."""
_MAX_CACHED = 500
_UNNAMED = ShapeModel(kind="shape", config={})
_UNTRAINED = Lengths(num_rows=None, longest=2, mean=2.0, supervised=1, mean_supervised=1.0, source="nothing is trained")
_FREE_STEP_BYTES = 64 << 20
"""The free memory of a GPU changes slightly all the time, so it is rounded in cache keys."""
Grids = tuple[tuple[int, ...], ...]
"""The grids of one row's images."""


class PlannerProcess:
    """Runs one job after another. If torch crashes, the next job starts a new process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="finefit-plan-")
        self._stderr = Path(self._folder.name) / "stderr"
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job, *arguments: object) -> Any:
        """Returns the result of the job, or raises its error as a FinefitError."""
        if self._process is None:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
            command, pipe = [sys.executable, "-P", "-m", "finefit.plan.start_worker"], subprocess.PIPE
            with self._stderr.open("w") as stderr:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # then there is no answer either
                pickle.dump((job, arguments), process.stdin)
                process.stdin.flush()
            while isinstance(answer := pickle.load(process.stdout), PlanningProgress):
                _observer.get()(answer)
        except (EOFError, pickle.UnpicklingError):  # the process has ended
            raise self._failed(self._end(process)) from None
        if isinstance(answer, FinefitError):
            raise answer
        return answer

    def _failed(self, code: int) -> FinefitError:
        tail = "\n".join(
            bounded.tail_of(self._stderr, _TAIL_BYTES).decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        )
        if code < 0:
            ended = f"the rehearsal was ended by {signal.Signals(-code).name} inside torch; its last lines"
            return ModelError(f"{ended}:\n{tail}", "please report it with the model's config.json")
        ended = f"the rehearsal ended with code {code}, which is a bug in finefit"
        return FinefitError(f"{ended}:\n{tail}", "please report it with these lines")

    def _end(self, process: "subprocess.Popen[bytes]") -> int:
        self._process = None
        with suppress(BrokenPipeError), process:  # leaving the block closes its pipes
            pass
        return process.wait()

    def __enter__(self) -> "PlannerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is not None:
            if kind is not None:  # on Ctrl-C, for example, nobody waits for the answer
                self._process.kill()
            self._end(self._process)
        self._folder.cleanup()


Observer = Callable[[PlanningProgress], None]
_shared: ContextVar[PlannerProcess | None] = ContextVar("shared planner", default=None)
_observer: ContextVar[Observer] = ContextVar("observer of planning", default=lambda _: None)


@contextmanager
def observed_planning(observer: Observer) -> Iterator[None]:
    """`observer` is called for every candidate that is rehearsed inside the block; a cached plan rehearses none."""
    before = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(before)


@contextmanager
def shared_planner() -> Iterator[None]:
    """One process runs all jobs that are requested inside the block."""
    if _shared.get() is not None:
        yield
        return
    with PlannerProcess() as planner:
        before = _shared.set(planner)
        try:
            yield
        finally:
            _shared.reset(before)


def ask(job: Job, *arguments: object) -> Any:
    with shared_planner():
        planner = _shared.get()
        assert planner is not None
        return planner.ask(job, *arguments)


def forecast(
    spec: Spec,
    base: Path,
    cards: tuple[str, ...],
    lengths: Lengths,
    *,
    budget_bytes: int | None = None,
    nodes: int | None = None,
) -> tuple[Forecast, ...]:
    """Returns one forecast per card. `budget_bytes` limits how much of a card may be used; `nodes` overrides the
    launcher's number for ranks that were already started."""
    asked, config = spec_to_json(_relevant(spec, nodes)), read_stub(spec.model, base).config
    request = RehearsalRequest(spec=asked, config=config, cards=cards, lengths=lengths, budget_bytes=budget_bytes)
    pairs = zip(_answer(request).forecasts, map(parse_card, cards), strict=True)
    return tuple(as_measured(replace(found, uncertainty=uncertainty(found.card)), card) for found, card in pairs)


def as_measured(found: Forecast, card: CardRequest) -> Forecast:
    """With times as earlier runs on this card and host took. A budget alone means a part of the card here."""
    name = found.card if card.kind is not None or found.card == "cpu" else _kind_here()
    factor = None if name is None else time_factor(name, host_here())
    if factor is None or found.step_seconds is None:
        return found

    note = f"times are {factor:.2f} x the prediction, as in earlier runs on {name} in this host"

    def scaled(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * factor

    return replace(
        found,
        step_seconds=scaled(found.step_seconds),
        tokens_per_second=found.tokens_per_second and found.tokens_per_second / factor,
        total_seconds=scaled(found.total_seconds),
        cost=scaled(found.cost),
        suggestions=tuple(replace(one, step_seconds=scaled(one.step_seconds)) for one in found.suggestions),
        notes=(*found.notes, note),
    )


def _kind_here() -> str | None:
    """The name of the card that a run on this machine uses; None if there is none, or none that is known."""
    card = next(iter(_cards_here()), None)
    kind = None if card is None else find_kind(card.name, card.memory_bytes)
    return None if kind is None else kind.name


def _cards_here() -> tuple[Card, ...]:
    return numbered(read_cards()[0], visible_cards())


def eval_limits_here(
    subject: Subject, base: Path, evaluations: tuple[Evaluation, ...], prompt_tokens: int, grids: Grids = ()
) -> dict[str, EvalBatchLimit]:
    """Returns the limits by label on the subject's device, for the memory that is free there now. `base`: the folder
    that the model's path is relative to."""
    config, card = read_stub(subject.model, base).config, "cpu" if subject.device == "cpu" else "auto"
    (limits,) = eval_limits_on((card,), config, subject.tuning, evaluations, subject.precision, prompt_tokens, grids)
    return limits


def eval_limits_on(
    cards: tuple[str, ...],
    config: dict[str, Any],
    tuning: Tuning,
    evaluations: tuple[Evaluation, ...],
    precision: Literal["auto", "bf16", "fp16", "fp32"],
    prompt_tokens: int,
    grids: Grids = (),
) -> tuple[dict[str, EvalBatchLimit], ...]:
    """Returns the limits by label, for each card, for a model that need not exist yet. `grids`: those of the prompt
    with the most image tokens."""
    spec = Spec(
        name="plan",
        precision=precision,
        model=_UNNAMED,
        tuning=_without_adapter_path(tuning),
        data=Data(train=(Source(path=""),), test=Source(path="")),
        optimizer=AdamW(lr=1e-5),
        evaluate=tuple(_relevant_evaluation(one.model_copy(update={"name": one.label})) for one in evaluations),
    )
    lengths = replace(_UNTRAINED, prompt=prompt_tokens, prompt_grids=grids)
    request = RehearsalRequest(
        spec=spec_to_json(spec), config=config, cards=cards, lengths=lengths, only_eval_limits=True
    )
    return _answer(request).eval_limits


def _answer(request: RehearsalRequest) -> RehearsalResult:
    """Answers from the cache, or by the planning process. The key is everything that the answer depends on; this
    machine matters only for its own cards."""
    request = replace(request, visible=visible_cards(), allocator=allocator_setting(os.environ))
    asked = [request.spec, request.config, request.cards, repr(request.lengths), request.only_eval_limits]
    here: list[object] = []
    if any(card.is_auto or card.is_cpu for card in map(parse_card, request.cards)):
        free = [(card.name, (card.free_bytes or 0) // _FREE_STEP_BYTES) for card in read_cards()[0]]
        here = [
            [free, count_cores(), read_memory_bytes(MEMORY_LIMITS)],
            request.visible,
            request.allocator,
            host_here(),
        ]
    elif any(parse_card(card).kind is None for card in request.cards):
        # whose rates compare candidates
        here = [[(card.name, card.memory_bytes) for card in _cards_here()], host_here()]
    libraries = [(name, read_version(name)) for name in _LIBRARIES]
    key = [*asked, request.budget_bytes, *here, libraries, source_digest(*_PACKAGES)]
    return cached_record("forecasts", key, RehearsalResult, lambda: ask("rehearse", request), max_entries=_MAX_CACHED)


def _relevant(spec: Spec, nodes: int | None) -> Spec:
    """Equalises everything that a forecast does not depend on, so that the cache finds it. Row lengths are passed
    separately; who starts the nodes makes no difference."""
    nodes = nodes or (spec.launcher.nodes if isinstance(spec.launcher, SlurmLauncher) else 1)
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
        "optimizer": AdamW(lr=1e-5, kind=spec.optimizer.kind, clip=None if spec.optimizer.clip is None else 1.0),
        "evaluate": tuple(map(_relevant_evaluation, spec.evaluate)),
        "validation": Validation(),
        "save": spec.save,
        "tuning": _without_adapter_path(spec.tuning),
        "launcher": SlurmLauncher(kind="slurm", nodes=nodes) if nodes > 1 else LocalLauncher(kind="local"),
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
    same: dict[str, Any] = {"limit": None, "sources": (), "base": True, "judge": None, "checkpoints": "final"}
    if evaluation.server is not None:  # that there is one decides, not which
        same["server"] = Server(url="http://localhost", model="any")
    return evaluation.model_copy(update=same)


def visible_cards() -> tuple[int, ...] | None:
    """Returns the indices in CUDA_VISIBLE_DEVICES, in order; None if it is not set, or names cards in another way."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(map(int, named)) if all(part.isdigit() for part in named) else None
