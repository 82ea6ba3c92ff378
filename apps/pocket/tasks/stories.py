"""Short stories about a named animal, and questions on them.

The entropy floor is exact: every choice is drawn through `Draw`, and different choices give
different texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw
from pocket.tasks.lexicon import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    COLORS,
    FOODS,
    HOBBIES,
    NAMES,
    OBJECTS,
    PLACES,
)
from pocket.tasks.story_grammar import OPTIONAL, PLOTS, SLOTS

_BOYS = frozenset(BOYS)
_PLOTS = tuple(PLOTS)
_ASK = (
    "Tell me a story about {a}.",
    "Please tell me a story about {a}.",
    "Can you tell me a story about {a}?",
    "Write a short story about {a}.",
    "I want to hear a story about {a}.",
    "Tell a story about {a}, please.",
    "Make up a story about {a}.",
    "Story time! It should be about {a}.",
)
_ASK_ANY = ("Tell me a story.", "Please tell me a story.", "Can you tell me a story?",
            "Write a short story.", "I want to hear a story.", "Make up a story.")  # fmt: skip
_THOUGHTS = (
    "The user wants a story about {a}.",
    "A story about {a}. I need a start, a problem and a good end.",
    "I will write a short story about {a}.",
)
_FOLLOW_UP_THOUGHT = "The story tells it."


@dataclass(slots=True)
class Story:
    """One story: the words that fill it, its sentences, and what can be asked about it."""

    fields: dict[str, str]
    text: str
    questions: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Phrasings of a question, and its answer."""


