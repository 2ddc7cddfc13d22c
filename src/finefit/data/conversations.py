"""Conversations from lists of messages: `role`/`content` with tool calls, reasoning and image parts, and ShareGPT's
`from`/`value`. A field of a message that a row has no place for is an error if it carries content or decides what is
trained on; otherwise it is reported as not used."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from finefit.data.columns import RecordError, image, is_given, printable, shown, text
from finefit.data.rows import Image, Message, Role, ToolCall

IMAGE_PLACEHOLDER: Final = "<image>"
"""Marks in the text where an image belongs."""

_ROLES: Final[dict[str, Role]] = {role: role for role in get_args(Role)}
_SPEAKERS: Final[dict[str, Role]] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
}
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_FIELDS: Final[dict[Role, frozenset[str]]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls", *_REASONING}),
    # calls and results are matched by their order, which is checked
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_SHAREGPT_FIELDS: Final = frozenset({"from", "value"})
_WEIGHTS: Final = ("weight", "train")
_CONTENT_FIELDS: Final = frozenset(
    {*_WEIGHTS, *_REASONING, "mask", "masked", "supervised", "loss", "label", "name", "text", "parts", "prefix"}
    | {"suffix", "refusal", "reasoning_details", "function", "function_call", "tool", "tools", "tool_calls"}
    | {"tool_call_id", "tool_responses", "content", "value", "image", "images", "audio", "video", "videos", "file"}
    | {"files", "attachments", "documents"}
)
"""Fields of a message that must not be lost; all others are its metadata."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    images: tuple[Image, ...] = ()
    """Those inside the messages themselves."""
    num_image_parts: int = 0
    """Places for images; the images may be in a column of their own."""

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


