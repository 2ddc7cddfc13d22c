"""The kinds of stages with their settings, and the paths and models that a spec names."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from finefit.spec import Part, require_labels
from finefit.spec.data import Fields, HeldOut, ImageLimits, Source
from finefit.spec.exports import parse_formats
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, Lora, ShapeModel
from finefit.spec.schema import DeepSpeed, Evaluation, Training
from finefit.spec.tasks import CustomTask, Form, LmEval, Task, TruthfulQa

STAGE = "stage://"
STAGE_PATH = re.compile(rf"{STAGE}([^/]+)(?:/(.*))?", re.DOTALL)
NAMED_INPUT = re.compile(r"\{([A-Za-z0-9_-]+)\}")
OUTPUT = "output"
"""The name of a script's own folder in its arguments."""
StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class StageModel(Part):
    """The model that another stage makes: trained, merged, or a mixture. A model trained with an adapter is its base
    with that adapter."""

    kind: Literal["stage"]
    name: StageName
    """Name of the stage."""


Input = Annotated[
    HubModel | FolderModel | EmbeddedModel | ShapeModel | CustomModel | StageModel, Field(discriminator="kind")
]


class TrainStage(Training):
    """One training, with the keys of a spec without stages."""

    kind: Literal["train"]
    model: Input


class Questions(Part):
    """Rows to answer, and how their prompts are built."""

    test: Source
    template: Literal["chat", "plain"] = "chat"
    """Same as in `data`: `plain` for a base model, which has no chat template."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Same as in `data`."""
    task: Form | None = None
    """Same as in `data`: how the rows are built."""
    max_tokens: int = Field(2048, ge=2)
    """Same as in `data`: prompt and answer together."""
    too_long: Literal["error", "drop", "cut_prompt"] = "error"
    """Same as in `data`."""
    images: ImageLimits = ImageLimits()
    """Sizes of images for vision-language models, usually the same as in the model's training."""

    def how(self) -> dict[str, Any]:
        """Returns all keys but the rows, in the form of a training's `data`."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "test"}


class EvaluateStage(Part):
    """Several models answer the same rows; each is scored in a process of its own."""

    kind: Literal["evaluate"]
    models: dict[StageName, Input] = Field(min_length=1)
    """The models by their names in tables. A stage of kind `gate` represents the choice among its experts."""
    data: Questions
    evaluate: tuple[Evaluation, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_name_each(self) -> "EvaluateStage":
        require_labels("evaluate has two evaluations", [evaluation.label for evaluation in self.evaluate])
        if served := [evaluation.label for evaluation in self.evaluate if evaluation.server is not None]:
            problem = f"evaluate: {', '.join(served)} asks a server, and a stage of kind evaluate asks its models"
            raise ValueError(f"{problem}; leave server out, and score the server with `finefit eval --server`")
        return self


class CompareStage(Part):
    """A table, a page and a Markdown file of the scores of stages."""

    kind: Literal["compare"]
    of: tuple[str, ...] = Field(min_length=1)
    """Stages that train or evaluate; `sft:base` or `sft:checkpoint-40` is one checkpoint of a training, `scores:sft`
    one model of an evaluation."""
    task: str | None = None
    """One task; by default all that two of them were scored on."""
    varies: tuple[str, ...] = ()
    """Settings that are meant to differ."""


Rule = Literal["entity", "number", "negation", "fabrication"]


class Rules(Part):
    """Rejected answers are made from right ones: an entity is swapped, a number changed, a negation inverted, or a
    sentence made up."""

    kind: Literal["rules"]
    per_row: int = Field(1, ge=1)
    """Maximum number of pairs per row, each by another rule."""
    shares: dict[Rule, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Relative frequencies of the rules; 0 leaves one out, and the default is 1."""
    words: str | None = None
    """Your own word lists in YAML, relative to the spec file."""

    @model_validator(mode="after")
    def _enough_rules(self) -> "Rules":
        left = [rule for rule in get_args(Rule) if self.shares.get(rule, 1) > 0]
        if not left:
            raise ValueError("shares: no rule is left to make pairs; give one of them more than 0")
        if self.per_row > len(left):
            there = f"there are {len(left)} ({', '.join(left)}); give at most {len(left)}"
            raise ValueError(f"per_row: {self.per_row} pairs of a row, each by another rule, but {there}")
        return self


class Verdicts(Part):
    """Pairs that people have judged with `finefit review`."""

    kind: Literal["verdicts"]
    of: tuple[str, ...] = Field(min_length=1)
    """Run directories with reviews, or files that `finefit review --export-pairs` wrote; relative to the spec file."""


