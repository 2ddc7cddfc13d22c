"""Forecasts, asked of a process of their own and kept by content: the same question is answered at once. Nothing here imports torch."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import finefit
from finefit import errors
from finefit.artifacts.evaluations import Subject
from finefit.artifacts.forecasts import Answer, Forecast, Lengths, Question, Room
from finefit.artifacts.launcher import allocator_setting
from finefit.artifacts.measurements import uncertainty
from finefit.artifacts.records import read_record, write_record
from finefit.errors import FinefitError, RunError
from finefit.facts.cards import parse_card
from finefit.facts.files import finefit_cache
from finefit.facts.machine import MEMORY_LIMITS, count_cores, read_cards, read_memory_bytes
from finefit.model.locate import Outline, outline
from finefit.pipeline.assumed_images import assume_images
from finefit.pipeline.data import missing, places, prepare_data, present
from finefit.pipeline.rehearsing import ask
from finefit.spec.load import spec_to_json
from finefit.spec.models import Lora, ShapeModel, Tuning
from finefit.spec.rows import Data, Held, Source
from finefit.spec.schema import AdamW, Dpo, Evaluation, LocalLauncher, NanStop, Save, SlurmLauncher, Spec, Validation

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel")
_ROOMS = ("plan", "rehearse", "evaluate", "step", "model", "objective", "data", "facts", "spec", "artifacts")
_MOST_KEPT = 500
Grids = tuple[tuple[int, ...], ...]
"""Of the images of one row."""
_UNNAMED = ShapeModel(kind="shape", config={})
_ROUNDED = 64 << 20
"""What is free on a card changes by a little all the time."""


def forecast(
    spec: Spec,
    base: Path,
    cards: tuple[str, ...],
    lengths: Lengths,
    *,
    budget_bytes: int | None = None,
    nodes: int | None = None,
) -> tuple[Forecast, ...]:
    """One for each card. `budget_bytes` where not all of a card may be used; `nodes` that ranks were started on, else those of the launcher."""
    question = Question(
        spec=spec_to_json(_relevant(spec, nodes)),
        config=outline(spec.model, base).config,
        cards=cards,
        lengths=lengths,
        budget_bytes=budget_bytes,
        visible=visible_cards(),
        allocator=allocator_setting(os.environ),
    )
    return tuple(replace(found, uncertainty=uncertainty(found.card)) for found in _answered(question).forecasts)


def rooms_here(
    subject: Subject, base: Path, evaluations: tuple[Evaluation, ...], prompt_tokens: int, grids: Grids = ()
) -> dict[str, Room]:
    """What evaluations have room for on the device that they get, by what is free there now. `base`: where the path of the model starts."""
    known, card = outline(subject.model, base), "cpu" if subject.device == "cpu" else "auto"
    asked = (known.config, subject.tuning, evaluations)
    (rooms,) = rooms_on((card,), *asked, precision=subject.precision, prompt_tokens=prompt_tokens, grids=grids)
    return rooms


def rooms_on(
    cards: tuple[str, ...],
    config: dict[str, Any],
    tuning: Tuning,
    evaluations: tuple[Evaluation, ...],
    *,
    precision: Literal["auto", "bf16", "fp16", "fp32"],
    prompt_tokens: int,
    grids: Grids = (),
) -> tuple[dict[str, Room], ...]:
    """By label, on each card. `config`: the model's, which need not exist yet. `grids`: of the prompt that shows most."""
    asked = tuple(_as_planned(e.model_copy(update={"name": e.label})) for e in evaluations)
    nowhere = Source(path="")
    spec = Spec(
        name="plan",
        precision=precision,
        model=_UNNAMED,
        tuning=_anywhere(tuning),
        data=Data(train=(nowhere,), test=nowhere),
        optimizer=AdamW(lr=1.0),
        evaluate=asked,
    )
    prompts = Lengths(
        num_rows=None,
        longest=2,
        mean=2.0,
        supervised=1,
        mean_supervised=1.0,
        source="nothing is trained",
        prompt=prompt_tokens,
        prompt_grids=grids,
    )
    question = Question(
        spec=spec_to_json(spec),
        config=config,
        cards=cards,
        lengths=prompts,
        visible=visible_cards(),
        allocator=allocator_setting(os.environ),
        only_rooms=True,
    )
    return _answered(question).rooms


def _answered(question: Question) -> Answer:
    """From the cache, or by a process that rehearses."""
    place = finefit_cache() / "forecasts" / f"{_key(question)}.json"
    answer = _kept(place)
    if answer is None:
        answer = ask(question)
        if answer.failure is None:
            with suppress(OSError):  # a cache that cannot be written costs time and nothing else
                _keep(place, answer)
    if answer.failure is not None:
        kind: type[FinefitError] = getattr(errors, answer.failure.kind, FinefitError)
        raise kind(answer.failure.problem, answer.failure.remedy)
    return answer


