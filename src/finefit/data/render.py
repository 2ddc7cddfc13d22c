"""The one renderer: training, validation and generation get their text here, so a prompt is the same string and the same tokens in all of them.

A conversation becomes segments, each tokenised by itself: at inference the prompt ends where the answer begins, so no token may straddle that place.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finefit.data.rows import Message
from finefit.errors import DataError, ModelError

_TODAY = date(2024, 7, 26)
"""For templates that write the date (Llama 3.2, gpt-oss): a prompt shall be the same tomorrow. Llama's own fallback."""
_SETTINGS: dict[str, Any] = {"enable_thinking": False, "strftime_now": _TODAY.strftime}
"""Rows hold answers without reasoning, so templates that know two modes (Qwen3, Nemotron) open the turn in the one without."""


@dataclass(frozen=True, slots=True)
class Segment:
    text: str
    supervised: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A row as the model sees it; it ends with an answer's end token."""

    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Renderer:
    tokenizer: PreTrainedTokenizerBase
    template: Literal["chat", "plain"]

    @property
    def pad(self) -> int:
        """Padding is never seen nor supervised, so any token will do where the tokenizer names none."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(pad if pad is not None else eos)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What stands before the answer, the opening of the assistant's turn included."""
        if self.template == "plain":
            return "".join(m.content for m in messages)
        return self._written(messages, opening=True)

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        tokens = self._start() + self._tokens(self.prompt_text(messages))
        if not tokens:
            raise DataError("the prompt is empty, so there is nothing to answer to", "give the row a prompt")
        return tokens

    def example(self, messages: Sequence[Message], *, num_given: int = 0) -> Example:
        """Every assistant turn after the given messages is supervised, its end included; nothing else is."""
        tokens, supervised = self._start(), [False] * len(self._start())
        for segment in self.segments(messages, num_given):
            piece = self._tokens(segment.text)
            tokens += piece
            supervised += [segment.supervised] * len(piece)
        return Example(tuple(tokens), (False, *supervised[1:]))  # nothing stands before the first token that could predict it

    def segments(self, messages: Sequence[Message], num_given: int = 0) -> list[Segment]:
        """Prompt and answer by turns; the last one is an answer."""
        if self.template == "plain":
            return self._plain_segments(messages)
        segments, done, whole = [], "", ""
        for at, message in enumerate(messages):
            if at < num_given or message.role != "assistant":
                continue
            prompt = self.prompt_text(messages[:at])
            if not prompt.startswith(whole):
                raise DataError(
                    f"the chat template renders what stands before message {at + 1} differently when more follows",
                    "give the conversation as one row of `prompt` and `completion` per answer",
                )
            whole = self._written(messages[: at + 1], opening=False)
            turn = self._turn(prompt, whole, message.content)
            segments += [Segment(prompt[len(done) :], False), Segment(turn, True)]
            done = prompt + turn
        return segments

    def _plain_segments(self, messages: Sequence[Message]) -> list[Segment]:
        if len(messages) != 2:
            raise DataError(f"the plain template takes one prompt and one completion, this row has {len(messages)} messages")
        eos = str(self.tokenizer.eos_token)
        return [Segment(messages[0].content, False), Segment(messages[1].content.removesuffix(eos) + eos, True)]

    def _written(self, messages: Sequence[Message], *, opening: bool) -> str:
        """`opening`: with the opening of the assistant's turn."""
        try:
            return str(self.tokenizer.apply_chat_template(_dicts(messages), tokenize=False, add_generation_prompt=opening, **_SETTINGS))
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses this conversation: {error}",
                "change the messages to what the template takes: some know no system role, or want user and assistant by turns",
            ) from None

    def _turn(self, prompt: str, whole: str, answer: str) -> str:
        """What the template writes for an answer, to the end token. A line break may follow there; generation never gets that far."""
        answer, eos = answer.strip(), str(self.tokenizer.eos_token)  # some templates trim
        before, found, after = whole.removeprefix(prompt).partition(answer)
        if not whole.startswith(prompt) or not found or before.strip():
            written = whole[len(prompt) :] if whole.startswith(prompt) else whole
            raise DataError(
                f"the chat template does not put the answer as it stands behind the prompt; after {prompt[-40:]!r} comes {written[-80:]!r}",
                "a model whose template does, or `data.template: plain`, can be trained on these rows",
            )
        end = after.find(eos)
        if end < 0:
            raise DataError(
                f"the chat template ends an answer without {eos!r}, so the model would never learn to stop",
                "use a tokenizer whose eos_token is the one that its chat template writes after an answer",
            )
        return before + answer + after[: end + len(eos)]

    def _start(self) -> list[int]:
        """Chat templates write their own first token; plain text gets the tokenizer's, where it adds one."""
        first = self.tokenizer("")["input_ids"][:1] if self.template == "plain" else []
        return list(first) if first == [self.tokenizer.bos_token_id] else []

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sha256(self) -> str:
        """Equal hashes render equal prompts."""
        special: dict[str, Any] = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        identity = {"kind": self.template, "template": self.tokenizer.chat_template, "special": special, "start": self._start()}
        identity |= {"thinking": _SETTINGS["enable_thinking"], "today": _TODAY.isoformat()}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def open_renderer(folder: Path | str, template: Literal["chat", "plain"], *, revision: str = "main") -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {folder} has no eos_token, so the model could not learn to stop",
            "set eos_token in tokenizer_config.json",
        )
    if template == "chat" and not tokenizer.chat_template:
        raise ModelError(
            f"{folder} has no chat template",
            "choose: `data.template: plain` trains on prompt + completion + end token as they stand; or take an instruct model, which has one",
        )
    return Renderer(tokenizer, template)


def _dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]
