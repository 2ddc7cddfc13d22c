"""The rows of a record, once it is known which column plays which part: one function per way of putting a row
together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from finefit.data.columns import (
    Column,
    RecordError,
    Value,
    answers,
    distinct,
    filled,
    images,
    is_given,
    passages,
    scalar,
    several,
    shown,
    text,
    verdict,
)
from finefit.data.conversations import (
    IMAGE_PLACEHOLDER,
    Conversation,
    check_answered,
    conversation,
    is_conversation,
    tools,
)
from finefit.data.records import Record
from finefit.data.rows import BadRow, Image, Message, Row

Parts = Mapping[str, Column]
"""By part: prompt, input, history, context, system, answer, references, wrong, messages, tools, chosen, rejected,
label, text, images..."""
Assemble = Callable[[Parts, Record], list[Row | BadRow]]

_QUESTION = {name: Column(name, (name,)) for name in ("context", "prompt", "answer")}


def chat(parts: Parts, record: Record) -> list[Row | BadRow]:
    return [_chat_row(parts, record)]


def judged_chat(parts: Parts, record: Record) -> list[Row | BadRow]:
    row = _chat_row(parts, record)
    return [replace(row, num_given=len(row.messages) - 1, is_good=_verdict(parts, record))]


def question(parts: Parts, record: Record) -> list[Row | BadRow]:
    return [_question_row(parts, record)]


def judged(parts: Parts, record: Record) -> list[Row | BadRow]:
    return [replace(_question_row(parts, record), is_good=_verdict(parts, record))]


def pair(parts: Parts, record: Record) -> list[Row | BadRow]:
    """The prompt is a column's, or else the messages that both endings begin with."""
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
            raise RecordError(f"{parts[name].name} does not go on from the prompt with an answer")
        check_answered((*asked.messages, *ending))
    row = _row(parts, record, Conversation.of((asked, chosen)), num_given=len(asked.messages))
    return [replace(row, rejected=other)]


def plain_text(parts: Parts, record: Record) -> list[Row | BadRow]:
    column = parts["text"]
    return [Row(source=record.source, number=record.number, text=filled(column.value(record.value), column.name))]


def several_questions(parts: Parts, record: Record) -> list[Row | BadRow]:
    """Parallel lists of questions and answers: a row for each pair."""
    columns = [parts["prompt"], parts["answer"]]
    asked, answered = (_entries(column, record.value) for column in columns)
    if len(asked) != len(answered):
        raise RecordError(f"has {len(asked)} {columns[0].name} and {len(answered)} {columns[1].name}")
    names = [column.keys[0] for column in columns]
    values = [dict(zip(names, both, strict=True)) for both in zip(asked, answered, strict=True)]
    return _each(parts, record, values, columns[0].name)


def meeting(parts: Parts, record: Record) -> list[Row | BadRow]:
    """QMSum: a meeting, and queries about it."""
    turns = enumerate(_entries(parts["context"], record.value))
    transcript = "\n".join(_turn(entry, f"{parts['context'].name}[{at}]") for at, entry in turns)
    columns = [parts[name] for name in ("general", "specific") if name in parts]
    queries = [_query(entry, column.name) for column in columns for entry in _entries(column, record.value)]
    return _each(_QUESTION, record, [{"context": transcript, **query} for query in queries], "queries")


def _each(parts: Parts, record: Record, values: Sequence[Value], what: str) -> list[Row | BadRow]:
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


def _turn(entry: object, place: str) -> str:
    if not isinstance(entry, dict):
        raise RecordError(f"{place} is {shown(entry)}; it needs `speaker` and `content`")
    return f"{text(entry.get('speaker'), f'{place}.speaker')}: {text(entry.get('content'), f'{place}.content')}"


def _query(entry: object, place: str) -> Value:
    if not isinstance(entry, dict):
        raise RecordError(f"{place} holds {shown(entry)}; a query has `query` and `answer`")
    return {"prompt": entry.get("query"), "answer": entry.get("answer")}


def _chat_row(parts: Parts, record: Record) -> Row:
    column = parts["messages"]
    talk = conversation(column.value(record.value), column.name)
    return _row(parts, record, _with_system(parts, record.value, talk), num_given=0)


def _question_row(parts: Parts, record: Record) -> Row:
    column = parts["answer"]
    asked = _asked(parts, record.value)
    answer, votes = column.value(record.value), dict[str, int]()
    if is_conversation(answer):
        ending = conversation(answer, column.name)
    else:
        best, votes = answers(answer, column.name)
        ending = Conversation((Message("assistant", best),))
    # All of a prompt is given; but the answers of a history are answers like the last one.
    num_given = len(asked.messages)
    if "history" in parts:
        num_given = next((at for at, message in enumerate(asked.messages) if message.role == "assistant"), num_given)
    row = _row(parts, record, Conversation.of((asked, ending)), num_given=num_given)
    row = replace(row, references=tuple(votes), votes=tuple(votes.values())) if votes else row
    return _with_truths(parts, record.value, row)