def lengths_of(spec: Spec, base: Path, *, to_come: str | None = None) -> Lengths:
    """Counted where rows and tokenizer are there, else the worst that the spec allows: every row of full length, every token supervised. `to_come`:
    what a stage has yet to make of the rows, or of their images."""
    known = outline(spec.model, base)
    if to_come is not None:
        return _assumed(spec, f"{to_come} is yet to be made", known)
    absent = [
        path
        for path in missing(spec.data, base)
        if path in {place for source in spec.data.train for place in places(source)}
    ]
    if absent or known.tokenizer is None:
        return _assumed(spec, f"{absent[0]} is not there" if absent else "the model comes without a tokenizer", known)
    there = spec.model_copy(update={"data": present(spec.data, base)})
    return prepare_data(there, base, known.tokenizer).record.lengths or _assumed(spec, "no row can be used", known)


def _assumed(spec: Spec, reason: str, known: Outline) -> Lengths:
    tokens = spec.data.max_tokens
    images = assume_images(known, spec.data.images, tokens)
    return Lengths(
        num_rows=None,
        longest=tokens,
        mean=float(tokens),
        supervised=tokens - 1,
        mean_supervised=float(tokens - 1),
        source=f"assumed from data.max_tokens, since {reason}{images.told}",
        sides=2 if isinstance(spec.objective, Dpo) else 1,
        grids=images.grids,
    )


def _relevant(spec: Spec, nodes: int | None) -> Spec:
    """What a forecast depends on; all else is made equal, so that it is not asked for again. The lengths of the rows are told apart."""
    nowhere = Source(path="")
    held, test = spec.data.validation and Held(path=""), spec.data.test and nowhere
    data = Data(train=(nowhere,), validation=held, test=test, packing=spec.data.packing)
    optimizer = AdamW(lr=1.0, kind=spec.optimizer.kind, clip=None if spec.optimizer.clip is None else 1.0)
    evaluations = tuple(_as_planned(evaluation) for evaluation in spec.evaluate)
    objective = spec.objective.model_copy(update={"beta": 1.0}) if isinstance(spec.objective, Dpo) else spec.objective
    nodes = nodes or (spec.launcher.nodes if isinstance(spec.launcher, SlurmLauncher) else 1)
    launcher = (
        SlurmLauncher(kind="slurm", nodes=nodes) if nodes > 1 else LocalLauncher(kind="local")
    )  # whoever starts them
    same = {
        "name": "plan",
        "seed": 0,
        "card": "auto",
        "device": "auto",
        "on_nan": NanStop(kind="stop"),
        "model": _UNNAMED,
    }
    more = {
        "data": data,
        "optimizer": optimizer,
        "evaluate": evaluations,
        "validation": Validation(),
        "save": Save(keep=spec.save.keep),
    }
    asked = {"objective": objective, "tuning": _anywhere(spec.tuning), "launcher": launcher, "trackers": ()}
    return spec.model_copy(update=same | more | asked)


def _anywhere(tuning: Tuning) -> Tuning:
    """An adapter's shape is that of the spec, wherever it lies."""
    is_there = isinstance(tuning, Lora) and tuning.adapter is not None
    return tuning.model_copy(update={"adapter": "somewhere"}) if is_there else tuning


def _as_planned(evaluation: Evaluation) -> Evaluation:
    return evaluation.model_copy(
        update={"limit": None, "sources": (), "base": True, "judge": None, "checkpoints": "final"}
    )


def _key(question: Question) -> str:
    """Of everything that the answer depends on."""
    requests = [parse_card(card) for card in question.cards]
    here = [_machine()] if any(request.is_auto or request.is_cpu for request in requests) else []
    limits = [question.budget_bytes, *([question.visible, question.allocator] if here else [])]
    content = [
        question.spec,
        question.config,
        question.cards,
        repr(question.lengths),
        question.only_rooms,
        here,
        limits,
        _versions(),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def visible_cards() -> tuple[int, ...] | None:
    """Those that CUDA_VISIBLE_DEVICES leaves, by their numbers; None where it says nothing, or names cards otherwise."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(map(int, named)) if all(part.isdigit() for part in named) else None


def _machine() -> list[object]:
    cards = [(card.name, (card.free_bytes or 0) // _ROUNDED) for card in read_cards()[0]]
    return [cards, count_cores(), read_memory_bytes(MEMORY_LIMITS)]


def _versions() -> dict[str, str]:
    """Of the libraries that are rehearsed with, and of our own rooms by their text."""
    text = hashlib.sha256()
    for room in _ROOMS:
        for file in sorted((Path(finefit.__file__).parent / room).rglob("*.py")):
            text.update(file.read_bytes())
    return {name: _version(name) for name in _PACKAGES} | {"finefit": text.hexdigest()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _kept(place: Path) -> Answer | None:
    try:
        return read_record(place, Answer)
    except (RunError, OSError):  # not there, written by another version, or not to be read
        return None


def _keep(place: Path, answer: Answer) -> None:
    """The newest ones only: every version of a spec leaves one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    write_record(place, answer)
    kept = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for old in kept[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)
