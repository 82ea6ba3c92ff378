"""Chat from stored records: facts about countries, small talk, puzzles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw

_FACTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "capital": (("What is the capital of {c}?", "Name the capital of {c}.",
                 "Which city is the capital of {c}?"), "The capital of {c} is {v}."),
    "languages": (("What languages are spoken in {c}?", "Which languages do people speak in {c}?"),
                  "In {c} people speak {v}."),
    "population": (("What is the population of {c}?", "How many people live in {c}?"),
                   "About {v} people live in {c}."),
    "location": (("Where is {c}?", "Where does {c} lie?"), "{c} lies in {v}."),
    "area": (("What is the area of {c}?", "How big is {c}?"), "The area of {c} is {v}."),
    "climate": (("What is the climate of {c}?", "How is the climate in {c}?"),
                "The climate of {c} is {v}."),
    "terrain": (("What does the land of {c} look like?", "What is the terrain of {c}?"),
                "The terrain of {c} is {v}."),
    "resources": (("What natural resources does {c} have?",), "{c} has {v}."),
    "government": (("What form of government does {c} have?", "How is {c} governed?"),
                   "The government of {c} is: {v}."),
    "independence": (("When did {c} become independent?",), "Independence of {c}: {v}."),
    "holiday": (("What is the national holiday of {c}?",), "The national holiday of {c} is {v}."),
    "colors": (("What are the national colors of {c}?",), "The national colors of {c} are {v}."),
    "symbol": (("What is the national symbol of {c}?",), "The national symbol of {c} is {v}."),
    "internet code": (("What is the internet code of {c}?",), "The internet code of {c} is {v}."),
    "nationality": (("What do you call someone from {c}?",), "Someone from {c} is {v}."),
    "religions": (("What are the religions of {c}?",), "The religions of {c} are {v}."),
    "industries": (("What are the industries of {c}?",), "The industries of {c} are {v}."),
    "crops": (("What does {c} grow?", "What are the farm products of {c}?"), "{c} produces {v}."),
    "coastline": (("How long is the coast of {c}?",), "The coast of {c} is {v} long."),
    "highest point": (("What is the highest point of {c}?",), "The highest point of {c} is {v}."),
    "neighbors": (("What are the neighbors of {c}?", "Which countries border {c}?"),
                  "The neighbors of {c} are {v}."),
}  # fmt: skip
_FAVORITES = ("capital", "languages", "location", "neighbors")


def factbook_document(
    rng: Random, countries: Mapping[str, Mapping[str, str]], *, only: Sequence[str] = ()
) -> Document:
    """One to four questions about countries.

    Args:
        rng: seeded source.
        countries: country -> fact -> value.
        only: ask one question, for one of these facts.
    """
    draw = Draw(rng)
    thinks = not only and draw.chance(0.2)
    names = tuple(countries)
    turns, checks = [], {}
    for i in range(1 if only else draw.integer(1, 4)):
        country = draw.pick(names)
        facts = countries[country]
        kinds = [fact for fact in only or (*_FAVORITES, *facts) if fact in facts] or list(facts)
        fact = draw.pick(kinds)
        asks, answer = _FACTS[fact]
        turns.append((draw.pick(asks).format(c=country), answer.format(c=country, v=facts[fact])))
        checks[2 * i + 1] = Check(facts[fact], "contains")
    return Document(
        task="factbook",
        messages=chat(turns, reasoning="I recall the facts about the country." if thinks else ""),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )


def small_talk_document(rng: Random, conversations: Sequence[Sequence[str]]) -> Document:
    """One or two stored conversations after each other."""
    draw = Draw(rng)
    turns = []
    for conversation in draw.sample(conversations, min(len(conversations), draw.integer(1, 2))):
        turns += list(zip(conversation[::2], conversation[1::2], strict=True))
    checks = {2 * i + 1: Check(answer) for i, (_, answer) in enumerate(turns)}
    thinks = draw.chance(0.2)
    return Document(
        task="small-talk",
        messages=chat(turns, reasoning="This is small talk." if thinks else ""),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )


def puzzle_document(rng: Random, puzzles: Sequence[tuple[str, str, str]]) -> Document:
    """One stored puzzle and its answer."""
    draw = Draw(rng)
    _, question, answer = draw.pick(puzzles)
    return Document(
        task="puzzles",
        messages=chat([(question, answer)]),
        checks={1: Check(answer)},
        nats=draw.nats,
        floor_is_exact=False,
    )
