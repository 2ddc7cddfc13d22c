"""What a user may ask for. Frozen; an unknown key is an error.

A choice is a union on `kind`, so an option exists only where it means something.
"""

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from finefit.spec.every import Every, Interval


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


_LABEL = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""It becomes the name of folders and files, and what follows a dot in these is not the user's."""
Share = Annotated[float, Field(ge=0, lt=1)]


class HubModel(Part):
    kind: Literal["hub"]
    id: str
    """Repository on the hub, `owner/name`."""
    revision: str = "main"
    """Branch, tag or commit."""


class FolderModel(Part):
    kind: Literal["folder"]
    path: str
    """A folder that transformers can load, relative to the spec file."""


class EmbeddedModel(Part):
    kind: Literal["embedded"]
    name: Literal["smollm2-135m"]
    """A model that comes with an installed package: nothing is downloaded."""


class ShapeModel(Part):
    kind: Literal["shape"]
    config: dict[str, Any]
    """The contents of a `config.json`, with `model_type`: enough to plan, nothing to train."""


Tower = Literal["language", "vision", "projector"]
"""Of a model that sees: what reads, what looks at images, and what stands between them."""
Layers = Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)]


class CustomModel(Part):
    """A model of your own, built by a Python file: naming it here is the consent to run that file, which is shown and recorded."""

    kind: Literal["custom"]
    file: str
    """Python, relative to the spec file."""
    entry: str = "build"
    """The function in it that builds the model from `config`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Handed to the function as it stands."""
    tokenizer: Annotated[HubModel | FolderModel | EmbeddedModel, Field(discriminator="kind")]
    """Whose tokenizer and chat template rows are written with."""
    weights: str | None = None
    """A safetensors file or a folder of them to start from, relative to the spec file; None: as the function leaves them, by the seed."""


Model = Annotated[HubModel | FolderModel | EmbeddedModel | ShapeModel | CustomModel, Field(discriminator="kind")]


class Lora(Part):
    kind: Literal["lora"]
    rank: int = Field(16, ge=1)
    """Rank of every adapter; memory and capacity grow linearly with it."""
    alpha: float = Field(32, gt=0)
    """Adapter outputs are scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Layers | dict[Tower, Layers] = "all-linear"
    """`all-linear` (every linear layer but the head), or names of linear layers such as [q_proj, v_proj]. Of a model that sees images these are of
    its language tower; others are named by tower: {language: all-linear, vision: [qkv], projector: all-linear}."""
    base_bits: Literal[4, 8] | None = None
    """4: the frozen weights in NF4, 8: in 8 bits (both need bitsandbytes). Lossy, so only ever asked for."""
    rank_stabilised: bool = False
    """Adapter outputs are scaled by alpha / sqrt(rank) instead of alpha / rank."""
    dora: bool = False
    """Direction and length of every weight are learnt apart (DoRA): slower, often better at low rank."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """What the adapter's own weights, gradients and moments are kept in. bf16 loses small updates, so it is only ever asked for."""
    adapter: str | None = None
    """A folder with an adapter to go on from, relative to the spec file; it is trained on, and no second one is laid over it."""


class Full(Part):
    kind: Literal["full"]


class Subset(Part):
    kind: Literal["subset"]
    trainable: tuple[str, ...] = Field(min_length=1)
    """Modules whose own weights are trained, by name with `*` for a part of it: [layers.*.mlp]. All else stays as it is, and that is proved. Of a
    model that sees images also its towers: [projector, language]."""


Tuning = Annotated[Lora | Full | Subset, Field(discriminator="kind")]


class ExactMatch(Part):
    """The answer is the reference."""

    kind: Literal["exact_match"]


class JsonMatch(Part):
    """The answer is JSON with every field right."""

    kind: Literal["json_match"]


