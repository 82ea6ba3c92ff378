"""JSON objects from a description in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw
from pocket.tasks.lexicon import ANIMALS, CODE_WORDS, COLORS, FOODS, NAMES
from pocket.tasks.tools import CITIES

_FIELDS: Mapping[str, Callable[[Draw], object]] = {
    "name": lambda draw: draw.pick(NAMES),
    "age": lambda draw: draw.integer(1, 99),
    "city": lambda draw: draw.pick(CITIES),
    "color": lambda draw: draw.pick(COLORS),
    "pet": lambda draw: draw.pick(ANIMALS),
    "food": lambda draw: draw.pick(FOODS),
    "count": lambda draw: draw.integer(0, 999),
    "word": lambda draw: draw.pick(CODE_WORDS),
    "ready": lambda draw: draw.pick((True, False)),
    "tags": lambda draw: draw.sample(CODE_WORDS, draw.integer(1, 3)),
}
_ASKS = ("Give me JSON with {f}.", "Write JSON with {f}.", "I need a JSON object with {f}.",
         "Make a JSON object: {f}.", "Return JSON with {f}.")  # fmt: skip


def json_document(rng: Random) -> Document:
    """One to three objects of one to five fields."""
    draw = Draw(rng)
    thinks = draw.chance(0.25)
    turns, checks = [], {}
    for i in range(draw.integer(1, 3)):
        names = draw.sample(tuple(_FIELDS), draw.integer(1, 5))
        value = {name: _FIELDS[name](draw) for name in names}
        parts = [f"{name} {_spoken(item)}" for name, item in value.items()]
        said = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
        answer = json.dumps(value)
        turns.append((draw.pick(_ASKS).format(f=said), answer))
        checks[2 * i + 1] = Check(answer, "json")
    return Document(
        task="json",
        messages=chat(turns, reasoning="I write one JSON object." if thinks else ""),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
    )


def _spoken(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
