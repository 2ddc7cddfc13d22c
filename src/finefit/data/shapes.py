"""Determines the shape of a source's records: it is recognised by the names of their columns, or declared in `fields:`.
An ambiguous source is an error that lists the candidates and the line to write."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from finefit.data import assemble, columns
from finefit.data.assemble import Assemble, is_conversation, metadata
from finefit.data.columns import CONTEXTS, PROMPTS, Column, RecordError, SampleColumns, listed, plain
from finefit.data.records import DataRecord
from finefit.data.rows import BadRow, Kind, Row
from finefit.errors import DataError
from finefit.spec.data import Fields

_QUESTIONS = ("Alpaca", "prompt and completion", "question and answer", "document and summary", "TruthfulQA", "AMR")
_SHAPES: Final[dict[str, tuple[Kind, Assemble]]] = {
    **dict.fromkeys(_QUESTIONS, ("chat", assemble.question)),
    "chat messages": ("chat", assemble.chat),
    "ShareGPT conversations": ("chat", assemble.chat),
    "several questions": ("chat", assemble.several_questions),
    "QMSum": ("chat", assemble.meeting),
    "preference pairs": ("pair", assemble.pair),
    "judged answers": ("judged", assemble.question),
    "judged conversations": ("judged", assemble.chat),
    "plain text": ("text", assemble.plain_text),
}

# names as normalised by `plain`
_SUMMARIES: Final = frozenset({"summary", "highlights"})
_ANSWERS: Final = _SUMMARIES.union(
    {"answer", "answers", "label", "response", "output", "completion", "target", "targets", "solution"},
    {"bestanswer", "longanswer"},
)
_CHATS: Final = frozenset({"messages", "conversation", "conversations", "dialogue"})
_SYSTEMS: Final = frozenset({"system", "systemprompt"})
_TEXTS: Final = frozenset({"text", "content"})
_IMAGES: Final = frozenset({"image", "images", "img", "imgname", "imagepath", "imagelocalname", "imagefilename"})
_CHOICES: Final = frozenset({"choices", "options"})
_MEDIA: Final = {
    plain_name: medium
    for medium in ("audio", "video")
    for plain_name in (medium, f"{medium}s", f"{medium}path", f"{medium}paths", f"{medium}file", f"{medium}files")
}
"""The medium that a column of this name holds; neither is supported."""
_MEANT: Final = (PROMPTS | _ANSWERS | CONTEXTS | _CHATS | _SYSTEMS | _TEXTS | _IMAGES | _CHOICES).union(
    {
        "chosen",
        "rejected",
        "chosenmessages",
        "rejectedmessages",
        "tools",
        "ktotag",
        "history",
        "questions",
        "correctanswers",
        "incorrectanswers",
    }
)

_BESIDE: Final = frozenset({"system", "tools", "images"})
_DECLARED: Final[dict[frozenset[str], str]] = {
    frozenset({"prompt", "answer"}): "question and answer",
    frozenset({"prompt", "answer", "label"}): "judged answers",
    frozenset({"messages"}): "chat messages",
    frozenset({"messages", "label"}): "judged conversations",
    frozenset({"chosen", "rejected"}): "preference pairs",
    frozenset({"prompt", "chosen", "rejected"}): "preference pairs",
    frozenset({"text"}): "plain text",
}

# Conventions that published datasets state only in their documentation.
_PUBLISHED_IMAGES: Final = {
    frozenset({"image_id", "flickr_original_url"}): "{image_id}.jpg",  # TextVQA
    frozenset({"id", "imageURL", "questions"}): "{id}",  # OCR-VQA: the URL has the extension, and many save all as .jpg
    frozenset({"image_id", "data_subtype"}): "COCO_{data_subtype}_{image_id:012}.jpg",  # VQAv2, on images of COCO
}
"""The file name that belongs to an image's id, by the columns that identify the dataset."""
_NUMBERED_COLUMNS: Final = frozenset({"imageURL", "questions", "split"})
_NUMBERED_SPLITS: Final = {"train": "1", "validation": "2", "test": "3"}
"""OCR-VQA stores all its splits in one file."""

