"""The byte-level alphabet of GPT-2's BPE: each byte is written as one printable character.

Printable Latin-1 characters stand for themselves; the other 68 bytes take U+0100 and up, in order.
"""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

CHAR_OF_BYTE: dict[int, str] = {
    **{byte: chr(byte) for byte in _PRINTABLE},
    **{byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)},
}
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def alphabet_bytes(text: str) -> bytes:
    """The bytes a token stands for; text outside the alphabet stands for its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHAR[char] for char in text)
    except KeyError:
        return text.encode("utf-8", "replace")
