"""The one renderer: training, evaluation and export get their text here, so a prompt is the same string and the same
tokens in all of them.

A conversation becomes segments, each tokenised by itself: at inference the prompt ends where the answer begins, so no
token may straddle that place.
"""

import hashlib
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from finefit.data import encode, image_check
from finefit.data.encode import Budget, TextEncoder, require_characters
from finefit.data.examples import Example, RenderedRow
from finefit.data.image_check import fill_placeholders, num_image_tokens, require_image_tokens, with_placeholders
from finefit.data.rows import IMAGE_PLACEHOLDER, ImageRef, Message, Row
from finefit.data.template import ChatTemplate, TemplateFormat, Written, needed_for_turn, read_tools, require_tools
from finefit.data.template_process import Conversation
from finefit.errors import DataError
from finefit.spec.data import TEMPLATE_OPTIONS
from finefit.vision.family import ImageProcessor

_TODAY = date(2024, 7, 26)
"""For templates that write the date (Llama 3.2, gpt-oss): a prompt must be the same tomorrow. Llama's own fallback."""
_RESERVED = {"messages", "conversations", "tools", "documents", "chat_template"}
_RESERVED |= {"add_generation_prompt", "continue_final_message"}

_NO_VISION = ("the row has an image, and this model cannot see", "leave out the row, or the image in it")
_NEEDS_CHAT = "use a model with a chat template"
_NO_ANSWER = ("the row has no answer after its prompt", "end the row with an answer")

Turns = Literal["all", "last"]


class Segment(NamedTuple):
    text: str
    supervised: bool


class Segments(NamedTuple):
    segments: list[Segment]
    image_refs: tuple[ImageRef, ...] = ()


Rendering = tuple[list[Segments], list[Segments]]
"""A row in text: its examples, each in segments, and those of its rejected answer."""

Made = TypeVar("Made")
Work = Generator[tuple[bool, tuple[Conversation, Conversation]], Written | None, Made]
"""Asks for what the template has to write, that for rows with tools or without, and goes on with it."""


