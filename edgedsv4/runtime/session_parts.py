"""What an engine lends to each of its sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.config import EngineOptions
    from edgedsv4.formats.snapshot_header import SnapshotModel
    from edgedsv4.model.hooks import GuessHook, SelectionHook
    from edgedsv4.model.model import Model
    from edgedsv4.runtime.stats import ExpertStats
    from edgedsv4.text.messages import Message, Prompt
    from edgedsv4.text.prompt import PromptOptions
    from edgedsv4.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What an engine lends to each of its sessions."""

    model: Model
    tokenizer: Tokenizer | None
    """None for a model without one; it has sessions but no replies."""
    variant: str
    """Prompt encoding."""
    options: EngineOptions
    render: Callable[[Sequence[Message], PromptOptions | None], Prompt]
    check_files: Callable[[], None]
    """Raises `FormatError` when a model file was changed; called before every chunk."""
    owner: Callable[[], SnapshotModel]
    """Which model saved sessions belong to; reads a little of every weight the first time."""
    check_room: Callable[[int], None]
    """Raises `CapacityError` when the state of so many tokens more does not fit in memory."""
    expert_stats: Callable[[], ExpertStats | None] = lambda: None
    """Where the routed experts came from so far; None where they are mapped."""
    backend: str = "reference"
    """Name of what computes."""
    on_experts: SelectionHook | None = None
    """Watches the routing of every forward of the main model; see `ForwardHooks`."""
    on_guesses: GuessHook | None = None
    """Watches guesses at the routing; see `ForwardHooks`."""
