"""Builds rows from a record once the role of each column is known, with one function per row layout. Conversations come
from lists of messages: `role`/`content` with tool calls, reasoning and parts (OpenAI's, or LLaMA-Factory's
`type`/`value`), or ShareGPT's `from`/`value`. A message field that a row cannot store is an error if it carries content
or decides what is trained on; otherwise it is reported as not used."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from finefit import bounded
from finefit.data import columns
from finefit.data.columns import Column, RecordError, Value, filled, is_given, shown, text
from finefit.data.records import DataRecord
from finefit.data.rows import IMAGE_PLACEHOLDER, BadRow, Image, Message, Role, Row, ToolCall

Parts = Mapping[str, Column]
"""Maps a part to its column: prompt, input, history, context, system, answer, references, messages, chosen, label,
text, images..."""
Assemble = Callable[[Parts, DataRecord], list[Row | BadRow]]

_QUESTION = {name: Column(name, (name,)) for name in ("context", "prompt", "answer")}
_ROLES: Final[dict[str, Role]] = {role: role for role in get_args(Role)}
_SPEAKERS: Final[dict[str, Role]] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
}
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_FIELDS: Final[dict[Role, frozenset[str]]] = {
    **dict.fromkeys(("system", "user"), frozenset({"role", "content"})),
    "assistant": frozenset({"role", "content", "tool_calls", *_REASONING}),
    # calls and results are matched by their order, which is checked
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_SHAREGPT_FIELDS: Final = frozenset({"from", "value"})
_WEIGHTS: Final = ("weight", "loss_weight", "train")
_CONTENT_FIELDS: Final = frozenset(
    {*_WEIGHTS, *_REASONING, "mask", "masked", "supervised", "loss", "label", "name", "text", "parts", "prefix"}
    | {"suffix", "refusal", "reasoning_details", "function", "function_call", "tool", "tools", "tool_calls"}
    | {"tool_call_id", "tool_responses", "content", "value", "image", "images", "audio", "audios", "video", "file"}
    | {"videos", "files", "attachments", "documents"}
)
"""Message fields that must not be lost; all other fields are metadata."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    images: tuple[Image, ...] = ()
    """Images that the messages themselves contain."""
    num_image_parts: int = 0
    """Number of image placeholders; the images may be in a column of their own."""

    @staticmethod
    def of(parts: "Iterable[Conversation]") -> "Conversation":
        parts = list(parts)
        return Conversation(
            tuple(message for part in parts for message in part.messages),
            tuple(found for part in parts for found in part.images),
            sum(part.num_image_parts for part in parts),
        )


def is_conversation(value: object) -> bool:
    entry = value[0] if isinstance(value, list) and value else value
    return isinstance(entry, dict) and ("role" in entry or "from" in entry)


def chat(parts: Parts, record: DataRecord) -> list[Row | BadRow]:
    column = parts["messages"]
    talk = _with_system(parts, record.value, conversation(column.value(record.value), column.name))
    return [_row(parts, record, talk, num_given=len(talk.messages) - 1 if "label" in parts else 0)]


def question(parts: Parts, record: DataRecord) -> list[Row | BadRow]:
    return [_question_row(parts, record)]


def pair(parts: Parts, record: DataRecord) -> list[Row | BadRow]:
    """The prompt comes from its column if there is one, otherwise from the messages that both answers share at the
    start."""
    chosen, rejected = (_ending(parts[name].value(record.value), parts[name].name) for name in ("chosen", "rejected"))
    if chosen.messages == rejected.messages:
        raise RecordError(f"{parts['chosen'].name} and {parts['rejected'].name} are equal")
    asked = _asked(parts, record.value) if parts.keys() & {"prompt", "context"} else Conversation(())
    num_inside = _num_inside(asked.messages, chosen.messages, rejected.messages)
    if num_inside:
        asked = _with_system(parts, record.value, replace(chosen, messages=chosen.messages[:num_inside]))
        chosen = Conversation(chosen.messages[num_inside:])
    other = rejected.messages[num_inside:]
    for name, ending in (("chosen", chosen.messages), ("rejected", other)):
        if not ending or ending[0].role != "assistant":
            raise RecordError(f"{parts[name].name} does not continue the prompt with an answer")
        check_answered((*asked.messages, *ending))
    row = _row(parts, record, Conversation.of((asked, chosen)), num_given=len(asked.messages))
    return [replace(row, rejected=other)]


