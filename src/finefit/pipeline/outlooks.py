"""What every stage of a pipeline will take and leave, before any of them has run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finefit.artifacts.forecasts import Forecast, Room, StageOutlook
from finefit.errors import ModelError
from finefit.facts.cards import parse_card
from finefit.facts.machine import MEMORY_LIMITS, read_cards, read_memory_bytes
from finefit.facts.model import read_config, stored_dtypes
from finefit.pipeline.assumed_images import assume_images
from finefit.pipeline.data import PreparedData, missing, places, prepare_data
from finefit.pipeline.forecasting import Grids, rooms_on
from finefit.pipeline.foreseen import foresee_stage, naming
from finefit.pipeline.outlines import Done, Outlines, copies_in, mixture_of, nothing_done
from finefit.pipeline.rehearsing import one_rehearser
from finefit.pipeline.sizes import size_of
from finefit.pipeline.wiring import wired_model, with_files
from finefit.spec.models import Full, Lora, Tuning
from finefit.spec.rows import Data, Source
from finefit.spec.schema import AdamW, Evaluation, Spec
from finefit.spec.stages import (
    BuildMoe,
    CentroidRouter,
    EvaluateStage,
    ForcedRouter,
    Input,
    MakePairs,
    MergeAdapter,
    Pipeline,
    Questions,
    Sampled,
    StageModel,
    TrainStage,
)

_PROCESS_BYTES = 1 << 30
"""Of a process with torch and transformers that has loaded nothing."""
_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ANY_LENGTH = 1 << 24
"""Tokens: more than any prompt has."""


def look_ahead(
    pipeline: Pipeline, base: Path, *, cards: tuple[str, ...], done: Done = nothing_done
) -> dict[str, StageOutlook]:
    """Of every stage, in their order."""
    outlines = Outlines(pipeline=pipeline, base=base.resolve(), done=done)
    with one_rehearser():
        return {name: look_at(outlines, name, cards) for name in pipeline.order()}


def look_at(outlines: Outlines, name: str, asked: tuple[str, ...] | None) -> StageOutlook:
    """`asked`: the cards; None for the device that a run gets here."""
    stage = outlines.pipeline.stages[name]
    if isinstance(stage, TrainStage):
        return of_forecasts(foresee_stage(outlines, name, asked))
    cards = asked or ("cpu" if outlines.pipeline.device == "cpu" or _is_cpu("auto") else "auto",)
    with naming(name):
        match stage:
            case EvaluateStage():
                return _of_evaluation(outlines, stage, cards)
            case MergeAdapter():
                return _of_merge(outlines, stage, cards)
            case BuildMoe():
                return _of_mixture(outlines, stage, name, cards)
            case MakePairs(method=Sampled() as method):
                return _of_sampling(outlines, stage, method, cards)
    return StageOutlook(kind=stage.kind, fits=(True,) * len(cards))


def of_forecasts(found: tuple[Forecast, ...]) -> StageOutlook:
    """Of a training, from what was foretold of it on each card."""
    first = found[0]
    return StageOutlook(
        kind="train",
        fits=tuple(one.fits and not one.gradients.unreached and not one.gradients.frozen for one in found),
        parameters=first.parameters,
        trainable_parameters=first.trainable_parameters,
        host_bytes=first.host_bytes,
        disk_bytes=first.disk_bytes,
        seconds=first.total_seconds,
        forecasts=found,
        notes=() if first.lengths.source == "counted" else (f"rows {first.lengths.source}",),
    )


# Models that are made and not trained


def _of_merge(outlines: Outlines, stage: MergeAdapter, cards: tuple[str, ...]) -> StageOutlook:
    parameters = size_of(outlines.of(stage.model).config).parameters
    num_bytes = parameters * _width(_merged_dtype(outlines, stage))
    host_bytes = num_bytes + _PROCESS_BYTES
    return StageOutlook(
        kind=stage.kind,
        fits=tuple(_holds(card, host_bytes) for card in cards),
        parameters=parameters,
        host_bytes=host_bytes,
        disk_bytes=num_bytes,
    )


def _of_mixture(outlines: Outlines, stage: BuildMoe, name: str, cards: tuple[str, ...]) -> StageOutlook:
    """Layer by layer: host memory holds one layer of all experts, or what lies outside of the layers; and the base, where its hidden states are
    looked at on the CPU."""
    _require_alike(outlines, stage)
    size = size_of(read_config(outlines.at(name)))
    if stage.merge == "average" and size.foreign is not None:
        raise ModelError(
            f"the base's {size.foreign} is no part of an MLP that is known here",
            "take a dense base of another architecture",
        )
    width = _width(_mixed_dtype(outlines, stage))
    written = max(size.outside, size.largest_layer) * width + _PROCESS_BYTES
    looked_at = size_of(outlines.of(stage.base).config).parameters if isinstance(stage.router, CentroidRouter) else 0
    loaded = [looked_at * _width(_PRECISIONS[_precision(outlines.pipeline, card)]) for card in cards]
    host_bytes = [
        written + num_bytes if _is_cpu(card) else written for card, num_bytes in zip(cards, loaded, strict=True)
    ]
    return StageOutlook(
        kind=stage.kind,
        fits=tuple(
            _holds(card, host) and _has(card, on_card)
            for card, host, on_card in zip(cards, host_bytes, loaded, strict=True)
        ),
        parameters=size.parameters,
        host_bytes=host_bytes[0],
        disk_bytes=size.parameters * width,
        notes=tuple(_mixture_notes(stage)),
    )


def _require_alike(outlines: Outlines, stage: BuildMoe) -> None:
    """As the build requires it."""
    base = outlines.of(stage.base).config
    for name, asked in _built_of(stage).items():
        if (config := outlines.of(asked).config) != base:
            from finefit.model.alike import require_alike  # torch comes with it

            require_alike(name, base, config)


def _built_of(stage: BuildMoe) -> dict[str, Input]:
    """Where every token is sent to one expert, the others are left out."""
    return (
        {stage.router.expert: stage.experts[stage.router.expert]}
        if isinstance(stage.router, ForcedRouter)
        else stage.experts
    )


def is_here(card: str) -> bool:
    """Whether a plan is for this machine, of which more is known than its card."""
    asked = parse_card(card)
    return asked.is_auto or asked.is_cpu


def _holds(card: str, host_bytes: int) -> bool:
    """Of another machine's host memory nothing is known."""
    return not is_here(card) or host_bytes <= read_memory_bytes(MEMORY_LIMITS)


