"""Which shape the records of a source have: recognised by the names of their columns, or declared in `fields:`.

Where more than one reading is possible none is taken: the error lists the candidates and the line to write.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, Literal

from finefit.data import assemble
from finefit.data.assemble import Assemble
from finefit.data.cells import Fault, held_image, inserted
from finefit.data.columns import CONTEXTS, PROMPTS, Column, Sample, listed, plain
from finefit.data.conversations import is_conversation, metadata
from finefit.data.published import image_column
from finefit.data.records import Record
from finefit.data.rows import BadRow, Kind, Row
from finefit.errors import DataError
from finefit.spec.rows import Fields

Name = Literal[
    "chat messages",
    "ShareGPT conversations",
    "Alpaca",
    "prompt and completion",
    "question and answer",
    "document and summary",
    "several questions",
    "QMSum",
    "TruthfulQA",
    "preference pairs",
    "judged answers",
    "judged conversations",
    "plain text",
    "AMR",
]
_SHAPES: Final[dict[Name, tuple[Kind, Assemble]]] = {
    "chat messages": ("chat", assemble.chat),
    "ShareGPT conversations": ("chat", assemble.chat),
    "Alpaca": ("chat", assemble.question),
    "prompt and completion": ("chat", assemble.question),
    "question and answer": ("chat", assemble.question),
    "document and summary": ("chat", assemble.question),
    "several questions": ("chat", assemble.several_questions),
    "QMSum": ("chat", assemble.meeting),
    "TruthfulQA": ("chat", assemble.question),
    "preference pairs": ("pair", assemble.pair),
    "judged answers": ("judged", assemble.judged),
    "judged conversations": ("judged", assemble.judged_chat),
    "plain text": ("text", assemble.plain_text),
    "AMR": ("chat", assemble.question),
}

# names as `plain` gives them
_SUMMARIES: Final = frozenset({"summary", "highlights"})
_ANSWERS: Final = _SUMMARIES | {
    *(
        "answer",
        "answers",
        "label",
        "response",
        "output",
        "completion",
        "target",
        "targets",
        "solution",
        "bestanswer",
        "longanswer",
    )
}
_CHATS: Final = frozenset({"messages", "conversation", "conversations", "dialogue"})
_SYSTEMS: Final = frozenset({"system", "systemprompt"})
_TEXTS: Final = frozenset({"text", "content"})
_IMAGES: Final = frozenset({"image", "images", "img", "imgname", "imagepath", "imagelocalname", "imagefilename"})
_IMAGE_URLS: Final = frozenset({"imageurl"})
_CHOICES: Final = frozenset({"choices", "options"})
_OTHERS: Final = frozenset(
    {"tools", "chosen", "rejected", "ktotag", "history", "questions", "correctanswers", "incorrectanswers"}
)
_MEANT: Final = PROMPTS | _ANSWERS | CONTEXTS | _CHATS | _SYSTEMS | _TEXTS | _IMAGES | _CHOICES | _OTHERS

_BESIDE: Final = frozenset({"system", "tools", "images"})
_DECLARED: Final[dict[frozenset[str], Name]] = {
    frozenset({"prompt", "answer"}): "question and answer",
    frozenset({"prompt", "answer", "label"}): "judged answers",
    frozenset({"messages"}): "chat messages",
    frozenset({"messages", "label"}): "judged conversations",
    frozenset({"chosen", "rejected"}): "preference pairs",
    frozenset({"prompt", "chosen", "rejected"}): "preference pairs",
    frozenset({"text"}): "plain text",
}

Parts = dict[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: Name
    parts: Mapping[str, Column]
    mapping: dict[str, str]
    """Which column is what, for the user; `not used` names the rest."""
    columns: frozenset[str] | None
    """Those of the records that the shape was recognised by; None where it was declared."""
    beside: Fields = field(default_factory=Fields)
    """What was declared beside a shape that was recognised."""

    @property
    def kind(self) -> Kind:
        return _SHAPES[self.name][0]

    def rows(self, record: Record) -> list[Row | BadRow]:
        """At least one for every record."""
        try:
            shape = self._for(record)
            return _SHAPES[shape.name][1](shape.parts, record)
        except Fault as fault:
            return [BadRow(record.source, record.number, str(fault))]

    def _for(self, record: Record) -> "Shape":
        """A later record may have a column that the first ones lack, such as `system`: it is looked at by itself, so that none is overlooked."""
        if self.columns is None or record.value.keys() <= self.columns:
            return self
        new = [name for name in record.value if name not in self.columns and plain(name) in _MEANT]
        if not new:
            return self
        try:
            own = find_shape([record], self.beside, source=record.source)
        except DataError as error:
            raise Fault(f"has {', '.join(new)}, which the first records lack: {error.problem}") from None
        if own.kind != self.kind:
            raise Fault(f"has {', '.join(new)}, which makes it {own.name}, while the first records are {self.name}")
        return own


def find_shape(sample: Sequence[Record], fields: Fields, *, source: str) -> Shape:
    if not sample:
        raise DataError(f"{source} holds no records", "check the path, or leave the source out")
    seen = Sample.of([record.value for record in sample], source)
    declared: dict[str, str] = fields.model_dump(exclude_none=True, exclude={"join"})
    if declared.keys() - _BESIDE:
        return _declared(seen, declared)
    return _with_beside(seen, _recognised(seen), fields, declared) if declared else _recognised(seen)


def _with_beside(seen: Sample, shape: Shape, fields: Fields, declared: dict[str, str]) -> Shape:
    """Where only what stands beside a shape is declared, such as the name of an image, the rest is recognised."""
    if shape.name == "plain text":
        raise DataError(
            f"{seen.source} holds plain text, which has no {', '.join(declared)}",
            "take these out of fields, or name a prompt and an answer",
        )
    parts = dict(shape.parts) | {field: seen.column(written, field) for field, written in declared.items()}
    return replace(_shape(seen, shape.name, parts), beside=fields)


def _declared(seen: Sample, fields: dict[str, str]) -> Shape:
    name = _DECLARED.get(frozenset(fields) - _BESIDE)
    if name is None or (name == "plain text" and len(fields) > 1):
        known = "; ".join(" and ".join(sorted(names, key=list(Fields.model_fields).index)) for names in _DECLARED)
        raise DataError(
            f"{seen.source}: fields with {', '.join(fields)} tell no shape",
            f"give one of: {known}; all but text may have system, tools, images",
        )
    return _shape(
        seen, name, {field: seen.column(written, field) for field, written in fields.items()}, is_declared=True
    )


def _recognised(seen: Sample) -> Shape:
    for detect in (_meeting, _amr, _pair):  # their names mean nothing else
        if shape := detect(seen):
            return shape
    found = [shape for detect in (_chat, _several, _question) if (shape := detect(seen))]
    if len(found) > 1:
        ways = " or as ".join(
            f"{shape.name} ({', '.join(column.name for column in shape.parts.values())})" for shape in found
        )
        raise _ambiguous(
            seen, f"can be read as {ways}", (shape.parts for shape in found if shape.name != "several questions")
        )
    return found[0] if found else _text(seen)


def _meeting(seen: Sample) -> Shape | None:
    parts = _columns(seen, context={"meetingtranscripts"}, general={"generalquerylist"}, specific={"specificquerylist"})
    return _shape(seen, "QMSum", parts) if "context" in parts and len(parts) > 1 else None


def _amr(seen: Sample) -> Shape | None:
    parts = _columns(seen, prompt={"snt"}, answer={"amr"})
    return _shape(seen, "AMR", parts) if len(parts) == 2 else None


def _pair(seen: Sample) -> Shape | None:
    parts = _columns(seen, chosen={"chosen"}, rejected={"rejected"})
    if len(parts) < 2:
        return None
    if any(_holds_prompt(value) for value in seen.values[parts["chosen"].name]):
        return _shape(seen, "preference pairs", parts | _beside(seen), prompt="what both begin with")
    prompts = _prompts(seen) + [{"prompt": Column(name, (name,))} for name in _chat_columns(seen)]
    if not prompts:
        problem = f"{seen.source} has pairs but no prompt that is known; its columns are {listed(seen.values)}"
        raise DataError(problem, f"name the prompt: {_line({'prompt': Column('...')} | parts)}")
    if len(prompts) > 1:
        raise _ambiguous(seen, f"may have its prompt in {_either(prompts)}", (prompt | parts for prompt in prompts))
    return _shape(seen, "preference pairs", prompts[0] | parts | _beside(seen))


def _holds_prompt(value: object) -> bool:
    first = value[0] if isinstance(value, list) and is_conversation(value) else {}
    return first.get("role", first.get("from")) in ("system", "user", "human")


def _chat(seen: Sample) -> Shape | None:
    found = _chat_columns(seen)
    if len(found) > 1:
        raise _ambiguous(
            seen, f"may have its messages in {' or '.join(found)}", ({"messages": Column(name)} for name in found)
        )
    if not found:
        return None
    parts = {"messages": Column(found[0], (found[0],))} | _beside(seen)
    if label := _verdict(seen):
        return _shape(seen, "judged conversations", parts | {"label": label})
    is_sharegpt = any(
        "from" in value[0] for value in seen.values[found[0]] if is_conversation(value) and isinstance(value, list)
    )
    return _shape(seen, "ShareGPT conversations" if is_sharegpt else "chat messages", parts)


def _chat_columns(seen: Sample) -> list[str]:
    return [
        name
        for name in seen.named(_CHATS)
        if any(isinstance(value, list) and is_conversation(value) for value in seen.values[name])
    ]


def _several(seen: Sample) -> Shape | None:
    parts = _columns(seen, prompt={"questions"}, answer={"answers"})
    is_parallel = len(parts) == 2 and all(
        isinstance(value, list) for column in parts.values() for value in seen.values[column.name]
    )
    contexts = _columns(seen, context=CONTEXTS)
    return _shape(seen, "several questions", parts | contexts | _beside(seen)) if is_parallel else None


def _question(seen: Sample) -> Shape | None:
    """A question and its answer under their many names, a document and its summary among them."""
    answers = seen.named(_ANSWERS)
    prompts = _prompts(seen)
    label = _judge(seen, answers)
    answers = [name for name in answers if label is None or name != label.name]
    name: Name | None = None
    if not prompts and answers and {plain(answer) for answer in answers} <= _SUMMARIES:
        prompts, name = [{"context": Column(found, (found,))} for found in seen.named(CONTEXTS)], "document and summary"
    ways: list[Parts] = [prompt | {"answer": Column(answer, (answer,))} for prompt, answer in product(prompts, answers)]
    if len(ways) > 1:
        raise _ambiguous(
            seen, f"may have its prompt in {_either(prompts)} and its answer in {' or '.join(answers)}", ways
        )
    if not ways:
        return None
    parts = ways[0] | _truths(seen, ways[0]) | _beside(seen) | ({"label": label} if label else {})
    _require_no_choices(seen, parts)
    return _shape(seen, "judged answers" if label else name or _name(parts), parts)


def _require_no_choices(seen: Sample, parts: Parts) -> None:
    """A question that was asked with choices cannot be answered without them."""
    found = [name for name in seen.named(_CHOICES) if any(_holds_choices(value) for value in seen.values[name])]
    if "prompt" in parts and found:
        ways = [parts | {"choices": Column(name, (name,))} for name in found]
        raise _ambiguous(
            seen,
            f"has {' and '.join(found)} beside {parts['prompt'].name}, and they would not be part of the prompt",
            [*ways, parts],
        )


def _holds_choices(value: object) -> bool:
    try:
        return isinstance(value, str | list | dict) and bool(inserted(value, "").strip())
    except Fault:
        return False


def _prompts(seen: Sample) -> list[Parts]:
    """What may be the prompt: Alpaca's two columns, or a question with its context; more than one where it cannot be told."""
    alpaca = _columns(seen, prompt={"instruction"}, input={"input"}, history={"history"})
    contexts = seen.named(CONTEXTS)
    asked = {plain(name) for name in seen.values} & PROMPTS
    if asked == {"instruction", "input"} and not contexts:
        return [alpaca]
    history = {"history": alpaca["history"]} if asked == {"instruction"} and "history" in alpaca else {}
    questions: list[Parts] = [{"prompt": Column(name, (name,)), **history} for name in seen.named(PROMPTS)]
    return (
        [question | {"context": Column(name, (name,))} for question in questions for name in contexts]
        if contexts
        else questions
    )


