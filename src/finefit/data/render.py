"""The only renderer: training, evaluation and export get their text here, so a prompt is the same string with the same
tokens in all of them.

A conversation becomes segments that are tokenised separately: at inference the prompt ends where the answer begins, so
no token may straddle that boundary."""

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
from finefit.data.template_process import TemplateRequest
from finefit.errors import DataError
from finefit.spec.data import TEMPLATE_OPTIONS
from finefit.vision.family import ImageProcessor

_TODAY = date(2024, 7, 26)
"""Date for templates that write one (Llama 3.2, gpt-oss), because a prompt must not change from day to day. It is
Llama's own fallback."""
_RESERVED = {"messages", "conversations", "tools", "documents", "chat_template"}
_RESERVED |= {"add_generation_prompt", "continue_final_message"}

_NO_VISION = ("the row has an image, but this model is text-only", "leave out the row, or the image in it")
_UNFINISHED = "\ufffd"
_MAX_STOP_TEXTS = 4
"""That the completions of an OpenAI-compatible server take."""
"""How a tokenizer decodes the first bytes of a character whose last ones are not written yet."""
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
"""The rendered text of a row: the segments of each example, and those of its rejected answer."""

Made = TypeVar("Made")
RenderSteps = Generator[tuple[bool, tuple[TemplateRequest, TemplateRequest]], Written | None, Made]
"""Yields the requests that the chat template has to render, with a flag for rows with tools, and resumes with their
text."""


