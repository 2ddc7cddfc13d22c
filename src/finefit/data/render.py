"""The one renderer: training, validation and generation get their text here, so a prompt is the same string and the same tokens in all of them.

A conversation becomes segments, each tokenised by itself: at inference the prompt ends where the answer begins, so no token may straddle that place.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finefit.data.rows import Message
from finefit.errors import DataError, ModelError


@dataclass(frozen=True, slots=True)
class Segment:
    text: str
    supervised: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A row as the model sees it, up to its last supervised token."""

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
        return str(self.tokenizer.apply_chat_template(_dicts(messages), tokenize=False, add_generation_prompt=True))

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        return self._start() + self._tokens(self.prompt_text(messages))

    def example(self, messages: Sequence[Message]) -> Example:
        """Every assistant turn is supervised, its end included; nothing else is."""
        tokens, supervised = self._start(), [False] * len(self._start())
        for segment in self.segments(messages):
            piece = self._tokens(segment.text)
            flags = self._up_to_turn_end(piece) if segment.supervised else [False] * len(piece)
            tokens += piece
            supervised += flags
        if not tokens or not any(supervised):
            raise DataError("the row has no supervised token")
        end = len(supervised) - supervised[::-1].index(True)
        return Example(tuple(tokens[:end]), tuple(supervised[:end]))

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        if self.template == "plain":
            return self._plain_segments(messages)
        segments, done = [], ""
        for at, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self.prompt_text(messages[:at])
            whole = str(self.tokenizer.apply_chat_template(_dicts(messages[: at + 1]), tokenize=False))
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise DataError(
                    f"the chat template renders message {at + 1} differently when more follows, so the answer cannot be told from the prompt",
                    "give the conversation as one row per answer",
                )
            segments += [Segment(prompt[len(done) :], False), Segment(whole[len(prompt) :], True)]
            done = whole
        return segments

    def _plain_segments(self, messages: Sequence[Message]) -> list[Segment]:
        if len(messages) != 2:
            raise DataError(f"the plain template takes one prompt and one completion, this row has {len(messages)} messages")
        return [Segment(messages[0].content, False), Segment(messages[1].content + self.tokenizer.eos_token, True)]

    def _start(self) -> list[int]:
        """Chat templates write their own first token; plain text gets the tokenizer's, where it adds one."""
        if self.template == "chat" or not getattr(self.tokenizer, "add_bos_token", False):
            return []
        return [self.tokenizer.bos_token_id]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _up_to_turn_end(self, piece: Sequence[int]) -> list[bool]:
        """The template may write a line break after the end of the turn; generation never gets that far."""
        eos = self.tokenizer.eos_token_id
        if eos not in piece:
            raise DataError(
                f"the chat template ends an answer without {self.tokenizer.eos_token!r}, so the model would never learn to stop",
                "use a tokenizer whose eos_token is the one that its chat template writes after an answer",
            )
        last = len(piece) - 1 - list(piece)[::-1].index(eos)
        return [at <= last for at in range(len(piece))]

    def sha256(self) -> str:
        """Equal hashes render equal prompts."""
        special: dict[str, Any] = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        identity = {"kind": self.template, "template": self.tokenizer.chat_template, "special": special, "start": self._start()}
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
