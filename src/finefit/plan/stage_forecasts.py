"""Forecasts the trainings of a pipeline before any stage has run: models that stages have yet to make are replaced by
stubs, and rows by the longest that the spec allows. A stub is a folder with config and tokenizer but no weights, cached
by content, so that later stages are planned as if the model existed."""

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from finefit.artifacts.cache import cached_folder, cached_record, content_key, source_digest
from finefit.artifacts.forecasts import Forecast, Lengths, ModelSize, Suggestion
from finefit.artifacts.records import Record, wired_model, wired_spec
from finefit.errors import FinefitError, ModelError, SpecError
from finefit.facts.files import TEMPLATES, finefit_cache, sha256_of
from finefit.model.resolve_model import ModelStub, custom_source_in, read_stub
from finefit.plan import client
from finefit.plan.client import forecast, shared_planner
from finefit.plan.prepared_data import missing, places, prepare_data, present
from finefit.spec import stages as kinds
from finefit.spec.data import Data, ImageLimits, Source
from finefit.spec.load import parse_any, spec_to_json
from finefit.spec.models import Lora
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Dpo, Sft, Spec

Forecaster = Callable[[Spec, Path, Lengths], tuple[Forecast, ...]]
"""Forecasts one training, on one or several cards."""
FinishedOutput = Callable[[str], Path | None]
"""Returns the output folder of a finished stage by its name; None if it has not run."""
_TEXTS = (".json", ".jinja", ".model", ".txt")
_NO_TOKENIZER_FILES = ("config.json", "model.safetensors.index.json", "adapter_config.json", "trainer_state.json")


def no_output(_: str) -> Path | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """What the config of a mixture of experts adds to the config of its base."""

    num_experts: int
    top_k: int
    shared: Literal["none", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStubs:
    """The models and files of a pipeline, whether they exist yet or not."""

    pipeline: Pipeline
    base: Path
    """The absolute folder that the spec's relative paths start from."""
    done: FinishedOutput = no_output
    known: dict[str, Path] = field(default_factory=dict)

    def at(self, name: str) -> Path:
        """Returns the output of a stage: the real one, else its stub, else a folder that does not exist."""
        if name not in self.known:
            found = self.done(name)
            if found is None:
                match self.pipeline.stages[name]:
                    case kinds.TrainStage(tuning=Lora()):
                        pass  # this stage makes only an adapter
                    case kinds.TrainStage() | kinds.MergeAdapter() as stage:
                        found = _cached_stub(self.of(stage.model), None)
                    case kinds.BuildMoe() as stage:
                        found = _cached_stub(self.of(stage.base), mixture_shape(stage))
            self.known[name] = found or _stubs_folder() / "to-come" / name
        return self.known[name]

    def of(self, asked: kinds.Input) -> ModelStub:
        """Returns the model without an adapter that may be applied to it."""
        return read_stub(wired_model(self.pipeline, asked, self.at).model, self.base)

    def is_made(self, path: str) -> bool:
        """Returns False for a path into the output of a stage that is not made yet."""
        found = kinds.STAGE_PATH.fullmatch(path)
        return found is None or (self.at(found[1]) / (found[2] or "")).exists()


def mixture_shape(stage: kinds.BuildMoe) -> MixtureShape | None:
    """Returns None for an average, which has the shape of its base. Copies that will be collapsed count once, as far as
    the spec shows them; a forced router leaves out all experts but one."""
    if stage.merge == "average":
        return None
    if isinstance(stage.router, kinds.ForcedRouter):
        return MixtureShape(num_experts=1, top_k=1, shared=stage.shared)
    count = len(stage.experts) - (len(expert_copies(stage)) if stage.copies == "collapse" else 0)
    top_k = {"top_k": min(stage.top_k, count), "weighted_sum": count, "top_1": 1}[stage.routing]
    return MixtureShape(num_experts=count, top_k=top_k, shared=stage.shared)


def expert_copies(stage: kinds.BuildMoe) -> dict[str, str]:
    """Maps each expert that names the same model as an earlier one to that expert."""
    first: dict[str, str] = {}
    found = {name: first.setdefault(asked.model_dump_json(), name) for name, asked in stage.experts.items()}
    return {name: other for name, other in found.items() if other != name}


def _stubs_folder() -> Path:
    return finefit_cache() / "model_stubs"


def _cached_stub(stub: ModelStub, mixture: MixtureShape | None) -> Path:
    texts = {}
    if (folder := stub.tokenizer) is not None:
        for path in sorted((*folder.iterdir(), *(folder / TEMPLATES).glob("*"))):
            if path.is_file() and path.suffix in _TEXTS and path.name not in _NO_TOKENIZER_FILES:
                texts[path.relative_to(folder).as_posix()] = path

    def fill(staging: Path) -> None:
        for name, path in texts.items():
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, staging / name)
        if mixture is not None:
            client.ask("fill_mixture_stub", staging, stub.config, mixture, stub.tokenizer)
        else:
            config = json.dumps(stub.config, indent=2, sort_keys=True)
            (staging / "config.json").write_text(config + "\n", encoding="utf-8")

    digests = {name: sha256_of(path) for name, path in texts.items()}
    made_by = [asdict(mixture), version("transformers"), source_digest("moe")] if mixture else None
    key = content_key([stub.config, made_by, digests])[:32]
    return cached_folder(_stubs_folder() / key, fill, is_complete=lambda stub: (stub / "config.json").is_file())