def plain_text(parts: Parts, record: DataRecord) -> list[Row | BadRow]:
    column = parts["text"]
    return [Row(source=record.source, number=record.number, text=filled(column.value(record.value), column.name))]


def several_questions(parts: Parts, record: DataRecord) -> list[Row | BadRow]:
    """Parallel lists of questions and answers give one row per pair."""
    prompt, answer = parts["prompt"], parts["answer"]
    asked, answered = _entries(prompt, record.value), _entries(answer, record.value)
    if len(asked) != len(answered):
        raise RecordError(f"has {len(asked)} {prompt.name} and {len(answered)} {answer.name}")
    values = [{prompt.keys[0]: one, answer.keys[0]: other} for one, other in zip(asked, answered, strict=True)]
    return _each(parts, record, values, prompt.name)


def meeting(parts: Parts, record: DataRecord) -> list[Row | BadRow]:
    """A QMSum record: a meeting transcript and queries about it."""
    turns: list[str] = []
    for at, entry in enumerate(_entries(parts["context"], record.value)):
        place = f"{parts['context'].name}[{at}]"
        if not isinstance(entry, dict):
            raise RecordError(f"{place} is {shown(entry)}; it needs `speaker` and `content`")
        speaker, said = (text(entry.get(name), f"{place}.{name}") for name in ("speaker", "content"))
        turns.append(f"{speaker}: {said}")
    transcript, queries = "\n".join(turns), list[Value]()
    for column in (parts[name] for name in ("general", "specific") if name in parts):
        for entry in _entries(column, record.value):
            if not isinstance(entry, dict):
                raise RecordError(f"{column.name} holds {shown(entry)}; a query has `query` and `answer`")
            queries.append({"context": transcript, "prompt": entry.get("query"), "answer": entry.get("answer")})
    return _each(_QUESTION, record, queries, "queries")


def _each(parts: Parts, record: DataRecord, values: Sequence[Value], what: str) -> list[Row | BadRow]:
    if not values:
        raise RecordError(f"has no {what}")
    rows: list[Row | BadRow] = []
    for part, value in enumerate(values, start=1):
        try:
            rows.append(replace(_question_row(parts, replace(record, value=record.value | value)), part=part))
        except RecordError as error:
            rows.append(BadRow(record.source, record.number, str(error), part))
    return rows


def _entries(column: Column, value: Value) -> list[Any]:
    found = column.get(value)
    if found is not None and not isinstance(found, list):
        raise RecordError(f"{column.name} is {shown(found)}, not a list")
    return found or []


def _question_row(parts: Parts, record: DataRecord) -> Row:
    column, value = parts["answer"], record.value
    asked = _asked(parts, value)
    answer, votes = column.value(value), dict[str, int]()
    if is_conversation(answer):
        ending = conversation(answer, column.name)
    else:
        best, votes = columns.answers(answer, column.name)
        ending = Conversation((Message("assistant", best),))
    # The whole prompt is given, but answers in a history are trained on like the last one.
    num_given = len(asked.messages)
    if "history" in parts:
        num_given = next((at for at, message in enumerate(asked.messages) if message.role == "assistant"), num_given)
    row = _row(parts, record, Conversation.of((asked, ending)), num_given=num_given)
    row = replace(row, references=tuple(votes), votes=tuple(votes.values())) if votes else row
    if "references" in parts:  # right answers in a column of their own have no votes
        right = (row.answer, *row.references, *_several(parts, "references", value))
        row = replace(row, references=tuple(dict.fromkeys(right)), votes=())
    wrong = _several(parts, "wrong", value) + _several(parts, "best_wrong", value)
    return replace(row, wrong=tuple(dict.fromkeys(wrong))) if wrong else row