def _name(parts: Parts) -> Name:
    asked, answered = plain(parts["prompt"].name), plain(parts["answer"].name)
    if "references" in parts or "wrong" in parts:
        return "TruthfulQA"
    if asked == "instruction" and ("input" in parts or answered == "output"):
        return "Alpaca"
    return "prompt and completion" if (asked, answered) == ("prompt", "completion") else "question and answer"


def _truths(seen: Sample, parts: Parts) -> Parts:
    """TruthfulQA's lists of what is right and wrong."""
    if plain(parts["answer"].name) != "bestanswer":
        return {}
    return _columns(seen, references={"correctanswers"}, wrong={"incorrectanswers"}, best_wrong={"bestincorrectanswer"})


def _verdict(seen: Sample) -> Column | None:
    """`kto_tag` whatever it holds, `label` where it is true or false."""
    if tags := _columns(seen, label={"ktotag"}):
        return tags["label"]
    label = _columns(seen, label={"label"}).get("label")
    values = seen.values[label.name] if label else []
    are_verdicts = all(
        isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")) for value in values
    )
    return label if values and are_verdicts else None


def _judge(seen: Sample, answers: Iterable[str]) -> Column | None:
    """`kto_tag` judges any answer; `label` may be the answer itself, except beside a completion."""
    label = _verdict(seen)
    is_judge = label is not None and (
        plain(label.name) != "label" or {plain(name) for name in answers} == {"completion", "label"}
    )
    return label if is_judge else None