class Rouge(Part):
    """ROUGE-1, -2, -L and -Lsum, each against the reference that is nearest by it (rouge-score)."""

    kind: Literal["rouge"]
    stemmer: bool = True
    """English words are compared by their stems."""
    tokenizer: Literal["unicode", "rouge"] = "unicode"
    """`unicode` keeps the letters of every script, and is equal to `rouge` for plain English; `rouge`, which is rouge-score's own, drops all but
    a-z and 0-9: of Vietnamese it keeps fragments, of Chinese nothing."""
    sentences: Literal["split", "lines"] = "split"
    """What ROUGE-Lsum takes for sentences: `split` ends them at full stops too, `lines` at the ends of lines only, as rouge-score does."""


class Bleu(Part):
    """Corpus BLEU (sacrebleu)."""

    kind: Literal["bleu"]
    tokenize: Literal["13a", "char", "intl", "zh", "none"] = "13a"
    lowercase: bool = False


class Chrf(Part):
    """Corpus chrF (sacrebleu); with `word_order: 2` chrF++."""

    kind: Literal["chrf"]
    word_order: int = Field(0, ge=0, le=2)


class RelaxedAccuracy(Part):
    """The answer is the reference, or a number near it (ChartQA)."""

    kind: Literal["relaxed_accuracy"]
    tolerance: float = Field(0.05, ge=0, lt=1)
    """How far a number may be off, as a share of the reference."""


class Anls(Part):
    """How near the answer is to a reference, character by character; nothing where less than half of it agrees (DocVQA, InfographicVQA)."""

    kind: Literal["anls"]
    threshold: float = Field(0.5, ge=0, le=1)


class VqaAccuracy(Part):
    """How many people gave the same answer, three being enough; rows need the answers of several people (VQAv2, TextVQA)."""

    kind: Literal["vqa_accuracy"]


class Amr(Part):
    """Smatch over all pairs: an answer that is no graph matches nothing and adds no triples of its own."""

    kind: Literal["amr"]
    restarts: int = Field(20, ge=20)
    """Seeded starts of the search for the best mapping of variables."""
    concepts: Literal["as_written", "underscores"] = "underscores"
    """How words of a concept are joined, on both sides alike."""
    repair_gold: bool = False
    """A variable that a gold graph defines twice gets another name the second time; without this such a row is an error."""
    mend_answers: bool = False
    """Score every answer a second time after brackets and variables were put right; both scores are shown, for the same items."""


class TruthfulQa(Part):
    """MC1 and MC2 by log-probability; with `generate` answers too, scored by their nearness to right and to wrong references."""

    kind: Literal["truthfulqa"]
    generate: bool = True
    scorer: Literal["rouge", "bleu", "bleurt"] = "rouge"
    """`bleurt` needs the package of that name."""
    checkpoint: str | None = None
    """Of BLEURT: a folder relative to the spec file; None: the small one that comes with the package."""


class QmSum(Part):
    """Summaries of meetings by query, the whole meeting in the prompt; ROUGE."""

    kind: Literal["qmsum"]


class Summary(Part):
    """ROUGE-Lsum, length against the reference's, sections that are there, extractive coverage, and faithfulness where an NLI model is named."""

    kind: Literal["summary"]
    sections: tuple[str, ...] = Field((), strict=False)  # a list comes to a task as Python's, which a strict tuple would refuse
    """Headings that a summary must have."""
    nli: Annotated[HubModel | FolderModel, Field(discriminator="kind")] | None = None
    """A model that tells whether one sentence follows from another; which of its labels means what is tried on known pairs first."""


class Hallucination(Part):
    """How often a wrong answer is more likely to the model than the right one, per token; rows need wrong answers, as preference pairs have them."""

    kind: Literal["hallucination"]


class Perplexity(Part):
    """Of the answer that a row gives, over all of its tokens; of plain text, over all of it."""

    kind: Literal["perplexity"]
    window: int = Field(2048, ge=2)
    """Tokens of plain text that are looked at together. A longer text is looked at in windows behind one another; the first token of each is not
    counted."""


class LmEval(Part):
    """Tasks of lm-evaluation-harness (needs lm-eval), in a process of their own."""

    kind: Literal["lm_eval"]
    tasks: tuple[str, ...] = Field(min_length=1, strict=False)
    shots: int | None = Field(None, ge=0)
    folder: str | None = None
    """With task files of your own, relative to the spec file."""


