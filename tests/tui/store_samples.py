"""Conversations and a clock for tests of what is kept on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4_chat.conversation import Conversation

if TYPE_CHECKING:
    from dsv4_chat.store import Store


class Clock:
    """Seconds that grow by one with each reading."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def talk(clock: Clock, *texts: str, title: str = "") -> Conversation:
    """A conversation of questions and answers in turns."""
    conversation = Conversation(clock=clock, title=title)
    for place, text in enumerate(texts):
        conversation.append("assistant" if place % 2 else "user", text)
    return conversation


def saved(store: Store, conversation: Conversation) -> Conversation:
    store.save_whole(conversation)
    return conversation
