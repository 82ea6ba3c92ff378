"""What an empty conversation shows: the model and its memory, and three things to try.

The idea: the same place first shows how far the model is loaded, so that nothing jumps around.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Click
from textual.widgets import ProgressBar, Static

from dsv4_chat.messages import SuggestionChosen
from dsv4_chat.plain_text import drawable
from dsv4_chat.units import bytes_text, speed_text

if TYPE_CHECKING:
    from dsv4_chat.chat_model import ModelFacts, Progress

KEYS = "Enter send  Esc stop  Ctrl+N new chat  Ctrl+O saved  F1 help  Ctrl+Q quit"


class Suggestion(Static, can_focus=True):
    """One thing to try; Enter or a click asks it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "choose", "Ask this", show=False),
        Binding("up", "app.focus_previous", "Above", show=False),
        Binding("down", "app.focus_next", "Below", show=False),
    ]

    def __init__(self, text: str) -> None:
        super().__init__(f"• {drawable(text)}", classes="suggestion", markup=False)
        self.text = text

    def action_choose(self) -> None:
        """Ask it."""
        self.post_message(SuggestionChosen(self.text))

    def on_click(self, event: Click) -> None:
        """A click does what the key does."""
        event.stop()
        self.action_choose()


class Welcome(Vertical):
    """The empty conversation.

    Args:
        model: its name, as it was asked for.
    """

    def __init__(self, model: str) -> None:
        super().__init__(id="welcome")
        self._model = model
        self._headline = Static(drawable(model), id="welcome-model", markup=False)
        self._lines = Static("", id="welcome-lines", markup=False)
        self._plan = Static("", id="welcome-plan", markup=False)
        self._area = Vertical(id="welcome-try")
        self._offered: tuple[tuple[str, ...], str] = ((), "")
        self._bar = ProgressBar(id="welcome-bar", show_eta=False)

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield self._headline
        yield self._lines
        yield self._bar
        yield self._area
        yield Static(KEYS, id="welcome-keys", markup=False)
        yield self._plan

    def show_progress(self, progress: Progress) -> None:
        """How far the model is loaded."""
        self._headline.update(f"Loading {drawable(self._model)}")
        self._bar.display = True
        self._bar.update(total=progress.total or None, progress=progress.done)
        self._lines.update(f"{progress_text(progress)}\nEsc cancels; you can type already")

    def show_facts(self, facts: ModelFacts, latest: str = "") -> None:
        """The model is there."""
        self._bar.display = False
        self._headline.update(f"{drawable(facts.name)} on {drawable(facts.device)}")
        self._lines.update(drawable("\n".join(facts.notes)))
        self._plan.update(drawable(f"Memory: {'; '.join(facts.plan_lines)}."))
        self._plan.display = bool(facts.plan_lines)
        self._offered = (facts.prompts[:3], latest)
        self._show_suggestions()

    def show_stopped(self) -> None:
        """It is not loaded; a card says why."""
        self._bar.display = False
        self._headline.update(f"{drawable(self._model)} is not loaded")
        self._lines.update("")

    def on_mount(self) -> None:
        """Show what was known before there was a place for it."""
        self._show_suggestions()

    def _show_suggestions(self) -> None:
        area = self._area
        if not area.is_mounted or not area.is_attached:
            return  # it is not there yet, or not any more
        prompts, latest = self._offered
        area.remove_children()
        if prompts:
            area.mount(Static("Try one (Tab, then Enter):", markup=False))
            area.mount_all(Suggestion(text) for text in prompts)
        if latest:
            area.mount(
                Static(f"Ctrl+O goes on with “{drawable(latest)}”", classes="latest", markup=False)
            )


def progress_text(progress: Progress) -> str:
    """Phase, how much is done, and how fast: `read weights 1.2 GiB of 8.0 GiB, 2.40 GB/s`."""
    text = progress.phase
    if progress.unit == "bytes":
        text += f" {bytes_text(progress.done)} of {bytes_text(progress.total)}"
    elif progress.total:
        text += f" {progress.done:,} of {progress.total:,}"
    if progress.bytes_per_second:
        text += f", {speed_text(progress.bytes_per_second)}"
    return text