class OwnTask(Part):
    """A Python file of yours with `METRICS`, `extract(answer)` and `score(found, reference)`, and if rows need it `build(prompt, answer)`."""

    kind: Literal["python"]
    path: str
    """Relative to the spec file."""


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Task = Annotated[
    ExactMatch
    | JsonMatch
    | RelaxedAccuracy
    | Anls
    | VqaAccuracy
    | Rouge
    | Bleu
    | Chrf
    | Amr
    | TruthfulQa
    | QmSum
    | Summary
    | Hallucination
    | Perplexity
    | LmEval
    | OwnTask,
    Field(discriminator="kind"),
    BeforeValidator(_named),
]
"""A bare name is the task with its defaults."""


def task_kinds() -> tuple[str, ...]:
    return tuple(get_args(part.model_fields["kind"].annotation)[0] for part in get_args(get_args(Task)[0]))


class AmrForm(Part):
    """A sentence becomes a graph in one answer, by way of sub-tasks whose results stand before it (MTUP)."""

    kind: Literal["amr"]
    method: Literal["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"] = "baseline"
    """`baseline`: the graph. `mtup2`: its skeleton, then the graph. `mtup3a`: concepts, the graph without variables, the graph. `mtup3b`: concepts,
    relations, the graph. `mtup4`: all four."""
    concepts: Literal["as_written", "underscores"] = "underscores"
    repair_gold: bool = False


Form = Annotated[AmrForm | OwnTask, Field(discriminator="kind"), BeforeValidator(_named)]


class Judge(Part):
    """A language model behind an OpenAI-compatible address that gives every answer a mark; never needed, always recorded."""

    url: str
    """For instance http://localhost:8000/v1."""
    model: str
    key: str | None = None
    """The name of the environment variable that holds the secret; the secret itself belongs in no file."""
    question: str | None = None
    """What the judge is asked, with {prompt}, {answer} and {reference} in braces; it must reply `Mark: N`, from 1 to 5."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "Judge":
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url: {self.url!r} is no address; give one such as http://localhost:8000/v1")
        if "@" in parts.netloc or parts.query:
            raise ValueError("url: it holds a user or a query, which all who read the run could read; name an environment variable with key instead")
        if self.question is not None and "{answer}" not in self.question:
            raise ValueError("question: it does not hold {answer}, so the judge would not see what it judges")
        return self


class Fields(Part):
    """Which column holds what: the name of a column, dots for what lies deeper, or text with names in braces: `{context}\\n\\n{question}`."""

    prompt: str | None = None
    answer: str | None = None
    """Of a column that holds a list, the most frequent entry is trained on; all of them count as right."""
    system: str | None = None
    messages: str | None = None
    """A list of messages, `role`/`content` or `from`/`value`."""
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None
    """Whether a judged answer is a good one."""
    text: str | None = None
    """Plain text, every token of which is supervised. For a text file: `line`, `paragraph` or `document`, what a record is."""
    tools: str | None = None
    images: str | None = None
    """A path, bytes, or a list of these; also a text that makes a file's name, `{image_id:012}.jpg` with zeros in front. May be given alone, or with
    `system` and `tools`: the rest is recognised then."""
    join: str | None = None
    """Another file, whose records are joined to these by the id column that both have."""


Scalar = str | int | float | bool
Where = dict[str, Scalar | Annotated[tuple[Scalar, ...], Field(min_length=1)]]


class Source(Part):
    path: str
    """A file (JSON, JSONL, CSV, TSV, Parquet, Arrow, text; also .gz), a folder, a glob, or `hf://datasets/owner/name[@revision][/files]`;
    relative to the spec file. Among stages also `stage://NAME/file`, what a stage has made."""
    fields: Fields = Fields()
    """Only where the shape of the records is not recognised, or another one is meant."""
    weight: float = Field(1.0, gt=0, le=1000)
    """How often a row is seen in an epoch: 2 is twice, 0.25 a seeded quarter of the rows once."""
    limit: int | None = Field(None, ge=1)
    """A seeded sample of at most so many rows."""
    where: Where = Field(default_factory=dict)
    """Only records with these values, such as {split: 2} or {kind: [bar, line]}; the others are not rows of this source. A data set that is known to
    number its splits (OCR-VQA) needs no `where`."""
    images_root: str | None = None
    """The folder or zip that paths of images start from, relative to the spec file. By default the folder of the data file; what is not there is
    looked for in the folders in it, then in its zips."""
    name: str | None = Field(None, pattern=_LABEL)
    """What its scores are told under, where `test` has several sources; by default the last part of its path, without the extension."""

    @property
    def label(self) -> str:
        """The same wherever the files lie, and whatever commit of the hub they are pinned to."""
        return self.name or PurePath(PurePath(self.path).name.partition("@")[0]).stem


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


Sources = Annotated[
    Annotated[Source, Tag("one")] | Annotated[tuple[Source, ...], Field(min_length=1), Tag("several")],
    Discriminator(_one_or_several),
]


class Held(Part):
    """A source of their own, or a share of the training rows."""

    path: str | None = None
    """As in `train`."""
    fields: Fields = Fields()
    where: Where = Field(default_factory=dict)
    """As in `train`."""
    images_root: str | None = None
    """As in `train`."""
    share: float | None = Field(None, gt=0, lt=1)
    """A seeded share of the training rows, taken out before anything is repeated; equal prompts stay on one side."""
    limit: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> "Held":
        if (self.path is None) == (self.share is None):
            raise ValueError("give either path or share")
        if self.share is not None and (self.limit is not None or self.fields != Fields() or self.where or self.images_root is not None):
            raise ValueError("fields, limit, where and images_root belong to a path; a share has those of train")
        return self

    def source(self, path: str) -> Source:
        return Source(path=path, fields=self.fields, limit=self.limit, where=self.where, images_root=self.images_root)


class ImageLimits(Part):
    """How large images are shown, within what the model's own processor does."""

    max_pixels: int | None = Field(None, ge=1)
    """An image with more is scaled down to so many, its shape kept; None: as the processor has it. Fewer pixels are fewer tokens."""
    min_pixels: int | None = Field(None, ge=1)
    """An image with fewer is scaled up, where the processor does that at all; None: as the processor has it."""


