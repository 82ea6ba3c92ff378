"""A card in the transcript that says what went wrong and offers what to do.

The idea: an error is part of the conversation's view, not a toast that is gone before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Static

from dsv4_chat.messages import CardChoice, CardChosen
from dsv4_chat.plain_text import drawable

if TYPE_CHECKING:
    from dsv4_chat.advice import Advice


class Card(Vertical):
    """One problem.

    Args:
        advice: what happened, what to do, and what to choose from.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,up", "app.focus_previous", "Choice before", show=False),
        Binding("right,down", "app.focus_next", "Choice behind", show=False),
    ]

    def __init__(self, advice: Advice) -> None:
        super().__init__(classes="card")
        self.advice = advice
        self.border_title = advice.title

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield Static(drawable(self.advice.what), classes="card-what", markup=False)
        yield Static(drawable(self.advice.to_do), classes="card-to-do", markup=False)
        if self.advice.choices:
            with Horizontal(classes="card-choices"):
                yield from _buttons(self.advice.choices)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Say what was chosen."""
        event.stop()
        for choice, _ in self.advice.choices:
            if event.button.has_class(f"choice-{choice}"):
                self.post_message(CardChosen(choice))

    def focus_choice(self) -> bool:
        """Give the focus to the first choice; whether there is one."""
        buttons = self.query(Button)
        if buttons:
            buttons.first().focus()
        return bool(buttons)


def _buttons(choices: Sequence[tuple[CardChoice, str]]) -> list[Button]:
    return [Button(label, classes=f"choice-{choice}", compact=True) for choice, label in choices]
