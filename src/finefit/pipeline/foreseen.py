"""Every training of a pipeline, foretold before any of its stages has run: those that do not exist yet are stood in for by their outlines."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.forecasts import Forecast, Lengths, Suggestion
from finefit.errors import FindingError, FinefitError, SpecError
from finefit.facts.machine import read_machine
from finefit.pipeline.data import missing, places, prepare_data
from finefit.pipeline.forecasting import forecast, lengths_of
from finefit.pipeline.outlines import Done, Outlines, nothing_done
from finefit.pipeline.rehearsing import one_rehearser
from finefit.pipeline.wiring import wired_spec
from finefit.spec.load import parse_any, spec_to_json
from finefit.spec.models import Lora
from finefit.spec.rows import Data, Source
from finefit.spec.schema import Sft, Spec
from finefit.spec.stages import STAGE_PATH, MakePairs, Pipeline, Rules, StageModel, TrainStage


def foresee_stages(
    pipeline: Pipeline,
    base: Path,
    *,
    cards: tuple[str, ...] | None = None,
    done: Done = nothing_done,
    names: Collection[str] | None = None,
) -> dict[str, tuple[Forecast, ...]]:
    """Of the stages that train, in their order, one for each card; without `cards` one, on the device that a run gets here. `names`: of these alone.
    What is suggested is written as the pipeline takes it."""
    outlines = Outlines(pipeline=pipeline, base=base.resolve(), done=done)
    asked = [
        name
        for name in pipeline.order()
        if isinstance(pipeline.stages[name], TrainStage) and (names is None or name in names)
    ]
    with one_rehearser():
        return {name: foresee_stage(outlines, name, cards) for name in asked}


def foresee_stage(outlines: Outlines, name: str, cards: tuple[str, ...] | None) -> tuple[Forecast, ...]:
    with naming(name):
        spec = spec_at(outlines, name)
        lengths = lengths_at(outlines, name, spec)
        if cards is None:
            from finefit.pipeline.preparation import foresee  # torch comes with it

            found: tuple[Forecast, ...] = (foresee(spec, outlines.base, lengths, read_machine()),)
        else:
            found = forecast(spec, outlines.base, cards, lengths)
        return tuple(
            replace(one, suggestions=within_pipeline(outlines.pipeline, name, one.suggestions)) for one in found
        )


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What is wrong with a stage is told with its name."""
    try:
        yield
    except FinefitError as error:
        raise type(error)(f"stage {name}: {error.problem}", error.remedy) from error


def spec_at(outlines: Outlines, name: str) -> Spec:
    return wired_spec(outlines.pipeline, name, outlines.at, outlines.base)


def require_fitting(forecasts: dict[str, tuple[Forecast, ...]]) -> None:
    """On the first card. All that does not fit is told at once, before anything is loaded."""
    too_large = {name: found[0] for name, found in forecasts.items() if not found[0].fits}
    if too_large:
        problems = [
            f"stage {name} needs {one.peak_bytes:,} bytes at its peak ({one.peak_instant}), {one.card} has {one.budget_bytes:,} to give"
            for name, one in too_large.items()
        ]
        raise FindingError("\n".join(problems), "\n".join(_way_out(name, one) for name, one in too_large.items()))


def _way_out(name: str, found: Forecast) -> str:
    fitting = next((one for one in found.suggestions if one.fits), None)
    if fitting is None:
        return f"no change of stage {name} makes it fit: take a larger card or a smaller model; `finefit plan SPEC` shows what fills it"
    return (
        " ".join(f"--set '{change}'" for change in fitting.changes)
        + f" ({fitting.peak_bytes:,} bytes; {fitting.price})"
    )


# How long rows are that another stage has yet to make


def lengths_at(outlines: Outlines, name: str, spec: Spec) -> Lengths:
    """Counted where the rows are there. Of rows to come the longest that the spec allows; how many they are and their mean is known of pairs that are
    made from rows which are there."""
    stage = outlines.pipeline.stages[name]
    assert isinstance(stage, TrainStage)
    to_come = [place for source in stage.data.train for place in places(source) if not outlines.is_made(place)]
    if not to_come:
        return lengths_of(spec, outlines.base)
    lengths = lengths_of(spec, outlines.base, to_come=to_come[0])
    given = given_rows(outlines, stage.data.train, spec)
    if given is None or given.num_rows is None:
        return lengths
    more = f"; number at most and mean by the {given.num_rows:,} rows that it is made from"
    return replace(
        lengths,
        num_rows=_most_pairs(outlines.pipeline, stage.data.train, given.num_rows),
        mean=min(given.mean, lengths.mean),
        mean_supervised=min(given.mean_supervised, lengths.mean_supervised),
        source=lengths.source + more,
    )


def given_rows(outlines: Outlines, sources: tuple[Source, ...], like: Spec) -> Lengths | None:
    """Of the rows that pairs are made from; None where these are not there, or some of the sources are made otherwise."""
    origins = [origin for source in sources for origin in origins_of(outlines.pipeline, source)]
    tokenizer = outlines_tokenizer(outlines, like)
    if not origins or tokenizer is None or any(STAGE_PATH.fullmatch(source.path) for source in origins):
        return None
    kept = {key: getattr(like.data, key) for key in ("max_tokens", "template", "template_options", "task")}
    data = Data(train=tuple(origins), too_long="drop", bad_rows="drop", drop_at_most=1.0, **kept)
    if missing(data, outlines.base):
        return None
    return prepare_data(
        like.model_copy(update={"data": data, "objective": Sft(kind="sft")}), outlines.base, tokenizer
    ).record.lengths


def outlines_tokenizer(outlines: Outlines, spec: Spec) -> Path | None:
    from finefit.model.locate import outline

    return outline(spec.model, outlines.base).tokenizer


def origins_of(pipeline: Pipeline, source: Source) -> tuple[Source, ...]:
    """The rows that a file of pairs is made from, by the name of its split; none where another kind of stage makes it."""
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


# What is suggested for a stage, as the pipeline takes it


def within_pipeline(pipeline: Pipeline, name: str, suggestions: tuple[Suggestion, ...]) -> tuple[Suggestion, ...]:
    """Those that leave the pipeline one that can be walked. An adapter that several stages train on is changed in all of them."""
    found = [replace(one, changes=tuple(_prefixed(pipeline, name, one.changes))) for one in suggestions]
    return tuple(one for one in found if _can_be_taken(pipeline, one))


def _prefixed(pipeline: Pipeline, name: str, changes: tuple[str, ...]) -> Iterator[str]:
    for change in changes:
        names = sharing_adapter(pipeline, name) if change.startswith("tuning.") else (name,)
        yield from (f"stages.{one}.{change}" for one in names)


def sharing_adapter(pipeline: Pipeline, name: str) -> tuple[str, ...]:
    """The stages that one adapter passes through, this one among them, in their order."""
    parents = {
        one: stage.model.name if isinstance(stage.model, StageModel) else None
        for one, stage in pipeline.stages.items()
        if isinstance(stage, TrainStage) and isinstance(stage.tuning, Lora)
    }
    roots = {one: _root_of(one, parents) for one in parents}
    return tuple(one for one in pipeline.order() if one in roots and roots[one] == roots.get(name)) or (name,)


def _root_of(name: str, parents: dict[str, str | None]) -> str:
    above = parents[name]
    return name if above is None or above not in parents else _root_of(above, parents)


def _can_be_taken(pipeline: Pipeline, suggestion: Suggestion) -> bool:
    try:
        parse_any(spec_to_json(pipeline), where="spec.json", overrides=suggestion.changes)
    except SpecError:
        return False
    return True