class Data(Part):
    train: tuple[Source, ...] = Field(min_length=1)
    validation: Held | None = None
    """Rows for the validation loss; they choose the checkpoint that is called best."""
    test: Sources | None = None
    """Rows that `evaluate` answers; one that is trained on too is refused. A source, or a list of them: scores are told for each, too."""
    max_tokens: int = Field(2048, ge=2)
    """The longest row in tokens, prompt and answer together."""
    too_long: Literal["error", "drop", "cut_prompt"] = "error"
    """What happens to a longer row. `cut_prompt` takes tokens out of the middle of its longest given message. An answer is never cut; plain
    text goes on in the next row."""
    bad_rows: Literal["error", "drop"] = "error"
    """What happens to a record that cannot be used."""
    drop_at_most: float = Field(0.1, ge=0, le=1)
    """The largest share of a source's rows that may be dropped; more stops the run."""
    cut_at_most: float = Field(0.5, ge=0, le=1)
    """The largest share of a source's rows whose prompt may be cut; more stops the run."""
    overlap: Literal["error", "drop", "warn"] = "error"
    """What happens when rows of validation or test stand in train too: exactly, but for case and punctuation, or nearly. `drop` takes them out of
    train."""
    turns: Literal["all", "last"] = "all"
    """Which answers of a conversation are supervised."""
    template: Literal["chat", "plain"] = "chat"
    """`chat`: the model's own chat template. `plain`: prompt and completion as they stand, for base models."""
    task: Form | None = None
    """How rows become prompt and answer, in training and evaluation alike; None: as they stand."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: true} for rows that hold reasoning."""
    images: ImageLimits = ImageLimits()
    """For models that see. Image tokens count as tokens of their row, and are never cut out of it."""
    packing: Literal["auto", "best_fit", "none"] = "auto"
    """`best_fit`: rows of a step stand behind one another without padding, each seeing only itself; the gradient is the same. `auto` does so
    where the model's attention allows it, on a card not with `deterministic`. `none` groups rows by length and pads them."""

    @model_validator(mode="after")
    def _test_rows_have_no_weight(self) -> "Data":
        if any(source.weight != 1 for source in self.test_sources()):
            raise ValueError("test.weight: only train has weights, a test row is answered once")
        labels = [source.label for source in self.test_sources()]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"test has two sources called {', '.join(twice)}; give them a name each")
        return self

    def test_sources(self) -> tuple[Source, ...]:
        if self.test is None:
            return ()
        return (self.test,) if isinstance(self.test, Source) else self.test

    def sources(self) -> dict[str, tuple[Source, ...]]:
        """By split; a share of the training rows is no source."""
        held = self.validation
        own = () if held is None or held.path is None else (held.source(held.path),)
        return {"train": self.train, "validation": own, "test": self.test_sources()}