def _has(card: str, num_bytes: int) -> bool:
    """Weights alone. A CPU computes in host memory, which is judged apart; where nobody tells what a card has, it is not judged."""
    asked = parse_card(card)
    here = next((one.memory_bytes for one in read_cards()[0]), None) if asked.is_auto else None
    known = asked.memory_bytes or here
    return known is None or num_bytes <= known


def _is_cpu(card: str) -> bool:
    asked = parse_card(card)
    return asked.is_cpu or (asked.is_auto and not read_cards()[0])


def _precision(pipeline: Pipeline, card: str) -> Literal["bf16", "fp16", "fp32"]:
    """What the stages of a run compute in where its spec leaves that open: as wide as bf16 on a card."""
    if pipeline.precision != "auto":
        return pipeline.precision
    return "fp32" if _is_cpu(card) else "bf16"


def _mixture_notes(stage: BuildMoe) -> Iterator[str]:
    mixture = mixture_of(stage)
    copies = {} if isinstance(stage.router, ForcedRouter) else copies_in(stage)  # all but one are left out there
    distinct = len(stage.experts) - len(copies)
    if mixture is None:
        yield f"the mean of {distinct if stage.copies == 'collapse' else len(stage.experts)} experts, as large as the base"
    else:
        yield f"{mixture.num_experts} experts, {mixture.top_k} of them for each token"
    if copies:
        told = f"{len(stage.experts)} slots hold {distinct} distinct {'model' if distinct == 1 else 'models'}"
        counted, harm = (
            ("they take no memory", "take memory and add nothing")
            if mixture
            else ("each counts once", "pull the mean their way")
        )
        if stage.copies == "collapse":
            yield f"{told}, and copies are collapsed: {counted}"
        else:
            yield f"{told}: copies {harm}, so the build refuses them; leave them out, or set copies: collapse"


def _dtypes(outlines: Outlines, asked: Input) -> tuple[str, ...]:
    """Torch's names of what weights are stored in, the most frequent first: of those that are there, else of those to come. Whole weights are
    trained and saved in fp32."""
    known = outlines.of(asked)
    if known.folder is not None and (found := stored_dtypes(known.folder)):
        return found
    match outlines.pipeline.stages[asked.name] if isinstance(asked, StageModel) else None:
        case TrainStage(tuning=Lora(), model=before):
            return _dtypes(outlines, before)
        case TrainStage():
            return ("float32",)
        case MergeAdapter() as stage:
            return (_merged_dtype(outlines, stage),)
        case BuildMoe() as stage:
            return (_mixed_dtype(outlines, stage),)
    return (str(known.config.get("dtype") or known.config.get("torch_dtype") or "float32"),)


def _merged_dtype(outlines: Outlines, stage: MergeAdapter) -> str:
    return _PRECISIONS.get(stage.precision) or _dtypes(outlines, stage.model)[0]


