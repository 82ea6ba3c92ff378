"""What the status line says of the app at one moment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsv4_chat.widgets.status_bar import StatusFacts

if TYPE_CHECKING:
    from dsv4_chat.app import ChatApp
    from dsv4_chat.dialogue import Dialogue


def status_facts(app: ChatApp, dialogue: Dialogue) -> StatusFacts:
    """Look at the model, the reply in progress and the conversation; never waits."""
    conversation, run = dialogue.conversation, dialogue.run
    memory = app.model.status()
    activity, rate, prefill, remaining = "ready", 0.0, None, None
    if app.facts is None:
        activity = "loading" if app.opening is not None else "no model"
    elif run is not None:
        pace, prefill = run.feed.pace, run.feed.progress
        activity = "writing" if run.node.content else "thinking"
        rate = pace.tokens_per_second
        if prefill is not None:
            activity = "reading"
            remaining = pace.remaining_seconds(prefill, app.clock())
        if run.is_stopping:
            activity, prefill = "stopping", None
    else:
        outcomes = [node.outcome for node in conversation.path() if node.outcome is not None]
        rate = outcomes[-1].tokens_per_second if outcomes else 0.0
    return StatusFacts(
        activity=activity,
        tokens_per_second=rate,
        prefill=prefill,
        remaining_seconds=remaining,
        memory=memory if app.keeper.is_evaluated else replace(memory, length=0),
        thinking=str(conversation.thinking),
        model=app.settings.model if app.facts is None else app.facts.name,
    )
