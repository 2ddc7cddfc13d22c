"""Forecasts what every stage needs and produces before any stage has run: device memory, host memory, disk and time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, StageForecast
from finefit.artifacts.records import wired_model, with_files
from finefit.errors import ModelError
from finefit.facts.cards import parse_card
from finefit.facts.files import read_config, stored_dtypes
from finefit.facts.machine import MEMORY_LIMITS, read_memory_bytes
from finefit.facts.nvml import read_cards
from finefit.plan import client, stage_forecasts
from finefit.plan.client import Grids, eval_limits_on, shared_planner
from finefit.plan.prepared_data import PreparedData, missing, places, prepare_data
from finefit.plan.stage_forecasts import ModelStubs, expert_copies, forecast_training, mixture_shape, model_size
from finefit.spec import stages as kinds
from finefit.spec.data import Data, Source
from finefit.spec.exports import export_bytes, parse_formats
from finefit.spec.models import Full, Lora, Model, Tuning
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import AdamW, Evaluation, Spec

_PROCESS_BYTES = 1 << 30
"""Memory of a process that has imported torch and transformers but loaded nothing."""
_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per parameter, by dtype."""
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PROBE_TOKENS = 256
"""Of a probe's item: prompt, answer, and what is written greedily."""
_DISK_BYTES_PER_SECOND = 200e6
_HOST_FLOPS = 20e9
"""Of two cores that answer one prompt at a time, which weights limit."""
_LOAD_SECONDS = 8.0
"""Of a program that starts and loads a small model."""
_ANY_LENGTH = 1 << 24
"""More tokens than any prompt has."""
EvalLimits = dict[str, dict[str, EvalBatchLimit]]
"""Limits by model and label, on one card."""


def forecast_stages(pipeline: Pipeline, base: Path, *, cards: tuple[str, ...]) -> dict[str, StageForecast]:
    """Forecasts every stage, in pipeline order."""
    stubs = ModelStubs(pipeline=pipeline, base=base.resolve())
    with shared_planner():
        return {name: forecast_stage(stubs, name, cards) for name in pipeline.order()}


def cards_here(pipeline: Pipeline) -> tuple[str]:
    """Returns the device that a run gets on this machine, as the name of a card."""
    return ("cpu" if pipeline.device == "cpu" or _is_cpu("auto") else "auto",)


def forecast_stage(
    stubs: ModelStubs, name: str, cards: tuple[str, ...], forecaster: stage_forecasts.Forecaster | None = None
) -> StageForecast:
    """`forecaster` is used for trainings; by default it forecasts the same cards."""
    stage = stubs.pipeline.stages[name]
    if isinstance(stage, kinds.TrainStage):
        return training_costs(forecast_training(stubs, name, forecaster or stage_forecasts.on_cards(cards)))
    with stage_forecasts.stage_in_errors(stubs.pipeline, name):
        match stage:
            case kinds.EvaluateStage():
                return _evaluation_costs(stubs, stage, cards)
            case kinds.MergeAdapter():
                return _merge_costs(stubs, stage, cards)
            case kinds.Export():
                return _export_costs(stubs, stage, cards)
            case kinds.BuildMoe():
                return _mixture_costs(stubs, stage, name, cards)
            case kinds.MakePairs(method=kinds.Sampled() as method):
                return _sampling_costs(stubs, stage, method, cards)
    return StageForecast(kind=stage.kind, fits=(True,) * len(cards))


