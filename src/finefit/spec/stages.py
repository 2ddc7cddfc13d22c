"""Several stages, each standing on data or on what other stages have made. Frozen; a graph that cannot be walked is refused when it is read.

`model: {kind: stage, name: sft}` is the model that a stage has made, and `stage://NAME/file` stands wherever a path does for a file of its output.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from finefit.spec.schema import (
    Common,
    EmbeddedModel,
    Evaluation,
    FolderModel,
    Form,
    HubModel,
    Lora,
    Model,
    Part,
    ShapeModel,
    Source,
    Spec,
    Task,
    Training,
    Tuning,
    require_labels,
)

STAGE_PATH = re.compile(r"stage://([^/]+)(?:/(.*))?", re.DOTALL)
StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class StageModel(Part):
    """The model that another stage has made: trained, merged, or a mixture. One that was trained with an adapter is its base with that adapter."""

    kind: Literal["stage"]
    name: StageName


Input = Annotated[HubModel | FolderModel | EmbeddedModel | ShapeModel | StageModel, Field(discriminator="kind")]


class TrainStage(Training):
    """One training, with the keys of a spec that has no stages."""

    kind: Literal["train"]
    model: Input


class Questions(Part):
    """Rows to be answered, and how they are asked."""

    test: Source
    template: Literal["chat", "plain"] = "chat"
    template_options: dict[str, Any] = Field(default_factory=dict)
    task: Form | None = None
    max_tokens: int = Field(2048, ge=2)
    too_long: Literal["error", "drop", "cut_prompt"] = "error"


class EvaluateStage(Part):
    """Several models, answering the same rows; each is scored in a process of its own."""

    kind: Literal["evaluate"]
    models: dict[StageName, Input] = Field(min_length=1)
    """By the names that the tables have. A stage of kind `gate` is here the choice among its experts."""
    data: Questions
    evaluate: tuple[Evaluation, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_name_each(self) -> "EvaluateStage":
        require_labels(self.evaluate)
        return self


class CompareStage(Part):
    """A table, a page and a Markdown file of what stages have scored."""

    kind: Literal["compare"]
    of: tuple[str, ...] = Field(min_length=1)
    """Stages that train or evaluate; `sft:base` or `sft:checkpoint-40` is one checkpoint of a training, `scores:sft` one model of an evaluation."""
    task: str | None = None
    varies: tuple[str, ...] = ()
    """Settings that are meant to differ."""


class Rules(Part):
    """Rejected answers are made from right ones: an entity swapped, a number changed, a negation inverted, a sentence made up."""

    kind: Literal["rules"]
    per_row: int = Field(1, ge=1)
    """Pairs of each row at most, each by another rule."""
    shares: dict[Literal["entity", "number", "negation", "fabrication"], float] = Field(default_factory=dict)
    """How often each rule is wanted beside the others; 0 leaves it out, and what is not named is 1."""
    words: str | None = None
    """Word lists of your own in YAML, relative to the spec file."""


class Verdicts(Part):
    """Pairs that people have judged with `finefit review`."""

    kind: Literal["verdicts"]
    of: tuple[str, ...] = Field(min_length=1)
    """Run directories with reviews, or files that `finefit review --export-pairs` wrote; relative to the spec file."""


class Sampled(Part):
    """Several answers of a model to each row, scored by a task: the best against the worst."""

    kind: Literal["sampled"]
    model: Input
    task: Task
    template: Literal["chat", "plain"] = "chat"
    samples: int = Field(4, ge=2)
    temperature: float = Field(0.8, gt=0)
    max_new_tokens: int = Field(256, ge=1)
    margin: float = Field(0.0, ge=0)
    """By which the scores of a pair differ at least."""


Method = Annotated[Rules | Verdicts | Sampled, Field(discriminator="kind")]


class MakePairs(Part):
    """Preference pairs in `train.jsonl`, and where they are asked for `validation.jsonl` and `test.jsonl`: stage://NAME/train.jsonl."""

    kind: Literal["make_pairs"]
    method: Method = Rules(kind="rules")
    train: tuple[Source, ...] = ()
    """Grounded rows with right answers. Of verdicts there is none to name."""
    validation: Source | None = None
    test: Source | None = None

    @model_validator(mode="after")
    def _rows_where_they_are_needed(self) -> "MakePairs":
        named = [key for key in ("train", "validation", "test") if getattr(self, key)]
        if self.method.kind == "verdicts" and named:
            raise ValueError(f"{named[0]}: verdicts are about answers that are there already; leave it out, and name the reviews in method.of")
        if self.method.kind != "verdicts" and not self.train:
            raise ValueError("train: rows with right answers are needed to make pairs of; name a file")
        return self