def _mixed_dtype(outlines: Outlines, stage: BuildMoe) -> str:
    """As the build chooses it: nothing that an expert has learnt is rounded away."""
    found = {dtype for asked in (stage.base, *_built_of(stage).values()) for dtype in _dtypes(outlines, asked)}
    return found.pop() if len(found) == 1 else "float32"


def _width(dtype: str) -> int:
    """Bytes of a parameter; where that is not known, four."""
    return _WIDTHS.get(dtype, 4)


# Models that answer


def _of_evaluation(outlines: Outlines, stage: EvaluateStage, cards: tuple[str, ...]) -> StageOutlook:
    tunings = _tunings(outlines, stage)
    asked = {name: _asked(outlines, stage, name) for name in tunings}
    rooms: list[dict[str, dict[str, Room]]] = [{} for _ in cards]
    for name, tuning in tunings.items():
        config, prompts, precision = (
            outlines.of(stage.models[name]).config,
            asked[name],
            _asked_precision(outlines.pipeline, cards),
        )
        for at, found in enumerate(
            rooms_on(
                cards,
                config,
                tuning,
                stage.evaluate,
                precision=precision,
                prompt_tokens=prompts.tokens,
                grids=prompts.grids,
            )
        ):
            rooms[at][name] = found
    gates = [f"{name}: the answers of its experts, chosen by the gate" for name in stage.models if name not in tunings]
    return StageOutlook(
        kind=stage.kind,
        fits=_can_answer(rooms),
        seconds=_answering_seconds(rooms[0], stage.evaluate, next((prompts.count for prompts in asked.values()), None)),
        rooms=tuple(rooms),
        notes=(*_assumptions(asked), *gates),
    )


def _asked_precision(pipeline: Pipeline, cards: tuple[str, ...]) -> Literal["auto", "bf16", "fp16", "fp32"]:
    """On the CPU as the run itself will ask, so that it finds the answer kept."""
    return _precision(pipeline, cards[0]) if all(map(_is_cpu, cards)) else pipeline.precision


def _can_answer(rooms: Sequence[dict[str, dict[str, Room]]]) -> tuple[bool, ...]:
    return tuple(all(room.fits for found in card.values() for room in found.values()) for card in rooms)


def _of_sampling(outlines: Outlines, stage: MakePairs, method: Sampled, cards: tuple[str, ...]) -> StageOutlook:
    """Each row is answered several times, its prompt as long as it is."""
    known = outlines.of(method.model)
    sources = [source for source in (*stage.train, stage.validation, stage.test) if source is not None]
    notes = (f"answers are sampled from a model of {size_of(known.config).parameters:,} parameters",)
    if (
        known.tokenizer is None
        or not all(outlines.is_made(source.path) for source in sources)
        or _absent(outlines, sources)
    ):
        unknown = "what they take is not known before the rows are there"
        return StageOutlook(kind=stage.kind, fits=(True,) * len(cards), notes=(*notes, unknown))
    asked = (Evaluation(task=method.task, max_new_tokens=method.max_new_tokens),)
    found = [_asked_of(outlines, source, method, asked, known.tokenizer) for source in sources]
    tuning, prompts = _tuning_of(outlines.pipeline, method.model), max(prompt for prompt, _ in found)
    rooms = rooms_on(
        cards, known.config, tuning, asked, precision=_asked_precision(outlines.pipeline, cards), prompt_tokens=prompts
    )
    named = [{"model": room} for room in rooms]
    seconds = _answering_seconds(named[0], asked, method.samples * sum(rows for _, rows in found))
    return StageOutlook(kind=stage.kind, fits=_can_answer(named), seconds=seconds, rooms=tuple(named), notes=notes)


def _absent(outlines: Outlines, sources: Sequence[Source]) -> tuple[str, ...]:
    return missing(Data.model_construct(train=tuple(sources)), outlines.base)


def _asked_of(
    outlines: Outlines, source: Source, method: Sampled, evaluations: tuple[Evaluation, ...], tokenizer: Path
) -> tuple[int, int]:
    """Tokens of the longest prompt, and how many rows there are at most."""
    data = Questions(test=source.model_copy(update={"weight": 1.0}), template=method.template, max_tokens=_ANY_LENGTH)
    record = prepare_data(_asking(outlines, method.model, data, evaluations), outlines.base, tokenizer).record
    return record.prompt_tokens or 2, sum(one.used for one in record.sources)