def training_costs(found: tuple[Forecast, ...]) -> StageForecast:
    """Derives the costs from a training's forecasts, one per card."""
    first = found[0]
    return StageForecast(
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


def _merge_costs(stubs: ModelStubs, stage: kinds.MergeAdapter, cards: tuple[str, ...]) -> StageForecast:
    parameters = model_size(stubs.of(stage.model).config).parameters
    num_bytes = parameters * _WIDTHS.get(_merged_dtype(stubs, stage), 4)
    host_bytes = num_bytes + _PROCESS_BYTES
    return StageForecast(
        kind=stage.kind,
        fits=tuple(_holds(card, host_bytes) for card in cards),
        parameters=parameters,
        host_bytes=host_bytes,
        disk_bytes=num_bytes,
    )


def _export_costs(stubs: ModelStubs, stage: kinds.Export, cards: tuple[str, ...]) -> StageForecast:
    """Merging goes tensor by tensor, so memory is that of the proof: one model at a time, in fp32 where that fits, else
    in the width that it has. Time is an upper bound of disk and host, by what was measured on two cores."""
    size = model_size(stubs.of(stage.model).config)
    formats, dtype = parse_formats(stage.to), _dtypes(stubs, stage.model)[0]
    stored_bytes = size.parameters * _WIDTHS.get(dtype, 4)
    here = read_memory_bytes(MEMORY_LIMITS)
    wide_bytes = 4 * size.parameters + _PROCESS_BYTES
    host_bytes = (
        wide_bytes if wide_bytes <= here or not any(map(is_this_machine, cards)) else stored_bytes + _PROCESS_BYTES
    )
    disk_bytes = export_bytes(formats, size.parameters, stored_bits=8.0 * _WIDTHS.get(dtype, 4))
    tokens = stage.prompts * _PROBE_TOKENS * (1 + len(formats))
    moved = (disk_bytes + stored_bytes * len(formats)) / _DISK_BYTES_PER_SECOND
    seconds = moved + 2.0 * size.parameters * tokens / _HOST_FLOPS + _LOAD_SECONDS * (1 + len(formats))
    return StageForecast(
        kind=stage.kind,
        fits=tuple(_holds(card, host_bytes) for card in cards),
        parameters=size.parameters,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        seconds=seconds,
        notes=(f"{', '.join(map(str, formats))}, each proved on {stage.prompts} prompts",),
    )


def _mixture_costs(stubs: ModelStubs, stage: kinds.BuildMoe, name: str, cards: tuple[str, ...]) -> StageForecast:
    """The build proceeds layer by layer: host memory holds one layer of all experts, or everything outside the layers.
    If the router starts from hidden states, the base is loaded too; on a CPU that takes host memory."""
    base = stubs.of(stage.base).config
    for expert, asked in _built_experts(stage).items():  # the build requires this too
        if (config := stubs.of(asked).config) != base:
            client.ask("require_same_config", expert, base, config)
    size = model_size(read_config(stubs.at(name)))
    if stage.merge == "average" and size.foreign is not None:
        problem = f"the base's {size.foreign} is not part of a known MLP"
        raise ModelError(problem, "use a dense base of another architecture")
    width = _WIDTHS.get(_mixture_dtype(stubs, stage), 4)
    written = max(size.outside, size.largest_layer) * width + _PROCESS_BYTES
    loaded = model_size(base).parameters if isinstance(stage.router, kinds.CentroidRouter) else 0
    on_card = [loaded * _WIDTHS[_PRECISIONS[_precision(stubs.pipeline, card)]] for card in cards]
    on_host = [written + weights if _is_cpu(card) else written for card, weights in zip(cards, on_card, strict=True)]
    return StageForecast(
        kind=stage.kind,
        fits=tuple(map(_holds, cards, on_host, on_card)),
        parameters=size.parameters,
        host_bytes=on_host[0],
        disk_bytes=size.parameters * width,
        notes=tuple(_mixture_notes(stage)),
    )


def _built_experts(stage: kinds.BuildMoe) -> dict[str, kinds.Input]:
    """A forced router leaves out all experts but one."""
    forced = stage.router.expert if isinstance(stage.router, kinds.ForcedRouter) else None
    return stage.experts if forced is None else {forced: stage.experts[forced]}


def is_this_machine(card: str) -> bool:
    """Returns whether the plan is for this machine, whose host memory and disk are known."""
    asked = parse_card(card)
    return asked.is_auto or asked.is_cpu


def _holds(card: str, host_bytes: int, card_bytes: int = 0) -> bool:
    """Checks host memory if it is this machine's, and the weights against a card of known size; on a CPU they are in
    host memory."""
    asked = parse_card(card)
    here = next((one.memory_bytes for one in read_cards()[0]), None) if asked.is_auto else None
    has_host = not is_this_machine(card) or host_bytes <= read_memory_bytes(MEMORY_LIMITS)
    known = asked.memory_bytes or here
    return has_host and (known is None or card_bytes <= known)


def _is_cpu(card: str) -> bool:
    asked = parse_card(card)
    return asked.is_cpu or (asked.is_auto and not read_cards()[0])


def _precision(pipeline: Pipeline, card: str) -> Literal["bf16", "fp16", "fp32"]:
    """Returns a run's compute precision; `auto` has the width of bf16 on a card."""
    if pipeline.precision != "auto":
        return pipeline.precision
    return "fp32" if _is_cpu(card) else "bf16"


def _mixture_notes(stage: kinds.BuildMoe) -> Iterator[str]:
    mixture = mixture_shape(stage)
    copies = {} if isinstance(stage.router, kinds.ForcedRouter) else expert_copies(stage)  # a forced router drops them
    distinct = len(stage.experts) - len(copies)
    if mixture is None:
        count = distinct if stage.copies == "collapse" else len(stage.experts)
        yield f"the mean of {count} experts, as large as the base"
        collapsed, harm = "each counts once", "bias the mean"
    else:
        yield f"{mixture.num_experts} experts, {mixture.top_k} of them for each token"
        collapsed, harm = "they take no memory", "take memory and add nothing"
    if copies:
        slots = f"{len(stage.experts)} slots hold {distinct} distinct {'model' if distinct == 1 else 'models'}"
        if stage.copies == "collapse":
            yield f"{slots}, and copies are collapsed: {collapsed}"
        else:
            yield f"{slots}: copies {harm}, so the build refuses them; leave them out, or set copies: collapse"


def _dtypes(stubs: ModelStubs, asked: kinds.Input) -> tuple[str, ...]:
    """Returns torch's names of the stored dtypes, the most frequent first. Full weights are trained and saved in
    fp32."""
    stub = stubs.of(asked)
    if stub.folder is not None and (found := stored_dtypes(stub.folder)):
        return found
    match stubs.pipeline.stages[asked.name] if isinstance(asked, kinds.StageModel) else None:
        case kinds.TrainStage(tuning=Lora(), model=before):
            return _dtypes(stubs, before)
        case kinds.TrainStage():
            return ("float32",)
        case kinds.MergeAdapter() as stage:
            return (_merged_dtype(stubs, stage),)
        case kinds.BuildMoe() as stage:
            return (_mixture_dtype(stubs, stage),)
    return (str(stub.config.get("dtype") or stub.config.get("torch_dtype") or "float32"),)


def _merged_dtype(stubs: ModelStubs, stage: kinds.MergeAdapter) -> str:
    return _PRECISIONS.get(stage.precision) or _dtypes(stubs, stage.model)[0]


def _mixture_dtype(stubs: ModelStubs, stage: kinds.BuildMoe) -> str:
    """Returns the dtype that the build chooses: nothing that an expert has learned is rounded away."""
    found = {dtype for asked in (stage.base, *_built_experts(stage).values()) for dtype in _dtypes(stubs, asked)}
    return found.pop() if len(found) == 1 else "float32"


def _evaluation_costs(stubs: ModelStubs, stage: kinds.EvaluateStage, cards: tuple[str, ...]) -> StageForecast:
    wired = {name: wired_model(stubs.pipeline, asked, stubs.at) for name, asked in stage.models.items()}
    tunings = same_base_bits(
        {
            name: (one.model, _tuning_of(stubs.pipeline, stage.models[name]), one.adapter is not None)
            for name, one in wired.items()
            if one.gate is None  # a gate loads nothing
        }
    )
    prompts = {name: _prompts(stubs, stage, name) for name in tunings}
    precision = _answer_precision(stubs.pipeline, cards)
    limits: list[EvalLimits] = [{} for _ in cards]
    for name, tuning in tunings.items():
        config, asked = stubs.of(stage.models[name]).config, prompts[name]
        found = eval_limits_on(cards, config, tuning, stage.evaluate, precision, asked.tokens, asked.grids)
        for by_model, on_card in zip(limits, found, strict=True):
            by_model[name] = on_card
    assumed = {name: asked.assumed for name, asked in prompts.items() if asked.assumed}
    notes = [f"{name}: {words}" for name, words in assumed.items()]
    if len(assumed) == len(prompts) and len(set(assumed.values())) == 1:  # all models share it
        notes = list(assumed.values())[:1]
    notes += [f"{name}: the answers of its experts, chosen by the gate" for name in wired if name not in tunings]
    count = next((asked.count for asked in prompts.values()), None)
    return _answer_costs(stage, limits, stage.evaluate, count, tuple(notes))


def _answer_precision(pipeline: Pipeline, cards: tuple[str, ...]) -> Literal["auto", "bf16", "fp16", "fp32"]:
    """On the CPU, returns the precision that the run itself will request, so that it finds the answer in the cache."""
    return _precision(pipeline, cards[0]) if all(map(_is_cpu, cards)) else pipeline.precision


def _answer_costs(
    stage: kinds.EvaluateStage | kinds.MakePairs,
    limits: Sequence[EvalLimits],
    evaluations: tuple[Evaluation, ...],
    items: int | None,
    notes: tuple[str, ...],
) -> StageForecast:
    """The time is an upper bound, for the longest prompt and answer; None if the card's rates or the rows are
    unknown."""
    counts = {one.label: items if one.limit is None or items is None else min(one.limit, items) for one in evaluations}
    found = [(counts[label], limit) for model in limits[0].values() for label, limit in model.items()]
    seconds = None
    if all(count is not None and limit.batch_seconds is not None for count, limit in found):
        seconds = sum(math.ceil((count or 0) / limit.rows) * (limit.batch_seconds or 0.0) for count, limit in found)
    return StageForecast(
        kind=stage.kind,
        fits=tuple(all(limit.fits for model in card.values() for limit in model.values()) for card in limits),
        seconds=seconds,
        eval_limits=tuple(limits),
        notes=notes,
    )


def _sampling_costs(
    stubs: ModelStubs, stage: kinds.MakePairs, method: kinds.Sampled, cards: tuple[str, ...]
) -> StageForecast:
    """Each row is answered several times, each time with its whole prompt."""
    stub = stubs.of(method.model)
    sources = [source for source in (*stage.train, stage.validation, stage.test) if source is not None]
    note = f"answers are sampled from a model of {model_size(stub.config).parameters:,} parameters"
    absent = missing(Data.model_construct(train=tuple(sources)), stubs.base)
    if stub.tokenizer is None or absent or not all(stubs.is_made(source.path) for source in sources):
        unknown = "their cost is not known before the rows exist"
        return StageForecast(kind=stage.kind, fits=(True,) * len(cards), notes=(note, unknown))
    asked = (Evaluation(task=method.task, max_new_tokens=method.max_new_tokens),)
    sizes = []
    for source in sources:
        whole = source.model_copy(update={"weight": 1.0})
        rows = kinds.Questions(test=whole, template=method.template, max_tokens=_ANY_LENGTH)
        record = prepare_data(_rows_spec(stubs, method.model, rows, asked), stubs.base, stub.tokenizer).record
        sizes.append((record.prompt_tokens or 2, sum(one.used for one in record.sources)))
    tuning, precision = _tuning_of(stubs.pipeline, method.model), _answer_precision(stubs.pipeline, cards)
    longest = max(tokens for tokens, _ in sizes)
    found = eval_limits_on(cards, stub.config, tuning, asked, precision, longest)
    items = method.samples * sum(count for _, count in sizes)
    return _answer_costs(stage, [{"model": on_card} for on_card in found], asked, items, (note,))


def same_base_bits(models: Mapping[str, tuple[Model, Tuning, bool]]) -> dict[str, Tuning]:
    """Returns the tuning of each (model, tuning, has adapter). A base that others use with an adapter is loaded in the
    same bits as theirs, so that their scores differ only by the adapter."""
    found: dict[str, Tuning] = {}
    for name, (model, tuning, has_adapter) in models.items():
        over = [other for base, other, has_one in models.values() if has_one and base == model and not has_adapter]
        bits = {one.base_bits for one in over if isinstance(one, Lora)}
        found[name] = over[0] if len(bits) == 1 and bits != {None} else tuning
    return found


def _tuning_of(pipeline: Pipeline, asked: kinds.Input) -> Tuning:
    stage = pipeline.stages[asked.name] if isinstance(asked, kinds.StageModel) else None
    if isinstance(stage, kinds.TrainStage) and isinstance(stage.tuning, Lora):
        return stage.tuning.model_copy(update={"adapter": None})
    return Full(kind="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """The prompts of one model."""

    tokens: int
    """Tokens of the longest prompt."""
    grids: Grids
    """Grids of the images in the prompt with the most image tokens."""
    count: int | None = None
    """None if the rows are unknown."""
    assumed: str = ""
    """The assumption made in that case, and the reason."""


def _prompts(stubs: ModelStubs, stage: kinds.EvaluateStage, name: str) -> _Prompts:
    prepared = prepared_eval_rows(stubs, stage, name)
    record = None if prepared is None else prepared.record
    if record is not None and record.prompt_tokens is not None:
        count = sum(source.used for source in record.sources)
        return _Prompts(tokens=record.prompt_tokens, grids=record.prompt_grids, count=count)
    longest = stage.data.max_tokens - min(max(one.max_new_tokens for one in stage.evaluate), stage.data.max_tokens // 2)
    images = stage_forecasts.longest_possible_images(stubs.of(stage.models[name]), stage.data.images, longest)
    not_made = [place for place in places(stage.data.test) if not stubs.is_made(place)]
    reason = f"{not_made[0]} is not made yet" if not_made else "rows or tokenizer do not exist"
    assumed = f"prompts assumed from data.max_tokens, since {reason}{images.note}"
    return _Prompts(tokens=longest, grids=images.grids, assumed=assumed)


def prepared_eval_rows(stubs: ModelStubs, stage: kinds.EvaluateStage, name: str) -> PreparedData | None:
    """Returns the rows as rendered for the model `name`; None if they or its tokenizer do not exist."""
    tokenizer, spec = stubs.of(stage.models[name]).tokenizer, eval_rows_spec(stubs, stage, name)
    if tokenizer is None or missing(spec.data, stubs.base):
        return None
    return prepare_data(spec, stubs.base, tokenizer)


def eval_rows_spec(stubs: ModelStubs, stage: kinds.EvaluateStage, name: str) -> Spec:
    return _rows_spec(stubs, stage.models[name], stage.data, stage.evaluate)


def _rows_spec(
    stubs: ModelStubs, asked: kinds.Input, rows: kinds.Questions, evaluations: tuple[Evaluation, ...]
) -> Spec:
    """Returns a spec of rows that are answered, not trained on; its model determines how images are processed."""

    def placed(path: str) -> str:
        name, _, file = path.partition("://")[2].partition("/")
        return str(stubs.at(name) / file)

    data = with_files(Data(train=(Source(path=""),), test=rows.test, **rows.how()), placed)
    spec = Spec(
        name="questions",
        seed=stubs.pipeline.seed,
        model=wired_model(stubs.pipeline, asked, stubs.at).model,
        tuning=Full(kind="full"),
        data=data,
        optimizer=AdamW(lr=1e-5),
        evaluate=evaluations,
    )
    return spec.model_copy(update={"data": data.model_copy(update={"train": ()})})
