"""Fold text to printable ASCII, so that the small vocabulary is spent on words."""

from __future__ import annotations

import html
import re
import unicodedata

_TABLE = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u2032": "'", "\u0060": "`",
        "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u00ab": '"', "\u00bb": '"', "\u2033": '"',
        "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "--", "\u2015": "--",
        "\u2212": "-", "\u2026": "...", "\u2022": "*", "\u00b7": "", "\u00d7": "x", "\u00f7": "/",
        "\u00a0": " ", "\u200b": "", "\ufeff": "", "\u00ad": "", "\u00df": "ss", "\u00e6": "ae",
        "\u00c6": "Ae", "\u0153": "oe", "\u0152": "Oe", "\u00f8": "o", "\u00d8": "O",
        "\u0131": "i", "\u0142": "l", "\u0141": "L", "\u00f0": "d", "\u00de": "Th", "\u00fe": "th",
        "\u0259": "a", "\u02bb": "'", "\u02bc": "'", "\u00b0": " degrees", "\u00bd": " 1/2",
        "\u00a3": "GBP ", "\u20ac": "EUR ", "\u2122": "(TM)", "\u00a9": "(C)", "\u00ae": "(R)",
    }
)  # fmt: skip
_UNPRINTABLE = re.compile(r"[^\n -~]")
_TAG = re.compile(r"<[^>]*>")
_BREAK = re.compile(r"<br[^>]*>|</p>", re.IGNORECASE)


def ascii_text(text: str) -> str:
    """The text in printable ASCII and newlines: letters lose their marks, the rest its place."""
    text = text.replace("\r\n", "\n").replace("\t", "    ").translate(_TABLE)
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
    return _UNPRINTABLE.sub("", text)


def one_line(text: str) -> str:
    """The text on one line, in ASCII, with single spaces."""
    return " ".join(ascii_text(text).split())


def plain_html(text: str) -> str:
    """The text of a piece of HTML, in ASCII; a line break becomes a newline."""
    return ascii_text(html.unescape(_TAG.sub("", _BREAK.sub("\n", text)))).strip()


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs of running text, each on one line."""
    return [line for part in re.split(r"\n\s*\n", text) if (line := one_line(part))]
