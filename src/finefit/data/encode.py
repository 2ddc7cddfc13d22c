"""A model's tokenizer: encodes and decodes text piece by piece, so that no token straddles two pieces, and makes long
prompts fit by cutting the middle out of their longest text, at token boundaries. Images are never cut."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from finefit.data.rows import IMAGE_PLACEHOLDER, Message
from finefit.errors import DataError, ModelError
from finefit.facts.files import read_object, reading_model, require_small_texts

GENERATION_CONFIG = "generation_config.json"
Span = tuple[int, int]
"""The start and end character of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a row may be, what happens to a longer one, and which of its turns are trained on."""

    max_tokens: int
    too_long: Literal["error", "drop", "cut_prompt"]
    turns: Literal["all", "last"]


def open_tokenizer(folder: Path | str, *, revision: str = "main", has_vision: bool = False) -> PreTrainedTokenizerBase:
    """`has_vision`: the chat template may be stored only with the processor."""
    require_small_texts(Path(folder))
    with reading_model(f"the tokenizer of {folder}", "put all of the model's tokenizer files there"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, revision=revision)
        eos = tokenizer.eos_token_id
        # settings of a wrong type only cause errors when they are used
        tokenizer.decode(tokenizer("a b")["input_ids"], clean_up_tokenization_spaces=False)
    beside = Path(folder) / "chat_template.json"
    if has_vision and beside.is_file() and not beside.with_suffix(".jinja").is_file():
        template = read_object(beside).get("chat_template")
        tokenizer.chat_template = (template if isinstance(template, str) else "") or tokenizer.chat_template
    if eos is None:
        problem = f"the tokenizer of {folder} has no eos_token, so the model could not learn to stop"
        raise ModelError(problem, "set eos_token in tokenizer_config.json")
    return tokenizer


def require_template(tokenizer: PreTrainedTokenizerBase, folder: Path | str) -> None:
    if not tokenizer.chat_template:
        plain = "`data.template: plain` trains on prompt + completion + end token as they are"
        remedy = f"choose: {plain}; or take an instruct model, which has one"
        raise ModelError(f"{folder} has no chat template", remedy)
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        problem = f"{folder} has the chat templates {names}, and none is called default"
        raise ModelError(problem, "name the one to use `default`")


def model_stops(folder: Path | str, revision: str) -> tuple[int, ...]:
    file = Path(folder) / GENERATION_CONFIG
    if Path(folder).is_dir() and not file.is_file():
        return ()
    with reading_model(file):
        try:
            stops = GenerationConfig.from_pretrained(folder, revision=revision).eos_token_id
        except OSError:  # a model on the hub may have no generation config
            if Path(folder).is_dir():
                raise
            return ()
        found = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
    if odd := [stop for stop in found if not isinstance(stop, int)]:
        raise ModelError(f"{file}: eos_token_id is {odd[0]!r}, not the number of a token", "write its number there")
    return found


@dataclass(frozen=True)
class TextEncoder:
    tokenizer: PreTrainedTokenizerBase

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Returns the tokens of each text alone, without the special tokens that the tokenizer would add around it."""
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()  # a tokenizer's file may enable both
        backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def pieces(self, pieces: Sequence[tuple[bool, str]]) -> Iterator[list[int]]:
        """Returns the tokens of each text. The flag before a text says whether it continues another text."""
        guard, num_guard = self._guard
        ids = self.ids([guard + text if is_inner else text for is_inner, text in pieces])
        if not num_guard:
            return iter(ids)
        return (piece[num_guard:] if is_inner else piece for (is_inner, _), piece in zip(pieces, ids, strict=True))

    def decoded(self, tokens: Sequence[int]) -> str:
        """Decodes the tokens as the middle of a text."""
        guard, size = self._guard
        before = self.ids([guard])[0] if size else []
        guarded, alone = (
            str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for ids in ([*before, *tokens], before)
        )
        return guarded.removeprefix(alone)

    @cached_property
    def _guard(self) -> tuple[str, int]:
        """A text after which the tokenizer adds no leading blank to a word, and its number of tokens."""
        joints = (("assistant\n", "Paris is"), ("[/INST]", " Paris is"))
        for guard in ("", str(self.tokenizer.eos_token), "\n"):
            size = len(self.ids([guard])[0])
            pieces = [self.ids([left + right, left, guard + right]) for left, right in joints]
            if all(whole == left + right[size:] for whole, left, right in pieces):
                return guard, size
        return "", 0

    def spans(self, text: str) -> Sequence[Span]:
        """Returns the span of each token; of each character if the tokenizer does not report spans."""
        if not self.tokenizer.is_fast:
            return [(at, at + 1) for at in range(len(text))]
        spans: list[Span] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
        return spans

    def fit(
        self, messages: Sequence[Message], length: Callable[[Sequence[Message]], int], max_tokens: int, has_images: bool
    ) -> tuple[Message, ...] | None:
        """Returns the messages, cut until `length` is at most `max_tokens`; None if they do not fit even with one token
        of each text. A message is one text or, if it has image placeholders, the texts between them.

        The length is measured again after every cut, because the tokens on both sides of a cut may merge differently.
        Each cut removes characters, so the loop ends."""
        kept = list(messages)
        texts = [m.content.split(IMAGE_PLACEHOLDER) if has_images else [m.content] for m in messages]
        while (excess := length(kept) - max_tokens) > 0:
            found = self._longest(kept, texts)
            if found is None:
                return None
            at, part = found
            texts[at][part] = without_middle(texts[at][part], self.spans(texts[at][part]), excess)
            kept[at] = replace(kept[at], content=IMAGE_PLACEHOLDER.join(texts[at]))
        return tuple(kept)

    def _longest(self, messages: Sequence[Message], texts: Sequence[Sequence[str]]) -> tuple[int, int] | None:
        """Returns the indices of the message and of its part that hold the longest text of a user or a tool, else of
        the system; an answer is never cut."""
        for roles in (("user", "tool"), ("system",)):
            chosen = [at for at, message in enumerate(messages) if message.role in roles]
            parts = [(at, part, text) for at in chosen for part, text in enumerate(texts[at]) if len(text) > 1]
            size, at, part = max(((len(self.spans(text)), -at, -part) for at, part, text in parts), default=(0, 0, 0))
            if size > 1:
                return -at, -part
        return None

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The first token of a plain text, if the tokenizer adds one."""
        first = tuple(self.tokenizer("")["input_ids"][:1])
        return first if first == (self.tokenizer.bos_token_id,) else ()

    @cached_property
    def added(self) -> re.Pattern[str]:
        return _any_of(map(str, self.tokenizer.added_tokens_decoder.values()))

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Matches the added tokens that are special, not ordinary text."""
        return _any_of(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)

    def unknown_in(self, text: str, ids: list[int]) -> str:
        """Returns a character that the model would see as the unknown token; empty if there is none."""
        token, spelled = self._unknown_token
        if token not in ids or spelled in text:
            return ""
        return next((character for character in text if token in self.ids([character])[0]), text)

    @cached_property
    def _unknown_token(self) -> tuple[int | None, str]:
        return self.tokenizer.unk_token_id, str(self.tokenizer.unk_token)


