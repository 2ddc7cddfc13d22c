"""A record -> its rows, once it is known which column plays which part. One function per way of putting a row together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from finefit.data.cells import (
    Fault,
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
from finefit.data.columns import Column
from finefit.data.conversations import IMAGE_MARK, Conversation, check_answered, conversation, is_conversation, tools
from finefit.data.records import Record, Value
from finefit.data.rows import BadRow, Image, Message, Row

Parts = Mapping[str, Column]
"""By part: prompt, input, history, context, system, answer, references, wrong, messages, tools, chosen, rejected, label, text, images..."""
Assemble = Callable[[Parts, Record], list[Row | BadRow]]


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
        raise Fault(f"{parts['chosen'].name} and {parts['rejected'].name} are equal")
    asked = _asked(parts, record.value) if parts.keys() & {"prompt", "context"} else Conversation(())
    num_inside = _num_inside(asked.messages, chosen.messages, rejected.messages)
    if num_inside:
        asked = _opened(parts, record.value, replace(chosen, messages=chosen.messages[:num_inside]))
        chosen = Conversation(chosen.messages[num_inside:])
    other = rejected.messages[num_inside:]
    for name, ending in (("chosen", chosen.messages), ("rejected", other)):
        _check_ending(asked.messages, ending, parts[name].name)
    row = _row(parts, record, Conversation.of((asked, chosen)), num_given=len(asked.messages))
    return [replace(row, rejected=other)]


def plain_text(parts: Parts, record: Record) -> list[Row | BadRow]:
    column = parts["text"]
    return [Row(source=record.source, number=record.number, text=filled(column.value(record.value), column.name))]


def several_questions(parts: Parts, record: Record) -> list[Row | BadRow]:
    """Parallel lists of questions and answers: a row for each pair."""
    asked, answered = (_entries(parts[name], record.value) for name in ("prompt", "answer"))
    if len(asked) != len(answered):
        raise Fault(f"has {len(asked)} {parts['prompt'].name} and {len(answered)} {parts['answer'].name}")
    names = [parts[name].keys[0] for name in ("prompt", "answer")]
    return _each(
        parts,
        record,
        [dict(zip(names, both, strict=True)) for both in zip(asked, answered, strict=True)],
        parts["prompt"].name,
    )


_TURN = {name: Column(name, (name,)) for name in ("context", "prompt", "answer")}


def meeting(parts: Parts, record: Record) -> list[Row | BadRow]:
    """QMSum: a meeting, and queries about it."""
    said = [
        _said(entry, f"{parts['context'].name}[{at}]")
        for at, entry in enumerate(_entries(parts["context"], record.value))
    ]
    queries = [
        _query(entry, parts[name].name)
        for name in ("general", "specific")
        if name in parts
        for entry in _entries(parts[name], record.value)
    ]
    return _each(_TURN, record, [{"context": "\n".join(said), **query} for query in queries], "queries")


def _each(parts: Parts, record: Record, values: Sequence[Value], what: str) -> list[Row | BadRow]:
    if not values:
        raise Fault(f"has no {what}")
    rows: list[Row | BadRow] = []
    for part, value in enumerate(values, start=1):
        try:
            rows.append(replace(_question_row(parts, replace(record, value=record.value | value)), part=part))
        except Fault as fault:
            rows.append(BadRow(record.source, record.number, str(fault), part))
    return rows


def _entries(column: Column, value: Value) -> list[Any]:
    found = column.get(value)
    if found is not None and not isinstance(found, list):
        raise Fault(f"{column.name} is {shown(found)}, not a list")
    return found or []


def _said(entry: object, place: str) -> str:
    if not isinstance(entry, dict):
        raise Fault(f"{place} is {shown(entry)}; it needs `speaker` and `content`")
    return f"{text(entry.get('speaker'), f'{place}.speaker')}: {text(entry.get('content'), f'{place}.content')}"


def _query(entry: object, place: str) -> Value:
    if not isinstance(entry, dict):
        raise Fault(f"{place} holds {shown(entry)}; a query has `query` and `answer`")
    return {"prompt": entry.get("query"), "answer": entry.get("answer")}


def _chat_row(parts: Parts, record: Record) -> Row:
    column = parts["messages"]
    return _row(
        parts, record, _opened(parts, record.value, conversation(column.value(record.value), column.name)), num_given=0
    )


def _question_row(parts: Parts, record: Record) -> Row:
    column = parts["answer"]
    asked = _asked(parts, record.value)
    answer, votes = column.value(record.value), dict[str, int]()
    if is_conversation(answer):
        ending = conversation(answer, column.name)
    else:
        best, votes = answers(answer, column.name)
        ending = Conversation((Message("assistant", best),))
    row = _row(parts, record, Conversation.of((asked, ending)), num_given=_num_given(parts, asked.messages))
    row = replace(row, references=tuple(votes), votes=tuple(votes.values())) if votes else row
    return _with_truths(parts, record.value, row)


def _with_truths(parts: Parts, value: Value, row: Row) -> Row:
    """Lists of what is right and wrong, where a record has them in columns of their own: nobody has voted on these."""
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
    """What stands before the answer."""
    prompt = parts["prompt"].value(value) if "prompt" in parts else None
    if not is_conversation(prompt):
        return _opened(parts, value, Conversation((*_history(parts, value), Message("user", _question(parts, value)))))
    if lost := [
        parts[name].name
        for name in ("context", "input", "history")
        if name in parts and is_given(parts[name].get(value))
    ]:
        raise Fault(f"{parts['prompt'].name} is a list of messages, in which {', '.join(lost)} has no place")
    return _opened(parts, value, conversation(prompt, parts["prompt"].name))


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
    turns = _entries(parts["history"], value) if "history" in parts else []
    messages: list[Message] = []
    for at, turn in enumerate(turns):
        place = f"{parts['history'].name}[{at}]"
        if not isinstance(turn, list) or len(turn) != 2:
            raise Fault(f"{place} is {shown(turn)}, not a question and its answer")
        messages += [Message("user", filled(turn[0], place)), Message("assistant", filled(turn[1], place))]
    return messages


def _num_given(parts: Parts, asked: Sequence[Message]) -> int:
    """All of a prompt; but the answers of a history are answers like the last one."""
    if "history" not in parts:
        return len(asked)
    return next((at for at, message in enumerate(asked) if message.role == "assistant"), len(asked))


def _opened(parts: Parts, value: Value, talk: Conversation) -> Conversation:
    """With the system column's text in front."""
    system = _optional(parts, "system", value)
    if not system.strip() or talk.messages[0] == Message("system", system):
        return talk
    if talk.messages[0].role == "system":
        raise Fault(f"has two system messages, one in {parts['system'].name}")
    return replace(talk, messages=(Message("system", system), *talk.messages))


