"""The rows: their sources, how they are read, and which of them are used."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from finefit.spec import LABEL, Part, require_labels
from finefit.spec.tasks import Form

TEMPLATE_OPTIONS: Mapping[str, Any] = {"enable_thinking": False}
"""Defaults of `template_options`: templates with two modes (Qwen3, Nemotron) open the turn without reasoning."""


class Fields(Part):
    """Which column holds what: the name of a column, with dots for nested ones, or text with names in braces:
    `{context}\\n\\n{question}`."""

    prompt: str | None = None
    answer: str | None = None
    """If the column holds a list, the most frequent entry is trained on; all of them count as right."""
    system: str | None = None
    messages: str | None = None
    """A list of messages, `role`/`content` or `from`/`value`."""
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None
    """Whether a judged answer is good."""
    text: str | None = None
    """Plain text, every token of which is supervised. In a text file, a record is a `line`, a `paragraph` or the
    `document`."""
    tools: str | None = None
    images: str | None = None
    """A path, bytes, or a list of these; or a text that makes a file name, `{image_id:012}.jpg` with leading zeros. May
    be given alone, or with `system` and `tools`: the rest is then recognised."""
    join: str | None = None
    """Another file whose records are joined to these by the id column that both have."""


Scalar = str | int | float | bool
Where = dict[str, Scalar | Annotated[tuple[Scalar, ...], Field(min_length=1)]]


class Source(Part):
    path: str
    """A file (JSON, JSONL, CSV, TSV, Parquet, Arrow, text; also .gz), a folder, a glob, or `hf://datasets/owner/name[@revision][/files]`;
    relative to the spec file. Among stages also `stage://NAME/file`, a file that a stage makes."""
    fields: Fields = Fields()
    """Needed only if the shape of the records is not recognised, or another one is meant."""
    weight: float = Field(1.0, gt=0, le=1000)
    """How often a row is seen in an epoch: 2 is twice, 0.25 is a seeded quarter of the rows once."""
    limit: int | None = Field(None, ge=1)
    """A seeded sample of at most this many rows."""
    where: Where = Field(default_factory=dict)
    """Selects only records with these values, such as {split: 2} or {kind: [bar, line]}; the others are ignored. A data
    set that is known to number its splits (OCR-VQA) needs no `where`."""
    images_root: str | None = None
    """The folder or zip that image paths start from, relative to the spec file. By default the folder of the data file,
    then the folders in it, then its zips."""
    name: str | None = Field(None, pattern=LABEL)
    """The name of its scores if `test` has several sources; by default the last part of its path, without the
    extension."""

    @property
    def label(self) -> str:
        """Does not depend on the folder, nor on the commit on the hub."""
        return self.name or PurePath(PurePath(self.path).name.partition("@")[0]).stem


Sources = Annotated[
    Annotated[Source, Tag("one")] | Annotated[tuple[Source, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]


class HeldOut(Part):
    """A separate source, or a share of the training rows."""

    path: str | None = None
    """The path of a source, in the forms of `train`."""
    fields: Fields = Fields()
    where: Where = Field(default_factory=dict)
    """A filter in the form of `train`."""
    images_root: str | None = None
    """The folder or zip of image paths, in the form of `train`."""
    share: float | None = Field(None, gt=0, lt=1)
    """A seeded share of the training rows, taken out before any repetition; equal prompts stay on one side."""
    limit: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> "HeldOut":
        if (self.path is None) == (self.share is None):
            raise ValueError("give either path or share")
        of_a_path = (self.fields, self.limit, self.where, self.images_root)
        if self.share is not None and of_a_path != (Fields(), None, {}, None):
            raise ValueError("fields, limit, where and images_root belong to a path; a share has those of train")
        return self

    def source(self, path: str) -> Source:
        return Source(path=path, fields=self.fields, limit=self.limit, where=self.where, images_root=self.images_root)


class ImageLimits(Part):
    """Sizes of images, within what the model's own processor does."""

    max_pixels: int | None = Field(None, ge=1)
    """Larger images are scaled down to this, with their aspect ratio; None: the processor's own limit. Fewer pixels are
    fewer tokens."""
    min_pixels: int | None = Field(None, ge=1)
    """Smaller images are scaled up, if the processor does that at all; None: the processor's own limit."""

    @model_validator(mode="after")
    def _limits_agree(self) -> "ImageLimits":
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            both = f"min_pixels is {self.min_pixels} and max_pixels is {self.max_pixels}"
            raise ValueError(f"{both}, which no image satisfies; lower min_pixels, or raise max_pixels")
        return self


class Data(Part):
    train: tuple[Source, ...] = Field(min_length=1)
    validation: HeldOut | None = None
    """Rows for the validation loss, which chooses the best checkpoint."""
    test: Sources | None = None
    """Rows that `evaluate` answers; a row that is also trained on is refused. A source, or a list of them: each also
    gets scores of its own."""
    max_tokens: int = Field(2048, ge=2)
    """The longest row in tokens, prompt and answer together."""
    too_long: Literal["error", "drop", "cut_prompt"] = "error"
    """What happens to a longer row. `cut_prompt` removes tokens from the middle of its longest given message. An answer
    is never cut; plain text continues in the next row."""
    bad_rows: Literal["error", "drop"] = "error"
    """What happens to a record that cannot be used."""
    drop_at_most: float = Field(0.1, ge=0, le=1)
    """The largest share of a source's rows that may be dropped; more stops the run."""
    cut_at_most: float = Field(0.5, ge=0, le=1)
    """The largest share of a source's rows whose prompt may be cut; more stops the run."""
    overlap: Literal["error", "drop", "warn"] = "error"
    """What happens if rows of validation or test are also in train: exactly, except for case and punctuation, or
    nearly. `drop` removes them from train."""
    turns: Literal["all", "last"] = "all"
    """Which answers of a conversation are supervised."""
    template: Literal["chat", "plain"] = "chat"
    """`chat`: the model's own chat template. `plain`: prompt and completion as they are, for base models."""
    task: Form | None = None
    """How rows become prompt and answer, in training and evaluation alike; None: unchanged."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: true} for rows that hold reasoning."""
    images: ImageLimits = ImageLimits()
    """Settings for vision-language models. Image tokens count as tokens of their row and are never cut."""
    packing: Literal["auto", "best_fit", "none"] = "auto"
    """`best_fit`: rows of a step are concatenated without padding, and each attends only to itself; the gradient is the
    same. `auto` does so if the model's attention allows it, on a card not with `deterministic`. `none` groups rows by
    length and pads them."""

    @model_validator(mode="after")
    def _test_rows_have_no_weight(self) -> "Data":
        if any(source.weight != 1 for source in self.test_sources()):
            raise ValueError("test.weight: only train has weights, a test row is answered once")
        require_labels("test has two sources", [source.label for source in self.test_sources()])
        return self

    def test_sources(self) -> tuple[Source, ...]:
        if self.test is None:
            return ()
        return (self.test,) if isinstance(self.test, Source) else self.test

    def sources(self) -> dict[str, tuple[Source, ...]]:
        """Returns the sources by split; a share of the training rows is not a source."""
        held = self.validation
        own = () if held is None or held.path is None else (held.source(held.path),)
        return {"train": self.train, "validation": own, "test": self.test_sources()}
