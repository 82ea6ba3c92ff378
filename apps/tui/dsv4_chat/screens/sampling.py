"""How replies are made: thinking, every sampling option, and the system message, in one panel.

The idea: the fields are those of `SamplingOptions`, and what is wrong with a value is said beside
it in the words of its own `ConfigError`; nothing is applied while one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static, TextArea

from dsv4_chat.sampling_text import (
    SAMPLING_KEYS,
    option_help,
    option_text,
    option_value,
    with_option,
)
from dsv4_chat.screens.choice_line import ChoiceLine
from edgedsv4 import ConfigError, SamplingOptions

_THINKING_HELP = "How much the model thinks before it answers; Left and Right choose."
_SYSTEM_HELP = "The system message: what the model is told before the conversation. Empty for none."
_WAYS = {"logit_bias": "42=-1.5, 7=-inf", "seed": "none", "max_tokens": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyChoices:
    """What a conversation's replies are made with."""

    sampling: SamplingOptions
    thinking: str | int = "none"
    system: str = ""


class SamplingScreen(ModalScreen[ReplyChoices | None]):
    """Change how replies are made; the result is what was applied, or None.

    Args:
        now: what holds at this moment.
        defaults: what resetting brings back, from the settings.
        modes: thinking modes of the model.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        # With priority, so that what is typed at once behind them goes to the new field.
        Binding("down", "move(1)", "Next field; next line of the system message", priority=True),
        Binding("up", "move(-1)", "Field before; line before", priority=True),
        Binding("ctrl+s", "apply", "Apply; so does Enter in a one-line field", priority=True),
        Binding("ctrl+r", "reset", "Bring back the defaults", priority=True),
        Binding("escape,ctrl+p,ctrl+c", "close", "Close without a change", priority=True),
    ]
    DEFAULT_CSS = """
    SamplingScreen { align: center middle; }
    SamplingScreen > Vertical {
        width: 96; max-width: 96%; height: 21; max-height: 98%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    SamplingScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    SamplingScreen Horizontal { height: auto; }
    SamplingScreen .label { width: 20; }
    SamplingScreen Input { width: 16; margin-right: 1; background: $panel; }
    SamplingScreen TextArea { width: 1fr; height: 3; background: $panel; }
    SamplingScreen .error {
        width: 1fr; height: 1; color: $error; text-wrap: nowrap; text-overflow: ellipsis;
    }
    SamplingScreen #says { height: 3; margin-top: 1; color: $text-muted; }
    """

    def __init__(
        self, now: ReplyChoices, defaults: ReplyChoices, modes: tuple[str, ...] = ("none",)
    ) -> None:
        super().__init__()
        self._now, self._defaults = now, defaults
        known = dict.fromkeys((*modes, str(now.thinking), str(defaults.thinking)))
        self._modes = tuple(known)

    def compose(self) -> ComposeResult:
        """Draw one line per field."""
        with Vertical() as box:
            box.border_title = "Replies"
            box.border_subtitle = "Enter or Ctrl+S apply, Ctrl+R defaults, Esc close"
            with VerticalScroll(can_focus=False):
                with Horizontal():
                    yield Static("thinking", classes="label")
                    yield ChoiceLine(self._modes, str(self._now.thinking), id="thinking")
                for key in SAMPLING_KEYS:
                    yield from self._option_line(key)
                with Horizontal():
                    yield Static("system", classes="label")
                    yield TextArea(self._now.system, compact=True, id="system")
            yield Static(id="says")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Say beside the field what is wrong with it."""
        event.stop()
        key = str(event.input.id)
        self.query_one(f"#error-{key}", Static).update(Content(self._error_of(key)))
        self._explain(key)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply from a one-line field."""
        event.stop()
        self.action_apply()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Explain the field that has the focus."""
        self._explain(event.widget.id or "")

    def action_move(self, step: int) -> None:
        """Go to another field, or line by line through the system message."""
        text = self.app.focused
        if isinstance(text, TextArea):
            is_last = text.cursor_at_last_line if step > 0 else text.cursor_at_first_line
            if not is_last:
                text.move_cursor_relative(rows=step)
                return
        if step > 0:
            self.focus_next()
        else:
            self.focus_previous()

    def action_apply(self) -> None:
        """Close with what stands in the fields; stay at the first one that is wrong."""
        for key in SAMPLING_KEYS:
            if self._error_of(key):
                self.query_one(f"#{key}", Input).focus()
                return
        values = {key: option_value(key, self._typed(key)) for key in SAMPLING_KEYS}
        sampling = SamplingOptions(**values)  # type: ignore[arg-type]  # each was checked above
        chosen = self.query_one("#thinking", ChoiceLine).chosen
        self.dismiss(
            ReplyChoices(
                sampling=sampling,
                thinking=int(chosen) if chosen.isdigit() else chosen,
                system=self.query_one("#system", TextArea).text.strip(),
            )
        )

    def action_reset(self) -> None:
        """Write the defaults into the fields; they hold once they are applied."""
        for key in SAMPLING_KEYS:
            self.query_one(f"#{key}", Input).value = option_text(self._defaults.sampling, key)
        self.query_one("#thinking", ChoiceLine).choose(str(self._defaults.thinking))
        self.query_one("#system", TextArea).text = self._defaults.system

    def action_close(self) -> None:
        """Close and change nothing."""
        self.dismiss(None)

    def _explain(self, key: str) -> None:
        """Say at the bottom what a field is for, after what is wrong with it."""
        texts = {"thinking": _THINKING_HELP, "system": _SYSTEM_HELP}
        text = texts.get(key, "")
        if key in SAMPLING_KEYS:
            error = self._error_of(key)
            text = f"{error}\n{option_help(key)}" if error else option_help(key)
        self.query_one("#says", Static).update(Content(text))

    def _option_line(self, key: str) -> Iterator[Horizontal]:
        yield Horizontal(
            Static(key.replace("_", " "), classes="label"),
            Input(
                option_text(self._now.sampling, key),
                placeholder=_WAYS.get(key, ""),
                compact=True,
                id=key,
            ),
            Static(id=f"error-{key}", classes="error"),
        )

    def _typed(self, key: str) -> str:
        return self.query_one(f"#{key}", Input).value

    def _error_of(self, key: str) -> str:
        try:
            with_option(SamplingOptions(), key, self._typed(key))
        except ConfigError as error:
            return str(error)
        return ""