def model_size(config: dict[str, Any]) -> ModelSize:
    def counted() -> ModelSize:
        try:
            size: ModelSize = client.ask("count_parameters", config)
        except FinefitError as error:
            reason = error.problem.strip().splitlines()[-1]
            problem = f"the parameters of a model of type {config.get('model_type')} cannot be counted: {reason}"
            raise ModelError(problem, "`finefit doctor` shows the installed versions") from error
        return size

    return cached_record("sizes", [config, version("transformers")], ModelSize, counted)


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
    """Forecasts the training stages in order; `names` restricts it to these."""
    stubs = ModelStubs(pipeline=pipeline, base=base.resolve(), done=done)
    asked = [name for name in pipeline.order() if names is None or name in names]
    trainings = [name for name in asked if isinstance(pipeline.stages[name], kinds.TrainStage)]
    with shared_planner():
        return {name: forecast_training(stubs, name, forecaster) for name in trainings}


def forecast_training(stubs: ModelStubs, name: str, forecaster: Forecaster) -> tuple[Forecast, ...]:
    with stage_in_errors(stubs.pipeline, name):
        spec = training_spec(stubs, name)
        found = forecaster(spec, stubs.base, _stage_row_lengths(stubs, name, spec))
        return tuple(replace(one, suggestions=suggestions_of(stubs.pipeline, name, one.suggestions)) for one in found)


@contextmanager
def stage_in_errors(pipeline: Pipeline, name: str) -> Iterator[None]:
    """In a pipeline of several stages, an error starts with the stage's name."""
    try:
        yield
    except FinefitError as error:
        if pipeline.is_flat:
            raise
        raise type(error)(f"stage {name}: {error.problem}", error.remedy) from error


def training_spec(stubs: ModelStubs, name: str) -> Spec:
    return wired_spec(stubs.pipeline, name, stubs.at, stubs.base)


def _stage_row_lengths(stubs: ModelStubs, name: str, spec: Spec) -> Lengths:
    """Counts the rows if they exist; otherwise assumes the longest that the spec allows. For pairs made from existing
    rows, number and mean are known; rules may make several pairs from each row."""
    stage = stubs.pipeline.stages[name]
    assert isinstance(stage, kinds.TrainStage)
    sources = stage.data.train
    not_made = [place for source in sources for place in places(source) if not stubs.is_made(place)]
    if not not_made:
        return row_lengths(spec, stubs.base)
    lengths = row_lengths(spec, stubs.base, not_made_yet=not_made[0])
    given = _pair_source_lengths(stubs, sources, spec)
    if given is None or given.num_rows is None:
        return lengths
    makers = [stubs.pipeline.stages[found[1]] for one in sources if (found := kinds.STAGE_PATH.fullmatch(one.path))]
    methods = [maker.method for maker in makers if isinstance(maker, kinds.MakePairs)]
    most = given.num_rows * max((method.per_row for method in methods if isinstance(method, kinds.Rules)), default=1)
    limits = [source.limit for source in sources if source.limit]
    return replace(
        lengths,
        num_rows=min(most, sum(limits)) if len(limits) == len(sources) else most,
        mean=min(given.mean, lengths.mean),
        mean_supervised=min(given.mean_supervised, lengths.mean_supervised),
        source=f"{lengths.source}; maximum number and mean from the {given.num_rows:,} rows that they are made from",
    )