@dataclass(frozen=True)
class Renderer:
    tokenizer: PreTrainedTokenizerBase
    template: Literal["chat", "plain"]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, which override the defaults."""
    model_stops: tuple[int, ...] = ()
    """Tokens at which the model's own generation settings stop, besides the end of a turn."""
    image_processor: ImageProcessor | None = None

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    @property
    def pad(self) -> int:
        """Padding is neither attended to nor supervised, so any token serves if the tokenizer has no padding token."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(pad if pad is not None else eos)

    @property
    def notes(self) -> tuple[str, ...]:
        opening = (
            "the chat template puts a different text before answers than it opens for generation; training and "
            "evaluation use the former, but other programs will open the turn differently"
        )
        eos = str(self.tokenizer.eos_token)
        ending = f"the chat template writes no end after answers, so {eos!r} is added: the model has to learn to stop"
        return (*(() if self._format.is_stock else (opening,)), *(() if self._format.is_ended else (ending,)))

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end generation: the end of a turn, of a text, and those in the model's own settings."""
        end = self._encoder.ids([self._format.closing])[0][-1]
        return tuple(dict.fromkeys((end, int(self.tokenizer.eos_token_id), *self.model_stops)))

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The same for a program that takes text, and no more than four."""
        texts = (str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.stop_tokens)
        return tuple(dict.fromkeys(texts))[:_MAX_STOP_TEXTS]

    def prompt_text(self, messages: Sequence[Message], *, tools: str = "", image_refs: Sequence[ImageRef] = ()) -> str:
        """Returns the prompt up to the opening of the assistant's turn; images are the template's placeholders."""
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
        """A prompt longer than `max_tokens` is cut like the prompt of a training row."""
        if max_tokens is not None:
            messages = self.cut_prompt(messages, tools=tools, image_refs=image_refs, max_tokens=max_tokens)
        tokens = self._prompt_tokens(messages, tools, image_refs)
        if not tokens:
            raise DataError("the prompt is empty, so there is nothing to answer", "give the row a prompt")
        return tokens

    def cut_prompt(
        self, messages: Sequence[Message], *, tools: str = "", image_refs: Sequence[ImageRef] = (), max_tokens: int
    ) -> tuple[Message, ...]:
        """Returns the messages, cut so that their prompt fits. Images are kept."""
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
        """Returns the token to add before a text. Chat templates write their own first token; plain text gets the
        tokenizer's. A vision-language model is used through its processor, which adds the first token to plain text,
        and to a chat whose template does not write it."""
        start = self._encoder.start
        if self.template == "plain":
            return start if self.image_processor is None else ()
        return start if self.image_processor is not None and tuple(ids[:1]) != start else ()

    def _placed(self, messages: Sequence[Message], image_refs: Sequence[ImageRef]) -> tuple[Message, ...]:
        """Returns the messages with a placeholder for each image, and rejects text that would be read as an image."""
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
        """Returns the answer that a model generated, without end tokens, reasoning and template text."""
        length = next((at for at, token in enumerate(tokens) if token in self._end_tokens), len(tokens))
        return self.answer_in(self._encoder.decoded(tokens[:length]), has_ended=length < len(tokens))

    def answer_in(self, text: str, *, has_ended: bool) -> str:
        """Returns the answer in generated text, which another program may have decoded."""
        form = self._format
        if has_ended:
            text = text.removesuffix(self._encoder.added.split(form.closing, maxsplit=1)[0])
        if form.opening and text.startswith(form.opening):
            return text[len(form.opening) :]
        if form.thought and text.startswith(form.thought[0]):
            _, between, answer = text.partition(form.thought[1])
            return answer if between else text
        return text

    def decode_so_far(self, tokens: Sequence[int]) -> str:
        """What `decode_answer` will begin with, whatever the model writes next: without half a character, and without
        what may yet turn out to be an opening, reasoning, or the beginning of an end."""
        form, raw = self._format, self._encoder.decoded(tokens)
        thought, closed = form.thought or ("", "")
        if any(whole.startswith(raw) for whole in (form.opening, thought) if whole):
            return ""
        if thought and raw.startswith(thought) and closed not in raw:
            return ""
        text, ending = self.decode_answer(tokens), self._encoder.added.split(form.closing, maxsplit=1)[0]
        text = text.rstrip(_UNFINISHED)
        begun = (size for size in range(len(ending), 0, -1) if text.endswith(ending[:size]))
        return text[: len(text) - next(begun, 0)]

    def render(self, rows: Sequence[Row], budget: Budget) -> list[RenderedRow]:
        """Returns one result per row, also for rows with faults. All segments are tokenised in one call."""
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
        """Both sides of a pair keep the same prompt, so only the shared messages are cut."""
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
            why = f"which even after cutting the prompt is more than max_tokens {budget.max_tokens}"
            return self._too_long(row, num_tokens, why)
        shorter = rendered(kept)
        return replace(shorter, cut_tokens=num_tokens - shorter.num_tokens, num_tokens=num_tokens)

    def _too_long(self, row: Row, num_tokens: int, why: str) -> RenderedRow:
        num_images = num_image_tokens(self.image_processor, row.image_refs)
        images = f" ({num_images} of images, which are never cut)" if row.image_refs else ""
        problem = f"too long: {num_tokens} tokens{images}, {why}"
        remedy = "raise data.max_tokens, or set data.too_long: drop to leave such rows out; an answer is never cut"
        return RenderedRow(problem=problem, remedy=remedy, is_too_long=True, num_tokens=num_tokens)

    def _all(self, steps: Sequence[RenderSteps[Rendering]]) -> list[Rendering | DataError]:
        """Runs all steps in parallel rounds, so that each template renders many requests at once."""
        done: dict[int, Rendering | DataError] = {}
        results: dict[int, Written | None] = dict.fromkeys(range(len(steps)))
        while results:
            needed: dict[bool, list[tuple[int, tuple[TemplateRequest, TemplateRequest]]]] = {False: [], True: []}
            for at, written in results.items():
                try:
                    has_tools, both = steps[at].send(written)
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
        return [done[at] for at in range(len(steps))]

    def _rendering(self, row: Row, turns: Turns) -> RenderSteps[Rendering]:
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
            problem = "both sides of the pair are rendered to the same text, so there is nothing to prefer"
            raise DataError(problem, "remove the pair, or fix one side")
        if max(len(examples), len(rejected)) > 1:
            problem = "the chat template rewrites an earlier answer of a pair when more follows, so it is not one text"
            raise DataError(problem, "set data.turns: last, which compares only the last answers")
        return examples, rejected

    def _examples(self, messages: Sequence[Message], row: Row, turns: Turns) -> RenderSteps[list[Segments]]:
        """Splits prompts and answers into segments. One example lasts as long as each prompt continues the last answer
        as it was trained."""
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
            raise DataError("the plain template does not support reasoning or tool calls", _NEEDS_CHAT)
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
        if supervised[:1] == (True,):  # the first token has no context from which it could be predicted
            supervised = (False, *supervised[1:])
        return Example(tuple(tokens), supervised, image_refs)

    def _windows(self, text: str, ids: list[int], max_tokens: int) -> RenderedRow:
        """Splits plain text into consecutive examples. The first token of each window has no context, so it is not
        supervised."""
        if unknown := self._encoder.unknown_in(text, ids):
            raise _unknown_character(unknown)
        eos = int(self.tokenizer.eos_token_id)
        tokens = (*self._encoder.start, *ids, *(() if ids[-1:] == [eos] else (eos,)))
        borders = list(range(0, len(tokens), max_tokens))
        if len(borders) > 1 and len(tokens) - borders[-1] == 1 and max_tokens > 2:
            borders[-1] -= 1  # nothing can be learned from a window of one token
        windows = [tokens[start:end] for start, end in zip(borders, [*borders[1:], len(tokens)], strict=True)]
        examples = tuple(Example(window, (False, *(True,) * (len(window) - 1))) for window in windows)
        return RenderedRow(examples=examples, num_tokens=max(map(len, windows)))

    def _segment_ids(self, renderings: Sequence[Rendering]) -> Iterator[list[int]]:
        """Yields the tokens of all segments, in order. A segment that does not start a text is tokenised as a
        continuation."""
        texts = [one.segments for rendering in renderings for side in rendering for one in side]
        return self._encoder.pieces([(at > 0, segment.text) for text in texts for at, segment in enumerate(text)])

    def special_tokens_in(self, text: str) -> tuple[str, ...]:
        """Returns the strings that the tokenizer would read as special tokens instead of text."""
        return tuple(dict.fromkeys(self._encoder.special.findall(text)))

    @cached_property
    def _templates(self) -> dict[bool, ChatTemplate]:
        """The templates, keyed by whether there are tools: a model may have a separate template for them."""
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
        """The tokens after which no answer continues."""
        first = self._encoder.added.search(self._format.closing)
        return frozenset((*self.stop_tokens, *(self._encoder.ids([first.group()])[0] if first else ())))

    def sha256(self) -> str:
        """Renderers with equal hashes render equal prompts."""
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
    """`image_processor`: that of a vision-language model; without it only text is rendered."""
    tokenizer = encode.open_tokenizer(folder, revision=revision, has_vision=image_processor is not None)
    if template == "chat":
        encode.require_template(tokenizer, folder)
    options = dict(template_options or {})
    if reserved := sorted(_RESERVED & set(options)):
        problem = f"data.template_options sets {', '.join(reserved)}, which come from the rows"
        raise DataError(problem, "remove it from data.template_options")
    return Renderer(tokenizer, template, options, encode.model_stops(folder, revision), image_processor)


def _unknown_character(character: str) -> DataError:
    problem = f"the tokenizer has no token for {character!r}, so the model cannot be taught to write it"
    return DataError(problem, "remove the character from the row, or use a model whose tokenizer knows it")
