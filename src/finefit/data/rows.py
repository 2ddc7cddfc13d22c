"""Rows: what every shape of record becomes. A row is a chat that ends with an answer, a preference pair, a judged
answer, or plain text. Test rows are kept on disk as text (`item_line`, `read_items`), because a task builds its prompt
from them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from finefit.errors import DataError, FinefitError

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["chat", "pair", "judged", "text"]

IMAGE_PLACEHOLDER: Final = "<image>"
"""Marks in the text where an image belongs."""
IMAGE_ARCHIVE: Final = "images.zip"
"""Among the prepared files: images that came as bytes, stored under their digests."""
_WITHOUT_LINES: Final = (".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of files whose records are not lines."""
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
    """What an assistant thinks before it answers, where a record keeps that apart."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """An image as the record gives it: a path, or the encoded bytes."""

    path: str = ""
    data: bytes = b""
    root: str = ""
    """The folder or zip that the path starts from: `images_root`, else the folder of the record's file."""
    root_name: str = ""
    """`images_root` as the spec has it, the same wherever the data lies. Empty where the spec names none."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that was found and decoded when its row was prepared: its file, its content and its size. Pixels are not
    kept; they are decoded again whenever the model needs them."""

    path: str
    """The file, or the zip that holds it. A relative path lies among the prepared files."""
    member: str
    """Inside the zip; empty where the file is the image."""
    sha256: str
    """Of the encoded image."""
    size: tuple[int, int]
    """Width and height in pixels, as decoded."""
    grid: tuple[int, ...]
    """What the vision tower is given, in the units of its family."""
    num_values: int = 0
    """Numbers in its pixel tensors, by which the images that take most memory are found."""
    row: str = field(default="", compare=False)
    """File and line of the first row with this image; empty where no row was prepared."""

    @property
    def place(self) -> str:
        return f"{self.member} in {self.path}" if self.member else self.path

    def to_json(self) -> list[Any]:
        return [self.path, self.member, self.sha256, self.size, self.grid, self.num_values, self.row]

    @staticmethod
    def from_json(values: Sequence[Any], folder: Path) -> "ImageRef":
        """`folder` holds the prepared files."""
        path, member, sha256, (width, height), grid, num_values, row = values
        return ImageRef(str(folder / path), member, sha256, (width, height), tuple(grid), num_values, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    source: str
    """The file, as the user named it."""
    number: int
    """Of the record: its line in a file of lines, else its place in the file, from 1."""
    part: int = 0
    """Which row of a record that holds several, from 1; 0 where it holds one."""
    messages: tuple[Message, ...] = ()
    """Ends with the answer. Empty for plain text."""
    num_given: int = 0
    """The number of messages at the start, the row's prompt, that are never supervised, whoever speaks."""
    rejected: tuple[Message, ...] = ()
    """The other ending of a preference pair, in place of the messages after the given ones."""
    is_good: bool | None = None
    text: str = ""
    """Plain text, of which every token is supervised."""
    tools: str = ""
    """A JSON list of the tools that the assistant may call."""
    images: tuple[Image, ...] = ()
    image_refs: tuple[ImageRef, ...] = ()
    """The same images, once they have been checked."""
    references: tuple[str, ...] = ()
    """All answers that count as right, where a record names several; the one trained on is among them."""
    votes: tuple[int, ...] = ()
    """How often a record lists each reference: the number of people who gave this answer."""
    wrong: tuple[str, ...] = ()
    """Answers that a record calls wrong."""
    dataset: str = ""
    """The source that it is reported under, where test rows come from several."""
    key: str = ""
    """Of the row that `data.task` built this one from, without its images: it stays the same item, whatever it was
    built into. An item that was read back has its whole key here."""
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
        """Empty for plain text."""
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
    """Where a user finds a row: `train.jsonl:3` is a line, as editors and grep name it. A file whose records are not
    lines has no such name."""
    has_lines = not source.lower().removesuffix(".gz").endswith(_WITHOUT_LINES)
    place = f"{source}:{number}" if has_lines else f"record {number} of {source}"
    return place + (f" ({part})" if part else "")


def as_item(row: Row) -> Row:
    """A row for an evaluation: a rejected answer is a wrong one; plain text is an answer without a prompt."""
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
    """Whether an evaluation of these sources includes the row; an evaluation that names none includes all."""
    return not sources or not row.dataset or row.dataset in sources


def item_line(row: Row) -> str:
    """What an evaluation needs of a row, with its place, so that an item can be found again."""
    item = {name: getattr(row, name) for name in _ITEM}
    item["messages"] = [] if row.text else [asdict(message) for message in row.messages]
    item |= {"key": key_of(row) if row.images else row.key, "repairs": row.repairs}
    item["image_refs"] = [ref.to_json() for ref in row.image_refs]
    return json.dumps(item, ensure_ascii=False) + "\n"


def read_items(path: Path) -> list[Row]:
    items: list[Row] = []
    with path.open(encoding="utf-8") as file:
        for item in map(json.loads, file):
            for message in item["messages"]:
                message["tool_calls"] = tuple(ToolCall(**call) for call in message["tool_calls"])
            messages = tuple(Message(**message) for message in item.pop("messages"))
            image_refs = tuple(ImageRef.from_json(values, path.parent) for values in item.pop("image_refs", ()))
            item |= {name: tuple(item.get(name, ())) for name in ("references", "votes", "wrong", "repairs")}
            items.append(as_item(Row(messages=messages, image_refs=image_refs, **item)))
    return items


def key_of(row: Row) -> str:
    """The same item has the same key in every run: the prompt and the right answers, before anything was built from
    them. Images count by content, so a row whose images are not checked yet has no key."""
    if not row.images:  # also a row that was read back, whose key covers its images
        return text_key(row)
    if len(row.image_refs) != len(row.images):
        raise FinefitError(f"{row.place} has images that have not been checked yet")
    return _hashed([text_key(row), *(ref.sha256 for ref in row.image_refs)])


def text_key(row: Row) -> str:
    """The key without images."""
    prompt, answer = [asdict(message) for message in row.prompt], row.text or row.answer
    return row.key or _hashed([prompt, row.tools, answer, sorted(row.references), sorted(row.wrong)])


def _hashed(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