def _pair_source_lengths(stubs: ModelStubs, sources: tuple[Source, ...], like: Spec) -> Lengths | None:
    """Returns lengths of the rows from which pairs are made; None if they do not exist, or other stages make some of
    the sources."""
    origins = [origin for source in sources for origin in pair_sources(stubs.pipeline, source)]
    tokenizer = read_stub(like.model, stubs.base).tokenizer
    if not origins or tokenizer is None or any(kinds.STAGE_PATH.fullmatch(source.path) for source in origins):
        return None
    kept = {key: getattr(like.data, key) for key in ("max_tokens", "template", "template_options", "task")}
    data = Data(train=tuple(origins), too_long="drop", bad_rows="drop", drop_at_most=1.0, **kept)
    if missing(data, stubs.base):
        return None
    spec = like.model_copy(update={"data": data, "objective": Sft(kind="sft")})
    return prepare_data(spec, stubs.base, tokenizer).record.lengths


def pair_sources(pipeline: Pipeline, source: Source) -> tuple[Source, ...]:
    """Returns the rows from which a make_pairs stage makes a file of pairs; none for other files."""
    found = kinds.STAGE_PATH.fullmatch(source.path)
    maker = None if found is None else pipeline.stages[found[1]]
    if found is None or not isinstance(maker, kinds.MakePairs):
        return ()
    if found[2] == "train.jsonl":
        return maker.train
    held = {"validation.jsonl": maker.validation, "test.jsonl": maker.test}.get(found[2] or "")
    return () if held is None else (held,)


def suggestions_of(pipeline: Pipeline, name: str, suggestions: tuple[Suggestion, ...]) -> tuple[Suggestion, ...]:
    """Returns the suggestions with the keys of the user's spec, and only those that leave the pipeline valid. An
    adapter that several stages train is changed in all of them."""
    if pipeline.is_flat:
        return suggestions
    found = []
    for one in suggestions:
        changes = tuple(
            f"stages.{stage}.{change}"
            for change in one.changes
            for stage in (stages_sharing_adapter(pipeline, name) if change.startswith("tuning.") else (name,))
        )
        with suppress(SpecError):
            parse_any(spec_to_json(pipeline), where="spec.json", overrides=changes)
            found.append(replace(one, changes=changes))
    return tuple(found)


def stages_sharing_adapter(pipeline: Pipeline, name: str) -> tuple[str, ...]:
    """Returns the stages that train the same adapter one after another, including this one, in order."""
    parents = {
        one: stage.model.name if isinstance(stage.model, kinds.StageModel) else None
        for one, stage in pipeline.stages.items()
        if isinstance(stage, kinds.TrainStage) and isinstance(stage.tuning, Lora)
    }

    def first(one: str) -> str:
        above = parents[one]
        return one if above is None or above not in parents else first(above)

    firsts = {one: first(one) for one in parents}
    return tuple(one for one in pipeline.order() if one in firsts and firsts[one] == firsts.get(name)) or (name,)


def row_lengths(spec: Spec, base: Path, *, not_made_yet: str | None = None) -> Lengths:
    """`not_made_yet`: the file of rows, or folder of images, that another stage has yet to make."""
    stub = read_stub(spec.model, base)
    if not_made_yet is not None:
        return _longest_possible(spec, f"{not_made_yet} is not made yet", stub)
    named = {place for source in spec.data.train for place in places(source)}
    absent = [path for path in missing(spec.data, base) if path in named]
    if absent or stub.tokenizer is None:
        reason = f"{absent[0]} does not exist" if absent else "the model has no tokenizer"
        return _longest_possible(spec, reason, stub)
    there = spec.model_copy(update={"data": present(spec.data, base)})
    counted = prepare_data(there, base, stub.tokenizer).record.lengths
    return counted or _longest_possible(spec, "no row can be used", stub)


def _longest_possible(spec: Spec, reason: str, stub: ModelStub) -> Lengths:
    """Assumes that every row has the maximum length and every token is supervised."""
    tokens = spec.data.max_tokens
    images = longest_possible_images(stub, spec.data.images, tokens)
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


class LongestPossibleImages(Record):
    """The images that each row of a vision-language model is assumed to have."""

    grids: tuple[tuple[int, ...], ...] = ()
    note: str = ""
    """The assumption, to be appended to a sentence about the rows; empty for a model without vision."""


def longest_possible_images(stub: ModelStub, limits: ImageLimits, tokens: int) -> LongestPossibleImages:
    """Returns the images assumed in rows of `tokens` tokens."""
    if custom_source_in(stub.config) is None and "vision_config" not in stub.config:
        return LongestPossibleImages()
    asked = (stub.config, stub.tokenizer, limits, tokens)
    found: LongestPossibleImages = client.ask("longest_possible_images", *asked)
    return found