def _text(seen: Sample) -> Shape:
    """Last: `text` stands beside many other shapes, too."""
    texts = [name for name in seen.named(_TEXTS) if any(isinstance(value, str) for value in seen.values[name])]
    others = seen.named(PROMPTS) + seen.named(_ANSWERS)
    if len(texts) == 1 and not others:
        return _shape(seen, "plain text", {"text": Column(texts[0], (texts[0],))})
    if texts:
        ways: list[Parts] = [{"text": Column(name)} for name in texts]
        ways += [{"prompt": Column(name), "answer": Column(other)} for name, other in product(texts, others)]
        raise _ambiguous(seen, f"has {', '.join(texts + others)}: plain text, or a prompt and an answer", ways)
    raise DataError(
        f"{seen.source}: the shape of its records is not recognised; their columns are {listed(seen.values)}",
        f"name the columns, for example {_line({'prompt': Column('...'), 'answer': Column('...')})} or {_line({'messages': Column('...')})}",
    )


def _columns(seen: Sample, **names: Iterable[str]) -> Parts:
    """The column of each part, where there is one; several that could be it are refused."""
    parts: Parts = {}
    for part, known in names.items():
        found = seen.named(frozenset(known))
        if len(found) > 1:
            raise DataError(
                f"{seen.source} may have its {part} in {' or '.join(found)}",
                "rename one of these columns, or declare the shape with fields:",
            )
        if found:
            parts[part] = Column(found[0], (found[0],))
    return parts


