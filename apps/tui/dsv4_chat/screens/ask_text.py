"""A question that is answered with one line of text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static


class AskTextScreen(ModalScreen[str | None]):
    """Ask for a line; the result is the line without blanks around it, or None for Esc.

    Args:
        question: one line.
        text: what stands there already, all of it selected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "cancel", "Close without an answer", priority=True),
    ]
    DEFAULT_CSS = """
    AskTextScreen { align: center middle; }
    AskTextScreen > Vertical {
        width: 70; max-width: 94%; height: auto;
        border: round $primary; background: $surface; padding: 1 2;
    }
    AskTextScreen #question { text-style: bold; margin-bottom: 1; }
    """

    def __init__(self, question: str, text: str = "") -> None:
        super().__init__()
        self._question, self._text = question, text

    def compose(self) -> ComposeResult:
        """Draw the question over a line to type in."""
        with Vertical() as box:
            box.border_subtitle = "Enter takes it, Esc closes"
            yield Static(Content(self._question), id="question")
            yield Input(self._text, compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the line; an empty one is no answer."""
        event.stop()
        if text := " ".join(event.value.split()):
            self.dismiss(text)

    def action_cancel(self) -> None:
        """Close without an answer."""
        self.dismiss(None)