class Sampled(Part):
    """Several answers of a model to each row, scored by a task: the best one against the worst."""

    kind: Literal["sampled"]
    model: Input
    task: Task
    """The task that scores the answers."""
    template: Literal["chat", "plain"] = "chat"
    """Same as in the training of that model: `plain` for a base model."""
    samples: int = Field(4, ge=2)
    """Answers per row."""
    temperature: float = Field(0.8, gt=0)
    """The higher it is, the more the answers differ."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum tokens of an answer."""
    margin: float = Field(0.0, ge=0)
    """Minimum difference between the scores of a pair (exclusive)."""


Method = Annotated[Rules | Verdicts | Sampled, Field(discriminator="kind")]


class MakePairs(Part):
    """Preference pairs in `train.jsonl`, and on request `validation.jsonl` and `test.jsonl`: stage://NAME/train.jsonl."""

    kind: Literal["make_pairs"]
    method: Method = Rules(kind="rules")
    train: tuple[Source, ...] = ()
    """Grounded rows with right answers; not for verdicts."""
    validation: Source | None = None
    test: Source | None = None

    @model_validator(mode="after")
    def _rows_where_they_are_needed(self) -> "MakePairs":
        named = [key for key in ("train", "validation", "test") if getattr(self, key)]
        if self.method.kind == "verdicts" and named:
            problem = f"{named[0]}: verdicts judge existing answers"
            raise ValueError(f"{problem}; leave it out, and name the reviews in method.of")
        if self.method.kind != "verdicts" and not self.train:
            raise ValueError("train: rows with right answers are needed to make pairs; name a file")
        train = {f"train.{at}": source for at, source in enumerate(self.train)}
        sources = train | {"validation": self.validation, "test": self.test}
        if heavy := [key for key, source in sources.items() if source is not None and source.weight > 1]:
            remedy = "give the weight to the training that reads the pairs"
            raise ValueError(f"{heavy[0]}.weight: a pair is made once; {remedy}")
        return self


class MergeAdapter(Part):
    """Merges an adapter into its base: a model that needs no peft."""

    kind: Literal["merge_adapter"]
    model: Input
    """Usually a stage that trains an adapter."""
    adapter: str | None = None
    """A folder with an adapter, relative to the spec file, if the model is not such a stage."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of the written weights; `auto`: unchanged."""