class MergeAdapter(Part):
    """An adapter becomes one with its base: a model that needs no peft."""

    kind: Literal["merge_adapter"]
    model: Input
    """Usually a stage that was trained with an adapter."""
    adapter: str | None = None
    """Else a folder with one, relative to the spec file."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """What the weights are written in; `auto` as they are."""


class RandomRouter(Part):
    kind: Literal["random"]


class CentroidRouter(Part):
    """Tokens go first to the expert whose rows they resemble: the router starts from the mean hidden states of each expert's data."""

    kind: Literal["centroids"]
    data: dict[StageName, Source]
    """Rows for each expert, by its name; usually those that it was trained on."""
    template: Literal["chat", "plain"] = "chat"
    """What the rows are rendered with: that of the experts' own training."""
    rows: int = Field(64, ge=1)
    """Looked at of each."""
    max_tokens: int = Field(512, ge=2)


class ForcedRouter(Part):
    """Every token to one expert, in every layer."""

    kind: Literal["select_one"]
    expert: StageName


RouterStart = Annotated[RandomRouter | CentroidRouter | ForcedRouter, Field(discriminator="kind")]


class BuildMoe(Part):
    """Trained copies of one dense model become a mixture of experts that transformers loads as it is."""

    kind: Literal["build_moe"]
    base: Input
    experts: dict[StageName, Input] = Field(min_length=1)
    """Whole models that differ from the base in their MLPs alone; one that was trained with an adapter is merged first."""
    merge: Literal["mixture", "average"] = "mixture"
    """`average`: a dense model again, the mean of the experts."""
    routing: Literal["top_k", "weighted_sum", "top_1"] = "top_k"
    """`weighted_sum`: all experts answer, weighted. `top_1`: one answers every token, at full weight; its router cannot be trained by the
    language-model loss."""
    top_k: int = Field(2, ge=1)
    shared: Literal["none", "base"] = "none"
    """`base`: the base's own MLP stands beside the experts (Qwen2 only)."""
    copies: Literal["refuse", "collapse"] = "refuse"
    """What happens to experts that are equal."""
    router: RouterStart = RandomRouter(kind="random")

    @model_validator(mode="after")
    def _router_knows_the_experts(self) -> "BuildMoe":
        router, names = self.router, ", ".join(self.experts)
        if self.merge == "average" and not isinstance(router, RandomRouter):
            raise ValueError(f"router: {router.kind}, and an average has no router; leave it out, or set merge: mixture")
        if self.routing == "top_k" and self.top_k > max(len(self.experts), 2):
            raise ValueError(f"top_k: {self.top_k} of {len(self.experts)} experts cannot answer; give at most {len(self.experts)}")
        if isinstance(router, ForcedRouter) and router.expert not in self.experts:
            raise ValueError(f"router.expert: {router.expert} is none of the experts, which are {names}; name one of them")
        if isinstance(router, CentroidRouter) and (odd := sorted(router.data.keys() ^ self.experts.keys())):
            raise ValueError(f"router.data: {', '.join(odd)} is an expert without rows, or rows without an expert; the experts are {names}")
        return self