Parts = dict[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    parts: Mapping[str, Column]
    mapping: dict[str, str]
    """Maps each part to its column, for the user; `not used` lists the other columns."""
    columns: frozenset[str] | None
    """The columns from which the shape was recognised; None if it was declared."""
    beside: Fields = field(default_factory=Fields)
    """Fields that were declared in addition to a recognised shape."""
    good: str = "true"
    """For judged answers: the label's value for a good one."""

    @property
    def kind(self) -> Kind:
        return _SHAPES[self.name][0]

    def rows(self, record: DataRecord) -> list[Row | BadRow]:
        """Returns at least one row for every record."""
        try:
            shape = self._for(record)
            return _SHAPES[shape.name][1](shape.parts, record)
        except RecordError as error:
            return [BadRow(record.source, record.number, str(error))]

    def _for(self, record: DataRecord) -> "Shape":
        """A later record may have a column that the first ones lack, such as `system`; then its own shape is
        detected."""
        if self.columns is None:
            return self
        for name, value in record.value.items():
            if medium := _medium(name, value):
                raise RecordError(f"has {medium} in {name}, and only text and images are trained on")
        if record.value.keys() <= self.columns:
            return self
        new = [name for name in record.value if name not in self.columns and plain(name) in _MEANT]
        if not new:
            return self
        try:
            own = find_shape([record], self.beside, source=record.source)
        except DataError as error:
            raise RecordError(f"has {', '.join(new)}, which the first records lack: {error.problem}") from None
        if own.kind != self.kind:
            kinds = f"makes it {own.name}, while the first records are {self.name}"
            raise RecordError(f"has {', '.join(new)}, which {kinds}")
        return own


def find_shape(sample: Sequence[DataRecord], fields: Fields, *, source: str) -> Shape:
    if not sample:
        raise DataError(f"{source} holds no records", "check the path, or leave the source out")
    seen = SampleColumns.of([record.value for record in sample], source)
    declared: dict[str, str] = fields.model_dump(exclude_none=True, exclude={"join"})
    if declared.keys() - _BESIDE:
        name = _DECLARED.get(frozenset(declared) - _BESIDE)
        if name is None or (name == "plain text" and len(declared) > 1):
            known = "; ".join(" and ".join(sorted(names, key=list(Fields.model_fields).index)) for names in _DECLARED)
            remedy = f"give one of: {known}; all but text may have system, tools, images"
            raise DataError(f"{seen.source}: fields with {', '.join(declared)} are not a known shape", remedy)
        parts = {field: seen.column(written, field) for field, written in declared.items()}
        return _shape(seen, name, parts, is_declared=True)
    shape = _recognised(seen)
    media = ((name, _medium(name, value)) for name, values in seen.values.items() for value in values)
    if found := next(((name, medium) for name, medium in media if medium), None):
        what = f"{found[1]} (column {found[0]})"
        problem = f"{seen.source} holds {what}, and finefit trains on text and images: it would be ignored"
        raise DataError(problem, f"leave these rows out, or train on their text alone with {fields_line(shape.parts)}")
    if not declared:
        return shape
    # Only additions to a recognised shape are declared, such as the column of an image.
    if shape.name == "plain text":
        problem = f"{seen.source} holds plain text, which has no {', '.join(declared)}"
        raise DataError(problem, "remove these from fields, or name a prompt and an answer")
    parts = dict(shape.parts) | {field: seen.column(written, field) for field, written in declared.items()}
    return replace(_shape(seen, shape.name, parts), beside=fields)


def _medium(name: str, value: object) -> str | None:
    """What a column holds that no model is trained on here: by its name, else by what it is."""
    if not columns.is_given(value):
        return None
    return _MEDIA.get(plain(name)) or columns.recording(value)


def _recognised(seen: SampleColumns) -> Shape:
    # These column names are unambiguous.
    parts = _columns(seen, context={"meetingtranscripts"}, general={"generalquerylist"}, specific={"specificquerylist"})
    if "context" in parts and len(parts) > 1:
        return _shape(seen, "QMSum", parts)
    if len(parts := _columns(seen, prompt={"snt"}, answer={"amr"})) == 2:
        return _shape(seen, "AMR", parts)
    if shape := _pair(seen):
        return shape
    found = [shape for detect in (_chat, _several, _question) if (shape := detect(seen))]
    if len(found) > 1:
        columns = [", ".join(column.name for column in shape.parts.values()) for shape in found]
        ways = " or as ".join(f"{shape.name} ({names})" for shape, names in zip(found, columns, strict=True))
        single = (shape.parts for shape in found if shape.name != "several questions")
        raise _ambiguous(seen, f"can be read as {ways}", single)
    return found[0] if found else _text(seen)


def _pair(seen: SampleColumns) -> Shape | None:
    parts = _columns(seen, chosen={"chosen"}, rejected={"rejected"})
    if len(parts) < 2:  # LLaMA-Factory's names
        parts = _columns(seen, chosen={"chosenmessages"}, rejected={"rejectedmessages"})
    if len(parts) < 2:
        return None
    first = [talk[0] for talk in _conversations(seen, parts["chosen"].name)]
    if any(message.get("role", message.get("from")) in ("system", "user", "human") for message in first):
        return _shape(seen, "preference pairs", parts | _beside(seen), prompt="the start of both")
    prompts = _prompts(seen) + [{"prompt": _named(name)} for name in _chat_columns(seen)]
    if not prompts:
        problem = f"{seen.source} has pairs but no known prompt column; its columns are {listed(seen.values)}"
        raise DataError(problem, f"name the prompt: {fields_line({'prompt': Column('...')} | parts)}")
    if len(prompts) > 1:
        raise _ambiguous(seen, f"may have its prompt in {_either(prompts)}", (prompt | parts for prompt in prompts))
    return _shape(seen, "preference pairs", prompts[0] | parts | _beside(seen))


def _chat(seen: SampleColumns) -> Shape | None:
    found = _chat_columns(seen)
    if len(found) > 1:
        ways = ({"messages": Column(name)} for name in found)
        raise _ambiguous(seen, f"may have its messages in {' or '.join(found)}", ways)
    if not found:
        return None
    parts = {"messages": _named(found[0])} | _beside(seen)
    if label := _verdict(seen):
        return _shape(seen, "judged conversations", parts | {"label": label})
    is_sharegpt = any("from" in talk[0] for talk in _conversations(seen, found[0]))
    return _shape(seen, "ShareGPT conversations" if is_sharegpt else "chat messages", parts)


def _chat_columns(seen: SampleColumns) -> list[str]:
    return [name for name in seen.named(_CHATS) if _conversations(seen, name)]


def _conversations(seen: SampleColumns, name: str) -> list[list[Any]]:
    return [value for value in seen.values[name] if isinstance(value, list) and is_conversation(value)]


def _several(seen: SampleColumns) -> Shape | None:
    parts = _columns(seen, prompt={"questions"}, answer={"answers"})
    values = [value for column in parts.values() for value in seen.values[column.name]]
    if len(parts) < 2 or not all(isinstance(value, list) for value in values):
        return None
    return _shape(seen, "several questions", parts | _columns(seen, context=CONTEXTS) | _beside(seen))


def _question(seen: SampleColumns) -> Shape | None:
    """Recognises a question and its answer under their many names, including a document and its summary."""
    answers, prompts, label = seen.named(_ANSWERS), _prompts(seen), _verdict(seen)
    # `kto_tag` judges any answer; `label` may be the answer itself, unless there is a completion.
    if label and plain(label.name) == "label" and {plain(answer) for answer in answers} != {"completion", "label"}:
        label = None
    answers = [name for name in answers if label is None or name != label.name]
    name = "judged answers" if label else ""
    if not prompts and answers and {plain(answer) for answer in answers} <= _SUMMARIES:
        prompts = [{"context": _named(found)} for found in seen.named(CONTEXTS)]
        name = name or "document and summary"
    ways: list[Parts] = [prompt | {"answer": _named(answer)} for prompt, answer in product(prompts, answers)]
    if len(ways) > 1:
        problem = f"may have its prompt in {_either(prompts)} and its answer in {' or '.join(answers)}"
        raise _ambiguous(seen, problem, ways)
    if not ways:
        return None
    parts = ways[0]
    if plain(parts["answer"].name) == "bestanswer":  # TruthfulQA's lists of right and wrong answers
        wrong = {"wrong": {"incorrectanswers"}, "best_wrong": {"bestincorrectanswer"}}
        parts = parts | _columns(seen, references={"correctanswers"}, **wrong)
    parts = parts | _beside(seen) | ({"label": label} if label else {})
    choices = [name for name in seen.named(_CHOICES) if any(map(_holds_choices, seen.values[name]))]
    if "prompt" in parts and choices:  # a question asked with choices cannot be answered without them
        problem = f"has {' and '.join(choices)} beside {parts['prompt'].name}, but they would not be part of the prompt"
        raise _ambiguous(seen, problem, [*(parts | {"choices": _named(name)} for name in choices), parts])
    return _shape(seen, name or _name(parts), parts)


def _holds_choices(value: object) -> bool:
    try:
        return isinstance(value, str | list | dict) and bool(columns.inserted(value, "").strip())
    except RecordError:
        return False


def _prompts(seen: SampleColumns) -> list[Parts]:
    """Returns the candidates for the prompt: Alpaca's two columns, or a question with its context; several if it is
    ambiguous."""
    alpaca = _columns(seen, prompt={"instruction"}, input={"input"}, history={"history"})
    contexts = seen.named(CONTEXTS)
    asked = {plain(name) for name in seen.values} & PROMPTS
    if asked == {"instruction", "input"} and not contexts:
        return [alpaca]
    history = {"history": alpaca["history"]} if asked == {"instruction"} and "history" in alpaca else {}
    questions: list[Parts] = [{"prompt": _named(name), **history} for name in seen.named(PROMPTS)]
    in_contexts = [question | {"context": _named(name)} for question in questions for name in contexts]
    return in_contexts if contexts else questions


def _name(parts: Parts) -> str:
    asked, answered = plain(parts["prompt"].name), plain(parts["answer"].name)
    if "references" in parts or "wrong" in parts:
        return "TruthfulQA"
    if asked == "instruction" and ("input" in parts or answered == "output"):
        return "Alpaca"
    return "prompt and completion" if (asked, answered) == ("prompt", "completion") else "question and answer"


def _verdict(seen: SampleColumns) -> Column | None:
    """Returns `kto_tag` whatever it holds, and `label` if it holds only verdicts."""
    if tags := _columns(seen, label={"ktotag"}):
        return tags["label"]
    label = _columns(seen, label={"label"}).get("label")
    return label if label and _written_verdicts(seen, label) else None


def _written_verdicts(seen: SampleColumns, label: Column) -> tuple[str, str] | None:
    """Returns how this column writes good and bad; None if it holds any other value."""
    written = {str(value).lower() for value in seen.values.get(label.name, [])}
    return next((pair for pair in columns.VERDICTS if written and written <= set(pair)), None)


def _text(seen: SampleColumns) -> Shape:
    """Plain text is tried last, because many other shapes have a `text` column too."""
    texts = [name for name in seen.named(_TEXTS) if any(isinstance(value, str) for value in seen.values[name])]
    others = seen.named(PROMPTS) + seen.named(_ANSWERS)
    if len(texts) == 1 and not others:
        return _shape(seen, "plain text", {"text": _named(texts[0])})
    if texts:
        ways: list[Parts] = [{"text": Column(name)} for name in texts]
        ways += [{"prompt": Column(name), "answer": Column(other)} for name, other in product(texts, others)]
        raise _ambiguous(seen, f"has {', '.join(texts + others)}: plain text, or a prompt and an answer", ways)
    examples = [{"prompt": Column("..."), "answer": Column("...")}, {"messages": Column("...")}]
    problem = f"{seen.source}: the shape of its records is not recognised; their columns are {listed(seen.values)}"
    raise DataError(problem, "name the columns, for example " + " or ".join(map(fields_line, examples)))


def _named(name: str) -> Column:
    return Column(name, (name,))


def _columns(seen: SampleColumns, **names: Iterable[str]) -> Parts:
    """Returns the column of each part that has one; several candidates are an error."""
    parts: Parts = {}
    for part, known in names.items():
        found = seen.named(frozenset(known))
        if len(found) > 1:
            problem = f"{seen.source} may have its {part} in {' or '.join(found)}"
            raise DataError(problem, "rename one of these columns, or declare the shape with fields:")
        if found:
            parts[part] = _named(found[0])
    return parts


def _beside(seen: SampleColumns) -> Parts:
    def image_rank(name: str) -> tuple[int, bool]:
        """Ranks columns of bytes before paths before anything else, and then the column that is simply called
        `image`."""
        first = next(iter(seen.values[name]), None)
        held = columns.held_image(first[0] if isinstance(first, list) else first)
        return 0 if isinstance(held, bytes) else 1 if held else 2, plain(name) not in ("image", "images", "img")

    parts = _columns(seen, system=_SYSTEMS, tools={"tools"})
    given = {name for name, values in seen.values.items() if values}
    if found := seen.named(_IMAGES):
        name = min(found, key=image_rank)
        parts["images"] = _named(name)
    elif found := [name for columns, name in _PUBLISHED_IMAGES.items() if columns <= given]:
        parts["images"] = seen.column(found[0], "images")
    return parts


def _shape(seen: SampleColumns, name: str, parts: Parts, *, is_declared: bool = False, **notes: str) -> Shape:
    def held(part: str) -> list[object]:
        column = parts.get(part)
        return [] if column is None or column.pieces else [column.get(record) for record in seen.records]

    mapping = notes | {part: column.name for part, column in parts.items()}
    has_several = any(isinstance(answer, list | dict) and not is_conversation(answer) for answer in held("answer"))
    if has_several and name != "several questions":
        mapping["answer"] += " (the most frequent)"
    if "images" not in parts and (urls := seen.named({"imageurl"})):
        mapping["images"] = f"none: {urls[0]} is a URL, and nothing is downloaded"
    used = {key for column in parts.values() for key in column.roots}
    unused = [column for column in seen.values if column not in used]
    unused += [f"{mapping['messages']}[].{field}" for field in sorted(set().union(*map(metadata, held("messages"))))]
    if unused:
        mapping["not used"] = listed(unused)
    good = (_written_verdicts(seen, parts["label"]) if "label" in parts else None) or ("true", "false")
    known = None if is_declared else frozenset(seen.values)
    return Shape(name=name, parts=parts, mapping=mapping, columns=known, good=good[0])


def _either(prompts: Iterable[Parts]) -> str:
    names = ([prompt[part].name for part in ("prompt", "input", "context") if part in prompt] for prompt in prompts)
    return " or ".join(map(" with ".join, names))


def _ambiguous(seen: SampleColumns, problem: str, ways: Iterable[Mapping[str, Column]]) -> DataError:
    return DataError(f"{seen.source} {problem}", "say which: " + " or ".join(fields_line(parts) for parts in ways))


def fields_line(parts: Mapping[str, Column]) -> str:
    """Returns the line with which a user can choose this reading."""
    names = {part: column.name for part, column in parts.items() if part in Fields.model_fields}
    if parts.keys() & {"context", "input", "choices"}:
        asked = "\\n".join(f"{{{parts[part].name}}}" for part in ("prompt", "input", "choices") if part in parts)
        context = [f"{{{parts['context'].name}}}"] if "context" in parts else []
        names["prompt"] = '"' + "\\n\\n".join([*context, asked] if asked else context) + '"'
    return f"fields: {{{', '.join(f'{part}: {name}' for part, name in names.items())}}}"


def numbered_split(columns: Collection[str], split: str) -> dict[str, tuple[str, ...]]:
    """Returns the column and value that identify records of this split; empty if the dataset does not number its
    splits."""
    is_numbered = frozenset(columns) >= _NUMBERED_COLUMNS and split in _NUMBERED_SPLITS
    return {"split": (_NUMBERED_SPLITS[split],)} if is_numbered else {}
