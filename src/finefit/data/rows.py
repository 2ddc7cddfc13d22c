"""Rows: the common form of all records. A row is a chat that ends with an answer, a preference pair, a judged answer,
or plain text. Test rows are stored on disk as text (`item_line`, `read_items`), because a task builds its prompt from
them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from finefit.artifacts.atomic import read_lines
from finefit.errors import DataError, FinefitError

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["chat", "pair", "judged", "text"]

IMAGE_PLACEHOLDER: Final = "<image>"
"""Marks the position of an image in the text."""
IMAGE_ARCHIVE: Final = "images.zip"
"""The archive among the prepared files that holds images that came as bytes, stored under their digests."""
_WITHOUT_LINES: Final = (".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Extensions of files whose records are not lines."""
_ITEM: Final = ("source", "number", "dataset", "part", "messages", "tools", "references", "votes", "wrong", "text")


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str
    reasoning: str = ""
    """The assistant's reasoning before the answer, if a record stores it separately."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """An image as the record has it: a path, or the encoded bytes."""

    path: str = ""
    data: bytes = b""
    root: str = ""
    """The folder or zip to which the path is relative: `images_root`, else the folder of the record's file."""
    root_name: str = ""
    """`images_root` as written in the spec, independent of where the data is stored. Empty if the spec has none."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that was found and decoded when its row was prepared: its file, content and size. Pixels are not stored;
    they are decoded again whenever the model needs them."""

    path: str
    """The image file, or the zip that holds it. A relative path is relative to the prepared files."""
    member: str
    """The name inside the zip; empty if the file is the image."""
    sha256: str
    """Digest of the encoded image."""
    size: tuple[int, int]
    """Width and height in pixels, as decoded."""
    grid: tuple[int, ...]
    """The vision tower's input size, in the units of its family."""
    num_values: int = 0
    """Number of values in its pixel tensors, which identifies the images that take the most memory."""
    row: str = field(default="", compare=False)
    """File and line of the first row with this image; empty if no row was prepared."""

    @property
    def place(self) -> str:
        return f"{self.member} in {self.path}" if self.member else self.path

    def to_json(self) -> list[Any]:
        return [self.path, self.member, self.sha256, self.size, self.grid, self.num_values, self.row]

    @staticmethod
    def from_json(values: Sequence[Any], folder: Path) -> "ImageRef":
        """`folder`: where the prepared files are."""
        path, member, sha256, (width, height), grid, num_values, row = values
        return ImageRef(str(folder / path), member, sha256, (width, height), tuple(grid), num_values, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    source: str
    """The file, as the user named it."""
    number: int
    """The record's line in a file of lines, else its position in the file, from 1."""
    part: int = 0
    """The row's index within a record that holds several, from 1; 0 if the record holds one."""
    messages: tuple[Message, ...] = ()
    """The last message is the answer. Empty for plain text."""
    num_given: int = 0
    """Number of leading messages, the row's prompt, that are never supervised, whatever their role."""
    rejected: tuple[Message, ...] = ()
    """The rejected ending of a preference pair, which replaces the messages after the given ones."""
    is_good: bool | None = None
    text: str = ""
    """Plain text, all of whose tokens are supervised."""
    tools: str = ""
    """A JSON list of the tools that the assistant may call."""
    images: tuple[Image, ...] = ()
    image_refs: tuple[ImageRef, ...] = ()
    """The same images after they have been checked."""
    references: tuple[str, ...] = ()
    """All answers that count as right, if a record has several; they include the one trained on."""
    votes: tuple[int, ...] = ()
    """How often a record lists each reference: the number of people who gave this answer."""
    wrong: tuple[str, ...] = ()
    """Answers that the record marks as wrong."""
    dataset: str = ""
    """The name under which the row is reported if there are several test sources."""
    key: str = ""
    """The key, without images, of the row from which `data.task` built this one: it remains the same item, whatever is
    built from it. An item that was read from disk has its whole key here."""
    repairs: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        if self.text:
            return "text"
        if self.rejected:
            return "pair"
        return "chat" if self.is_good is None else "judged"

    @property
    def place(self) -> str:
        return place_of(self.source, self.number, self.part)

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The text of the last message; empty for plain text."""
        return self.messages[-1].content if self.messages else ""


@dataclass(frozen=True, slots=True)
class BadRow:
    source: str
    number: int
    reason: str
    part: int = 0

    @property
    def place(self) -> str:
        return place_of(self.source, self.number, self.part)


def place_of(source: str, number: int, part: int = 0) -> str:
    """Returns where a user finds a row: `train.jsonl:3` is a line, in the notation of editors and grep. A file whose
    records are not lines has no such notation."""
    has_lines = not source.lower().removesuffix(".gz").endswith(_WITHOUT_LINES)
    place = f"{source}:{number}" if has_lines else f"record {number} of {source}"
    return place + (f" ({part})" if part else "")


def as_item(row: Row) -> Row:
    """Converts a row for an evaluation: a rejected answer is a wrong one; plain text is an answer without a prompt."""
    match row.kind:
        case "text":
            return replace(row, messages=(Message("assistant", row.text),))
        case "pair":
            if len(row.rejected) != 1 or len(row.messages) != row.num_given + 1:
                problem = "is a pair whose sides differ in more than their last answer"
                raise DataError(problem, "give test pairs that share all but the last answer")
            return replace(row, rejected=(), wrong=(row.rejected[0].content,))
        case "chat" | "judged":
            return row


def is_asked(row: Row, sources: tuple[str, ...]) -> bool:
    """Returns whether an evaluation of these sources includes the row; one that names no sources includes all rows."""
    return not sources or not row.dataset or row.dataset in sources


def item_line(row: Row) -> str:
    """Serialises what an evaluation needs of a row, with its place, so that the item can be found again."""
    item = {name: getattr(row, name) for name in _ITEM}
    item["messages"] = [] if row.text else [asdict(message) for message in row.messages]
    item |= {"key": key_of(row) if row.images else row.key, "repairs": row.repairs}
    item["image_refs"] = [ref.to_json() for ref in row.image_refs]
    return json.dumps(item, ensure_ascii=False) + "\n"


def read_items(path: Path) -> list[Row]:
    items: list[Row] = []
    for item in read_lines(path):
        for message in item["messages"]:
            message["tool_calls"] = tuple(ToolCall(**call) for call in message["tool_calls"])
        messages = tuple(Message(**message) for message in item.pop("messages"))
        image_refs = tuple(ImageRef.from_json(values, path.parent) for values in item.pop("image_refs", ()))
        item |= {name: tuple(item.get(name, ())) for name in ("references", "votes", "wrong", "repairs")}
        items.append(as_item(Row(messages=messages, image_refs=image_refs, **item)))
    return items


def key_of(row: Row) -> str:
    """Returns a key that is the same for the same item in every run: the prompt and the right answers, before anything
    is built from them. Images count by content, so a row has no key until its images are checked."""
    if not row.images:  # or the row was read from disk, and its key covers its images
        return text_key(row)
    if len(row.image_refs) != len(row.images):
        raise FinefitError(f"{row.place} has images that have not been checked yet")
    return _hashed([text_key(row), *(ref.sha256 for ref in row.image_refs)])


def text_key(row: Row) -> str:
    """Returns the key without images."""
    prompt, answer = [asdict(message) for message in row.prompt], row.text or row.answer
    return row.key or _hashed([prompt, row.tools, answer, sorted(row.references), sorted(row.wrong)])


def _hashed(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
