"""The conversations of the terminal app on disk: one of 50,000 tokens among 200 others.

What the app waits for: opening the database, the list, a search, loading, and writing one turn
while it streams. Text is English-like random words, 1.3 tokens each, 250 turns of 200 tokens.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import harness
from harness import Figure

from dsv4_chat.conversation import Conversation
from dsv4_chat.store import Store

TURNS, WORDS_PER_TURN = 250, 154
OTHERS, TURNS_OF_OTHERS = 200, 20


def words(drawn: random.Random, count: int) -> str:
    """Random words of three to nine letters."""
    letters = "etaoinshrdlcumwf"
    return " ".join("".join(drawn.choices(letters, k=drawn.randint(3, 9))) for _ in range(count))


def conversation_of(drawn: random.Random, turns: int) -> Conversation:
    """A conversation of questions and answers."""
    conversation = Conversation()
    for turn in range(turns):
        conversation.append("assistant" if turn % 2 else "user", words(drawn, WORDS_PER_TURN))
    return conversation


def measure(repeats: int) -> list[Figure]:
    """Milliseconds of everything the app does with the store."""
    drawn = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for _ in range(OTHERS):
            store.save_whole(conversation_of(drawn, TURNS_OF_OTHERS))
        long = conversation_of(drawn, TURNS)
        store.save_whole(long)
        if store.load(long.id) != long:
            raise RuntimeError("the store gives back another conversation")
        rare = long.path()[3].content.split()[5]
        reply = long.append("assistant", words(drawn, 1000), state="streaming")

        def save_growing() -> None:
            reply.content += " more"
            store.save_node(long, reply)

        def save_finished() -> None:
            reply.state = "complete"
            store.save_node(long, reply)

        def open_again() -> None:
            Store(Path(folder)).close()

        times = {
            "open": harness.seconds(open_again, repeats),
            "list 200": harness.seconds(store.list, repeats),
            "search a rare word": harness.seconds(lambda: store.list(rare), repeats),
            "search two letters (not indexed)": harness.seconds(lambda: store.list("qz"), repeats),
            "load 50,000 tokens": harness.seconds(lambda: store.load(long.id), repeats),
            "save a growing reply": harness.seconds(save_growing, repeats),
            "save a finished reply": harness.seconds(save_finished, repeats),
            "path of 250 turns": harness.seconds(long.path, repeats),
            "messages of 250 turns": harness.seconds(long.to_messages, repeats),
        }
        size = store.path.stat().st_size
        store.close()
    return [
        *(Figure("tui store", name, 1e3 * took, "ms", repeats) for name, took in times.items()),
        Figure("tui store", "database", size / 1e6, "MB", 1),
    ]


if __name__ == "__main__":
    harness.main(measure)
