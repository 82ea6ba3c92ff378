"""Texts from outside, made safe to draw: no control characters, one kind of line end.

The idea: what a terminal or the Markdown parser would take for an order is shown as a picture of
itself, so that nothing vanishes and nothing is obeyed.
"""

from __future__ import annotations

from typing import Final

_PICTURES: Final = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x0D: None,
    # Lines end here for Python and not for Markdown, which counts them differently then.
    0x2028: 0x0A,
    0x2029: 0x0A,
    # Directions would reorder the words around the text.
    **dict.fromkeys((0x202A, 0x202B, 0x202C, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068, 0x2069)),
}


def drawable(text: str) -> str:
    """The text with control characters replaced; line feeds and tabs stay."""
    if text.isprintable():
        return text
    return text.translate(_PICTURES).encode("utf-8", "replace").decode("utf-8")
