"""Sentence patterns of the stories.

A pattern is one choice from each part of a slot, joined; the product of the parts makes hundreds of
patterns a slot. Fields: N name, n animal, He he his him pronouns of the hero, F friend's name,
f friend's animal, p place, q second place, o object with its colour, j adjective with article,
b hobby, d food, m second food.

A fifth of the patterns of each slot is held out of training. Every part still occurs in training,
so a model that has learnt the parts can be judged on patterns it has not seen.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HELD_OUT_OF = 5

Parts = Sequence[Sequence[str]]

_TIMES = ("One day", "One morning", "One sunny afternoon", "One rainy day", "Early one day",
          "Late one evening", "On a windy day", "On the first day of spring", "After breakfast",
          "Just before supper")  # fmt: skip

COMMON: Mapping[str, Parts] = {
    "opening": (
        (
            "Once upon a time",
            "Long ago",
            "Not so long ago",
            "Many years ago",
            "In a time of peace",
            "Once",
            "A long time ago",
            "One summer",
        ),
        (
            " there was",
            " there lived",
            ", far away, there was",
            ", near the sea, there lived",
            ", in a quiet land, there was",
        ),
        (" {j} {n} named {N}", " {j} {n} called {N}", " {j} {n} whose name was {N}"),
        (
            " with a home by the {p}.",
            ". {N} lived near the {p}.",
            ". {His} home was by the {p}.",
            ". Everyone near the {p} knew {him}.",
        ),
    ),
    "likes": (
        (
            "{N} liked to {b}",
            "Every day {he} would {b}",
            "Most of all {he} loved to {b}",
            "{He} was very good at one thing: {he} could {b}",
            "In the evening {N} used to {b}",
            "{N} was happy when {he} could {b}",
        ),
        (
            " and eat {d}",
            ", and {his} favorite food was {d}",
            ", and then {he} ate {d}",
            ", and {he} always had some {d} with {him}",
            ", and {he} never said no to {d}",
        ),
        (
            ".",
            " all day long.",
            " with a big smile.",
            ", even in the rain.",
            " when the work was done.",
        ),
    ),
    "weather": (
        (
            "The sun was shining",
            "A cold wind was blowing",
            "Soft rain was falling",
            "The sky was clear",
            "Snow lay on the ground",
            "A thick fog had come",
            "The clouds were low",
            "The air was warm",
        ),
        (
            " and the birds were singing",
            " and the leaves were dancing",
            " and all was still",
            " and the day felt long",
            " and nobody was outside",
        ),
        (
            ".",
            " near the {q}.",
            ", but {N} did not mind.",
            ", and {N} felt ready for anything.",
            ", and {N} looked out of the window.",
        ),
    ),
    "meeting": (
        (
            "On the way",
            "Near the {q}",
            "Behind the {q}",
            "After a while",
            "Soon",
            "Just then",
            "At the {q}",
        ),
        (" {he} met", " {N} met", " {he} saw", " {N} found", " {he} came upon"),
        (
            " a {f} named {F}.",
            " a friendly {f} called {F}.",
            " {F}, who was a {f}.",
            " {F} the {f}.",
            " an old friend, {F} the {f}.",
        ),
    ),
    "greeting": (
        (
            '"Hello, {N}," said {F}.',
            '"Good day," said {F}.',
            '"What a surprise," said {F}.',
            '"Can I help you?" asked {F}.',
            '"You look worried," said {F}.',
            "{F} waved and smiled.",
            "{F} looked up and laughed.",
            '"Who are you?" asked {F}.',
        ),
        (
            ' "I am {N}," {he} said,',
            " {N} told {F} everything,",
            " {N} was glad,",
            " They sat down together,",
            " {N} took a deep breath,",
        ),
        (
            " and they shared some {m}.",
            " and they began to talk.",
            " and soon they were friends.",
            " and they made a plan.",
            " and {F} listened well.",
            " and they walked on together.",
        ),
    ),
    "setback": (
        (
            "But it was not easy",
            "But the way was long",
            "At first nothing worked",
            "Then a storm came",
            "But {N} was afraid",
            "Then the path ended",
            "But it was getting dark",
            "Then {N} slipped and fell",
        ),
        (
            ", and {N} wanted to give up",
            ", and {N} began to cry",
            ", and {N} had to rest",
            ", and {N} did not know what to do",
            ", and {N} felt very small",
        ),
        (
            ".",
            " for a while.",
            '. "Do not worry," said {F}.',
            '. "Try again," said {F}.',
            ". {F} stayed close to {him}.",
        ),
    ),
    "feeling": (
        (
            "{N} cried with joy",
            "{N} smiled proudly",
            "{He} clapped and cheered",
            "{N} shouted hooray",
            "{N} jumped up and down",
            "{N} thanked {F} again and again",
            "{N} gave {F} a hug",
            "{N} laughed out loud",
        ),
        (
            " and sang a song",
            " and danced around",
            " and so did {F}",
            " and {F} laughed too",
            " and {F} was glad",
        ),
        (".", " all the way home.", " for a long time.", " under the stars.", " that evening."),
    ),
    "lesson": (
        (
            "{N} learned",
            "From that day on {N} knew",
            "That day {he} found out",
            "{N} never forgot",
            "Now {he} understood",
            "{F} and {N} both learned",
        ),
        (
            " that a good friend",
            " that a kind word",
            " that a little help",
            " that being brave",
            " that telling the truth",
            " that sharing",
        ),
        (
            " is worth more than gold.",
            " makes everything better.",
            " can change the whole day.",
            " is the best gift of all.",
            " is never a waste of time.",
        ),
    ),
    "ending": (
        (
            "And so",
            "From then on",
            "After that",
            "In the end",
            "Since that day",
            "And every spring",
        ),
        (" {N} and {F}", " the two friends", " {N} the {n} and {F} the {f}", " they both"),
        (
            " lived happily",
            " played together",
            " went home",
            " ate {m} together",
            " sat by the fire",
        ),
        (
            ".",
            ". The end.",
            " by the {p}.",
            " and were never sad again.",
            " and told this story to everyone.",
        ),
    ),
}

PLOTS: Mapping[str, Mapping[str, Parts]] = {
    "lost": {
        "problem": (
            _TIMES,
            (" {N} lost", " {N} could not find", " the wind took away", " someone took",
             " {N} dropped"),
            (" {his} {o}.", " {his} favorite thing, {his} {o}.", " the {o} that {he} loved."),
            ("", " {He} looked everywhere.", " It was gone.", " {He} was very sad."),
        ),
        "action": (
            ("Together they looked", "They searched all day", "{F} helped {him} look",
             "They asked everyone and looked"),
            (" under the leaves", " behind the stones", " in every corner", " along the path",
             " in the tall grass"),
            (" near the {q}.", " until it was late.", " and did not stop.", " with a lamp."),
        ),
        "resolution": (
            ("At last", "Suddenly", "Then", "Finally", "When the moon came up"),
            (" {F} saw the {o}", " {N} found the {o}", " they spotted the {o}",
             " there was the {o}"),
            (" in a nest", " on a branch", " under a bush", " beside the water", " in the sand"),
            (".", ", safe and clean.", ", just waiting there."),
        ),
    },
    "skill": {
        "problem": (
            _TIMES,
            (" {N} wanted to learn how to {b}", " {N} decided to {b} ",
             " {N} dreamed that {he} could {b}", " {N} tried to {b}"),
            (", but {he} did not know how.", ", but it was hard.", ", but everyone laughed.",
             ", but {he} had no teacher.", " in front of all."),
        ),
        "action": (
            ("{F} showed {him}", "{F} taught {him}", "Step by step {F} explained",
             "Again and again they practiced"),
            (" what to do", " the right way", " a clever trick", " how it works"),
            (" by the {q}.", " every day.", " with a {o}.", " and never got tired.",
             " from morning to night."),
        ),
        "resolution": (
            ("After a week", "At last", "In the end", "One morning", "Before long"),
            (" {N} could do it", " {he} did it well", " {N} was as good as {F}",
             " it worked"),
            (", and everyone clapped.", " without any help.", ", and nobody laughed now.",
             " for the first time.", ", and {F} cheered."),
        ),
    },
    "gift": {
        "problem": (
            _TIMES,
            (" {N} made a {o}", " {N} bought a {o}", " {N} found a {o}", " {N} got a {o}"),
            (" for a friend", " for {his} mother", " for the birthday of the king",
             " as a present"),
            (".", ", but it broke.", ", but it was too big.", ", but {he} had no box for it."),
        ),
        "action": (
            ("{F} had an idea", "They put their heads together", "They worked hard",
             "{F} brought some tools"),
            (" and they fixed it", " and they made it better", " and they tied a ribbon around it",
             " and they cleaned it"),
            (" with great care.", " in no time.", " at the {q}.", " until it was perfect.",
             " while they ate {m}."),
        ),
        "resolution": (
            ("Then", "In the evening", "The next day", "When all was ready", "At noon"),
            (" they gave away the {o}", " the {o} was ready", " everyone admired the {o}",
             " {N} carried the {o} home"),
            (" with a bow.", " and there was a party.", " and all were pleased.",
             " and the music played.", " in a fine box."),
        ),
    },
    "journey": {
        "problem": (
            _TIMES,
            (" {N} set out", " {N} packed a bag and left", " {N} went on a trip",
             " {N} began a long walk"),
            (" to see the {q}", " to visit the {q}", " to reach the {q}", " to find the {q}"),
            (".", " with a {o}.", " all alone.", ", just for fun."),
        ),
        "action": (
            ("They walked", "They ran", "They crept", "They sailed", "They marched"),
            (" over the hills", " through the trees", " along the river", " past the fields",
             " into the night"),
            (" and told stories.", " and counted their steps.", " and ate {m}.",
             " and sang loudly.", " without a word."),
        ),
        "resolution": (
            ("At last", "After three days", "When the sun rose", "Tired but happy", "Finally"),
            (" they reached the {q}", " they stood before the {q}", " they saw the {q}",
             " they came to the {q}"),
            (", and it was beautiful.", ", and they rested there.", ", and {N} found a {o} there.",
             ", and they stayed for a week."),
        ),
    },
    "rescue": {
        "problem": (
            _TIMES,
            (" {N} heard a cry", " {N} heard someone call for help", " {N} saw smoke",
             " {N} heard a loud noise"),
            (" near the {q}", " from the {q}", " coming from the {q}", " not far from the {q}"),
            (".", " and ran there at once.", " and took {his} {o}.", " and was worried."),
        ),
        "action": (
            ("{F} was stuck", "{F} was in trouble", "{F} could not move", "{F} was lost"),
            (", so {N} pulled", ", so {N} pushed", ", so {N} held out a hand",
             ", so {N} called the others"),
            (" with all {his} strength.", " as hard as {he} could.", " and did not let go.",
             " and used the {o}."),
        ),
        "resolution": (
            ("At last", "With one big pull", "After an hour", "Bit by bit", "Soon"),
            (" {F} was free", " {F} was safe", " all was well again", " the danger was over"),
            (", and they ate {m}.", ", and they rested.", ", and {N} was a hero.",
             ", and everyone cheered.", " at last."),
        ),
    },
}  # fmt: skip

OPTIONAL = ("likes", "weather", "greeting", "setback", "feeling", "lesson")


@dataclass(frozen=True, slots=True)
class Slot:
    """The patterns of one sentence: those of training, and the held-out fifth."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def _slot(name: str, parts: Parts) -> Slot:
    train: list[str] = []
    held_out: list[str] = []
    for indices in itertools.product(*(range(len(part)) for part in parts)):
        pattern = "".join(part[i] for part, i in zip(parts, indices, strict=True))
        is_held_out = zlib.crc32(f"{name}{indices}".encode()) % HELD_OUT_OF == 0
        (held_out if is_held_out else train).append(pattern)
    return Slot(tuple(train), tuple(held_out))


SLOTS: Mapping[str, Slot] = {
    **{name: _slot(name, parts) for name, parts in COMMON.items()},
    **{
        f"{plot}.{name}": _slot(f"{plot}.{name}", parts)
        for plot, slots in PLOTS.items()
        for name, parts in slots.items()
    },
}
"""Slot name -> its patterns; the slots of a plot are named `plot.slot`."""
