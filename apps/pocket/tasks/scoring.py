"""Exact scorers: a reply against the expected answer, as a number of 0..1."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping

from edgedsv4.errors import ConfigError
from pocket.tasks.lexicon import listed

_WORD = re.compile(r"[a-z0-9]+")
_NUMBER = re.compile(r"-?\d+")
_STOP_WORDS = frozenset(
    listed(
        """a an the of or and to in is it that as by for with be on are at from which its not used
    means something someone"""
    )
)


def exact(reply: str, expected: str) -> float:
    """Whether the reply is the answer, apart from space around it."""
    return float(reply.strip() == expected.strip())


def contains(reply: str, expected: str) -> float:
    """Whether the answer occurs in the reply, whatever the case."""
    return float(expected.strip().lower() in reply.lower())


def number(reply: str, expected: str) -> float:
    """Whether the last number of the reply is the expected one."""
    found = _NUMBER.findall(reply.replace(",", ""))
    return float(bool(found) and int(found[-1]) == int(expected))


def words(reply: str, expected: str) -> float:
    """Whether the reply has the same words in the same order and case."""
    return float(reply.replace(",", " ").split() == expected.replace(",", " ").split())


def mentions(reply: str, expected: str) -> float:
    """The share of the words asked for (separated by `|`) that the reply holds."""
    asked = [word for word in expected.split("|") if word]
    found = sum(re.search(rf"\b{re.escape(word)}\b", reply) is not None for word in asked)
    return found / len(asked) if asked else float(bool(reply.strip()))


def json_value(reply: str, expected: str) -> float:
    """Whether the reply is JSON with the expected value."""
    try:
        return float(json.loads(reply) == json.loads(expected))
    except ValueError:
        return 0.0


def content_f1(reply: str, expected: str) -> float:
    """F1 of the content words: harmonic mean of precision and recall, as multisets."""
    left, right = (Counter(_content_words(text)) for text in (reply, expected))
    shared = sum((left & right).values())
    return 2 * shared / (left.total() + right.total()) if shared else 0.0


def tool_call(reply: str, expected: str) -> float:
    """Whether the reply's calls, as JSON `[[name, arguments], …]`, are the expected ones."""
    return json_value(reply, expected)


def _content_words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


SCORERS: Mapping[str, Callable[[str, str], float]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "words": words,
    "mentions": mentions,
    "json": json_value,
    "f1": content_f1,
    "tool_call": tool_call,
}


def score(scorer: str, reply: str, expected: str) -> float:
    """Judge a reply.

    Args:
        scorer: a key of `SCORERS`.
        reply: text of the reply; for `tool_call` its calls as JSON `[[name, arguments], …]`.
        expected: from the document's check.

    Raises:
        ConfigError: an unknown scorer.
    """
    if scorer not in SCORERS:
        raise ConfigError(f"scorer must be one of {', '.join(SCORERS)}, found {scorer!r}")
    return SCORERS[scorer](reply, expected)