def require_characters(texts: Iterable[str]) -> None:
    """Tokenizers reject half of a surrogate pair, and would refuse the whole batch because of it."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        problem = "the text holds half of a surrogate pair, which is not a character"
        raise DataError(problem, "write the file again in UTF-8") from None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest token that fits. Blanks are text, even if a vocabulary lists them as added tokens."""
    return re.compile(_choice(sorted({text for text in tokens if text.strip()})) or r"(?!)")


def _choice(texts: Sequence[str]) -> str:
    """Shared prefixes are written once: Gemma adds 6,000 tokens, which would otherwise all be tried at every `<`."""
    longer = groupby((text for text in texts if text), key=lambda text: text[0])
    choices: list[str] = [re.escape(first) + _choice([text[1:] for text in group]) for first, group in longer]
    if len(choices) == 1 and "" not in texts:
        return choices[0]
    return f"(?:{'|'.join(choices)}){'?' if '' in texts else ''}" if choices else ""


def without_middle(text: str, spans: Sequence[Span], excess: int) -> str:
    """Removes `excess` tokens from the middle, but keeps at least one. `spans` are those of `text`."""
    num_kept = max(len(spans) - excess, 1)
    num_head = (num_kept + 1) // 2
    tail_at = len(spans) - (num_kept - num_head)
    head_end = _border(spans, num_head, inner=0)
    tail_start = _border(spans, tail_at, inner=1) if tail_at < len(spans) else len(text)
    shorter = text[:head_end] + text[tail_start:] or text[:1]
    middle = len(text) // 2
    return shorter if len(shorter) < len(text) else text[:middle] + text[middle + 1 :]


def _border(spans: Sequence[Span], at: int, *, inner: int) -> int:
    """Returns the character position between tokens at - 1 and at. If both share a character, the outer side is
    returned, so that the character is removed."""
    left, right = spans[at - 1], spans[at]
    if left[1] <= right[0]:
        return left[1] if inner == 0 else right[0]
    return left[0] if inner == 0 else right[1]
