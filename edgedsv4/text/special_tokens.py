"""The spellings of DeepSeek-V4's control tokens, each written once.

The bar is U+FF5C and the low line U+2581. Ids differ between vocabularies, so every token is looked
up by its text.
"""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

TASK_TOKENS: Mapping[str, str] = MappingProxyType(
    {
        name: f"<｜{name}｜>"
        for name in ("action", "query", "authority", "domain", "title", "read_url")
    }
)
"""Quick task -> the token that asks for it."""

REPLY_MARKUP = frozenset({THINK, END_THINK, DSML})
"""Added tokens a reply is built from: the reply parser needs them, so decoding never hides them."""

TURN_TOKENS = frozenset(
    {BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, LATEST_REMINDER, *TASK_TOKENS.values()}
)
"""Tokens that only structure a conversation; decoding hides them whatever their type."""
