"""Forecasts of the trainings of a pipeline before any stage has run: models and rows that stages have yet to make are
replaced by stubs and by the longest rows that the spec allows."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from finefit.artifacts.forecasts import Forecast, Lengths, Suggestion
from finefit.artifacts.wiring import wired_spec
from finefit.errors import FinefitError, SpecError
from finefit.model.resolve_model import ModelOutline, custom_source_in, model_outline
from finefit.plan.client import forecast, shared_planner
from finefit.plan.model_stubs import FinishedOutput, ModelStubs, no_output
from finefit.plan.prepared_data import missing, places, prepare_data, present
from finefit.spec.data import Data, ImageLimits, Source
from finefit.spec.load import parse_any, spec_to_json
from finefit.spec.models import Lora
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Dpo, Sft, Spec
from finefit.spec.stages import STAGE_PATH, MakePairs, Rules, StageModel, TrainStage

Forecaster = Callable[[Spec, Path, Lengths], tuple[Forecast, ...]]
"""Forecasts one training, on one or several cards."""


def on_cards(cards: tuple[str, ...]) -> Forecaster:
    return lambda spec, base, lengths: forecast(spec, base, cards, lengths)


def forecast_trainings(
    pipeline: Pipeline,
    base: Path,
    forecaster: Forecaster,
    *,
    done: FinishedOutput = no_output,
    names: Collection[str] | None = None,
) -> dict[str, tuple[Forecast, ...]]:
    """Of the stages that train, in their order; `names`: only of these."""
    stubs = ModelStubs(pipeline=pipeline, base=base.resolve(), done=done)
    asked = [name for name in pipeline.order() if names is None or name in names]
    trainings = [name for name in asked if isinstance(pipeline.stages[name], TrainStage)]
    with shared_planner():
        return {
            name: forecast_training(stubs, name, forecaster) for name in trainings if names is None or name in names
        }


def forecast_training(stubs: ModelStubs, name: str, forecaster: Forecaster) -> tuple[Forecast, ...]:
    with stage_in_errors(stubs.pipeline, name):
        spec = training_spec(stubs, name)
        found = forecaster(spec, stubs.base, stage_row_lengths(stubs, name, spec))
        return tuple(replace(one, suggestions=suggestions_of(stubs.pipeline, name, one.suggestions)) for one in found)


@contextmanager
def stage_in_errors(pipeline: Pipeline, name: str) -> Iterator[None]:
    """An error of one of several stages begins with the stage's name."""
    try:
        yield
    except FinefitError as error:
        if pipeline.is_flat:
            raise
        raise type(error)(f"stage {name}: {error.problem}", error.remedy) from error


def training_spec(stubs: ModelStubs, name: str) -> Spec:
    return wired_spec(stubs.pipeline, name, stubs.at, stubs.base)


# Lengths of rows that another stage has yet to make


def stage_row_lengths(stubs: ModelStubs, name: str, spec: Spec) -> Lengths:
    """Counted where the rows exist; else the longest that the spec allows. Of pairs that are made from existing rows,
    number and mean are known."""
    stage = stubs.pipeline.stages[name]
    assert isinstance(stage, TrainStage)
    not_made = [place for source in stage.data.train for place in places(source) if not stubs.is_made(place)]
    if not not_made:
        return row_lengths(spec, stubs.base)
    lengths = row_lengths(spec, stubs.base, not_made_yet=not_made[0])
    given = _pair_source_lengths(stubs, stage.data.train, spec)
    if given is None or given.num_rows is None:
        return lengths
    return replace(
        lengths,
        num_rows=_most_pairs(stubs.pipeline, stage.data.train, given.num_rows),
        mean=min(given.mean, lengths.mean),
        mean_supervised=min(given.mean_supervised, lengths.mean_supervised),
        source=f"{lengths.source}; number at most and mean by the {given.num_rows:,} rows that it is made from",
    )


