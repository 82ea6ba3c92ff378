"""ChatterBot's English conversations, without the topics a small model should keep out of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pocket.corpus.ascii_text import one_line

PACKAGE = "chatterbot-corpus"
_MULTI_TURN = ("conversations", "greetings")
# Left out: politics, health, money, psychology, emotion, ai, gossip (about persons, or claims to
# be one), botprofile (another bot's identity), coding (long listings).
_QUESTION_ANSWER = (
    "computers",
    "food",
    "history",
    "humor",
    "literature",
    "movies",
    "science",
    "sports",
    "tech_support",
    "trivia",
)
_BOT_NAMES = re.compile(r"\b(robot|bot|chatterbot|program(?:med)?|Salvius|Ron)\b", re.IGNORECASE)


def records(root: Path) -> Iterator[dict[str, object]]:
    """One record per conversation: its topic and its turns, the user's first."""
    folder = root / "chatterbot_corpus/data/english"
    seen = set()
    for topic in (*_MULTI_TURN, *_QUESTION_ANSWER):
        for turns in conversations((folder / f"{topic}.yml").read_text("utf-8")):
            # Other topics list alternative answers to the first line.
            kept = turns if topic in _MULTI_TURN else turns[:2]
            kept = kept[: len(kept) // 2 * 2]
            key = tuple(kept)
            if kept and key not in seen and not _BOT_NAMES.search(" ".join(kept)):
                seen.add(key)
                yield {"topic": topic, "turns": kept}


def conversations(text: str) -> list[list[str]]:
    """The nested lists of a conversation file: `- - ` opens one, `  - ` adds a turn."""
    found: list[list[str]] = []
    for line in text.split("\nconversations:", 1)[1].splitlines():
        if line.startswith("- - "):
            found.append([line[4:]])
        elif line.startswith("  - ") and found:
            found[-1].append(line[4:])
        elif line.startswith("    ") and found:
            found[-1][-1] += " " + line.strip()
    return [[_unquoted(turn) for turn in turns] for turns in found]


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "'":
        text = text[1:-1].replace("''", "'")
    elif len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1].replace('\\"', '"')
    return one_line(text)