class Sft(Part):
    kind: Literal["sft"]


class Dpo(Part):
    kind: Literal["dpo"]
    beta: float = Field(0.1, gt=0)
    """How strongly the model is held to where it started."""
    reference: Literal["auto", "cached"] = "auto"
    """Where the starting model's log-probabilities come from. `auto`: from the same weights without the adapter, or with a frozen copy of the adapter
    that training goes on from; `cached` (and always for tuning without an adapter): computed once for all rows before the first step."""


class Router(Part):
    """The language-model loss of a mixture of experts, and what keeps its router from sending every token to the same ones."""

    kind: Literal["router"]
    balance: float = Field(0.01, ge=0)
    """Weight of the balance of each row's tokens over the experts, a mean over the layers: 1 where they are spread evenly, as many as there are
    experts where all go to one. Computed row by row, so that the micro-batch does not change it; without effect where every expert answers."""


Objective = Annotated[Sft | Dpo | Router, Field(discriminator="kind")]


class AdamW(Part):
    kind: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """`adamw_8bit` (needs bitsandbytes and a CUDA device) keeps both moments in 8 bits: lossy, 2 bytes per trained parameter instead of 8.
    `paged_`: the moments move to host memory when the card is full."""
    lr: float = Field(gt=0)
    """The peak of the schedule, as written: never scaled by batch or number of cards."""
    weight_decay: float = Field(0.0, ge=0)
    """Applied to matrices, not to biases and norms."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float | None = Field(1.0, gt=0)
    """Largest norm of the whole gradient; `null` for no clipping."""


class Schedule(Part):
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    warmup: Share | Annotated[int, Field(ge=1)] = 0.03
    """Over which the learning rate rises from 0: a share of all steps below 1, or a whole number of steps."""

    @model_validator(mode="after")
    def _one_length(self) -> "Schedule":
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both given; keep one (on the command line, --set schedule.epochs=null removes the other)")
        return self


class Save(Part):
    every: Every = Interval(unit="steps", count=200)
    """`200 steps`, `epoch` or `15 minutes`; the end of the run is always saved."""
    keep: int = Field(3, ge=1)
    """Checkpoints kept, besides the best, the newest verified and the one that the run resumed from."""


class NanStop(Part):
    kind: Literal["stop"]


class NanSkip(Part):
    kind: Literal["skip"]
    at_most: int = Field(3, ge=1)
    """Steps left out over the whole run before it stops."""


class NanRollBack(Part):
    kind: Literal["roll_back"]
    at_most: int = Field(3, ge=1)
    """Returns to the last checkpoint over the whole run before it stops."""


OnNan = Annotated[NanStop | NanSkip | NanRollBack, Field(discriminator="kind")]


class Levers(Part):
    """Exact levers: none of them changes the gradient."""

    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows in memory at once; gradients are accumulated up to the global batch."""
    recompute: Annotated[int, Field(ge=0)] | Literal["auto", "none", "all"] = "auto"
    """Layers whose activations are computed again in backward instead of kept, counted from the first."""
    keep_attention: bool | Literal["auto"] = "auto"
    """Recomputed layers keep their attention outputs: a little memory against the dearest part of long rows."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto", "none"] = "auto"
    """Supervised tokens whose logits exist at once; `none` holds those of the whole micro-batch."""
    offload: Literal["auto", "none", "inputs"] = "auto"
    """`inputs`: the input of every recomputed layer waits in pinned host memory."""
    mlp_tiles: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Pieces of a row that pass an MLP one after the other, each computed again in backward; 1 for none."""
    adapter_inputs: Literal["auto", "bf16", "fp32"] = "auto"
    """What an adapter's input is kept in; peft's own fp32 copy holds no more than bf16 when the product is taken in bf16."""
    kernels: Literal["auto", "torch", "fused"] = "auto"
    """`fused`: an adapter in one autograd node with its layer, the gradient of a frozen head taken together with its loss, and on a card norms,
    rotary embedding and gated MLPs by Liger's kernels (needs liger-kernel). `torch`: the libraries' own operations."""
    update: Literal["auto", "after", "inside"] = "auto"
    """`inside`: each tensor is updated as soon as its gradient is there, which is then given back; only where it is asked for, without clipping and
    with the whole step in one micro-batch. `auto` is `after`."""
    compile: bool = False
    """Layers compiled by torch.compile, with `kernels: torch`; not those of a mixture of experts. Its memory is planned as that of the layers as they
    are, which need no less."""


