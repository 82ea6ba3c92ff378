"""The prompt: several lines, history, placeholders for long pastes, completion of commands.

The idea: Textual's text area, with the keys of a chat. It says what is to be sent; everything else
about a conversation is unknown here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from dsv4_chat.messages import PromptChanged, PromptSubmitted
from dsv4_chat.plain_text import drawable

if TYPE_CHECKING:
    from dsv4_chat.command_completion import Completion
    from dsv4_chat.pastes import Pastes
    from dsv4_chat.prompt_history import PromptHistory

HINT = "Ask something, or / for commands"


class CompletionList(OptionList, can_focus=False):
    """Ways to go on with a command, above the prompt; the prompt has the keys."""

    def __init__(self) -> None:
        super().__init__(id="completions", markup=False)
        self.display = False
        self._found: list[Completion] = []

    def offer(self, found: list[Completion]) -> None:
        """Show these; none hides the list."""
        if found == self._found:
            return
        self._found = found
        self.clear_options()
        self.add_options(Option(_row(completion)) for completion in found)
        self.display = bool(found)
        self.highlighted = 0 if found else None

    def chosen(self) -> str | None:
        """The line of the highlighted entry; None when nothing is offered."""
        place = self.highlighted
        return self._found[place].line if self.display and place is not None else None


def _row(completion: Completion) -> str:
    return drawable(f"{completion.label:<24} {completion.help}".rstrip())


_TAKEN = frozenset(("ctrl+c", "ctrl+e", "ctrl+f", "ctrl+x", "ctrl+y", "pageup", "pagedown"))
"""Keys of the text area that mean something else in the chat."""


class PromptInput(TextArea, inherit_bindings=False):
    """The prompt line.

    Args:
        pastes: keeps the texts behind placeholders.
        history: earlier prompts.
        completions: the list that shows ways to go on.
    """

    # None of them has priority: such keys are handled before letters that were typed just before.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Send", show=False),
        Binding("shift+enter,ctrl+j,alt+enter", "newline", "New line", show=False),
        Binding("up", "cursor_up", "Line above; earlier prompt", show=False),
        Binding("down", "cursor_down", "Line below; later prompt", show=False),
        Binding("tab", "take_completion", "Complete a command", show=False),
        *(
            Binding(binding.key, binding.action, "", show=False)
            for binding in Binding.make_bindings(TextArea.BINDINGS)
            if binding.key not in _TAKEN | {"up", "down"}
        ),
    ]

    def __init__(self, pastes: Pastes, history: PromptHistory, completions: CompletionList) -> None:
        super().__init__(
            id="prompt",
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            compact=True,
            placeholder=HINT,
        )
        self._pastes = pastes
        self._history = history
        self._completions = completions

    def put(self, text: str) -> None:
        """Replace what stands there; the cursor goes to the end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
        self._history.leave()

    def insert_at_cursor(self, text: str) -> None:
        """Insert where the cursor is, as if typed."""
        self.replace(text, *self.selection)

    def insert_long(self, text: str) -> None:
        """Insert a text, as a placeholder when it is long."""
        self.insert_at_cursor(self._pastes.shorten(text.replace("\r\n", "\n").replace("\r", "\n")))

    def clear_into_history(self) -> None:
        """Empty the prompt; Up brings the text back."""
        self._history.add(self.text)
        self.put("")

    def close_completions(self) -> bool:
        """Hide the list; whether it was shown."""
        was_shown = self._completions.display
        self._completions.offer([])
        return was_shown

    def action_submit(self) -> None:
        """Send, unless the list has a name to complete first."""
        line = self._completions.chosen()
        if line is not None and line.rstrip() != self.text.rstrip():
            self.put(line)
            if line.endswith((" ", "/")):
                return
        typed = self.text
        if not typed.strip():
            return
        self.close_completions()
        self._history.add(typed)
        self.put("")
        self.post_message(PromptSubmitted(self._pastes.expand(typed), typed))

    def action_newline(self) -> None:
        """Begin another line."""
        self.insert_at_cursor("\n")

    def action_take_completion(self) -> None:
        """Take the highlighted entry; without a list go to the next widget."""
        line = self._completions.chosen()
        if line is None:
            self.screen.focus_next()
        else:
            self.put(line)

    def action_cursor_up(self, select: bool = False) -> None:
        """The list, the line above, or the prompt before."""
        if self._completions.display:
            self._completions.action_cursor_up()
        elif select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        elif (text := self._history.older(self.text)) is not None:
            self._recall(text)

    def action_cursor_down(self, select: bool = False) -> None:
        """The list, the line below, or the prompt behind."""
        if self._completions.display:
            self._completions.action_cursor_down()
        elif select or not self.cursor_at_last_line:
            super().action_cursor_down(select)
        elif (text := self._history.newer()) is not None:
            self._recall(text)

    async def on_key(self, event: events.Key) -> None:
        """Enter is a key of ours and no text."""
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            self.action_submit()

    async def on_paste(self, event: events.Paste) -> None:
        """A long paste becomes a placeholder."""
        event.prevent_default()
        event.stop()
        self.insert_long(event.text)

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Tell the screen what stands there."""
        event.stop()
        self._tell()

    def on_text_area_selection_changed(self, event: TextArea.SelectionChanged) -> None:
        """The cursor moved."""
        event.stop()
        self._tell()

    def _recall(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    def _tell(self) -> None:
        row, column = self.cursor_location
        before = "\n".join([*self.document.lines[:row], self.document.get_line(row)[:column]])
        self.post_message(PromptChanged(before))


class PromptNote(Static):
    """One muted line above the prompt: what is being edited, or how to use a command."""

    def __init__(self) -> None:
        super().__init__("", id="prompt-note", markup=False)
        self.display = False

    def say(self, text: str) -> None:
        """Show a line; an empty one hides it."""
        self.update(drawable(text))
        self.display = bool(text)
