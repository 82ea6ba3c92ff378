"""A few words in a line, one of them chosen with Left and Right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Static


class ChoiceLine(Static, can_focus=True):
    """Choose one of a few words; it takes one line.

    Args:
        choices: at least one.
        chosen: one of them; another word means the first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "choose(-1)", "Value before"),
        Binding("right,space", "choose(1)", "Next value"),
    ]
    DEFAULT_CSS = """
    ChoiceLine { height: 1; width: 1fr; padding: 0 1; background: $surface; }
    ChoiceLine:focus { background: $panel; }
    """

    class Changed(Message):
        """Another word is chosen."""

    def __init__(self, choices: Sequence[str], chosen: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._choices = tuple(choices)
        self.chosen = chosen if chosen in self._choices else self._choices[0]

    def on_mount(self) -> None:
        """Draw the words."""
        self._draw()

    def choose(self, word: str) -> None:
        """Take a word; one that is not there changes nothing."""
        if word in self._choices and word != self.chosen:
            self.chosen = word
            self._draw()
            self.post_message(self.Changed())

    def on_click(self, event: events.Click) -> None:
        """Take the word that was clicked."""
        place = event.x - 1
        for word in self._choices:
            if 0 <= place < len(word) + 2:
                self.choose(word)
            place -= len(word) + 3

    def action_choose(self, step: int) -> None:
        """Take the next word or the one before, round the ends."""
        place = self._choices.index(self.chosen) + step
        self.choose(self._choices[place % len(self._choices)])

    def _draw(self) -> None:
        words = [
            Content.styled(f" {word} ", "bold reverse") if word == self.chosen else f" {word} "
            for word in self._choices
        ]
        pieces = [piece for word in words for piece in (word, " ")]
        self.update(Content.assemble(*pieces))