class Single(Part):
    """One process."""

    kind: Literal["single"]


class Parallel(Part):
    """A whole copy of the model on each device; gradients are summed (torch's DDP)."""

    kind: Literal["ddp"]
    devices: int = Field(ge=1)
    """Processes, one for each card, or on a CPU as many as are asked for; of one node where there are several."""


class FullyShard(Part):
    """Weights, gradients and optimizer state divided over the devices (torch's fully_shard)."""

    kind: Literal["fsdp2"]
    devices: int = Field(ge=1)


class DeepSpeed(Part):
    """DeepSpeed's ZeRO: 2 divides gradients and optimizer state, 3 the weights too."""

    kind: Literal["deepspeed"]
    devices: int = Field(ge=1)
    stage: Literal[2, 3] = 2
    config: str | None = None
    """A DeepSpeed JSON of your own, relative to the spec file; what contradicts the spec is refused by name."""


class AutoEngine(Part):
    """One process for one device; for several the mildest sharding that fits: ddp, then fsdp2."""

    kind: Literal["auto"]
    devices: int | None = Field(None, ge=1)
    """None: one, or as many as `card` names."""


Engine = Annotated[AutoEngine | Single | Parallel | FullyShard | DeepSpeed, Field(discriminator="kind")]


class LocalLauncher(Part):
    kind: Literal["local"]


class SlurmLauncher(Part):
    kind: Literal["slurm"]
    nodes: int = Field(1, ge=1)
    partition: str | None = None
    minutes: int = Field(1440, ge=1)
    """Time limit of the job; before it ends the job saves, and is queued again."""
    account: str | None = None
    options: dict[str, str] = Field(default_factory=dict)
    """Further `#SBATCH` options by name, such as {constraint: a100}."""


Launcher = Annotated[LocalLauncher | SlurmLauncher, Field(discriminator="kind")]


class Tracker(Part):
    """Fed from the run's own metrics; whatever befalls a tracker, the run goes on."""

    kind: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str | None = None
    """By default the name of the run."""