class Gate(Part):
    """Which expert answers a whole prompt, by the mean of its input embeddings: cheaper than a mixture and no router of one, since it knows nothing
    of the hidden states that a router sees."""

    kind: Literal["gate"]
    base: Input
    """Whose embeddings are taken."""
    experts: dict[StageName, Input] = Field(min_length=2)
    data: dict[StageName, Source]
    """Rows of each expert, by its name."""
    template: Literal["chat", "plain"] = "chat"
    """What the prompts are rendered with: that of the experts' own training."""
    epochs: int = Field(20, ge=1)
    lr: float = Field(1e-2, gt=0)
    held_out: float = Field(0.3, gt=0, lt=1)
    """A seeded share of the rows, which the accuracy is measured on."""

    @model_validator(mode="after")
    def _rows_of_every_expert(self) -> "Gate":
        if odd := sorted(self.experts.keys() ^ self.data.keys()):
            raise ValueError(f"data: {', '.join(odd)} is an expert without rows, or rows without an expert; name the same in experts and in data")
        if heavy := sorted(name for name, source in self.data.items() if source.weight > 1):
            raise ValueError(f"data.{heavy[0]}.weight: experts count alike however many rows they have, so no row is seen twice; leave weight out")
        return self


class PythonStage(Part):
    """A script of yours: it is given its inputs and a folder, and must leave what it declares there."""

    kind: Literal["python"]
    script: str
    """Relative to the spec file."""
    inputs: dict[StageName, str] = Field(default_factory=dict)
    """Files or folders by name, relative to the spec file; or `stage://NAME/file`. A change of any of them runs it again."""
    arguments: tuple[str, ...] = ()
    """With the names of inputs in braces, and {output} for the folder: ["{raw}", "{output}/clean.jsonl"]."""
    outputs: tuple[str, ...] = Field(min_length=1)
    """Files or folders below {output} that must be there at the end."""

    @model_validator(mode="after")
    def _stays_inside(self) -> "PythonStage":
        for name in self.outputs:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"outputs: {name!r} leads out of the stage's own folder; name what lies below {{output}}")
        if twice := sorted({name for name in self.outputs if self.outputs.count(name) > 1}):
            raise ValueError(f"outputs: {', '.join(twice)} is written twice; name each once")
        return self


AnyStage = Annotated[
    TrainStage | EvaluateStage | CompareStage | MakePairs | MergeAdapter | BuildMoe | Gate | PythonStage, Field(discriminator="kind")
]
_MAKERS_OF_MODELS = ("train", "merge_adapter", "build_moe")
_MAKERS_OF_FILES = ("make_pairs", "python", "train", "merge_adapter", "build_moe")


