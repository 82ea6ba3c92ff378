"""The conversation that is shown, kept on disk with every turn and in the model as far as it got.

The idea: the one place that knows both a conversation and where it is stored. Text is written when
a turn begins and ends; the evaluated state when the conversation is left, since it is large.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_chat.conversation import Conversation, Node
from dsv4_chat.store_errors import StoreError
from edgedsv4 import CancelledError, Dsv4Error

if TYPE_CHECKING:
    from dsv4_chat.chat_model import ChatModel
    from dsv4_chat.settings import Settings
    from dsv4_chat.store import Store

logger = logging.getLogger(__name__)


class ConversationKeeper:
    """The current conversation and its place on disk.

    Args:
        settings: how new conversations begin.
        store: where they are kept; None keeps nothing.
        complain: told what could not be saved.
    """

    def __init__(
        self, settings: Settings, store: Store | None, complain: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.store = store
        self._complain = complain
        self.current = self.new()
        self._evaluated: str | None = None
        """Id of the conversation whose state the model has."""
        self._is_state_saved = True
        self._behind: str | None = None
        """Id of the conversation of which a turn could not be written."""

    def new(self) -> Conversation:
        """An empty conversation as the settings want it; it becomes the current one."""
        settings = self.settings
        self.current = Conversation(
            system=settings.system,
            sampling=settings.sampling_options(),
            thinking=settings.thinking,
        )
        return self.current

    def use(self, conversation: Conversation) -> None:
        """Make another one the current one."""
        self.current = conversation

    def fork(self, node_id: int) -> Conversation:
        """Make a copy up to a turn the current one; the model has its state already."""
        was_evaluated = self._evaluated == self.current.id
        self.current = self.current.fork(node_id)
        if was_evaluated:
            self._evaluated, self._is_state_saved = self.current.id, False
        return self.current

    async def save_turn(self, node: Node) -> None:
        """Write one turn; a failure is told and nothing is lost from the view."""
        conversation = self.current
        if self.is_behind:
            await self.save_whole()
        else:
            await self._store(lambda store: store.save_node(conversation, node))

    async def save_partial(self, node: Node) -> None:
        """Write a turn that grows, so that a crash loses little of it; a failure is only noted."""
        conversation, store = self.current, self.store
        if store is None or self.is_behind:
            return
        try:
            await asyncio.to_thread(store.save_node, conversation, node)
        except StoreError as error:
            logger.warning("a reply in progress was not saved: %s", error)

    async def save_options(self) -> None:
        """Write title, options and the shown path, once there is a turn to keep."""
        conversation = self.current
        if self.is_behind:
            await self.save_whole()
        elif conversation.nodes:
            await self._store(lambda store: store.save_conversation(conversation))

    async def save_whole(self) -> None:
        """Write a conversation with turns that were not stored before."""
        conversation = self.current
        await self._store(lambda store: store.save_whole(conversation))

    @property
    def is_behind(self) -> bool:
        """Whether turns of the current conversation are not on disk, because writing failed."""
        return self._behind == self.current.id

    async def load(self, conversation_id: str) -> Conversation:
        """Read a conversation; it becomes the current one.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        if self.store is None:
            raise StoreError("conversations are not kept in this run")
        self.current = await asyncio.to_thread(self.store.load, conversation_id)
        return self.current

    @property
    def is_evaluated(self) -> bool:
        """Whether what the model has evaluated is of the current conversation."""
        return self._evaluated == self.current.id

    def evaluated(self) -> None:
        """The model has worked on the current conversation."""
        self._evaluated, self._is_state_saved = self.current.id, False

    def forget(self, conversation_id: str) -> None:
        """A conversation was deleted: its state is not to be saved any more."""
        if self._evaluated == conversation_id:
            self.forget_state()

    def forget_state(self) -> None:
        """The model was closed, and its state with it."""
        self._evaluated, self._is_state_saved = None, True

    def state_to_save(self) -> str | None:
        """Id of the conversation whose state the model has and no file holds; it counts as saved.

        Asked before a conversation is left: `save_state` runs later, when it is not current.
        """
        if self.store is None or self._is_state_saved or not self._keeps_states:
            return None
        self._is_state_saved = True
        return self._evaluated

    def save_state(self, model: ChatModel, owner: str) -> None:
        """Save what the model has evaluated of a conversation; in the model's thread.

        Without it the conversation is evaluated again, so a failure is only noted.
        """
        store = self.store
        if store is None:
            return
        try:
            model.save_state(store.snapshot_path(owner))
            store.snapshot_saved(owner)
        except CancelledError:
            logger.info("saving the state of a conversation was cancelled")
        except Dsv4Error as error:
            logger.warning("the state of a conversation was not saved: %s", error)

    def load_state(self, model: ChatModel, conversation_id: str) -> bool:
        """Give the model a saved state, if there is one; in the model's thread.

        Without it the next reply evaluates the conversation again, so a failure is only noted.
        """
        store = self.store
        if store is None or not self._keeps_states or self._evaluated == conversation_id:
            return False
        path: Path | None = None
        try:
            path = store.find_snapshot(conversation_id)
            if path is None:
                return False
            model.load_state(path)
        except CancelledError:
            return False
        except Dsv4Error as error:
            logger.warning("a saved state was not loaded: %s", error)
            if path is not None:
                self._drop(store, conversation_id)
            return False
        self._evaluated, self._is_state_saved = conversation_id, True
        return True

    @property
    def _keeps_states(self) -> bool:
        return self.settings.snapshots != "off" and self.settings.snapshot_gigabytes > 0

    def _drop(self, store: Store, conversation_id: str) -> None:
        try:
            store.drop_snapshot(conversation_id)
        except StoreError as error:
            logger.warning("a saved state was not removed: %s", error)

    async def _store(self, write: Callable[[Store], None]) -> None:
        if self.store is None:
            return
        conversation = self.current.id
        try:
            await asyncio.to_thread(write, self.store)
        except StoreError as error:
            self._behind = conversation
            self._complain(str(error))
        else:
            if self._behind == conversation:
                self._behind = None