class Export(Part):
    """Takes a model elsewhere: merged, converted, loaded by other programs, and proved equal to what was trained."""

    kind: Literal["export"]
    model: Input
    """Usually a stage that trains."""
    to: tuple[str, ...] = Field(min_length=1)
    """Formats: adapter, merged, merged:fp32, gguf, gguf:q4_k_m, gguf-lora."""
    onto: Literal["original", "trained"] = "original"
    """What an adapter is merged into that was trained on 4 or 8 bits. `original`: the base as it is published.
    `trained`: the weights in few bits, unpacked."""
    prompts: int = Field(16, ge=1)
    """Held-out prompts on which each export is compared with the trained model."""
    ollama: bool = False
    """Writes a Modelfile for ollama beside a GGUF file."""
    accept: bool = False
    """Keeps an export that is worse than its bound, and records it."""

    @field_validator("to")
    @classmethod
    def _known_formats(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        found = parse_formats(to)
        if len(found) < len(to):
            raise ValueError(f"{', '.join(to)} names a format twice; name each once")
        return tuple(map(str, found))


class RandomRouter(Part):
    kind: Literal["random"]


class CentroidRouter(Part):
    """Tokens go first to the expert whose rows they resemble: the router starts from the mean hidden states of each
    expert's rows."""

    kind: Literal["centroids"]
    data: dict[StageName, Source]
    """Rows for each expert by name; usually those that it was trained on."""
    template: Literal["chat", "plain"] = "chat"
    """Same as in the experts' own training."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Same as in the experts' own training."""
    task: Form | None = None
    """`data.task` of the experts' own training."""
    rows: int = Field(64, ge=2)
    """Rows used per expert; at least one is held out to measure the router."""
    max_tokens: int = Field(512, ge=2)
    """Longer prompts are cut in the middle; a row that is still too long is left out."""

    @model_validator(mode="after")
    def _no_row_twice(self) -> "CentroidRouter":
        if heavy := sorted(name for name, source in self.data.items() if source.weight > 1):
            problem = f"data.{heavy[0]}.weight: equal rows count once in an expert's mean, so no row is seen twice"
            raise ValueError(f"{problem}; leave weight out")
        return self


class ForcedRouter(Part):
    """Every token goes to one expert, in every layer."""

    kind: Literal["select_one"]
    expert: StageName
    """One of `experts`; the others are left out."""


RouterStart = Annotated[RandomRouter | CentroidRouter | ForcedRouter, Field(discriminator="kind")]
_OF_MIXTURES = ("routing", "top_k", "shared", "router")


class BuildMoe(Part):
    """Trained copies of one dense model become a mixture of experts that transformers can load."""

    kind: Literal["build_moe"]
    base: Input
    experts: dict[StageName, Input] = Field(min_length=1)
    """Full models that differ from the base only in their MLPs; an adapter is merged first."""
    merge: Literal["mixture", "average"] = "mixture"
    """`average`: a dense model, the mean of the experts."""
    routing: Literal["top_k", "weighted_sum", "top_1"] = "top_k"
    """`weighted_sum`: all experts answer, weighted. `top_1`: one answers each token at full weight; its router cannot
    be trained by the language-model loss."""
    top_k: int = Field(2, ge=1)
    """Experts that answer each token, with `routing: top_k`."""
    shared: Literal["none", "base"] = "none"
    """`base`: the base's own MLP is added beside the experts (Qwen2 only)."""
    copies: Literal["refuse", "collapse"] = "refuse"
    """What happens to equal experts."""
    router: RouterStart = RandomRouter(kind="random")

    @model_validator(mode="after")
    def _router_knows_the_experts(self) -> "BuildMoe":
        router, names = self.router, ", ".join(self.experts)
        fields, count = type(self).model_fields, len(self.experts)
        idle = ", ".join(key for key in _OF_MIXTURES if getattr(self, key) != fields[key].default)
        if self.merge == "average" and idle:
            problem = f"{idle}: an average has no router and nothing to choose among"
            raise ValueError(f"{problem}; leave it out, or set merge: mixture")
        if self.routing == "top_k" and self.top_k > max(count, 2):
            raise ValueError(f"top_k: {self.top_k} of {count} experts cannot answer; give at most {count}")
        if isinstance(router, ForcedRouter) and router.expert not in self.experts:
            raise ValueError(f"router.expert: {router.expert} is not one of the experts; name one of {names}")
        if isinstance(router, CentroidRouter) and (odd := sorted(router.data.keys() ^ self.experts.keys())):
            problem = f"router.data: {', '.join(odd)} is an expert without rows, or rows without an expert"
            raise ValueError(f"{problem}; the experts are {names}")
        return self


class Gate(Part):
    """Chooses the expert for a whole prompt by the mean of its input embeddings: cheaper than a mixture, but without
    the hidden states that a router sees."""

    kind: Literal["gate"]
    base: Input
    """The model whose input embeddings are used."""
    experts: dict[StageName, Input] = Field(min_length=2)
    data: dict[StageName, Source]
    """Rows for each expert by name."""
    template: Literal["chat", "plain"] = "chat"
    """Same as in the experts' own training."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Same as in the experts' own training."""
    task: Form | None = None
    """`data.task` of the experts' own training, and of the stage that evaluates the gate."""
    epochs: int = Field(20, ge=1)
    """Passes over the prompts."""
    lr: float = Field(1e-2, gt=0)
    """Learning rate of the gate."""
    held_out: float = Field(0.3, gt=0, lt=1)
    """A seeded share of the rows, on which the accuracy is measured."""

    @model_validator(mode="after")
    def _rows_of_every_expert(self) -> "Gate":
        if odd := sorted(self.experts.keys() ^ self.data.keys()):
            problem = f"data: {', '.join(odd)} is an expert without rows, or rows without an expert"
            raise ValueError(f"{problem}; name the same in experts and in data")
        if heavy := sorted(name for name, source in self.data.items() if source.weight > 1):
            problem = f"data.{heavy[0]}.weight: experts count equally with any number of rows, so no row is seen twice"
            raise ValueError(f"{problem}; leave weight out")
        return self


class PythonStage(Part):
    """Your own script: it gets its inputs and a folder, and must write its declared outputs there."""

    kind: Literal["python"]
    script: str
    """A path relative to the spec file. Modules and files that it reads belong under inputs; otherwise changing them
    reruns nothing."""
    inputs: dict[StageName, str] = Field(default_factory=dict)
    """Files or folders by name, relative to the spec file, or `stage://NAME/file`. A change of any of them reruns the
    stage."""
    arguments: tuple[str, ...] = ()
    """Command-line arguments, with names of inputs in braces, and {output} for the folder: ["{raw}",
    "{output}/clean.jsonl"]."""
    outputs: tuple[str, ...] = Field(min_length=1)
    """Files or folders below {output} that must exist at the end."""

    @model_validator(mode="after")
    def _names_its_files(self) -> "PythonStage":
        paths = [PurePosixPath(name) for name in self.outputs]
        for name, path in zip(self.outputs, paths, strict=True):
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"outputs: {name!r} is outside of the stage's folder; name paths below {{output}}")
        if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
            raise ValueError(f"outputs: {', '.join(twice)} is written twice; name each once")
        if OUTPUT in self.inputs:
            raise ValueError(f"inputs: {{{OUTPUT}}} is the stage's own folder; give the input {OUTPUT} another name")
        names = [*self.inputs, OUTPUT]
        for argument in self.arguments:
            if STAGE in argument:
                problem = f"arguments: a change of {argument} would rerun nothing"
                raise ValueError(f"{problem}; name it under inputs, and its name in braces here")
            if unknown := [name for name in NAMED_INPUT.findall(argument) if name not in names]:
                there = ", ".join(f"{{{name}}}" for name in names)
                raise ValueError(f"arguments: {{{unknown[0]}}} names no input of this stage; there are {there}")
        return self