def _tunings(outlines: Outlines, stage: EvaluateStage) -> dict[str, Tuning]:
    """How each model is loaded, but those that a gate chooses among; one that others here lay an adapter over in the same bits as theirs."""
    models = {name: wired_model(outlines.pipeline, asked, outlines.at) for name, asked in stage.models.items()}
    own: dict[str, Tuning] = {
        name: _tuning_of(outlines.pipeline, stage.models[name]) for name, found in models.items() if found.gate is None
    }
    for name, tuning in own.items():
        over = [
            own[other]
            for other in own
            if models[other].adapter is not None and models[other].model == models[name].model
        ]
        bits = {one.base_bits for one in over if isinstance(one, Lora)}
        if isinstance(tuning, Full) and len(bits) == 1 and bits != {None}:
            own = own | {name: over[0]}
    return own


def _tuning_of(pipeline: Pipeline, asked: Input) -> Tuning:
    stage = pipeline.stages[asked.name] if isinstance(asked, StageModel) else None
    if isinstance(stage, TrainStage) and isinstance(stage.tuning, Lora):
        return stage.tuning.model_copy(update={"adapter": None})
    return Full(kind="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """What a model is asked."""

    tokens: int
    """Of the longest."""
    grids: Grids
    """Of the images of the one that shows most."""
    count: int | None = None
    """None where the rows are not known."""
    assumed: str = ""
    """Why, and what is assumed of them then."""


def _asked(outlines: Outlines, stage: EvaluateStage, name: str) -> _Prompts:
    prepared = prepared_questions(outlines, stage, name)
    record = None if prepared is None else prepared.record
    if record is not None and record.prompt_tokens is not None:
        return _Prompts(
            tokens=record.prompt_tokens, grids=record.prompt_grids, count=sum(source.used for source in record.sources)
        )
    longest = stage.data.max_tokens - min(max(one.max_new_tokens for one in stage.evaluate), stage.data.max_tokens // 2)
    images = assume_images(outlines.of(stage.models[name]), stage.data.images, longest)
    to_come = [place for place in places(stage.data.test) if not outlines.is_made(place)]
    reason = f"{to_come[0]} is yet to be made" if to_come else "rows or tokenizer are not there"
    return _Prompts(
        tokens=longest, grids=images.grids, assumed=f"prompts assumed from data.max_tokens, since {reason}{images.told}"
    )


def _assumptions(asked: Mapping[str, _Prompts]) -> tuple[str, ...]:
    """Once where they are those of all models, else with the name of each."""
    told = {name: prompts.assumed for name, prompts in asked.items() if prompts.assumed}
    are_alike = len(told) == len(asked) and len(set(told.values())) == 1
    return tuple(told.values())[:1] if are_alike else tuple(f"{name}: {words}" for name, words in told.items())


def prepared_questions(outlines: Outlines, stage: EvaluateStage, name: str) -> PreparedData | None:
    """As the model of this name is asked them; None where they or its tokenizer are not there."""
    tokenizer = outlines.of(stage.models[name]).tokenizer
    spec = asking_spec(outlines, stage, name)
    return (
        None if tokenizer is None or missing(spec.data, outlines.base) else prepare_data(spec, outlines.base, tokenizer)
    )


def asking_spec(outlines: Outlines, stage: EvaluateStage, name: str) -> Spec:
    """Of rows that are answered and not trained on."""
    return _asking(outlines, stage.models[name], stage.data, stage.evaluate)


def _asking(outlines: Outlines, asked: Input, questions: Questions, evaluations: tuple[Evaluation, ...]) -> Spec:
    """With the model itself, which says how it sees."""
    rows = Data(train=(Source(path=""),), test=questions.test, **questions.how())
    data = with_files(rows, lambda path: str(_placed(outlines, path)))
    spec = Spec(
        name="questions",
        seed=outlines.pipeline.seed,
        model=wired_model(outlines.pipeline, asked, outlines.at).model,
        tuning=Full(kind="full"),
        data=data,
        optimizer=AdamW(lr=1.0),
        evaluate=evaluations,
    )
    return spec.model_copy(update={"data": data.model_copy(update={"train": ()})})


def _placed(outlines: Outlines, path: str) -> Path:
    _, _, rest = path.partition("://")
    name, _, file = rest.partition("/")
    return outlines.at(name) / file


def _answering_seconds(
    rooms: dict[str, dict[str, Room]], evaluations: tuple[Evaluation, ...], items: int | None
) -> float | None:
    """At most: as if every prompt and every answer were the longest. None where the rates of the card or the rows are not known."""
    asked = {one.label: items if one.limit is None or items is None else min(one.limit, items) for one in evaluations}
    found = [(asked[label], room) for model in rooms.values() for label, room in model.items()]
    if any(count is None or room.batch_seconds is None for count, room in found):
        return None
    return sum(math.ceil((count or 0) / room.rows) * (room.batch_seconds or 0.0) for count, room in found)