def _beside(seen: Sample) -> Parts:
    parts = _columns(seen, system=_SYSTEMS, tools={"tools"})
    if found := seen.named(_IMAGES):
        name = min(found, key=lambda name: _image_rank(seen, name))
        parts["images"] = Column(name, (name,))
    elif named := image_column(seen):
        parts["images"] = named
    return parts


def _image_rank(seen: Sample, name: str) -> tuple[int, bool]:
    """Bytes before paths before what is neither; then the column that is called just `image`."""
    first = next(iter(seen.values[name]), None)
    held = held_image(first[0] if isinstance(first, list) else first)
    return 0 if isinstance(held, bytes) else 1 if held else 2, plain(name) not in ("image", "images", "img")


def _shape(seen: Sample, name: Name, parts: Parts, *, is_declared: bool = False, **notes: str) -> Shape:
    mapping = notes | {part: column.name for part, column in parts.items()}
    if "answer" in parts and name != "several questions" and _has_several(seen, parts["answer"]):
        mapping["answer"] += " (the most frequent)"
    if "images" not in parts and (urls := seen.named(_IMAGE_URLS)):
        mapping["images"] = f"none: {urls[0]} is a URL, and nothing is downloaded"
    used = {key for column in parts.values() for key in column.roots}
    if unused := [*(column for column in seen.values if column not in used), *_unused_in_messages(seen, parts)]:
        mapping["not used"] = listed(unused)
    return Shape(name=name, parts=parts, mapping=mapping, columns=None if is_declared else frozenset(seen.values))


def _unused_in_messages(seen: Sample, parts: Parts) -> list[str]:
    column = parts.get("messages")
    if column is None or column.pieces:
        return []
    return [
        f"{column.name}[].{name}"
        for name in sorted(set().union(*(metadata(column.get(record)) for record in seen.records)))
    ]


def _has_several(seen: Sample, column: Column) -> bool:
    held = [] if column.pieces else [column.get(record) for record in seen.records]
    return any(isinstance(value, list | dict) and not is_conversation(value) for value in held)


def _either(prompts: Iterable[Parts]) -> str:
    return " or ".join(
        " with ".join(prompt[part].name for part in ("prompt", "input", "context") if part in prompt)
        for prompt in prompts
    )


def _ambiguous(seen: Sample, problem: str, ways: Iterable[Mapping[str, Column]]) -> DataError:
    return DataError(f"{seen.source} {problem}", "say which: " + " or ".join(_line(parts) for parts in ways))


def _line(parts: Mapping[str, Column]) -> str:
    """What a user may write to have it read so."""
    names = {part: column.name for part, column in parts.items() if part in Fields.model_fields}
    if parts.keys() & {"context", "input", "choices"}:
        asked = "\\n".join(f"{{{parts[part].name}}}" for part in ("prompt", "input", "choices") if part in parts)
        context = [f"{{{parts['context'].name}}}"] if "context" in parts else []
        names["prompt"] = '"' + "\\n\\n".join([*context, asked] if asked else context) + '"'
    return f"fields: {{{', '.join(f'{part}: {name}' for part, name in names.items())}}}"
