"""Seeded strings that are hard on a tokenizer: scripts, marks, markers, control characters."""

# ruff: noqa: RUF001, RUF005 (texts of many scripts, one kind per line)

from __future__ import annotations

import random

FRAGMENTS = (
    [
        "the",
        " quick",
        "Brown",
        "x",
        "a1",
        "don't",
        " I'm",
        "naïve",
        "Straße",
        "cafe\u0301",
        "Ω",
        "ñ",
    ]
    + [
        "深度",
        "求索",
        "龥",
        "〇",
        "漢字",
        "ひらがな",
        "カタカナ",
        "・",
        "한국어",
        "ﾊﾝｶｸ",
        "、",
        "。",
    ]
    + ["مرحبا", "שלום", "ก็ได้", "नमस्ते", "ไทย", "বাংলা", "\u0301", "\u0300\u0323", "\u20dd"]
    + [
        "👩\u200d🚀",
        "🇩🇪",
        "👍🏽",
        "🌕",
        "❤\ufe0f",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u202e",
        "𝔘",
        "𠮷",
    ]
    + ["0", "12", "1234567", "٣٤", "Ⅷ", "½", "²", "１２", "3.14", "48,310.55", "0x1F", "৪২"]
    + ["<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
    + ["<｜", "｜>", "▁", "<|EOT|>", "<dsml:", "<｜/table>｜", "<｜place▁holder▁no▁5｜>"]
    + [
        "for(i=0;i<10;++i){\n",
        "\tsum+=a[i]>>2;\n}",
        "==",
        "//",
        "!",
        "...",
        "—",
        "#include",
        "$_",
        "`",
    ]
    + [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\xa0", "\u3000"]
    + ["\u2028", "\u1680", "\x00", "\x01", "\x1b[0m", "\x1f", "\x7f", "\x9f", "\ud7ff", "\ue000"]
    + ["\ufffd", "\uffff", "\U0010ffff", "Ā", "Ġ", "Ċ", "ď"]
)


def hostile_strings(count: int, seed: int) -> list[str]:
    """Strings of up to 40 fragments and random characters; no lone surrogates."""
    draw = random.Random(seed)
    strings = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randrange(1, 40)):
            if draw.random() < 0.15:
                code = draw.randrange(0x110000)
                parts.append(chr(code) if not 0xD800 <= code < 0xE000 else "?")
            else:
                parts.append(draw.choice(FRAGMENTS) * draw.choice((1, 1, 1, 1, 2, 7)))
        strings.append("".join(parts))
    return strings