def _several(parts: Parts, name: str, value: Value) -> tuple[str, ...]:
    found = parts[name].get(value) if name in parts else None
    if not is_given(found):
        return ()
    return (text(found, parts[name].name),) if name == "best_wrong" else columns.several(found, parts[name].name)


def _row(parts: Parts, record: DataRecord, talk: Conversation, *, num_given: int) -> Row:
    check_answered(talk.messages)
    return Row(
        source=record.source,
        number=record.number,
        messages=talk.messages,
        num_given=num_given,
        tools=tools(parts["tools"].get(record.value), parts["tools"].name) if "tools" in parts else "",
        images=_images(parts, record.value, talk),
        is_good=columns.verdict(parts["label"].value(record.value), parts["label"].name) if "label" in parts else None,
    )


def _asked(parts: Parts, value: Value) -> Conversation:
    """Returns all messages before the answer."""
    prompt = parts["prompt"].value(value) if "prompt" in parts else None
    if is_conversation(prompt):
        beside = [parts[name] for name in ("context", "input", "history") if name in parts]
        if lost := [column.name for column in beside if is_given(column.get(value))]:
            raise RecordError(f"{parts['prompt'].name} is a list of messages, which cannot hold {', '.join(lost)}")
        return _with_system(parts, value, conversation(prompt, parts["prompt"].name))
    messages: list[Message] = []
    for at, turn in enumerate(_entries(parts["history"], value) if "history" in parts else []):
        place = f"{parts['history'].name}[{at}]"
        if not isinstance(turn, list) or len(turn) != 2:
            raise RecordError(f"{place} is {shown(turn)}, not a question and its answer")
        messages += [Message("user", filled(turn[0], place)), Message("assistant", filled(turn[1], place))]
    context = _optional(parts, "context", value)
    if "prompt" in parts:
        # as LLaMA-Factory does: one line feed between Alpaca's instruction and its input
        lines = (text(prompt, parts["prompt"].name), _optional(parts, "input", value))
        asked = filled("\n".join(line for line in lines if line.strip()), parts["prompt"].name)
        asked = f"{context}\n\n{asked}" if context.strip() else asked
    else:
        asked = filled(context, parts["context"].name)
    return _with_system(parts, value, Conversation((*messages, Message("user", asked))))


def _optional(parts: Parts, name: str, value: Value) -> str:
    found = parts[name].get(value) if name in parts else None
    if found is None:
        return ""
    return columns.passages(found, parts[name].name) if name == "context" else columns.scalar(found, parts[name].name)


def _with_system(parts: Parts, value: Value, talk: Conversation) -> Conversation:
    """Prepends the system column's text as a system message."""
    system = _optional(parts, "system", value)
    if not system.strip() or talk.messages[0] == Message("system", system):
        return talk
    if talk.messages[0].role == "system":
        raise RecordError(f"has two system messages, one in {parts['system'].name}")
    return replace(talk, messages=(Message("system", system), *talk.messages))


def _ending(value: object, place: str) -> Conversation:
    if isinstance(value, str):
        return Conversation((Message("assistant", filled(value, place)),))
    return conversation(value, place)