def article(noun: str) -> str:
    """The noun with `a` or `an` before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def draw_hero(draw: Draw) -> dict[str, str]:
    """Name and animal of a hero, with the pronouns that go with the name."""
    name = draw.pick(NAMES)
    he, his, him = ("he", "his", "him") if name in _BOYS else ("she", "her", "her")
    return {"N": name, "n": draw.pick(ANIMALS), "he": he, "his": his, "him": him,
            "He": he.title(), "His": his.title()}  # fmt: skip


def draw_story(draw: Draw, hero: dict[str, str], *, held_out: bool = False) -> Story:
    """A story about a hero.

    Args:
        draw: source of the choices.
        hero: from `draw_hero`.
        held_out: use the patterns that training never shows, for every sentence.
    """
    plot = draw.pick(_PLOTS)
    order = ("opening", "likes", "weather", f"{plot}.problem", "meeting", "greeting",
             f"{plot}.action", "setback", f"{plot}.resolution", "feeling", "lesson",
             "ending")  # fmt: skip
    used = [name for name in order if name not in OPTIONAL or draw.chance(0.5)]
    patterns = [draw.pick(SLOTS[name].held_out if held_out else SLOTS[name].train) for name in used]
    text = " ".join(patterns)
    fields = _draw_fields(draw, hero, text)
    text = text.format_map(fields)
    return Story(fields, text, _questions(fields, plot, patterns))


def _draw_fields(draw: Draw, hero: dict[str, str], text: str) -> dict[str, str]:
    """The words for a pattern; only what it shows is drawn, so that the floor stays exact."""
    fields = dict(hero)
    fields["F"] = draw.pick([name for name in NAMES if name != hero["N"]])
    fields["f"] = draw.pick([animal for animal in ANIMALS if animal != hero["n"]])
    fields["j"] = article(draw.pick(ADJECTIVES))
    fields["p"] = draw.pick(PLACES)
    if "{q}" in text:
        fields["q"] = draw.pick([place for place in PLACES if place != fields["p"]])
    if "{o}" in text:
        fields["o"] = f"{draw.pick(COLORS)} {draw.pick(OBJECTS)}"
    if "{b}" in text:
        fields["b"] = draw.pick(HOBBIES)
    if "{d}" in text:
        fields["d"] = draw.pick(FOODS)
    if "{m}" in text:
        fields["m"] = draw.pick([food for food in FOODS if food != fields.get("d")])
    return fields


def _questions(
    fields: dict[str, str], plot: str, patterns: Sequence[str]
) -> list[tuple[tuple[str, ...], str]]:
    """Questions that the text of this story answers."""
    joined = " ".join(patterns)
    name, friend = fields["N"], fields["F"]
    questions = [
        ((f"What kind of animal is {name}?", f"What animal is {name}?"),
         f"{name} is {article(fields['n'])}."),
        (("Who is the story about?", "What is the name of the hero?"),
         f"It is about {name} the {fields['n']}."),
        ((f"Where does {name} live?", f"Where is the home of {name}?"),
         f"{name} lives near the {fields['p']}."),
        ((f"Whom did {name} meet?", "Who is the friend?",
          f"Who else is in the story besides {name}?"),
         f"{friend} the {fields['f']}."),
        ((f"What kind of animal is {friend}?", f"What animal is {friend}?"),
         f"{friend} is {article(fields['f'])}."),
    ]  # fmt: skip
    if "{o}" in joined:
        color, thing = fields["o"].split(" ")
        questions.append(((f"What color is the {thing}?", f"What is the color of the {thing}?"),
                          f"The {thing} is {color}."))  # fmt: skip
    if plot == "lost":
        questions.append(((f"What did {name} lose?", "What was lost?"),
                          f"{name} lost a {fields['o']}."))  # fmt: skip
    if "{d}" in joined:
        questions.append(((f"What does {name} like to eat?", f"What food does {name} like?"),
                          f"{name} likes {fields['d']}."))  # fmt: skip
    if "{b}" in joined and "{d}" in joined:
        questions.append(((f"What does {name} like to do?", f"What does {name} enjoy?"),
                          f"{name} likes to {fields['b']}."))  # fmt: skip
    if "{m}" in joined:
        questions.append((("What did the friends eat?", f"What did {name} and {friend} eat?"),
                          f"They ate {fields['m']}."))  # fmt: skip
    return questions


def _draw_topic(draw: Draw, hero: dict[str, str]) -> tuple[str, float]:
    """What the request tells about the hero, and the nats of what it leaves to the answer."""
    name_nats, animal_nats = math.log(len(NAMES)), math.log(len(ANIMALS))
    about = draw.weighted(("both", "animal", "name", "any"), (6, 2, 1, 1))
    if about == "both":
        return f"{article(hero['n'])} named {hero['N']}", 0.0
    if about == "animal":
        return article(hero["n"]), name_nats
    if about == "name":
        return hero["N"], animal_nats
    return "", name_nats + animal_nats


def story_document(rng: Random, *, held_out: bool = False) -> Document:
    """A request, the story, and up to three questions on it.

    Args:
        rng: seeded source.
        held_out: use the held-out patterns.
    """
    draw = Draw(rng)
    hero = draw_hero(draw)
    topic, hidden_nats = _draw_topic(draw, hero)
    question = draw.pick(_ASK).format(a=topic) if topic else draw.pick(_ASK_ANY)
    thinks = draw.chance(0.25)
    count = draw.weighted((0, 1, 2, 3), (2, 3, 3, 2))
    before = draw.nats
    thought = draw.pick(_THOUGHTS).format(a=topic or "an animal") if thinks and not count else ""
    story = draw_story(draw, hero, held_out=held_out)
    answer_nats = draw.nats - before + hidden_nats
    turns = [(question, story.text)]
    asked = [word for word in (hero["N"], hero["n"]) if word in topic.split()]
    checks = {1: Check("|".join(asked), "mentions")}
    for phrasings, answer in draw.sample(story.questions, count):
        thought = _FOLLOW_UP_THOUGHT if thinks else ""
        turns.append((draw.pick(phrasings), answer))
        checks[2 * len(turns) - 1] = Check(answer)
    return Document(
        task="stories",
        messages=chat(turns, reasoning=thought),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
        answer_nats=answer_nats,
    )
