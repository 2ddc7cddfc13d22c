"""What every shape of record becomes: a row. It is chat that ends with an answer, a preference pair, a judged answer, or plain text."""

from dataclasses import dataclass
from typing import Literal

from finefit.data.pictures import Picture

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["chat", "pair", "judged", "text"]


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
    """Either a path as the record gives it, or the encoded bytes."""

    path: str = ""
    data: bytes = b""
    root: str = ""
    """The folder or zip that the path starts from: what `images_root` names, else the folder of the record's file."""
    root_name: str = ""
    """As `images_root` has it: the same wherever the data lies. Empty where it names none."""


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
    """So many messages at the start are never supervised, whoever speaks: those of a row's prompt."""
    rejected: tuple[Message, ...] = ()
    """The other ending of a preference pair: what stands in place of the messages after the given ones."""
    is_good: bool | None = None
    """The verdict on a judged answer."""
    text: str = ""
    """Plain text, of which every token is supervised."""
    tools: str = ""
    """A JSON list of the tools that the assistant may call."""
    images: tuple[Image, ...] = ()
    pictures: tuple[Picture, ...] = ()
    """The same, once they were looked at."""
    references: tuple[str, ...] = ()
    """All answers that count as right, where a record names several; the one trained on is among them."""
    votes: tuple[int, ...] = ()
    """How often a record lists each reference: so many people gave this answer."""
    wrong: tuple[str, ...] = ()
    """Answers that a record calls wrong."""
    dataset: str = ""
    """The source that it is told under, where test rows come from several."""
    key: str = ""
    """Of the row that this one was built from by `data.task`, without its images: the same item, whatever it was built into. Of an item that was read
    back its whole key."""
    repairs: tuple[str, ...] = ()
    """What was put right when it was built."""

    @property
    def kind(self) -> Kind:
        if self.text:
            return "text"
        if self.rejected:
            return "pair"
        return "chat" if self.is_good is None else "judged"

    @property
    def place(self) -> str:
        return _place(self.source, self.number, self.part)

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """Plain text has none."""
        return self.messages[-1].content if self.messages else ""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record, or a row of one, that cannot be used."""

    source: str
    number: int
    reason: str
    part: int = 0

    @property
    def place(self) -> str:
        return _place(self.source, self.number, self.part)


def _place(source: str, number: int, part: int) -> str:
    return f"{source}:{number}" + (f" ({part})" if part else "")