def _pair_source_lengths(stubs: ModelStubs, sources: tuple[Source, ...], like: Spec) -> Lengths | None:
    """Of the rows that pairs are made from; None where they do not exist, or other stages make some sources."""
    origins = [origin for source in sources for origin in pair_sources(stubs.pipeline, source)]
    tokenizer = model_outline(like.model, stubs.base).tokenizer
    if not origins or tokenizer is None or any(STAGE_PATH.fullmatch(source.path) for source in origins):
        return None
    kept = {key: getattr(like.data, key) for key in ("max_tokens", "template", "template_options", "task")}
    data = Data(train=tuple(origins), too_long="drop", bad_rows="drop", drop_at_most=1.0, **kept)
    if missing(data, stubs.base):
        return None
    spec = like.model_copy(update={"data": data, "objective": Sft(kind="sft")})
    return prepare_data(spec, stubs.base, tokenizer).record.lengths


def pair_sources(pipeline: Pipeline, source: Source) -> tuple[Source, ...]:
    """The rows from which a stage of kind make_pairs makes a file of pairs; none for other files."""
    found = STAGE_PATH.fullmatch(source.path)
    maker = None if found is None else pipeline.stages[found[1]]
    if found is None or not isinstance(maker, MakePairs):
        return ()
    if found[2] == "train.jsonl":
        return maker.train
    held = {"validation.jsonl": maker.validation, "test.jsonl": maker.test}.get(found[2] or "")
    return () if held is None else (held,)


def _most_pairs(pipeline: Pipeline, sources: tuple[Source, ...], rows: int) -> int:
    """Rules may make several of each row."""
    found = [STAGE_PATH.fullmatch(source.path) for source in sources]
    methods = [stage.method for match in found if match and isinstance(stage := pipeline.stages[match[1]], MakePairs)]
    most = rows * max((method.per_row for method in methods if isinstance(method, Rules)), default=1)
    limits = [source.limit for source in sources]
    return min(most, sum(limit for limit in limits if limit is not None)) if all(limits) else most


# Suggestions, with the keys that the user's spec has


def suggestions_of(pipeline: Pipeline, name: str, suggestions: tuple[Suggestion, ...]) -> tuple[Suggestion, ...]:
    """Those that leave the pipeline valid. An adapter that several stages train is changed in all of them."""
    if pipeline.is_flat:
        return suggestions
    found = [replace(one, changes=tuple(_prefixed(pipeline, name, one.changes))) for one in suggestions]
    return tuple(one for one in found if _is_valid_with(pipeline, one.changes))


def _prefixed(pipeline: Pipeline, name: str, changes: tuple[str, ...]) -> Iterator[str]:
    for change in changes:
        names = stages_sharing_adapter(pipeline, name) if change.startswith("tuning.") else (name,)
        yield from (f"stages.{one}.{change}" for one in names)


def stages_sharing_adapter(pipeline: Pipeline, name: str) -> tuple[str, ...]:
    """The stages that train the same adapter one after another, this one included, in their order."""
    parents = {
        one: stage.model.name if isinstance(stage.model, StageModel) else None
        for one, stage in pipeline.stages.items()
        if isinstance(stage, TrainStage) and isinstance(stage.tuning, Lora)
    }

    def first(one: str) -> str:
        above = parents[one]
        return one if above is None or above not in parents else first(above)

    firsts = {one: first(one) for one in parents}
    return tuple(one for one in pipeline.order() if one in firsts and firsts[one] == firsts.get(name)) or (name,)


def _is_valid_with(pipeline: Pipeline, changes: tuple[str, ...]) -> bool:
    try:
        parse_any(spec_to_json(pipeline), where="spec.json", overrides=changes)
    except SpecError:
        return False
    return True


# Lengths of rows: counted where rows and tokenizer exist, else the worst that the spec allows. Vision code, and with it
# torch, is imported only for a vision-language model.

_SIDE_STEP, _LARGEST_SIDE = 28, 4480
"""Pixels of the square images that are tried."""
_TOKENS_BESIDE_IMAGE = 2
"""One before the image, and one to be answered."""


