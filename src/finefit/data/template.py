"""Learns what a chat template writes around an answer by rendering marked conversations; no template is known by
name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from finefit import bounded
from finefit.data.rows import IMAGE_PLACEHOLDER, Message
from finefit.data.template_process import Json, TemplateProcess, TemplateRequest, Tools, shared_process
from finefit.errors import DataError

_ANSWER, _THOUGHT, _NAME = "Zq0AnswerMark0qZ", "Zq0ThoughtMark0qZ", "zq0_call_mark"
"""Markers that replace an answer and its parts, to find the template's text around them."""
_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_BLANKS = re.compile(r"\s*")
_NO_ROOM = "the chat template does not write the reasoning before this answer"
_WITHOUT_REASONING = "leave the reasoning out of the row, or use a model whose template writes it"
_OTHER_MODEL = "leave the row out, or use a model whose chat template writes tools and their calls"


class TemplateFormat(NamedTuple):
    is_stock: bool
    """The answer follows the prompt that the template itself opens for generation."""
    opening: str
    """Text between prompt and answer that the model has to write."""
    closing: str
    """Text from the answer to the end of generation, including the end token."""
    is_ended: bool
    thought: tuple[str, str] | None
    """Text before the reasoning, and between reasoning and answer, if the template writes reasoning after the
    prompt."""


Written = Sequence[str | DataError]


def needed_for_turn(dicts: Sequence[Json], at: int, tools: Tools) -> tuple[TemplateRequest, TemplateRequest]:
    """Returns the two requests to render to locate the answer at `at`: up to it, and including it."""
    return TemplateRequest(dicts[:at], True, tools), TemplateRequest(dicts[: at + 1], False, tools)