class Evaluation(Part):
    task: Task
    """A name, or a mapping with `kind` and the task's own keys."""
    name: str | None = Field(None, pattern=_LABEL)
    """Where one kind of task is evaluated in two ways."""
    limit: int | None = Field(None, ge=1)
    """A seeded sample of the test rows instead of all of them."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Which sources of `data.test` are asked, by name, where there are several: each data set has a metric of its own. By default all."""
    max_new_tokens: int = Field(256, ge=1)
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Answers generated at a time; `auto` is what the plan finds room for."""
    judge: Judge | None = None
    checkpoints: Literal["final", "all"] = "final"
    """Which of the run's checkpoints are scored at its end."""
    base: bool = True
    """Score the starting model too: a result without its baseline says little."""

    @property
    def label(self) -> str:
        """Names the evaluation in files and tables."""
        if self.name is not None:
            return self.name
        return PurePath(self.task.path).stem if isinstance(self.task, OwnTask) else self.task.kind

    @model_validator(mode="after")
    def _can_be_called(self) -> "Evaluation":
        if not re.fullmatch(_LABEL, self.label):
            raise ValueError(
                f"a task is called as its file is, and {self.label!r} is no name; "
                "give name: with letters, digits, `_` and `-`, 64 at most, a letter or digit first"
            )
        return self


class Validation(Part):
    every: Every | None = None
    """Besides every save, which always validates: the best is chosen among the saved."""


class Common(Part):
    """What is said once, of one stage or of many."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Names the run directory: runs/<name>-<n>."""
    seed: int = Field(42, ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device where there is one. `cuda` without one is refused, not replaced."""
    card: str = "auto"
    """What the plan is for: a card's name, `24GiB`, `8xA100-40GB`, `cpu`, or `auto` (what this machine has free now). A run takes the card
    that is there, and of a named one no more than its size."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto` is bf16 on a card that has it, fp16 with loss scaling on an older one, fp32 on a CPU."""
    deterministic: bool = False
    """Bit-identical resume on a card too, at some speed; a CPU always has it."""
    trackers: tuple[Tracker, ...] = ()


class Training(Part):
    """What is trained and how, whatever model it starts from."""

    tuning: Tuning
    data: Data
    objective: Objective = Sft(kind="sft")
    optimizer: AdamW
    schedule: Schedule = Schedule(epochs=1)
    global_batch: int = Field(16, ge=1)
    """Rows per optimizer step. The planner never changes it."""
    levers: Levers | Literal["auto"] = "auto"
    engine: Engine = AutoEngine(kind="auto")
    save: Save = Save()
    validation: Validation = Field(default=Validation(), alias="validate")
    on_nan: OnNan = NanStop(kind="stop")
    """A step whose loss or gradient is not finite is never applied; this says what follows."""
    evaluate: tuple[Evaluation, ...] = ()
    """Tasks that every finished run is scored on, in a process of its own."""

    @model_validator(mode="after")
    def _one_name_each(self) -> Self:
        require_labels(self.evaluate)
        self._require_sources()
        return self

    @model_validator(mode="after")
    def _routers_can_be_heard(self) -> Self:
        if isinstance(self.objective, Router) and isinstance(self.levers, Levers) and self.levers.compile:
            raise ValueError("levers.compile: true hides what routers say, which objective router is computed from; set levers.compile: false")
        return self

    def _require_sources(self) -> None:
        labels = [source.label for source in self.data.test_sources()]
        for evaluation in self.evaluate:
            if lost := [name for name in evaluation.sources if name not in labels]:
                raise ValueError(f"evaluate: {evaluation.label} is asked of {', '.join(lost)}; data.test has {', '.join(labels) or 'no source'}")

    def max_prompt_tokens(self) -> int | None:
        """Longer prompts of test rows are cut, so that an answer still ends within the lengths that were trained; None where nothing is cut."""
        if self.data.too_long != "cut_prompt":
            return None
        answer = max((evaluation.max_new_tokens for evaluation in self.evaluate), default=0)
        return self.data.max_tokens - min(answer, self.data.max_tokens // 2)


def require_labels(evaluations: tuple[Evaluation, ...]) -> None:
    labels = [evaluation.label for evaluation in evaluations]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"evaluate has two evaluations called {', '.join(twice)}; give them a name each")


class _Started(Common):
    """The keys of a spec that stand between those of all stages and those of a training."""

    model: Model
    launcher: Launcher = LocalLauncher(kind="local")
    """Where the processes are started: here, or by a SLURM scheduler (needs submitit)."""


class Spec(Training, _Started):
    """One stage. Several are a `Pipeline` (`spec/stages.py`)."""
