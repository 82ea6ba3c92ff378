"""What widgets and the app's workers say to the chat screen, as typed messages.

The idea: a widget never calls the app. It posts what happened, and the screen decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from textual.message import Message

if TYPE_CHECKING:
    from dsv4_chat.chat_model import ModelFacts, Progress

CardChoice = Literal["drop", "new", "retry", "quit", "model"]
"""What a card in the transcript offers: leave the oldest turns out and ask again, begin a new
conversation, try again, leave, load the model again."""


class OpeningAdvanced(Message):
    """The model loads; only the newest one waits in the queue."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        super().__init__()

    def can_replace(self, message: Message) -> bool:
        """Whether this one makes an older one that still waits superfluous."""
        return isinstance(message, OpeningAdvanced)


class ModelOpened(Message):
    """The model can be asked."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        super().__init__()


class OpeningFailed(Message):
    """The model cannot be opened, or loading was cancelled."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__()


class PromptSubmitted(Message):
    """The prompt is to be sent.

    Attributes:
        text: what to send, pastes and files written out.
        typed: what stood in the prompt, to put it back when sending fails.
    """

    def __init__(self, text: str, typed: str) -> None:
        self.text = text
        self.typed = typed
        super().__init__()


class PromptChanged(Message):
    """The prompt holds another text, or the cursor moved to another place in it."""

    def __init__(self, before_cursor: str) -> None:
        self.before_cursor = before_cursor
        super().__init__()


class SuggestionChosen(Message):
    """One of the things to try on the welcome view."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__()


class CardChosen(Message):
    """A choice of a card in the transcript."""

    def __init__(self, choice: CardChoice) -> None:
        self.choice = choice
        super().__init__()


class VersionWanted(Message):
    """Another version of a turn is to be shown.

    Attributes:
        node_id: the turn that is shown.
        step: -1 for the older, 1 for the newer one.
    """

    def __init__(self, node_id: int, step: int) -> None:
        self.node_id = node_id
        self.step = step
        super().__init__()
