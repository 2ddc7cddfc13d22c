"""The kinds of stages, and what each is given. A choice is a union on `kind`, as in the rest of a spec."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, Lora, ShapeModel
from finefit.spec.part import Part
from finefit.spec.rows import Fields, Held, ImageLimits, Source
from finefit.spec.schema import DeepSpeed, Evaluation, Training, require_labels
from finefit.spec.tasks import Form, LmEval, OwnTask, Task, TruthfulQa

STAGE = "stage://"
STAGE_PATH = re.compile(rf"{STAGE}([^/]+)(?:/(.*))?", re.DOTALL)
NAMED_INPUT = re.compile(r"\{([A-Za-z0-9_-]+)\}")
OUTPUT = "output"
"""What a script's own folder is called among its arguments."""
StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class StageModel(Part):
    """The model that another stage has made: trained, merged, or a mixture. One that was trained with an adapter is its base with that adapter."""

    kind: Literal["stage"]
    name: StageName
    """Of the stage."""


Input = Annotated[
    HubModel | FolderModel | EmbeddedModel | ShapeModel | CustomModel | StageModel, Field(discriminator="kind")
]


class TrainStage(Training):
    """One training, with the keys of a spec that has no stages."""

    kind: Literal["train"]
    model: Input


class Questions(Part):
    """Rows to be answered, and how they are asked."""

    test: Source
    template: Literal["chat", "plain"] = "chat"
    """As in `data`: `plain` for a base model, which has no chat template."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """As in `data`."""
    task: Form | None = None
    """As in `data`: what the rows are built with before."""
    max_tokens: int = Field(2048, ge=2)
    """As in `data`: of prompt and answer together."""
    too_long: Literal["error", "drop", "cut_prompt"] = "error"
    """As in `data`."""
    images: ImageLimits = ImageLimits()
    """For models that see: how large images are shown, usually as in the training of the model that is asked."""

    def how(self) -> dict[str, Any]:
        """Without the rows: by the keys that `data` of a training has for the same."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "test"}


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
    """One alone; else all that two of them were scored on."""
    varies: tuple[str, ...] = ()
    """Settings that are meant to differ."""


Rule = Literal["entity", "number", "negation", "fabrication"]