class Pipeline(Common):
    defaults: dict[str, Any] = Field(default_factory=dict)
    """What every stage of kind train has unless it says otherwise: the keys of a spec."""
    stages: dict[StageName, AnyStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _can_be_walked(self) -> "Pipeline":
        _require_one_folder_each(list(self.stages))
        for name, stage in self.stages.items():
            _require_inputs(name, stage, self.stages)
        self.order()
        for name, stage in self.stages.items():
            if isinstance(stage, TrainStage) and isinstance(stage.model, StageModel):
                _require_same_adapter(name, stage, stage.model.name, self.stages[stage.model.name])
            if isinstance(stage, BuildMoe):
                _require_whole_models(name, stage, self.stages)
        return self

    def order(self) -> tuple[str, ...]:
        """Every stage behind those that it stands on, else as written."""
        done: dict[str, None] = {}
        for name in self.stages:
            self._visit(name, done, ())
        return tuple(done)

    def _visit(self, name: str, done: dict[str, None], above: tuple[str, ...]) -> None:
        if name in above:
            circle = " -> ".join((*above[above.index(name) :], name))
            raise ValueError(f"stages stand on each other in a circle: {circle}; let one of them stand on data alone")
        if name not in done:
            for needed in needs(self.stages[name]):
                self._visit(needed, done, (*above, name))
            done[name] = None

    def spec_of(self, name: str, *, model: Model, tuning: Tuning) -> Spec:
        """A training as a spec of its own, where it is known what stands for the stages that it names."""
        stage = self.stages[name]
        assert isinstance(stage, TrainStage)
        common = {key: getattr(self, key) for key in Common.model_fields} | {"name": f"{self.name}-{name}"[:64]}
        own = {key: getattr(stage, key) for key in Training.model_fields} | {"tuning": tuning}
        written = {key for key in own if key in stage.model_fields_set} | {key for key in common if key in self.model_fields_set}
        return Spec.model_construct(_fields_set=written | {"name", "model"}, **common, **own, model=model)


def needs(stage: BaseModel) -> tuple[str, ...]:
    """The stages that one stands on, in the order of its keys."""
    return tuple(dict.fromkeys(name for name, _ in _named(stage)))


def _named(stage: BaseModel) -> Iterator[tuple[str, Literal["model", "file", "scores"]]]:
    """Names of other stages, and what is wanted of them."""
    if isinstance(stage, CompareStage):
        yield from ((part.partition(":")[0], "scores") for part in stage.of)
    yield from _within(stage)


def _within(value: Any) -> Iterator[tuple[str, Literal["model", "file"]]]:
    match value:
        case StageModel():
            yield value.name, "model"
        case BaseModel():
            for field in type(value).model_fields:
                yield from _within(getattr(value, field))
        case dict():
            for inner in value.values():
                yield from _within(inner)
        case tuple() | list():
            for inner in value:
                yield from _within(inner)
        case str() if found := STAGE_PATH.fullmatch(value):
            yield found[1], "file"


def _require_inputs(name: str, stage: BaseModel, stages: dict[str, Any]) -> None:
    for needed, what in _named(stage):
        if needed not in stages:
            raise ValueError(f"stage {name} stands on stage {needed}, which is not there; the stages are {', '.join(stages)}")
        kind = stages[needed].kind
        makers: tuple[str, ...] = {"model": _MAKERS_OF_MODELS, "file": _MAKERS_OF_FILES, "scores": ("train", "evaluate")}[what]
        if isinstance(stage, EvaluateStage) and what == "model":
            makers = (*makers, "gate")
        if kind not in makers:
            raise ValueError(f"stage {name} wants {_WORDS[what]} of stage {needed}, and {kind} makes none; name a stage of kind {', '.join(makers)}")


def _require_whole_models(name: str, stage: BuildMoe, stages: dict[str, Any]) -> None:
    """Known before an expert is trained, not after."""
    for asked in (stage.base, *stage.experts.values()):
        maker = stages[asked.name] if isinstance(asked, StageModel) else None
        if isinstance(asked, StageModel) and isinstance(maker, TrainStage) and isinstance(maker.tuning, Lora):
            raise ValueError(
                f"stage {name} is built of whole models, and stage {asked.name} trains an adapter; put a stage of kind merge_adapter between, "
                "and let the adapter have targets in the MLPs alone: [gate_proj, up_proj, down_proj]"
            )


def _require_same_adapter(name: str, stage: TrainStage, before: str, other: BaseModel) -> None:
    """An adapter is trained on as it is; anything else needs it merged into its base first."""
    if not isinstance(other, TrainStage) or not isinstance(other.tuning, Lora):
        return
    if not isinstance(stage.tuning, Lora):
        raise ValueError(
            f"stage {name} trains weights of a model that stage {before} has only laid an adapter over; put a stage of kind merge_adapter between"
        )
    for key in ("rank", "alpha", "targets", "base_bits", "rank_stabilised", "dora"):
        here, there = getattr(stage.tuning, key), getattr(other.tuning, key)
        if here != there:
            raise ValueError(f"stage {name} goes on with the adapter of stage {before}, whose tuning.{key} is {there}, not {here}; make them equal")


_WORDS = {"model": "the model", "file": "a file", "scores": "the scores"}


def _require_one_folder_each(names: list[str]) -> None:
    """Folders of some systems do not tell capitals from small letters."""
    for at, name in enumerate(names):
        for other in names[:at]:
            if name.lower() == other.lower():
                raise ValueError(f"stages {other} and {name} would write into one folder; give one of them another name")