def _ending(value: object, place: str) -> Conversation:
    if isinstance(value, str):
        return Conversation((Message("assistant", filled(value, place)),))
    return conversation(value, place)


def _num_inside(asked: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """So many messages of both endings are the prompt itself."""
    if asked:
        return len(asked) if list(chosen[: len(asked)]) == list(rejected[: len(asked)]) == list(asked) else 0
    return next(
        (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )


def _check_ending(asked: Sequence[Message], ending: Sequence[Message], place: str) -> None:
    if not ending or ending[0].role != "assistant":
        raise Fault(f"{place} does not go on from the prompt with an answer")
    check_answered((*asked, *ending))


def _verdict(parts: Parts, record: Record) -> bool:
    return verdict(parts["label"].value(record.value), parts["label"].name)


def _images(parts: Parts, value: Value, talk: Conversation) -> tuple[Image, ...]:
    """A question about an image needs it, or says by an empty list that it has none; a conversation has as many as it has marks."""
    found = parts["images"].get(value) if "images" in parts else None
    if "images" in parts and not is_given(found) and found != [] and "messages" not in parts:
        raise Fault(f"has no {parts['images'].name}")
    beside = images(found, parts["images"].name) if is_given(found) else ()
    if beside and talk.images:
        raise Fault(f"has images both in its messages and in {parts['images'].name}")
    num_marks = (
        sum(message.content.count(IMAGE_MARK) for message in talk.messages)
        if "images" in parts or talk.num_image_parts
        else 0
    )
    total = beside or talk.images
    if num_marks and num_marks != len(total):
        raise Fault(f"has {num_marks} {IMAGE_MARK} marks and {len(total)} images")
    return total