def _with_truths(parts: Parts, value: Value, row: Row) -> Row:
    """Lists of right and wrong answers that a record has in columns of their own; these have no votes."""
    if "references" in parts:
        right = (row.answer, *row.references, *_several(parts, "references", value))
        row = replace(row, references=distinct(right), votes=())
    wrong = _several(parts, "wrong", value) + _several(parts, "best_wrong", value)
    return replace(row, wrong=distinct(wrong)) if wrong else row


def _several(parts: Parts, name: str, value: Value) -> tuple[str, ...]:
    found = parts[name].get(value) if name in parts else None
    if not is_given(found):
        return ()
    return (text(found, parts[name].name),) if name == "best_wrong" else several(found, parts[name].name)


def _row(parts: Parts, record: Record, talk: Conversation, *, num_given: int) -> Row:
    check_answered(talk.messages)
    return Row(
        source=record.source,
        number=record.number,
        messages=talk.messages,
        num_given=num_given,
        tools=tools(parts["tools"].get(record.value), parts["tools"].name) if "tools" in parts else "",
        images=_images(parts, record.value, talk),
    )


def _asked(parts: Parts, value: Value) -> Conversation:
    """What comes before the answer."""
    prompt = parts["prompt"].value(value) if "prompt" in parts else None
    if not is_conversation(prompt):
        talk = Conversation((*_history(parts, value), Message("user", _question(parts, value))))
        return _with_system(parts, value, talk)
    beside = [parts[name] for name in ("context", "input", "history") if name in parts]
    if lost := [column.name for column in beside if is_given(column.get(value))]:
        raise RecordError(f"{parts['prompt'].name} is a list of messages, in which {', '.join(lost)} has no place")
    return _with_system(parts, value, conversation(prompt, parts["prompt"].name))


def _question(parts: Parts, value: Value) -> str:
    context = _optional(parts, "context", value)
    if "prompt" not in parts:
        return filled(context, parts["context"].name)
    column = parts["prompt"]
    # as LLaMA-Factory does: one line feed between Alpaca's instruction and its input
    lines = (text(column.value(value), column.name), _optional(parts, "input", value))
    asked = filled("\n".join(line for line in lines if line.strip()), column.name)
    return f"{context}\n\n{asked}" if context.strip() else asked


def _optional(parts: Parts, name: str, value: Value) -> str:
    found = parts[name].get(value) if name in parts else None
    if found is None:
        return ""
    return passages(found, parts[name].name) if name == "context" else scalar(found, parts[name].name)


def _history(parts: Parts, value: Value) -> list[Message]:
    """Alpaca's earlier turns: [question, answer] each."""
    messages: list[Message] = []
    for at, turn in enumerate(_entries(parts["history"], value) if "history" in parts else []):
        place = f"{parts['history'].name}[{at}]"
        if not isinstance(turn, list) or len(turn) != 2:
            raise RecordError(f"{place} is {shown(turn)}, not a question and its answer")
        messages += [Message("user", filled(turn[0], place)), Message("assistant", filled(turn[1], place))]
    return messages


def _with_system(parts: Parts, value: Value, talk: Conversation) -> Conversation:
    """With the text of the system column in front."""
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
    """The number of messages at the start of both endings that are the prompt itself."""
    if asked:
        return len(asked) if list(chosen[: len(asked)]) == list(rejected[: len(asked)]) == list(asked) else 0
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((at for at, (one, other) in both if one != other), min(len(chosen), len(rejected)))


def _verdict(parts: Parts, record: Record) -> bool:
    return verdict(parts["label"].value(record.value), parts["label"].name)


def _images(parts: Parts, value: Value, talk: Conversation) -> tuple[Image, ...]:
    """A question about an image needs one, or states by an empty list that it has none. A conversation has as many
    images as placeholders."""
    found = parts["images"].get(value) if "images" in parts else None
    if "images" in parts and not is_given(found) and found != [] and "messages" not in parts:
        raise RecordError(f"has no {parts['images'].name}")
    beside = images(found, parts["images"].name) if is_given(found) else ()
    if beside and talk.images:
        raise RecordError(f"has images both in its messages and in {parts['images'].name}")
    total = beside or talk.images
    if "images" in parts or talk.num_image_parts:
        num_placeholders = sum(message.content.count(IMAGE_PLACEHOLDER) for message in talk.messages)
        if num_placeholders and num_placeholders != len(total):
            raise RecordError(f"has {num_placeholders} {IMAGE_PLACEHOLDER} placeholders and {len(total)} images")
    return total
