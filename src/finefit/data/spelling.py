"""Text as a tokenizer spells it, whoever wrote it: in tokens and back, piece by piece, so that no token straddles two of them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from finefit.data.budget import Span
from finefit.errors import DataError

_JOINTS = (("assistant\n", "Paris is"), ("[/INST]", " Paris is"))


@dataclass(frozen=True)
class Spelling:
    tokenizer: PreTrainedTokenizerBase

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Of each by itself, without what the tokenizer would put around it."""
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()  # a tokenizer's file may ask for both
        backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def pieces(self, pieces: Sequence[tuple[bool, str]]) -> Iterator[list[int]]:
        """Of each text, which is read as the middle of one where that is said before it."""
        guard, num_guard = self._guard
        ids = self.ids([guard + text if is_inner else text for is_inner, text in pieces])
        if not num_guard:
            return iter(ids)
        return (piece[num_guard:] if is_inner else piece for (is_inner, _), piece in zip(pieces, ids, strict=True))

    def decoded(self, tokens: Sequence[int]) -> str:
        """As the middle of a text."""
        guard, size = self._guard
        before = self.ids([guard])[0] if size else []
        guarded, alone = (
            str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for ids in ([*before, *tokens], before)
        )
        return guarded.removeprefix(alone)

    @cached_property
    def _guard(self) -> tuple[str, int]:
        """Some tokenizers write a blank before a text's first word; not so behind this text, of so many tokens."""
        for guard in ("", str(self.tokenizer.eos_token), "\n"):
            size = len(self.ids([guard])[0])
            pieces = [self.ids([left + right, left, guard + right]) for left, right in _JOINTS]
            if all(whole == left + right[size:] for whole, left, right in pieces):
                return guard, size
        return "", 0

    def spans(self, text: str) -> Sequence[Span]:
        """Of its tokens; of its characters where the tokenizer does not tell."""
        if not self.tokenizer.is_fast:
            return [(at, at + 1) for at in range(len(text))]
        spans: list[Span] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
        return spans

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The first token of a plain text, where the tokenizer adds one."""
        first = tuple(self.tokenizer("")["input_ids"][:1])
        return first if first == (self.tokenizer.bos_token_id,) else ()

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Tokens that were added to the vocabulary."""
        return _any_of(map(str, self.tokenizer.added_tokens_decoder.values()))

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Those of them that are no text."""
        return _any_of(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)

    def unknown_in(self, text: str, ids: list[int]) -> str:
        """A character that the tokenizer cannot write: the model would be taught the token for what is unknown in its place. Empty where there is
        none."""
        token, spelled = self._unknown_token
        if token not in ids or spelled in text:
            return ""
        return next((character for character in text if token in self.ids([character])[0]), text)

    @cached_property
    def _unknown_token(self) -> tuple[int | None, str]:
        return self.tokenizer.unk_token_id, str(self.tokenizer.unk_token)


def require_characters(texts: Iterable[str]) -> None:
    """Tokenizers take no half of a surrogate pair, and would refuse the whole batch for it."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise DataError(
            "the text holds half of a surrogate pair, which is no character", "write the file anew in UTF-8"
        ) from None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """The longest that fits. Blanks are text, even where a vocabulary counts them as added."""
    return re.compile(_choice(sorted({text for text in tokens if text.strip()})) or r"(?!)")


def _choice(texts: Sequence[str]) -> str:
    """Shared beginnings are written once: Gemma adds 6,000 tokens, and one after the other they would be tried at every `<`."""
    longer = groupby((text for text in texts if text), key=lambda text: text[0])
    choices: list[str] = [re.escape(first) + _choice([text[1:] for text in group]) for first, group in longer]
    if len(choices) == 1 and "" not in texts:
        return choices[0]
    return f"(?:{'|'.join(choices)}){'?' if '' in texts else ''}" if choices else ""
