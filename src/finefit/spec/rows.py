"""Which rows, from where, and how much of them."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from finefit.spec.part import LABEL, Part
from finefit.spec.tasks import Form

TEMPLATE_OPTIONS: Mapping[str, Any] = {"enable_thinking": False}
"""Where `template_options` do not say: most rows hold answers without reasoning, so templates that know two modes (Qwen3, Nemotron) open the turn
in the one without."""


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
    name: str | None = Field(None, pattern=LABEL)
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
        if self.share is not None and (
            self.limit is not None or self.fields != Fields() or self.where or self.images_root is not None
        ):
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

    @model_validator(mode="after")
    def _the_smallest_is_no_larger_than_the_largest(self) -> "ImageLimits":
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            both = f"min_pixels is {self.min_pixels} and max_pixels is {self.max_pixels}"
            raise ValueError(f"{both}: no image has so many and so few; lower min_pixels, or raise max_pixels")
        return self


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