@dataclass(frozen=True)
class ChatTemplate:
    name: str
    """The template's name with its model, for errors."""
    source: str
    variables: Mapping[str, Any]
    eos: str
    added: re.Pattern[str]
    """Matches runs of tokens that were added to the vocabulary, which templates use as delimiters."""
    special: re.Pattern[str]
    """Matches one added token that is special."""
    process: TemplateProcess = field(default_factory=shared_process, compare=False, repr=False)

    def write_all(self, conversations: Sequence[TemplateRequest]) -> list[str | DataError]:
        """Renders all requests at once, which is much faster than one by one. A refused conversation gives a
        DataError."""
        return self.process.render(self.name, self.source, self.variables, conversations)

    def write(self, messages: Sequence[Json], *, opening: bool, tools: Tools = None) -> str:
        """`opening`: add the opening of the assistant's turn."""
        return _accepted(*self.write_all([TemplateRequest(messages, opening, tools)]))

    def prompt(self, messages: Sequence[Json], tools: Tools) -> str:
        """Returns the template's own opening for generation, or everything before an answer if answers do not follow
        that opening."""
        return self._prompt(self.write(messages, opening=True, tools=tools), messages, tools)

    def _prompt(self, stock: str, messages: Sequence[Json], tools: Tools) -> str:
        marked = self.write([*messages, self._said("assistant", _ANSWER)], opening=False, tools=tools)
        if marked.startswith(stock):
            return stock
        thinking = [*messages, self._said("assistant", _ANSWER, _THOUGHT)]
        if self.writes_reasoning and self.write(thinking, opening=False, tools=tools).startswith(stock):
            return stock
        place = marked.rfind(_ANSWER)
        if place < 0:
            raise _lost(stock, marked)
        return marked[:place]

    def turn(
        self, messages: Sequence[Message], dicts: Sequence[Json], at: int, tools: Tools, written: Written
    ) -> tuple[str, str]:
        """Returns the prompt of the answer at `at`, and everything that the model has to write after it, including the
        end. `written`: the rendered requests of `needed_for_turn`."""
        message, form = messages[at], self.format
        stock, whole = map(_accepted, written)
        is_usual = form.is_stock and not message.reasoning and not message.tool_calls
        if is_usual and whole.startswith(stock + form.opening):
            end = _end_of(message.content, whole, len(stock) + len(form.opening))
            if end is not None:
                return stock, self._ended(whole, len(stock), end)
        return self._rare_turn(message, dicts[:at], tools, stock, whole)

    def _rare_turn(
        self, message: Message, before: Sequence[Json], tools: Tools, stock: str, whole: str
    ) -> tuple[str, str]:
        """Handles an answer that is not at its usual position, which is then found by rendering a marked answer in the
        same context."""
        prompt = self._prompt(stock, before, tools)
        if not whole.startswith(prompt):
            is_lost = bool(message.reasoning)
            raise self._no_room(message, before, tools) if is_lost else self._misplaced(message, prompt, whole)
        end: int | None = len(prompt)
        if message.content.strip():
            marked = self.write([*before, self._dict(replace(message, content=_ANSWER))], opening=False, tools=tools)
            place = marked.rfind(_ANSWER)
            end = _end_of(message.content, whole, place) if place >= 0 and whole.startswith(marked[:place]) else None
        if end is None:
            raise self._misplaced(message, prompt, whole)
        if message.reasoning.strip() not in whole[len(prompt) :]:
            raise self._no_room(message, before, tools)
        for call in message.tool_calls:
            if call.name not in whole[len(prompt) :]:
                raise DataError(f"the chat template leaves out the call of the tool {call.name!r}", _OTHER_MODEL)
        end = max([end, *(whole.rfind(call.name) for call in message.tool_calls[-1:])])
        return prompt, self._ended(whole, len(prompt), end, is_call=bool(message.tool_calls))

    def _ended(self, whole: str, start: int, end: int, *, is_call: bool = False) -> str:
        """Returns the text from `start` to the end of generation after `end`: the tokenizer's end token, or the first
        added tokens. The text of a tool call contains special tokens, so the last of them ends its turn."""
        eos = whole.find(self.eos, end)
        if eos >= 0:
            return whole[start : eos + len(self.eos)]
        marks = list(self.special.finditer(whole, end))[-1:] if is_call else [self.added.search(whole, end)]
        return whole[start : marks[0].end()] if marks and marks[0] else whole[start:] + self.eos

    def _no_room(self, message: Message, before: Sequence[Json], tools: Tools) -> DataError:
        if not self.variables["enable_thinking"]:
            thinking = replace(self, variables={**self.variables, "enable_thinking": True})
            with suppress(DataError):
                stock = thinking.write(before, opening=True, tools=tools)
                whole = thinking.write([*before, thinking._dict(message)], opening=False, tools=tools)
                thinking._rare_turn(message, before, tools, stock, whole)
                remedy = "set `data.template_options: {enable_thinking: true}`"
                return DataError(f"{_NO_ROOM}: it closes the thinking at once", remedy)
        return DataError(_NO_ROOM, _WITHOUT_REASONING)

    def _misplaced(self, message: Message, prompt: str, whole: str) -> DataError:
        if "</think>" in message.content:
            return DataError(f"{_NO_ROOM}: it leaves out what is in <think>", _WITHOUT_REASONING)
        if self.variables["enable_thinking"] and self.writes_reasoning and not whole.startswith(prompt):
            remedy = "remove enable_thinking from data.template_options, or give every answer its reasoning"
            return DataError("the chat template opens the thinking, but this answer has no reasoning before it", remedy)
        return _lost(prompt, whole)

    @cached_property
    def format(self) -> TemplateFormat:
        """The format is learned from the simplest conversation that the template accepts."""
        for before in ([self._said("user", "Hi.")], [self._said("system", "Be brief."), self._said("user", "Hi.")]):
            with suppress(DataError):
                return self._format_of(before)
        return TemplateFormat(True, "", self.eos, True, None)

    def _format_of(self, before: Sequence[Json]) -> TemplateFormat:
        prompt = self.prompt(before, None)
        marked = self.write([*before, self._said("assistant", _ANSWER)], opening=False)
        place = marked.rfind(_ANSWER)
        if place < 0:
            raise _lost(prompt, marked)
        end = place + len(_ANSWER)
        closing, thought = self._ended(marked, end, end), None
        if self.writes_reasoning:
            whole = self.write([*before, self._said("assistant", _ANSWER, _THOUGHT)], opening=False)
            start, stop = whole.find(_THOUGHT, len(prompt)), whole.rfind(_ANSWER)
            if whole.startswith(prompt) and 0 <= start < stop:
                thought = (whole[len(prompt) : start], whole[start + len(_THOUGHT) : stop])
        return TemplateFormat(
            is_stock=prompt == self.write(before, opening=True),
            opening=marked[len(prompt) : place] if marked.startswith(prompt) else "",
            closing=closing,
            is_ended=marked[end:].startswith(closing),
            thought=thought,
        )

    def thoughts_apart(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Moves reasoning inside an answer to where the template expects it, if the template writes reasoning."""
        apart = list(messages)
        for at, message in enumerate(messages):
            if message.role == "assistant" and not message.reasoning and "<think>" in message.content:
                found = _THINKING.fullmatch(message.content) if self.writes_reasoning else None
                if found:
                    apart[at] = replace(message, reasoning=found[1].strip(), content=found[2].strip())
        return apart

    def dicts(self, messages: Sequence[Message], *, has_images: bool = False) -> list[Json]:
        """Converts messages to the form that templates expect: a tool's answer names its call. `has_images`:
        placeholders mark images."""
        dicts: list[Json] = []
        open_calls: Iterator[Json] = iter(())
        for message in messages:
            written = self._dict(message)
            if has_images and IMAGE_PLACEHOLDER in message.content:
                texts = [_typed(text) if text else [] for text in message.content.split(IMAGE_PLACEHOLDER)]
                written["content"] = texts[0] + [part for text in texts[1:] for part in ({"type": "image"}, *text)]
            if message.tool_calls:
                open_calls = iter(written["tool_calls"])
            elif message.role == "tool" and (call := next(open_calls, None)):
                written |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
            dicts.append(written)
        return dicts

    def _dict(self, message: Message) -> Json:
        if message.reasoning and not self.writes_reasoning:
            problem = "the chat template does not write the reasoning of a message"
            inside = "put it into the answer, as <think>reasoning</think>answer"
            raise DataError(problem, f"{inside}, or leave it out, or use a model whose template writes it")
        written = self._said(message.role, message.content, message.reasoning)
        if message.tool_calls:
            if self.call_form is None:
                raise DataError("the chat template does not write tool calls", _OTHER_MODEL)
            calls = enumerate(message.tool_calls)
            written["tool_calls"] = [_call(call.name, call.arguments, at, self.call_form) for at, call in calls]
            if not message.content:
                written["content"] = self.call_form.no_content
        return written

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return _typed(text) if self.is_typed else text

    def _said(self, role: str, content: str, reasoning: str = "") -> Json:
        names = ("reasoning_content", "reasoning", "thinking") if reasoning else ()  # where templates look for it
        return {"role": role, "content": self._content(content), **dict.fromkeys(names, reasoning)}

    @cached_property
    def is_typed(self) -> bool:
        """Whether the template accepts content only as a list of typed parts, as the templates of vision models may."""
        said = (("user", "Hi."), ("assistant", _ANSWER))
        plain, typed = ([{"role": role, "content": form(text)} for role, text in said] for form in (str, _typed))
        return not self._shows(plain, _ANSWER) and self._shows(typed, _ANSWER)

    @cached_property
    def writes_reasoning(self) -> bool:
        return self._shows([self._said("user", "Hi."), self._said("assistant", _ANSWER, _THOUGHT)], _THOUGHT)

    @cached_property
    def call_form(self) -> "_CallForm | None":
        """The form of tool calls that the template accepts: arguments as an object or as JSON text, and missing content
        as "" or None."""
        for form in (_CallForm(*choice) for choice in product((False, True), ("", None))):
            calls = [_call(_NAME, f'{{"mark": "{_ANSWER}"}}', 0, form)]
            message = {"role": "assistant", "content": form.no_content, "tool_calls": calls}
            if self._shows([self._said("user", "Hi."), message], _NAME, _ANSWER):
                return form
        return None

    def _shows(self, messages: Sequence[Json], *marks: str) -> bool:
        try:
            written = self.write(messages, opening=False)
        except DataError:
            return False
        return all(mark in written for mark in marks)


def _accepted(written: str | DataError) -> str:
    if isinstance(written, DataError):
        raise written
    return written


class _CallForm(NamedTuple):
    is_text: bool
    no_content: str | None


def _typed(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _call(name: str, arguments: str, at: int, form: _CallForm) -> Json:
    try:
        decoded = bounded.parse_json(arguments)
    except ValueError as error:
        problem = f"the arguments of the call of {name!r} are not JSON: {error}"
        raise DataError(problem, "write them as a JSON object") from None
    if not isinstance(decoded, dict):
        raise DataError(f"the arguments of the call of {name!r} are not a JSON object", "write them as a JSON object")
    function = {"name": name, "arguments": arguments if form.is_text else decoded}
    return {"id": f"call{at:05}", "type": "function", "function": function}


def _end_of(answer: str, whole: str, start: int) -> int | None:
    """Returns where the answer that begins at `start` ends; templates may trim its white space."""
    text, blanks = answer.strip(), _BLANKS.match(whole, start)
    begin = blanks.end() if blanks else start
    return begin + len(text) if whole.startswith(text, begin) else None


def _lost(prompt: str, whole: str) -> DataError:
    written = whole[len(prompt) :] if whole.startswith(prompt) else whole
    problem = f"the chat template does not write the answer unchanged; after {prompt[-40:]!r} comes {written[-80:]!r}"
    return DataError(problem, "set `data.template: plain`, or use a model whose template writes answers unchanged")


def read_tools(tools: str) -> Tools:
    """Converts tools to the form that most templates expect: each function inside an object with its type."""
    if not tools:
        return None
    try:
        listed = bounded.parse_json(tools)
    except ValueError as error:
        raise DataError(f"the tools are not JSON: {error}", "write them as a JSON list") from None
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        remedy = "write them as a JSON list of objects with name, description and parameters"
        raise DataError("the tools are not a list of JSON objects", remedy)
    return [t if isinstance(t.get("function"), dict) else {"type": "function", "function": t} for t in listed]


def require_tools(tools: Tools, prompt: str) -> None:
    """A model cannot call a tool that its prompt does not name."""
    for tool in tools or ():
        name = tool["function"].get("name", "")
        if not isinstance(name, str):
            raise DataError("the name of a tool is not text", "give every tool a name that is a string")
        if name not in prompt:
            raise DataError(f"the chat template leaves out the tool {name!r}", _OTHER_MODEL)