def row_lengths(spec: Spec, base: Path, *, not_made_yet: str | None = None) -> Lengths:
    """`not_made_yet`: the file of rows, or folder of images, that another stage has yet to make."""
    outline = model_outline(spec.model, base)
    if not_made_yet is not None:
        return _assumed(spec, f"{not_made_yet} is not made yet", outline)
    named = {place for source in spec.data.train for place in places(source)}
    absent = [path for path in missing(spec.data, base) if path in named]
    if absent or outline.tokenizer is None:
        return _assumed(spec, f"{absent[0]} does not exist" if absent else "the model has no tokenizer", outline)
    there = spec.model_copy(update={"data": present(spec.data, base)})
    counted = prepare_data(there, base, outline.tokenizer).record.lengths
    return counted or _assumed(spec, "no row can be used", outline)


def _assumed(spec: Spec, reason: str, outline: ModelOutline) -> Lengths:
    """Every row of full length, every token supervised."""
    tokens = spec.data.max_tokens
    images = assume_images(outline, spec.data.images, tokens)
    return Lengths(
        num_rows=None,
        longest=tokens,
        mean=float(tokens),
        supervised=tokens - 1,
        mean_supervised=float(tokens - 1),
        source=f"assumed from data.max_tokens, since {reason}{images.note}",
        sides=2 if isinstance(spec.objective, Dpo) else 1,
        grids=images.grids,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedImages:
    """The images that one row of a vision-language model is assumed to have."""

    grids: tuple[tuple[int, ...], ...] = ()
    note: str = ""
    """What is assumed, to be appended to a sentence about the rows; empty for a model without vision."""


def assume_images(outline: ModelOutline, limits: ImageLimits, tokens: int) -> AssumedImages:
    """In rows of `tokens` tokens, image tokens included: the largest image that `max_pixels` allows; without
    `max_pixels` one whose tokens fill half a row, or else the smallest."""
    if custom_source_in(outline.config) is not None:
        return _images_of_custom_model(outline)
    if "vision_config" not in outline.config:
        return AssumedImages()
    from finefit.vision import geometry_of  # torch comes with it

    geometry = geometry_of(outline.config)
    if geometry is None:
        return AssumedImages()
    fitting = [grid for grid in _grids(outline, limits) if geometry.num_tokens(grid) <= tokens - _TOKENS_BESIDE_IMAGE]
    if not fitting:
        return AssumedImages(note=f", without images: none fits into {tokens:,} tokens")
    small = [grid for grid in fitting if limits.max_pixels is not None or 2 * geometry.num_tokens(grid) <= tokens]
    grid = max(small or fitting[:1], key=geometry.num_tokens)
    return AssumedImages(grids=(grid,), note=f", each with an image of {geometry.num_tokens(grid):,} tokens")


def _grids(outline: ModelOutline, limits: ImageLimits) -> Iterator[tuple[int, ...]]:
    """Of square images from the smallest up to `max_pixels`. A model of kind shape has no processor and is assumed not
    to scale images."""
    from finefit.vision import geometry_of, open_image_processor

    geometry = geometry_of(outline.config)
    assert geometry is not None
    processor = None if outline.tokenizer is None else open_image_processor(outline.tokenizer, outline.config, limits)
    largest = _LARGEST_SIDE if limits.max_pixels is None else math.isqrt(limits.max_pixels)
    for side in (*range(_SIDE_STEP, largest, _SIDE_STEP), largest):
        yield geometry.square_grid(side) if processor is None else processor.grid((side, side))


def _images_of_custom_model(outline: ModelOutline) -> AssumedImages:
    """It gets images as they are: as many as it asks for, or one."""
    from finefit.custom.inputs import UNKNOWN_SIZE, meta_twin

    source = custom_source_in(outline.config)
    assert source is not None
    twin = meta_twin(source)
    count = (1 if twin.views is None else twin.views) if twin.has_vision else 0
    if not count:
        return AssumedImages()
    width, height = UNKNOWN_SIZE
    images = "an image" if count == 1 else f"{count} images"
    return AssumedImages(grids=(UNKNOWN_SIZE,) * count, note=f", each with {images} of {width} x {height} pixels")
