"""A JSON text, value by value, without holding more of it in memory than one value needs."""

import json
import re
from typing import Any, TextIO

_CHUNK = 1 << 20
"""Characters that are read at a time."""
_DECODER = json.JSONDecoder()
_OPEN_NUMBERS = frozenset(("", ".", "e", "E", "e+", "e-", "E+", "E-"))
"""What may stand between a number and the end of the buffer while the number goes on."""
_BLANK = re.compile(r"[ \t\r\n]*")


class JsonStream:
    """Decodes one value after the other through a buffer that slides along the file."""

    def __init__(self, handle: TextIO) -> None:
        self._handle = handle
        self._buffer = ""
        self._at = 0
        self._passed = 0
        self._ended = False

    @property
    def position(self) -> int:
        """In characters, from 0."""
        return self._passed + self._at

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            blank = _BLANK.match(self._buffer, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._grow()

    def skip(self) -> None:
        self._at += 1

    def value(self) -> tuple[Any, str]:
        """The next value, and its text."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_go_on(error):
                    self._at = len(self._buffer) if _is_open_string(error) else error.pos
                    raise
            else:
                if self._ended or self._buffer[end : end + 3] not in _OPEN_NUMBERS:
                    text = self._buffer[self._at : end]
                    self._at = end
                    return value, text
            self._grow()

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether more text could mend this; without the question a fault at the start would read the whole file into memory."""
        longest_token = len(r"\ud83d\ude00")
        return _is_open_string(error) or error.pos >= len(self._buffer) - longest_token

    def _grow(self) -> None:
        """At least doubles what is left, so that a long value is not decoded again for every chunk."""
        more = self._handle.read(max(_CHUNK, len(self._buffer) - self._at))
        self._buffer = self._buffer[self._at :] + more
        self._passed += self._at
        self._at = 0
        self._ended = not more


def _is_open_string(error: json.JSONDecodeError) -> bool:
    """Whether a string reaches to the end of the text; the error's place is where it begins."""
    return error.msg.startswith("Unterminated string")