def conversation(value: object, place: str) -> Conversation:
    """A list of messages, or a single one."""
    if isinstance(value, dict):
        return _message(value, place)
    if not isinstance(value, list) or not value:
        raise RecordError(f"{place} is {shown(value)}, not a list of messages")
    whole = Conversation.of(_message(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    _check_order_of_results(value, place)
    return whole


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
    """A list of tools, or its JSON, as a JSON list; empty where there are none."""
    if not is_given(value):
        return ""
    found = _loaded(value, place) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise RecordError(f"{place} is {shown(value)}, not a list of tools")
    return _json(found, place) if found else ""


def _message(entry: object, place: str) -> Conversation:
    if isinstance(entry, dict) and is_given(entry.get("role")):
        return _role_and_content(entry, place)
    if isinstance(entry, dict) and is_given(entry.get("from")):
        return _from_and_value(entry, place)
    raise RecordError(f"{place} is {shown(entry)}; a message has `role` and `content`, or `from` and `value`")


def _role_and_content(entry: dict[str, Any], place: str) -> Conversation:
    role = _known(entry["role"], _ROLES, place)
    _refuse_unknown(entry, role, _FIELDS[role], place)
    calls = _tool_calls(entry.get("tool_calls"), f"{place}.tool_calls") if role == "assistant" else ()
    content = "" if calls and entry.get("content") is None else entry.get("content")
    parts = _content(content, f"{place}.content")
    message = Message(role, parts.messages[0].content, _reasoning(entry, place) if role == "assistant" else "", calls)
    return Conversation((message,), parts.images, parts.num_image_parts)


def _from_and_value(entry: dict[str, Any], place: str) -> Conversation:
    role = _known(entry["from"], _SPEAKERS, place)
    _refuse_unknown(entry, role, _SHAREGPT_FIELDS, place)
    if entry["from"] == "function_call":
        return Conversation((Message(role, "", tool_calls=_function_calls(entry.get("value"), f"{place}.value")),))
    return Conversation((Message(role, text(entry.get("value"), f"{place}.value")),))


def _known(name: object, roles: dict[str, Role], place: str) -> Role:
    if not isinstance(name, str) or name not in roles:
        raise RecordError(f"{place} has the role {shown(name)}; known are {', '.join(roles)}")
    return roles[name]


def _refuse_unknown(entry: dict[str, Any], role: Role, known: frozenset[str], place: str) -> None:
    lost = [name for name in entry if name in _CONTENT_FIELDS - known and is_given(entry[name])]
    if extra := [name for name in lost if not _is_usual_weight(name, entry[name], role)]:
        raise RecordError(f"{place} has the field {printable(', '.join(sorted(extra)))}, which would be lost")


def metadata(value: object) -> set[str]:
    """Fields of messages that mean nothing to a model, such as a language or a time."""
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    known = _CONTENT_FIELDS | _SHAREGPT_FIELDS | frozenset().union(*_FIELDS.values())
    given = {name for entry in entries for name in entry if isinstance(name, str) and is_given(entry[name])}
    return given - known


def _is_usual_weight(name: str, value: object, role: Role) -> bool:
    """A weight that asks for the default: answers are supervised, everything else is not."""
    return name in _WEIGHTS and isinstance(value, bool | int | float) and value == (role == "assistant")


def _reasoning(entry: dict[str, Any], place: str) -> str:
    names = [name for name in _REASONING if is_given(entry.get(name))]
    found = {text(entry[name], f"{place}.{name}") for name in names}
    if len(found) > 1:
        raise RecordError(f"{place} has two different reasonings, under {', '.join(names)}")
    return found.pop() if found else ""


def _content(value: object, place: str) -> Conversation:
    """Text, or parts of text and images; an image leaves a placeholder in the text."""
    if not isinstance(value, list):
        return Conversation((Message("user", text(value, place)),))
    words: list[str] = []
    found: list[Image] = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            words.append(text(part.get("text"), f"{place}[{at}].text"))
        elif kind in ("image", "image_url"):
            words.append(IMAGE_PLACEHOLDER)
            # a part without a value only marks the place of an image that a column holds
            held = [part[name] for name in ("image", "image_url", "bytes", "path", "url") if is_given(part.get(name))]
            found += [image(entry, f"{place}[{at}]") for entry in held[:1]]
        else:
            raise RecordError(f"{place}[{at}] is {shown(part)}; a part is text or an image")
    return Conversation((Message("user", "".join(words)),), tuple(found), words.count(IMAGE_PLACEHOLDER))


def _tool_calls(value: object, place: str) -> tuple[ToolCall, ...]:
    if not is_given(value):
        return ()
    if not isinstance(value, list):
        raise RecordError(f"{place} is {shown(value)}, not a list of calls")
    return tuple(_tool_call(entry, f"{place}[{at}]") for at, entry in enumerate(value))


def _tool_call(entry: object, place: str) -> ToolCall:
    """OpenAI's {"type": "function", "function": {...}}, or the function's name and arguments alone."""
    call = entry.get("function", entry) if isinstance(entry, dict) else entry
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise RecordError(f"{place} is {shown(entry)}; a call has `name` and `arguments`")
    arguments = call.get("arguments")
    found = _loaded(arguments, f"{place}.arguments") if isinstance(arguments, str) else arguments
    if not isinstance(found, dict):
        raise RecordError(f"{place}.arguments is {shown(arguments)}, not a JSON object")
    written = text(arguments, place) if isinstance(arguments, str) else _json(found, f"{place}.arguments")
    return ToolCall(text(call["name"], f"{place}.name"), written)


def _function_calls(value: object, place: str) -> tuple[ToolCall, ...]:
    found = _loaded(value, place) if isinstance(value, str) else value
    calls = _tool_calls(found if isinstance(found, list) else [found], place)
    if not calls:
        raise RecordError(f"{place} is {shown(value)}, which calls no function")
    return calls


def _check_order_of_results(entries: list[Any], place: str) -> None:
    """Rows keep no ids, so only the order tells which call a result belongs to."""
    called = [call.get("id") for entry in entries for call in entry.get("tool_calls") or () if isinstance(call, dict)]
    answered = [entry.get("tool_call_id") for entry in entries if is_given(entry.get("tool_call_id"))]
    if any(map(is_given, called)) and answered != called[: len(answered)]:
        raise RecordError(f"{place} has tool results that do not come in the order of the calls")


def _loaded(value: str, place: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{place} is not JSON: {error}") from None


def _json(value: object, place: str) -> str:
    try:
        return text(json.dumps(_without_nulls(value), ensure_ascii=False, allow_nan=False), place)
    except (TypeError, ValueError, RecursionError):
        raise RecordError(f"{place} is {shown(value)}, which JSON cannot hold") from None


def _without_nulls(value: object) -> object:
    """Parquet gives every object the keys of all the others, null where it had none."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
