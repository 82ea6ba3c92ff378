"""A question with a few answers: Enter takes the marked one, a letter its own, Esc none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a question."""

    id: str
    """What the screen returns."""
    key: str
    """Letter that gives it at once."""
    label: str
    help: str = ""
    """What it does, beside the label."""


YES_NO: Final = (
    Answer(id="yes", key="y", label="Yes"),
    Answer(id="no", key="n", label="No"),
)


class ConfirmScreen(ModalScreen[str | None]):
    """Ask a question; the result is the id of an answer, or None for Esc.

    Args:
        question: one line.
        answers: at least one, the marked one first unless `marked` says otherwise.
        detail: more lines under the question.
        marked: id of the answer that Enter takes.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "cancel", "Close without an answer", priority=True),
        Binding("tab,right", "move(1)", "Next answer", show=False),
        Binding("shift+tab,left", "move(-1)", "Answer before", show=False),
    ]
    DEFAULT_CSS = """
    ConfirmScreen { align: center middle; }
    ConfirmScreen > Vertical {
        width: 70; max-width: 94%; height: auto; max-height: 90%;
        border: round $primary; background: $surface; padding: 1 2;
    }
    ConfirmScreen #question { text-style: bold; width: 1fr; }
    ConfirmScreen #detail { color: $text-muted; width: 1fr; margin-top: 1; }
    ConfirmScreen OptionList { height: auto; margin-top: 1; background: $surface; }
    ConfirmScreen OptionList:focus { background-tint: transparent; }
    """

    def __init__(
        self,
        question: str,
        answers: Sequence[Answer] = YES_NO,
        *,
        detail: str = "",
        marked: str | None = None,
    ) -> None:
        super().__init__()
        self._question, self._detail = question, detail
        self._answers = tuple(answers)
        ids = [answer.id for answer in self._answers]
        self._marked = ids.index(marked) if marked in ids else 0

    def compose(self) -> ComposeResult:
        """Draw the question over its answers."""
        with Vertical():
            yield Static(Content(self._question), id="question")
            if self._detail:
                yield Static(Content(self._detail), id="detail")
            options = OptionList(
                *(Option(_prompt(answer), id=answer.id) for answer in self._answers),
                compact=True,
            )
            options.highlighted = self._marked
            yield options

    def on_key(self, event: events.Key) -> None:
        """Take the answer whose letter was pressed."""
        for answer in self._answers:
            if event.key == answer.key:
                event.stop()
                self.dismiss(answer.id)
                return

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take the marked answer."""
        event.stop()
        self.dismiss(event.option_id)

    def action_move(self, step: int) -> None:
        """Mark another answer."""
        options = self.query_one(OptionList)
        options.highlighted = ((options.highlighted or 0) + step) % len(self._answers)

    def action_cancel(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


def _prompt(answer: Answer) -> Content:
    # No muted colour: it could not be read on the bar of the marked answer.
    end = f" - {answer.help}" if answer.help else ""
    return Content.assemble((answer.key, "underline"), "  ", (answer.label, "bold"), end)