def _num_inside(asked: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Returns how many leading messages of both answers belong to the prompt."""
    if asked:
        return len(asked) if list(chosen[: len(asked)]) == list(rejected[: len(asked)]) == list(asked) else 0
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((at for at, (one, other) in both if one != other), min(len(chosen), len(rejected)))


def _images(parts: Parts, value: Value, talk: Conversation) -> tuple[Image, ...]:
    """A question needs its image, or an empty list that says it has none; a conversation needs one image per
    placeholder."""
    found = parts["images"].get(value) if "images" in parts else None
    if "images" in parts and not is_given(found) and found != [] and "messages" not in parts:
        raise RecordError(f"has no {parts['images'].name}")
    beside = columns.images(found, parts["images"].name) if is_given(found) else ()
    if beside and talk.images:
        raise RecordError(f"has images both in its messages and in {parts['images'].name}")
    total = beside or talk.images
    if "images" in parts or talk.num_image_parts:
        num_placeholders = sum(message.content.count(IMAGE_PLACEHOLDER) for message in talk.messages)
        if num_placeholders and num_placeholders != len(total):
            raise RecordError(f"has {num_placeholders} {IMAGE_PLACEHOLDER} placeholders and {len(total)} images")
    return total


def conversation(value: object, place: str) -> Conversation:
    """Parses a list of messages, or a single one."""
    if isinstance(value, dict):
        return _message(value, place)
    if not isinstance(value, list) or not value:
        raise RecordError(f"{place} is {shown(value)}, not a list of messages")
    whole = Conversation.of(_message(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    # rows keep no ids, so only the order shows which call a result belongs to
    called = [call.get("id") for entry in value for call in entry.get("tool_calls") or () if isinstance(call, dict)]
    answered = [entry.get("tool_call_id") for entry in value if is_given(entry.get("tool_call_id"))]
    if any(map(is_given, called)) and answered != called[: len(answered)]:
        raise RecordError(f"{place} has tool results that are not in the order of the calls")
    return whole


def _message(entry: object, place: str) -> Conversation:
    if isinstance(entry, dict) and is_given(entry.get("role")):
        role = _role(entry, "role", place)
        is_answer = role == "assistant"
        calls = _tool_calls(entry.get("tool_calls"), f"{place}.tool_calls") if is_answer else ()
        parts = _content("" if calls and entry.get("content") is None else entry.get("content"), f"{place}.content")
        (content,) = parts.messages
        if (content.reasoning or content.tool_calls) and not is_answer:
            raise RecordError(f"{place} has reasoning or a tool call, which only an assistant may have")
        names = [name for name in _REASONING if is_answer and is_given(entry.get(name))]
        reasonings = {name: text(entry[name], f"{place}.{name}") for name in names}
        reasonings |= {"content": content.reasoning} if content.reasoning else {}
        if len(set(reasonings.values())) > 1:
            raise RecordError(f"{place} has two different reasonings, under {', '.join(reasonings)}")
        reasoning = next(iter(reasonings.values()), "")
        message = Message(role, content.content, reasoning, (*calls, *content.tool_calls))
        return Conversation((message,), parts.images, parts.num_image_parts)
    if isinstance(entry, dict) and is_given(entry.get("from")):
        role, said = _role(entry, "from", place), entry.get("value")
        if entry["from"] != "function_call":
            return Conversation((Message(role, text(said, f"{place}.value")),))
        found = _loaded(said, f"{place}.value") if isinstance(said, str) else said
        calls = _tool_calls(found if isinstance(found, list) else [found], f"{place}.value")
        if not calls:
            raise RecordError(f"{place}.value is {shown(said)}, which calls no function")
        return Conversation((Message(role, "", tool_calls=calls),))
    raise RecordError(f"{place} is {shown(entry)}; a message has `role` and `content`, or `from` and `value`")


def _role(entry: dict[str, Any], key: Literal["role", "from"], place: str) -> Role:
    """Returns the role, and raises an error if a field of the message would be lost."""
    roles = _ROLES if key == "role" else _SPEAKERS
    if not isinstance(entry[key], str) or entry[key] not in roles:
        raise RecordError(f"{place} has the role {shown(entry[key])}; known are {', '.join(roles)}")
    role = roles[entry[key]]
    known = _FIELDS[role] if key == "role" else _SHAREGPT_FIELDS
    lost = {name: entry[name] for name in entry if name in _CONTENT_FIELDS - known and is_given(entry[name])}
    for name in _WEIGHTS:  # a weight equal to the default is not lost: only answers are supervised
        if isinstance(lost.get(name), bool | int | float) and lost[name] == (role == "assistant"):
            del lost[name]
    if lost:
        raise RecordError(f"{place} has the field {columns.printable(', '.join(sorted(lost)))}, which would be lost")
    return role


def check_answered(messages: Sequence[Message]) -> None:
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise RecordError("has no answer: its last message is not the assistant's, or nothing comes before it")
    if messages[0].role == "assistant":
        raise RecordError("begins with an answer: nothing comes before it")
    if any(m.role == "assistant" and not m.content.strip() and not m.tool_calls for m in messages):
        raise RecordError("has an empty answer")
    first = next(at for at, m in enumerate(messages) if m.role == "assistant")
    if not any(m.content.strip() for m in messages[:first]):
        raise RecordError("has an empty prompt")


def tools(value: object, place: str) -> str:
    """Returns the tools as a JSON list, given a list or its JSON; empty if there are no tools."""
    if not is_given(value):
        return ""
    found = _loaded(value, place) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise RecordError(f"{place} is {shown(value)}, not a list of tools")
    return _json(found, place) if found else ""


def metadata(value: object) -> set[str]:
    """Returns the message fields that mean nothing to a model, such as a language or a time."""
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    known = _CONTENT_FIELDS | _SHAREGPT_FIELDS | frozenset().union(*_FIELDS.values())
    given = {name for entry in entries for name in entry if isinstance(name, str) and is_given(entry[name])}
    return given - known


def _content(value: object, place: str) -> Conversation:
    """Parses text, or parts of text and images; each image leaves a placeholder in the text. LLaMA-Factory's parts may
    also be reasoning and tool calls."""
    if not isinstance(value, list):
        return Conversation((Message("user", text(value, place)),))
    words: list[str] = []
    reasonings: list[str] = []
    calls: list[ToolCall] = []
    found: list[Image] = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            key = "value" if part.get("text") is None and part.get("value") is not None else "text"
            words.append(text(part.get(key), f"{place}[{at}].{key}"))
        elif kind == "reasoning":
            reasonings.append(text(part.get("value"), f"{place}[{at}].value"))
        elif kind == "tool_call":
            call = part.get("value")
            call = _loaded(call, f"{place}[{at}].value") if isinstance(call, str) else call
            calls += _tool_calls([call], f"{place}[{at}].value")
        elif kind in ("image", "image_url"):
            words.append(IMAGE_PLACEHOLDER)
            # a part without a value only marks where an image from the column belongs
            keys = ("image", "image_url", "bytes", "path", "url", "value")
            held = [part[name] for name in keys if is_given(part.get(name))]
            found += [columns.image(entry, f"{place}[{at}]") for entry in held[:1]]
        else:
            raise RecordError(f"{place}[{at}] is {shown(part)}; only text and images are trained on")
    message = Message("user", "".join(words), "".join(reasonings), tuple(calls))
    return Conversation((message,), tuple(found), words.count(IMAGE_PLACEHOLDER))


def _tool_calls(value: object, place: str) -> tuple[ToolCall, ...]:
    """Each call is OpenAI's {"type": "function", "function": {...}}, or just the function's name and arguments."""
    if not is_given(value):
        return ()
    if not isinstance(value, list):
        raise RecordError(f"{place} is {shown(value)}, not a list of calls")
    calls: list[ToolCall] = []
    for at, entry in enumerate(value):
        its, call = f"{place}[{at}]", entry.get("function", entry) if isinstance(entry, dict) else entry
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise RecordError(f"{its} is {shown(entry)}; a call has `name` and `arguments`")
        arguments = call.get("arguments")
        found = _loaded(arguments, f"{its}.arguments") if isinstance(arguments, str) else arguments
        if not isinstance(found, dict):
            raise RecordError(f"{its}.arguments is {shown(arguments)}, not a JSON object")
        written = text(arguments, its) if isinstance(arguments, str) else _json(found, f"{its}.arguments")
        calls.append(ToolCall(text(call["name"], f"{its}.name"), written))
    return tuple(calls)


def _loaded(value: str, place: str) -> object:
    try:
        return bounded.parse_json(value)
    except ValueError as error:
        raise RecordError(f"{place} is not JSON: {error}") from None


def _json(value: object, place: str) -> str:
    try:
        return text(json.dumps(_without_nulls(value), ensure_ascii=False, allow_nan=False), place)
    except (TypeError, ValueError, RecursionError):
        raise RecordError(f"{place} is {shown(value)}, which JSON cannot hold") from None


def _without_nulls(value: object) -> object:
    """Parquet gives every object the keys of all others, with null where a key was absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
