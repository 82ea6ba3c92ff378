"""What each failure means for the person in front of it, and what can be done.

The idea: the library's errors say what was expected and found; this adds the next step in the app.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4 import (
    BackendUnavailableError,
    CancelledError,
    CapacityError,
    ConfigError,
    ContextFullError,
    DeviceLostError,
    FormatError,
    NumericError,
    StorageError,
)

if TYPE_CHECKING:
    from dsv4_chat.messages import CardChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One card."""

    title: str
    """A few words."""
    what: str
    """What happened: the error's own message."""
    to_do: str
    """What to do, as a sentence."""
    choices: tuple[tuple[CardChoice, str], ...] = ()
    """What can be done at once: choice and label, the likeliest one first."""


_RETRY: tuple[CardChoice, str] = ("retry", "Try again")
_DROP: tuple[CardChoice, str] = ("drop", "Leave out the oldest turns")
_QUIT: tuple[CardChoice, str] = ("quit", "Quit")
_NEW: tuple[CardChoice, str] = ("new", "New chat")
_LOAD: tuple[CardChoice, str] = ("model", "Load again")


def advice_on_opening(error: Exception, model: str) -> Advice:
    """The model cannot be opened."""
    title, choices = "The model cannot be opened", (_LOAD, _QUIT)
    if isinstance(error, CancelledError):
        return Advice(
            title="Loading was stopped",
            what=f"{model} is not loaded.",
            to_do="Load it again, or leave with Ctrl+Q and name another model.",
            choices=choices,
        )
    to_do = "Load it again, or leave with Ctrl+Q; a log is written with log_file in the settings."
    if isinstance(error, FormatError | StorageError):
        to_do = "Check the path, or leave with Ctrl+Q and name another file: dsv4-chat FILE."
    elif isinstance(error, CapacityError):
        to_do = (
            "Close other programs and load it again, or leave with Ctrl+Q and start with a smaller"
            " context: dsv4-chat --ctx 2048."
        )
    elif isinstance(error, ConfigError | BackendUnavailableError):
        to_do = "Leave with Ctrl+Q and start with another option: dsv4-chat --help lists them."
    return Advice(title=title, what=_said(error), to_do=to_do, choices=choices)


def advice_on_full_context(*, can_drop: bool) -> Advice:
    """A reply has filled the context."""
    return Advice(
        title="The context is full",
        what="The reply ends here: there is no room for more.",
        to_do=(
            "Leave the oldest turns out and go on (they stay readable here), or begin a new chat."
            if can_drop
            else "Begin a new chat, or restart with a larger --ctx."
        ),
        choices=(_DROP, _NEW) if can_drop else (_NEW,),
    )


def advice_on_reply(error: Exception, *, can_drop: bool) -> Advice:
    """A reply failed."""
    if isinstance(error, ContextFullError):
        to_do = (
            "Leave the oldest turns out (they stay readable here), or begin a new chat."
            if can_drop
            else "Shorten the message, begin a new chat, or restart with a larger --ctx."
        )
        return Advice(
            title="The context is full",
            what=f"{error.needed:,} tokens are needed, the context holds {error.capacity:,}.",
            to_do=to_do,
            choices=(_DROP, _NEW) if can_drop else (_NEW,),
        )
    if isinstance(error, DeviceLostError):
        return Advice(
            title="The device stopped answering",
            what=_said(error),
            to_do="Load the model again; the conversation is saved and goes on.",
            choices=(_LOAD, _QUIT),
        )
    if isinstance(error, CapacityError):
        return Advice(
            title="Out of memory",
            what=_said(error),
            to_do="Close other programs and try again, or restart with a smaller --ctx.",
            choices=(_RETRY, _NEW),
        )
    if isinstance(error, ConfigError):
        return Advice(
            title="The model cannot be asked this",
            what=_said(error),
            to_do="Ctrl+T changes the thinking mode, Ctrl+P sampling and the system message.",
            choices=(_RETRY, _NEW),
        )
    if isinstance(error, NumericError):
        return Advice(
            title="The computation went wrong",
            what=_said(error),
            to_do="Try again; if it stays so, the weights may be damaged: edgedsv4 chat --verify.",
            choices=(_RETRY, _NEW),
        )
    return Advice(
        title="The reply failed",
        what=_said(error),
        to_do="The message is back in the prompt; try again, or begin a new chat.",
        choices=(_RETRY, _NEW),
    )


def _said(error: Exception) -> str:
    text = str(error)
    return text if text else type(error).__name__
