"""Bytes of tokens turned into text as they come, never printing half a character.

The pieces joined are exactly `bytes.decode("utf-8", "replace")` of all bytes, however they came.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Decodes one reply, token by token.

    A character whose bytes are not complete yet is held back; bytes that can never become a
    character read U+FFFD.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """Start a reply.

        Args:
            token_bytes: id -> the bytes to print for it; empty for a token that is not shown.
        """
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What was still held back, as U+FFFD; the decoder is ready for another reply then."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