class Rules(Part):
    """Rejected answers are made from right ones: an entity swapped, a number changed, a negation inverted, a sentence made up."""

    kind: Literal["rules"]
    per_row: int = Field(1, ge=1)
    """Pairs of each row at most, each by another rule."""
    shares: dict[Rule, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """How often each rule is wanted beside the others; 0 leaves it out, and what is not named is 1."""
    words: str | None = None
    """Word lists of your own in YAML, relative to the spec file."""

    @model_validator(mode="after")
    def _enough_rules(self) -> "Rules":
        left = [rule for rule in get_args(Rule) if self.shares.get(rule, 1) > 0]
        if not left:
            raise ValueError("shares: no rule is left to make pairs by; give one of them more than 0")
        if self.per_row > len(left):
            there = f"there are {len(left)} ({', '.join(left)})"
            raise ValueError(
                f"per_row: {self.per_row} pairs of a row, each by another rule, and {there}; give at most {len(left)}"
            )
        return self


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
    """What an answer is worth."""
    template: Literal["chat", "plain"] = "chat"
    """As in the training of that model: `plain` for a base model."""
    samples: int = Field(4, ge=2)
    """Answers to each row."""
    temperature: float = Field(0.8, gt=0)
    """The higher, the more the answers differ."""
    max_new_tokens: int = Field(256, ge=1)
    """Of an answer."""
    margin: float = Field(0.0, ge=0)
    """The scores of a pair differ by more than this."""


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
            raise ValueError(
                f"{named[0]}: verdicts are about answers that are there already; leave it out, and name the reviews in method.of"
            )
        if self.method.kind != "verdicts" and not self.train:
            raise ValueError("train: rows with right answers are needed to make pairs of; name a file")
        return self

    @model_validator(mode="after")
    def _no_row_twice(self) -> "MakePairs":
        sources = {f"train.{at}": source for at, source in enumerate(self.train)} | {
            "validation": self.validation,
            "test": self.test,
        }
        if heavy := [key for key, source in sources.items() if source is not None and source.weight > 1]:
            raise ValueError(
                f"{heavy[0]}.weight: a pair is made once; give the weight to the training that reads the pairs"
            )
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
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Those of the experts' own training too."""
    task: Form | None = None
    """What the rows are built with before: `data.task` of the experts' own training."""
    rows: int = Field(64, ge=2)
    """Looked at of each; of few rows one is held out, to show what the router is worth."""
    max_tokens: int = Field(512, ge=2)
    """Of a row: a longer prompt is cut in its middle, and a row that cannot be cut so far is left out."""

    @model_validator(mode="after")
    def _no_row_twice(self) -> "CentroidRouter":
        if heavy := sorted(name for name, source in self.data.items() if source.weight > 1):
            raise ValueError(
                f"data.{heavy[0]}.weight: equal rows count once in the mean of an expert's, so no row is seen twice; leave weight out"
            )
        return self


class ForcedRouter(Part):
    """Every token to one expert, in every layer."""

    kind: Literal["select_one"]
    expert: StageName
    """Of `experts`; the others are left out."""


RouterStart = Annotated[RandomRouter | CentroidRouter | ForcedRouter, Field(discriminator="kind")]


_OF_MIXTURES = ("routing", "top_k", "shared", "router")


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
    """Experts that answer each token, with `routing: top_k`."""
    shared: Literal["none", "base"] = "none"
    """`base`: the base's own MLP stands beside the experts (Qwen2 only)."""
    copies: Literal["refuse", "collapse"] = "refuse"
    """What happens to experts that are equal."""
    router: RouterStart = RandomRouter(kind="random")

    @model_validator(mode="after")
    def _router_knows_the_experts(self) -> "BuildMoe":
        router, names = self.router, ", ".join(self.experts)
        if self.merge == "average" and (
            idle := [key for key in _OF_MIXTURES if getattr(self, key) != type(self).model_fields[key].default]
        ):
            raise ValueError(
                f"{', '.join(idle)}: an average has no router and nothing to choose among; leave it out, or set merge: mixture"
            )
        if self.routing == "top_k" and self.top_k > max(len(self.experts), 2):
            raise ValueError(
                f"top_k: {self.top_k} of {len(self.experts)} experts cannot answer; give at most {len(self.experts)}"
            )
        if isinstance(router, ForcedRouter) and router.expert not in self.experts:
            raise ValueError(
                f"router.expert: {router.expert} is none of the experts, which are {names}; name one of them"
            )
        if isinstance(router, CentroidRouter) and (odd := sorted(router.data.keys() ^ self.experts.keys())):
            raise ValueError(
                f"router.data: {', '.join(odd)} is an expert without rows, or rows without an expert; the experts are {names}"
            )
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
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Those of the experts' own training too."""
    task: Form | None = None
    """What the rows are built with before: `data.task` of the experts' own training, and of the stage that evaluates the gate."""
    epochs: int = Field(20, ge=1)
    """Passes over the prompts."""
    lr: float = Field(1e-2, gt=0)
    """Of the gate, not of a model."""
    held_out: float = Field(0.3, gt=0, lt=1)
    """A seeded share of the rows, which the accuracy is measured on."""

    @model_validator(mode="after")
    def _rows_of_every_expert(self) -> "Gate":
        if odd := sorted(self.experts.keys() ^ self.data.keys()):
            raise ValueError(
                f"data: {', '.join(odd)} is an expert without rows, or rows without an expert; name the same in experts and in data"
            )
        if heavy := sorted(name for name, source in self.data.items() if source.weight > 1):
            raise ValueError(
                f"data.{heavy[0]}.weight: experts count alike however many rows they have, so no row is seen twice; leave weight out"
            )
        return self


class PythonStage(Part):
    """A script of yours: it is given its inputs and a folder, and must leave what it declares there."""

    kind: Literal["python"]
    script: str
    """Relative to the spec file. Modules and files beside it that it reads belong under inputs, or a change of them runs nothing again."""
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
                raise ValueError(
                    f"outputs: {name!r} leads out of the stage's own folder; name what lies below {{output}}"
                )
        paths = [PurePosixPath(name) for name in self.outputs]
        if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
            raise ValueError(f"outputs: {', '.join(twice)} is written twice; name each once")
        return self

    @model_validator(mode="after")
    def _arguments_name_inputs(self) -> "PythonStage":
        if OUTPUT in self.inputs:
            raise ValueError(
                f"inputs: {{{OUTPUT}}} is the stage's own folder already; give the input {OUTPUT} another name"
            )
        names = [*self.inputs, OUTPUT]
        for argument in self.arguments:
            if STAGE in argument:
                raise ValueError(
                    f"arguments: a change of {argument} would run nothing again; name it under inputs, and its name in braces here"
                )
            if unknown := [name for name in NAMED_INPUT.findall(argument) if name not in names]:
                there = ", ".join(f"{{{name}}}" for name in names)
                raise ValueError(f"arguments: {{{unknown[0]}}} names no input of this stage; there are {there}")
        return self


AnyStage = Annotated[
    TrainStage | EvaluateStage | CompareStage | MakePairs | MergeAdapter | BuildMoe | Gate | PythonStage,
    Field(discriminator="kind"),
]
PATHS: dict[type, tuple[str, ...]] = {
    Source: ("path", "images_root"),
    Held: ("path", "images_root"),
    Fields: ("join",),
    FolderModel: ("path",),
    CustomModel: ("file", "weights"),
    Lora: ("adapter",),
    DeepSpeed: ("config",),
    OwnTask: ("path",),
    LmEval: ("folder",),
    TruthfulQa: ("checkpoint",),
    Rules: ("words",),
    Verdicts: ("of",),
    MergeAdapter: ("adapter",),
    PythonStage: ("script", "inputs"),
}
"""Where paths stand: what is looked at when it is asked what has changed. Only there may a stage be named by `stage://`."""
