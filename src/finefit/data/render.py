"""The one renderer: training, evaluation and export get their text here, so a prompt is the same string and the same tokens in all of them.

A conversation becomes segments, each tokenised by itself: at inference the prompt ends where the answer begins, so no token may straddle that place.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from finefit.data.budget import Budget, fitted
from finefit.data.conversations import IMAGE_MARK
from finefit.data.examples import Draft, Example, Rendered, Segment, Sheet, joined, too_long, unknown_character
from finefit.data.eyes.eye import Eye
from finefit.data.marks import (
    filled,
    inlined,
    num_image_tokens,
    num_marks,
    placed,
    require_image_tokens,
    require_unwritten,
)
from finefit.data.pictures import Picture
from finefit.data.rows import Message, Row
from finefit.data.spelling import Spelling, require_characters
from finefit.data.template import ChatTemplate, Habits, read_tools, require_tools
from finefit.data.tokenizers import model_stops, open_tokenizer, require_template
from finefit.errors import DataError
from finefit.spec.rows import TEMPLATE_OPTIONS

_TODAY = date(2024, 7, 26)
"""For templates that write the date (Llama 3.2, gpt-oss): a prompt shall be the same tomorrow. Llama's own fallback."""
_RESERVED = (
    "messages",
    "conversations",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


@dataclass(frozen=True)
class Renderer:
    tokenizer: PreTrainedTokenizerBase
    template: Literal["chat", "plain"]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, over the defaults."""
    model_stops: tuple[int, ...] = ()
    """What the model's own generation settings stop at, besides the end of a turn."""
    eye: Eye | None = None
    """Of a model that sees."""

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tokenizer)

    @property
    def pad(self) -> int:
        """Padding is never seen nor supervised, so any token will do where the tokenizer names none."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(pad if pad is not None else eos)

    @property
    def uses_stock_prompt(self) -> bool:
        """Whether other programs, which open the turn as the template does for generation, give the model the prompt of its training."""
        return self._habits.is_stock

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the template."""
        habits, eos = self._habits, str(self.tokenizer.eos_token)
        opening = (
            "the chat template writes answers behind another text than it opens for generation; training and evaluation use the first, "
            "other programs will open the turn differently"
        )
        ending = (
            f"the chat template writes no end after an answer, so {eos!r} is put there: the model has to learn to stop"
        )
        return (*(() if habits.is_stock else (opening,)), *(() if habits.is_ended else (ending,)))

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Each of them ends generation: the end of a turn, of a text, and what the model's own settings name."""
        end = self._spelling.ids([self._habits.closing])[0][-1]
        return tuple(dict.fromkeys((end, int(self.tokenizer.eos_token_id), *self.model_stops)))

    def prompt_text(self, messages: Sequence[Message], *, tools: str = "", pictures: Sequence[Picture] = ()) -> str:
        """What stands before the answer, the opening of the assistant's turn included; of an image the template's mark."""
        messages = self._placed(messages, pictures)
        if self.template == "plain":
            return self._plain_text(messages, tools, has_images=bool(pictures))
        template, given = self._chat(tools), read_tools(tools)
        prompt = template.prompt(template.dicts(template.thoughts_apart(messages), has_images=bool(pictures)), given)
        require_tools(given, prompt)
        return prompt

    def prompt_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: str = "",
        pictures: Sequence[Picture] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Cut as a training row where it is longer than `max_tokens`. `pictures`: what the images of the messages are."""
        if max_tokens is not None:
            messages = self.cut_prompt(messages, tools=tools, pictures=pictures, max_tokens=max_tokens)
        tokens = self._prompt_tokens(messages, tools, pictures)
        if not tokens:
            raise DataError("the prompt is empty, so there is nothing to answer to", "give the row a prompt")
        return tokens

    def cut_prompt(
        self, messages: Sequence[Message], *, tools: str = "", pictures: Sequence[Picture] = (), max_tokens: int
    ) -> tuple[Message, ...]:
        """The messages with so much taken out that their prompt fits. Images stay."""
        kept = fitted(
            placed(messages, len(pictures)),
            length=lambda cut: len(self._prompt_tokens(cut, tools, pictures)),
            spans=self._spelling.spans,
            max_tokens=max_tokens,
            mark=IMAGE_MARK if pictures else None,
        )
        if kept is None:
            images = f" and its images ({num_image_tokens(self.eye, pictures)} tokens)" if pictures else ""
            raise DataError(
                f"the template's own text and one token of each message{images} take more than {max_tokens} tokens",
                "allow more tokens for the prompt" + (", or lower data.images.max_pixels" if pictures else ""),
            )
        return kept

    def _prompt_tokens(self, messages: Sequence[Message], tools: str, pictures: Sequence[Picture]) -> list[int]:
        text = self.prompt_text(messages, tools=tools, pictures=pictures)
        if self.eye is not None:
            (text,) = filled([text], self.eye, pictures)
        require_characters([text])
        (ids,) = self._spelling.ids([text])
        tokens = [*self._before(ids), *ids]
        require_image_tokens(tokens, self.eye, pictures)
        return tokens

    def _before(self, ids: Sequence[int]) -> tuple[int, ...]:
        """What stands before the first tokens of a text. Chat templates write their own first token; plain text gets the tokenizer's. A model that
        sees is used through its processor: that writes the first token into plain text, and puts it before a chat whose template has none."""
        if self.template == "plain":
            return self._spelling.start if self.eye is None else ()
        return self._spelling.start if self.eye is not None and tuple(ids[:1]) != self._spelling.start else ()

    def _placed(self, messages: Sequence[Message], pictures: Sequence[Picture]) -> tuple[Message, ...]:
        """With a mark for each picture, and no text that would be taken for one."""
        if self.eye is None:
            if pictures:
                raise DataError(
                    "the row has an image, and this model cannot see", "leave the row out, or take the image out of it"
                )
            return tuple(messages)
        messages = placed(messages, len(pictures))
        require_unwritten(messages, (self.eye.mark, self._image_token), has_images=bool(pictures))
        return inlined(messages, self.eye, pictures) if pictures and not self.eye.mark else messages

    @cached_property
    def _image_token(self) -> str:
        assert self.eye is not None
        token = self.eye.lens.image_token
        return str(self.tokenizer.convert_ids_to_tokens(token)) if token >= 0 else ""

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """The answer in what a model wrote behind a prompt: without the end, what the template writes around an answer, and its reasoning."""
        habits = self._habits
        length = next((at for at, token in enumerate(tokens) if token in self._last_marks), len(tokens))
        text = self._spelling.decoded(tokens[:length])
        if length < len(tokens):  # else it was not finished
            text = text.removesuffix(self._closing_text)
        if habits.opening and text.startswith(habits.opening):
            return text[len(habits.opening) :]
        if habits.thought and text.startswith(habits.thought[0]):
            _, between, answer = text.partition(habits.thought[1])
            return answer if between else text
        return text

    def render(self, rows: Sequence[Row], budget: Budget) -> list[Rendered]:
        """One for each row, whatever is wrong with it. All segments are tokenised in one call."""
        drafts = [self._draft(row, budget.turns) for row in rows]
        segments = self._segment_ids([draft for draft in drafts if isinstance(draft, Draft)])
        return [
            Rendered(problem=draft.problem, remedy=draft.remedy)
            if isinstance(draft, DataError)
            else self._finished(row, draft, segments, budget)
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def _finished(self, row: Row, draft: Draft, segments: Iterator[list[int]], budget: Budget) -> Rendered:
        if row.kind == "text":
            return self._windows(row.text, next(segments), budget.max_tokens)
        whole = self._assembled(draft, segments)
        if whole.num_tokens <= budget.max_tokens or whole.problem:
            return whole
        if budget.too_long != "cut_prompt":
            return too_long(
                f"too long: {whole.num_tokens} tokens{self._of_images(row)}, max_tokens is {budget.max_tokens}",
                whole.num_tokens,
            )
        try:
            return self._cut(row, whole, budget)
        except DataError as error:
            return Rendered(problem=error.problem, remedy=error.remedy, num_tokens=whole.num_tokens)

    def _cut(self, row: Row, whole: Rendered, budget: Budget) -> Rendered:
        """Both sides of a pair keep the same prompt, so only what both have is cut."""
        num_shared = row.num_given if row.rejected else len(row.messages)
        row = replace(row, messages=placed(row.messages, len(row.pictures)))

        def rendered(messages: Sequence[Message]) -> Rendered:
            draft = self._written(replace(row, messages=(*messages, *row.messages[num_shared:])), budget.turns)
            return self._assembled(draft, self._segment_ids([draft]))

        shared = row.messages[:num_shared]
        mark = IMAGE_MARK if row.pictures else None
        kept = fitted(
            shared,
            length=lambda cut: rendered(cut).num_tokens,
            spans=self._spelling.spans,
            max_tokens=budget.max_tokens,
            mark=mark,
        )
        if kept is None:
            return too_long(
                f"too long: {whole.num_tokens} tokens{self._of_images(row)}, and without what can be cut from the prompt still more than max_tokens "
                f"{budget.max_tokens}",
                whole.num_tokens,
            )
        shorter = rendered(kept)
        return replace(shorter, cut_tokens=whole.num_tokens - shorter.num_tokens, num_tokens=whole.num_tokens)

    def _of_images(self, row: Row) -> str:
        return f" ({num_image_tokens(self.eye, row.pictures)} of images, which are never cut)" if row.pictures else ""

    def _draft(self, row: Row, turns: Literal["all", "last"]) -> Draft | DataError:
        try:
            return self._written(row, turns)
        except DataError as error:
            return error

    def _written(self, row: Row, turns: Literal["all", "last"]) -> Draft:
        if row.images and not row.pictures:
            raise DataError(
                "the row has an image, and this model cannot see", "leave the row out, or take the image out of it"
            )
        if row.kind == "text":
            require_characters([row.text])
            self._placed([Message("user", row.text)], ())
            return Draft([Sheet([Segment(row.text, True)])], [])
        examples = self._examples(row.messages, row, turns)
        if not row.rejected:
            return Draft(examples, [])
        rejected = self._examples((*row.messages[: row.num_given], *row.rejected), row, turns)
        if examples == rejected:
            raise DataError(
                "both sides of the pair are written alike, so there is nothing to prefer",
                "remove the pair, or mend one side",
            )
        if max(len(examples), len(rejected)) > 1:
            raise DataError(
                "the chat template writes an earlier answer of the pair differently once more follows, so its side is not one text",
                "set data.turns: last, which compares the last answers alone",
            )
        return Draft(examples, rejected)

    def _examples(self, messages: Sequence[Message], row: Row, turns: Literal["all", "last"]) -> list[Sheet]:
        """Prompt and answer by turns, in one example as long as each prompt goes on from the last answer as that was trained."""
        marked, messages = placed(messages, len(row.pictures)), self._placed(messages, row.pictures)
        if self.template == "plain":
            return [self._sheet(self._plain(messages, row.tools, has_images=bool(row.pictures)), row.pictures)]
        template, given = self._chat(row.tools), read_tools(row.tools)
        messages = template.thoughts_apart(messages)
        dicts = template.dicts(messages, has_images=bool(row.pictures))
        answers = [at for at, message in enumerate(messages) if at >= row.num_given and message.role == "assistant"]
        if not answers:
            raise DataError("the row has no answer behind what is given", "end the row with an answer")
        examples: list[list[Segment]] = []
        shown: list[int] = []
        done = ""
        for at in answers if turns == "all" else answers[-1:]:
            prompt, turn = template.turn(messages, dicts, at, given)
            if not examples or not prompt.startswith(done):
                require_tools(given, prompt)
                examples.append([])
                shown.append(0)
                done = ""
            segments = Segment(prompt[len(done) :], False), Segment(turn, True)
            require_characters(segment.text for segment in segments)
            examples[-1] += segments
            shown[-1] = num_marks(marked[:at]) if row.pictures else 0
            done = prompt + turn
        return [self._sheet(segments, row.pictures[:count]) for segments, count in zip(examples, shown, strict=True)]

    def _sheet(self, segments: list[Segment], pictures: tuple[Picture, ...]) -> Sheet:
        if self.eye is None:
            return Sheet(segments)
        texts = filled([segment.text for segment in segments], self.eye, pictures)
        return Sheet(
            [Segment(text, segment.supervised) for segment, text in zip(segments, texts, strict=True)], pictures
        )

    def _plain(self, messages: Sequence[Message], tools: str, *, has_images: bool) -> list[Segment]:
        if not messages or messages[-1].role != "assistant":
            raise DataError("the row has no answer behind what is given", "end the row with an answer")
        answer, eos = messages[-1], str(self.tokenizer.eos_token)
        if answer.reasoning or answer.tool_calls:
            raise DataError(
                "the plain template has no place for reasoning or calls of tools", "use a model with a chat template"
            )
        prompt = self._plain_text(messages[:-1], tools, has_images=has_images)
        require_characters([prompt, answer.content])
        return [Segment(prompt, False), Segment(answer.content.removesuffix(eos) + eos, True)]

    def _plain_text(self, messages: Sequence[Message], tools: str, *, has_images: bool) -> str:
        prompt = _plain_prompt(messages, tools)
        if self.eye is None:
            return prompt
        marked = prompt.replace(IMAGE_MARK, self.eye.mark) if has_images and self.eye.mark else prompt
        return self.eye.plain(marked, str(self.tokenizer.bos_token) if self._spelling.start else "")

    def _assembled(self, draft: Draft, ids: Iterator[list[int]]) -> Rendered:
        filled = [[[(segment, next(ids)) for segment in sheet.segments] for sheet in side] for side in draft]
        for segment, piece in chain.from_iterable(chain.from_iterable(filled)):
            if segment.supervised and (unknown := self._spelling.unknown_in(segment.text, piece)):
                return unknown_character(unknown)
        sides = [
            tuple(
                joined(self._before(pieces[0][1]), pieces, sheet.pictures)
                for pieces, sheet in zip(side, sheets, strict=True)
            )
            for side, sheets in zip(filled, draft, strict=True)
        ]
        try:
            for example in chain(*sides):
                require_image_tokens(example.tokens, self.eye, example.images)
        except DataError as error:
            return Rendered(problem=error.problem, remedy=error.remedy)
        return Rendered(examples=sides[0], rejected=sides[1], num_tokens=max(len(e.tokens) for e in chain(*sides)))

    def _windows(self, text: str, ids: list[int], max_tokens: int) -> Rendered:
        """Plain text in examples that stand behind one another. What a window begins with has nothing before it that could predict it."""
        if unknown := self._spelling.unknown_in(text, ids):
            return unknown_character(unknown)
        eos = int(self.tokenizer.eos_token_id)
        tokens = (*self._spelling.start, *ids, *(() if ids[-1:] == [eos] else (eos,)))
        borders = list(range(0, len(tokens), max_tokens))
        if len(borders) > 1 and len(tokens) - borders[-1] == 1 and max_tokens > 2:
            borders[-1] -= 1  # a window of one token has nothing to learn
        windows = [tokens[start:end] for start, end in zip(borders, [*borders[1:], len(tokens)], strict=True)]
        examples = tuple(Example(window, (False, *(True,) * (len(window) - 1))) for window in windows)
        return Rendered(examples=examples, num_tokens=max(map(len, windows)))

    def _segment_ids(self, drafts: Sequence[Draft]) -> Iterator[list[int]]:
        """Of all segments, in order. What does not begin a text is read as the middle of one."""
        segments = [
            (at > 0, segment.text)
            for draft in drafts
            for side in draft
            for sheet in side
            for at, segment in enumerate(sheet.segments)
        ]
        return self._spelling.pieces(segments)

    def special_tokens_in(self, text: str) -> tuple[str, ...]:
        """What the tokenizer would read as a mark of the template instead of as text."""
        return tuple(dict.fromkeys(self._spelling.special.findall(text)))

    @cached_property
    def _templates(self) -> dict[bool, ChatTemplate]:
        """By whether there are tools: a model may have a template of its own for them."""
        eos = str(self.tokenizer.eos_token)
        variables = {
            **self.tokenizer.special_tokens_map,
            **TEMPLATE_OPTIONS,
            "strftime_now": _TODAY.strftime,
            **self.template_options,
        }
        sources = {
            has_tools: str(self.tokenizer.get_chat_template(tools=[] if has_tools else None))
            for has_tools in (False, True)
        }
        usual = ChatTemplate(
            sources[False], variables, eos, re.compile(f"(?:{self._spelling.marks.pattern})+"), self._spelling.special
        )
        return {False: usual, True: usual if sources[True] == sources[False] else replace(usual, source=sources[True])}

    def _chat(self, tools: str) -> ChatTemplate:
        return self._templates[bool(tools)]

    @property
    def _habits(self) -> Habits:
        if self.template == "plain":
            return Habits(True, "", str(self.tokenizer.eos_token), True, None)
        return self._chat("").habits

    @cached_property
    def _closing_text(self) -> str:
        """What stands between an answer and the first mark behind it."""
        return self._spelling.marks.split(self._habits.closing, maxsplit=1)[0]

    @cached_property
    def _last_marks(self) -> frozenset[int]:
        """Tokens that no answer goes on behind."""
        first = self._spelling.marks.search(self._habits.closing)
        return frozenset((*self.stop_tokens, *(self._spelling.ids([first.group()])[0] if first else ())))

    def sha256(self) -> str:
        """Equal hashes render equal prompts."""
        special: dict[str, Any] = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        identity = {
            "kind": self.template,
            "template": self.tokenizer.chat_template,
            "special": special,
            "start": self._spelling.start,
        }
        identity |= {"options": {**TEMPLATE_OPTIONS, **self.template_options}, "today": _TODAY.isoformat()}
        identity |= {} if self.eye is None else {"eye": self.eye.identity}
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def open_renderer(
    folder: Path | str,
    template: Literal["chat", "plain"],
    *,
    template_options: Mapping[str, Any] | None = None,
    revision: str = "main",
    eye: Eye | None = None,
) -> Renderer:
    """`eye`: of a model that sees; without it only text is rendered."""
    tokenizer = open_tokenizer(folder, revision=revision, sees=eye is not None)
    if template == "chat":
        require_template(tokenizer, folder)
    options = dict(template_options or {})
    if reserved := sorted(set(options) & set(_RESERVED)):
        raise DataError(
            f"data.template_options sets {', '.join(reserved)}, which the rows give",
            "take it out of data.template_options",
        )
    return Renderer(tokenizer, template, options, model_stops(folder, revision), eye)


def _plain_prompt(messages: Sequence[Message], tools: str) -> str:
    if tools or any(m.role == "tool" or m.tool_calls for m in messages):
        raise DataError("the plain template knows no tools", "use a model with a chat template")
    if [m.role for m in messages if m.role != "system"] != ["user"]:
        raise DataError(
            f"the plain template takes one prompt and one completion, this row has {len(messages) + 1} messages",
            "use a model with a chat template",
        )
    return "\n\n".join(m.content for m in messages)