AnyStage = Annotated[
    TrainStage | EvaluateStage | CompareStage | MakePairs | MergeAdapter | Export | BuildMoe | Gate | PythonStage,
    Field(discriminator="kind"),
]
PATHS: dict[type, tuple[str, ...]] = {
    Source: ("path", "images_root"),
    HeldOut: ("path", "images_root"),
    Fields: ("join",),
    FolderModel: ("path",),
    CustomModel: ("file", "weights"),
    Lora: ("adapter",),
    DeepSpeed: ("config",),
    CustomTask: ("path",),
    LmEval: ("folder",),
    TruthfulQa: ("checkpoint",),
    Rules: ("words",),
    Verdicts: ("of",),
    MergeAdapter: ("adapter",),
    PythonStage: ("script", "inputs"),
}
"""The keys that hold paths, whose contents decide what has changed. Only these may refer to a stage by `stage://`."""
P = TypeVar("P", bound=BaseModel)
MovePath = Callable[[str], str]
_MODELS = get_args(get_args(Input)[0])


def leaves(part: object, key: str = "", holder: BaseModel | None = None) -> Iterator[tuple[str, Any, BaseModel | None]]:
    """Yields (dotted key, value, the part that has the path) for every text and every model of a spec."""
    if isinstance(part, (str, *_MODELS)):
        yield key, part, holder
    inner: Iterable[tuple[object, object]] = ()
    match part:
        case BaseModel():
            inner = ((name, getattr(part, name)) for name in type(part).model_fields)
        case dict():
            inner = part.items()
        case tuple() | list():
            inner = enumerate(part)
    for name, value in inner:
        if isinstance(part, BaseModel):
            holder = part if name in PATHS.get(type(part), ()) else None
        yield from leaves(value, f"{key}.{name}" if key else str(name), holder)


def paths_of(part: object) -> Iterator[tuple[str, BaseModel, str]]:
    """Yields (dotted key, the part that names it, the path) for every path in a spec."""
    yield from ((key, holder, path) for key, path, holder in leaves(part) if holder is not None)


def models_of(stage: BaseModel) -> Iterator[tuple[str, Input]]:
    """Yields the models of a stage by their keys, such as `base`, `experts.law` or `method.model`, but not those within
    a model."""
    last = None
    for key, value, _ in leaves(stage):
        if isinstance(value, _MODELS) and (last is None or not key.startswith(f"{last}.")):
            yield key, value
            last = key


def moved(part: P, move: MovePath, *, addresses: bool = False) -> P:
    """Returns a copy with every path replaced; URLs (`hf://`, `stage://`) only with `addresses`."""

    def change(holder: object, name: str, value: Any) -> Any:
        match value:
            case BaseModel():
                return moved(value, move, addresses=addresses)
            case dict():
                return {key: change(holder, name, inner) for key, inner in value.items()}
            case tuple():
                return tuple(change(holder, name, inner) for inner in value)
            case str() if name in PATHS.get(type(holder), ()) and (addresses or "://" not in value):
                return move(value)
        return value

    return part.model_copy(update={name: change(part, name, getattr(part, name)) for name in part.model_fields_set})