@dataclass(frozen=True)
class Renderer:
    tokenizer: PreTrainedTokenizerBase
    template: Literal["chat", "plain"]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, over the defaults."""
    model_stops: tuple[int, ...] = ()
    """What the model's own generation settings stop at, besides the end of a turn."""
    image_processor: ImageProcessor | None = None

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    @property
    def pad(self) -> int:
        """Padding is never attended to nor supervised, so any token will do where the tokenizer names none."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(pad if pad is not None else eos)

    @property
    def notes(self) -> tuple[str, ...]:
        opening = (
            "the chat template writes answers after another text than it opens for generation; training and evaluation "
            "use the first, other programs will open the turn differently"
        )
        eos = str(self.tokenizer.eos_token)
        ending = f"the chat template writes no end after an answer, so {eos!r} is added: the model has to learn to stop"
        return (*(() if self._format.is_stock else (opening,)), *(() if self._format.is_ended else (ending,)))

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Each ends generation: the end of a turn, of a text, and what the model's own settings name."""
        end = self._encoder.ids([self._format.closing])[0][-1]
        return tuple(dict.fromkeys((end, int(self.tokenizer.eos_token_id), *self.model_stops)))

    def prompt_text(self, messages: Sequence[Message], *, tools: str = "", image_refs: Sequence[ImageRef] = ()) -> str:
        """Up to the opening of the assistant's turn; images are the template's placeholders."""
        messages = self._placed(messages, image_refs)
        if self.template == "plain":
            return self._plain_prompt(messages, tools, has_images=bool(image_refs))
        template, given = self._templates[bool(tools)], read_tools(tools)
        dicts = template.dicts(template.thoughts_apart(messages), has_images=bool(image_refs))
        prompt = template.prompt(dicts, given)
        require_tools(given, prompt)
        return prompt

    def prompt_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: str = "",
        image_refs: Sequence[ImageRef] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """A prompt longer than `max_tokens` is cut like that of a training row."""
        if max_tokens is not None:
            messages = self.cut_prompt(messages, tools=tools, image_refs=image_refs, max_tokens=max_tokens)
        tokens = self._prompt_tokens(messages, tools, image_refs)
        if not tokens:
            raise DataError("the prompt is empty, so there is nothing to answer", "give the row a prompt")
        return tokens

    def cut_prompt(
        self, messages: Sequence[Message], *, tools: str = "", image_refs: Sequence[ImageRef] = (), max_tokens: int
    ) -> tuple[Message, ...]:
        """The messages, cut so that their prompt fits. Images stay."""
        messages = with_placeholders(messages, len(image_refs))
        kept = self._encoder.fit(
            messages, lambda cut: len(self._prompt_tokens(cut, tools, image_refs)), max_tokens, bool(image_refs)
        )
        if kept is None:
            images = num_image_tokens(self.image_processor, image_refs)
            extra = f" and its images ({images} tokens)" if image_refs else ""
            problem = f"the template's own text and one token of each message{extra} take more than {max_tokens} tokens"
            lower = ", or lower data.images.max_pixels" if image_refs else ""
            raise DataError(problem, f"allow more tokens for the prompt{lower}")
        return kept

    def _prompt_tokens(self, messages: Sequence[Message], tools: str, image_refs: Sequence[ImageRef]) -> list[int]:
        text = self.prompt_text(messages, tools=tools, image_refs=image_refs)
        if self.image_processor is not None:
            (text,) = fill_placeholders([text], self.image_processor.placeholder, self.image_processor, image_refs)
        require_characters([text])
        (ids,) = self._encoder.ids([text])
        tokens = [*self._before(ids), *ids]
        require_image_tokens(tokens, self.image_processor, image_refs)
        return tokens

    def _before(self, ids: Sequence[int]) -> tuple[int, ...]:
        """What comes before the first tokens of a text. Chat templates write their own first token; plain text gets the
        tokenizer's. A vision-language model is used through its processor, which writes the first token into plain
        text, and puts it before a chat whose template has none."""
        start = self._encoder.start
        if self.template == "plain":
            return start if self.image_processor is None else ()
        return start if self.image_processor is not None and tuple(ids[:1]) != start else ()

    def _placed(self, messages: Sequence[Message], image_refs: Sequence[ImageRef]) -> tuple[Message, ...]:
        """The messages with a placeholder for each image, and no text that would be taken for one."""
        processor = self.image_processor
        if processor is None:
            if image_refs:
                raise DataError(*_NO_VISION)
            return tuple(messages)
        messages, token = with_placeholders(messages, len(image_refs)), processor.geometry.image_token
        spelled = str(self.tokenizer.convert_ids_to_tokens(token)) if token >= 0 else ""
        image_check.require_no_image_text(messages, (processor.placeholder, spelled), has_images=bool(image_refs))
        if processor.placeholder or not image_refs:
            return messages
        texts = fill_placeholders([m.content for m in messages], IMAGE_PLACEHOLDER, processor, image_refs)
        return tuple(replace(message, content=text) for message, text in zip(messages, texts, strict=True))

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """The answer in what a model wrote, without its end, its reasoning and what the template writes around it."""
        form = self._format
        length = next((at for at, token in enumerate(tokens) if token in self._end_tokens), len(tokens))
        text = self._encoder.decoded(tokens[:length])
        if length < len(tokens):  # else it was not finished
            text = text.removesuffix(self._encoder.added.split(form.closing, maxsplit=1)[0])
        if form.opening and text.startswith(form.opening):
            return text[len(form.opening) :]
        if form.thought and text.startswith(form.thought[0]):
            _, between, answer = text.partition(form.thought[1])
            return answer if between else text
        return text

    def render(self, rows: Sequence[Row], budget: Budget) -> list[RenderedRow]:
        """One for each row, whatever is wrong with it. All segments are tokenised in one call."""
        renderings = self._all([self._rendering(row, budget.turns) for row in rows])
        segments = self._segment_ids([found for found in renderings if not isinstance(found, DataError)])
        return [self._finished(row, found, segments, budget) for row, found in zip(rows, renderings, strict=True)]

    def _finished(
        self, row: Row, rendering: Rendering | DataError, segments: Iterator[list[int]], budget: Budget
    ) -> RenderedRow:
        num_tokens = 0
        try:
            if isinstance(rendering, DataError):
                raise rendering
            if row.kind == "text":
                return self._windows(row.text, next(segments), budget.max_tokens)
            whole = self._assembled(rendering, segments)
            num_tokens = whole.num_tokens
            if num_tokens <= budget.max_tokens:
                return whole
            if budget.too_long != "cut_prompt":
                return self._too_long(row, num_tokens, f"max_tokens is {budget.max_tokens}")
            return self._cut(row, num_tokens, budget)
        except DataError as error:
            return RenderedRow(problem=error.problem, remedy=error.remedy, num_tokens=num_tokens)

    def _cut(self, row: Row, num_tokens: int, budget: Budget) -> RenderedRow:
        """Both sides of a pair keep the same prompt, so only what they share is cut."""
        num_shared = row.num_given if row.rejected else len(row.messages)
        row = replace(row, messages=with_placeholders(row.messages, len(row.image_refs)))

        def rendered(messages: Sequence[Message]) -> RenderedRow:
            cut = replace(row, messages=(*messages, *row.messages[num_shared:]))
            (rendering,) = self._all([self._rendering(cut, budget.turns)])
            if isinstance(rendering, DataError):
                raise rendering
            return self._assembled(rendering, self._segment_ids([rendering]))

        kept = self._encoder.fit(
            row.messages[:num_shared], lambda cut: rendered(cut).num_tokens, budget.max_tokens, bool(row.image_refs)
        )
        if kept is None:
            why = f"and without what can be cut from the prompt still more than max_tokens {budget.max_tokens}"
            return self._too_long(row, num_tokens, why)
        shorter = rendered(kept)
        return replace(shorter, cut_tokens=num_tokens - shorter.num_tokens, num_tokens=num_tokens)

    def _too_long(self, row: Row, num_tokens: int, why: str) -> RenderedRow:
        num_images = num_image_tokens(self.image_processor, row.image_refs)
        images = f" ({num_images} of images, which are never cut)" if row.image_refs else ""
        problem = f"too long: {num_tokens} tokens{images}, {why}"
        remedy = "raise data.max_tokens, or set data.too_long: drop to leave such rows out; an answer is never cut"
        return RenderedRow(problem=problem, remedy=remedy, is_too_long=True, num_tokens=num_tokens)

    def _all(self, works: Sequence[Work[Rendering]]) -> list[Rendering | DataError]:
        """What each piece of work comes to. All go on at one pace, so that each template writes for all at once."""
        done: dict[int, Rendering | DataError] = {}
        results: dict[int, Written | None] = dict.fromkeys(range(len(works)))
        while results:
            needed: dict[bool, list[tuple[int, tuple[Conversation, Conversation]]]] = {False: [], True: []}
            for at, written in results.items():
                try:
                    has_tools, both = works[at].send(written)
                    needed[has_tools].append((at, both))
                except StopIteration as end:
                    done[at] = end.value
                except DataError as error:
                    done[at] = error
            results = {}
            for has_tools, several in needed.items():
                if several:
                    texts = iter(self._templates[has_tools].write_all([one for _, both in several for one in both]))
                    results |= {at: (next(texts), next(texts)) for at, _ in several}
        return [done[at] for at in range(len(works))]

    def _rendering(self, row: Row, turns: Turns) -> Work[Rendering]:
        if row.images and not row.image_refs:
            raise DataError(*_NO_VISION)
        if row.kind == "text":
            require_characters([row.text])
            self._placed([Message("user", row.text)], ())
            return [Segments([Segment(row.text, True)])], []
        examples = yield from self._examples(row.messages, row, turns)
        if not row.rejected:
            return examples, []
        rejected = yield from self._examples((*row.messages[: row.num_given], *row.rejected), row, turns)
        if examples == rejected:
            problem = "both sides of the pair are rendered alike, so there is nothing to prefer"
            raise DataError(problem, "remove the pair, or fix one side")
        if max(len(examples), len(rejected)) > 1:
            problem = "the chat template rewrites an earlier answer of a pair once more follows, so it is not one text"
            raise DataError(problem, "set data.turns: last, which compares the last answers alone")
        return examples, rejected

    def _examples(self, messages: Sequence[Message], row: Row, turns: Turns) -> Work[list[Segments]]:
        """Prompts and answers: one example as long as each prompt continues the last answer as it was trained."""
        marked = with_placeholders(messages, len(row.image_refs))
        messages = self._placed(messages, row.image_refs)
        if self.template == "plain":
            segments = self._plain_segments(messages, row.tools, has_images=bool(row.image_refs))
            return [self._with_images(segments, row.image_refs)]
        template, given = self._templates[bool(row.tools)], read_tools(row.tools)
        messages = template.thoughts_apart(messages)
        dicts = template.dicts(messages, has_images=bool(row.image_refs))
        answers = [at for at, message in enumerate(messages) if at >= row.num_given and message.role == "assistant"]
        if not answers:
            raise DataError(*_NO_ANSWER)
        examples: list[list[Segment]] = []
        num_images: list[int] = []
        done = ""
        for at in answers if turns == "all" else answers[-1:]:
            written = yield bool(row.tools), needed_for_turn(dicts, at, given)
            assert written is not None
            prompt, turn = template.turn(messages, dicts, at, given, written)
            if not examples or not prompt.startswith(done):
                require_tools(given, prompt)
                examples.append([])
                num_images.append(0)
                done = ""
            new = Segment(prompt[len(done) :], False), Segment(turn, True)
            require_characters(segment.text for segment in new)
            examples[-1] += new
            num_images[-1] = image_check.num_placeholders(marked[:at]) if row.image_refs else 0
            done = prompt + turn
        return [self._with_images(e, row.image_refs[:n]) for e, n in zip(examples, num_images, strict=True)]

    def _with_images(self, segments: list[Segment], image_refs: tuple[ImageRef, ...]) -> Segments:
        processor = self.image_processor
        if processor is None:
            return Segments(segments)
        texts = fill_placeholders([s.text for s in segments], processor.placeholder, processor, image_refs)
        filled = [Segment(text, segment.supervised) for segment, text in zip(segments, texts, strict=True)]
        return Segments(filled, image_refs)

    def _plain_segments(self, messages: Sequence[Message], tools: str, *, has_images: bool) -> list[Segment]:
        if not messages or messages[-1].role != "assistant":
            raise DataError(*_NO_ANSWER)
        answer, eos = messages[-1], str(self.tokenizer.eos_token)
        if answer.reasoning or answer.tool_calls:
            raise DataError("the plain template has no place for reasoning or tool calls", _NEEDS_CHAT)
        prompt = self._plain_prompt(messages[:-1], tools, has_images=has_images)
        require_characters([prompt, answer.content])
        return [Segment(prompt, False), Segment(answer.content.removesuffix(eos) + eos, True)]

    def _plain_prompt(self, messages: Sequence[Message], tools: str, *, has_images: bool) -> str:
        if tools or any(m.role == "tool" or m.tool_calls for m in messages):
            raise DataError("the plain template does not support tools", _NEEDS_CHAT)
        if [m.role for m in messages if m.role != "system"] != ["user"]:
            given = f"this row has {len(messages) + 1} messages"
            raise DataError(f"the plain template takes one prompt and one completion, {given}", _NEEDS_CHAT)
        prompt, processor = "\n\n".join(m.content for m in messages), self.image_processor
        if processor is None:
            return prompt
        if has_images and processor.placeholder:
            prompt = prompt.replace(IMAGE_PLACEHOLDER, processor.placeholder)
        return processor.plain_prompt(prompt, str(self.tokenizer.bos_token) if self._encoder.start else "")

    def _assembled(self, rendering: Rendering, ids: Iterator[list[int]]) -> RenderedRow:
        tokenised = [[[(segment, next(ids)) for segment in one.segments] for one in side] for side in rendering]
        for segment, piece in chain.from_iterable(chain.from_iterable(tokenised)):
            if segment.supervised and (unknown := self._encoder.unknown_in(segment.text, piece)):
                raise _unknown_character(unknown)
        examples, rejected = (
            tuple(self._joined(pieces, one.image_refs) for pieces, one in zip(side, several, strict=True))
            for side, several in zip(tokenised, rendering, strict=True)
        )
        for example in (*examples, *rejected):
            require_image_tokens(example.tokens, self.image_processor, example.images)
        longest = max(len(example.tokens) for example in (*examples, *rejected))
        return RenderedRow(examples=examples, rejected=rejected, num_tokens=longest)

    def _joined(self, pieces: Sequence[tuple[Segment, list[int]]], image_refs: tuple[ImageRef, ...]) -> Example:
        start = self._before(pieces[0][1])
        tokens, supervised = [*start], (False,) * len(start)
        for segment, ids in pieces:
            tokens += ids
            supervised += (segment.supervised,) * len(ids)
        if supervised[:1] == (True,):  # nothing comes before the first token that could predict it
            supervised = (False, *supervised[1:])
        return Example(tuple(tokens), supervised, image_refs)

    def _windows(self, text: str, ids: list[int], max_tokens: int) -> RenderedRow:
        """Plain text in consecutive examples. Nothing comes before a window that could predict its first token."""
        if unknown := self._encoder.unknown_in(text, ids):
            raise _unknown_character(unknown)
        eos = int(self.tokenizer.eos_token_id)
        tokens = (*self._encoder.start, *ids, *(() if ids[-1:] == [eos] else (eos,)))
        borders = list(range(0, len(tokens), max_tokens))
        if len(borders) > 1 and len(tokens) - borders[-1] == 1 and max_tokens > 2:
            borders[-1] -= 1  # a window of one token has nothing to learn
        windows = [tokens[start:end] for start, end in zip(borders, [*borders[1:], len(tokens)], strict=True)]
        examples = tuple(Example(window, (False, *(True,) * (len(window) - 1))) for window in windows)
        return RenderedRow(examples=examples, num_tokens=max(map(len, windows)))

    def _segment_ids(self, renderings: Sequence[Rendering]) -> Iterator[list[int]]:
        """The tokens of all segments, in order. A segment that does not begin a text is read as the middle of one."""
        texts = [one.segments for rendering in renderings for side in rendering for one in side]
        return self._encoder.pieces([(at > 0, segment.text) for text in texts for at, segment in enumerate(text)])

    def special_tokens_in(self, text: str) -> tuple[str, ...]:
        """What the tokenizer would read as a special token instead of as text."""
        return tuple(dict.fromkeys(self._encoder.special.findall(text)))

    @cached_property
    def _templates(self) -> dict[bool, ChatTemplate]:
        """By whether there are tools: a model may have a template of its own for them."""
        eos, today = str(self.tokenizer.eos_token), {"strftime_now": _TODAY.strftime}
        variables = {**self.tokenizer.special_tokens_map, **TEMPLATE_OPTIONS, **today, **self.template_options}
        added = re.compile(f"(?:{self._encoder.added.pattern})+")
        without = str(self.tokenizer.get_chat_template())
        with_tools = str(self.tokenizer.get_chat_template(tools=[]))
        model = self.tokenizer.name_or_path or "the model"
        usual = ChatTemplate(f"the chat template of {model}", without, variables, eos, added, self._encoder.special)
        for_tools = replace(usual, name=f"the chat template for tools of {model}", source=with_tools)
        return {False: usual, True: usual if with_tools == without else for_tools}

    @property
    def _format(self) -> TemplateFormat:
        if self.template == "plain":
            return TemplateFormat(True, "", str(self.tokenizer.eos_token), True, None)
        return self._templates[False].format

    @cached_property
    def _end_tokens(self) -> frozenset[int]:
        """Tokens after which no answer continues."""
        first = self._encoder.added.search(self._format.closing)
        return frozenset((*self.stop_tokens, *(self._encoder.ids([first.group()])[0] if first else ())))

    def sha256(self) -> str:
        """Equal hashes render equal prompts."""
        special: dict[str, Any] = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        identity = {"kind": self.template, "template": self.tokenizer.chat_template, "special": special}
        identity |= {"start": self._encoder.start, "today": _TODAY.isoformat()}
        identity |= {"options": {**TEMPLATE_OPTIONS, **self.template_options}}
        identity |= {} if self.image_processor is None else {"image_processor": self.image_processor.identity}
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def open_renderer(
    folder: Path | str,
    template: Literal["chat", "plain"],
    *,
    template_options: Mapping[str, Any] | None = None,
    revision: str = "main",
    image_processor: ImageProcessor | None = None,
) -> Renderer:
    """`image_processor`: of a vision-language model; without it only text is rendered."""
    tokenizer = encode.open_tokenizer(folder, revision=revision, has_vision=image_processor is not None)
    if template == "chat":
        encode.require_template(tokenizer, folder)
    options = dict(template_options or {})
    if reserved := sorted(_RESERVED & set(options)):
        problem = f"data.template_options sets {', '.join(reserved)}, which the rows give"
        raise DataError(problem, "take it out of data.template_options")
    return Renderer(tokenizer, template, options, encode.model_stops(folder, revision), image_processor)


def _unknown_character(character: str) -> DataError:
    problem = f"the tokenizer has no token for {character!r}, so the model cannot be taught to write it"
    return DataError(problem, "take the character out of the row, or take a model whose tokenizer knows it")
