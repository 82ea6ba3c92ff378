"""Random changes to a conversation, each compared with a plain list of paths and with the disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsv4_chat.conversation import Conversation, Node
from dsv4_chat.store import Store

TEXTS = st.text(alphabet="aé河🦊 \n'\"%_", max_size=6)
ROLES = st.sampled_from(["user", "assistant"])
STATES = st.sampled_from(["complete", "stopped", "failed", "streaming"])


class ConversationMachine(RuleBasedStateMachine):
    """The conversation beside its plain twin: every turn's path, and the one that is shown."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name))
        self.conversation = Conversation()
        self.paths: dict[int, list[int]] = {}
        self.shown: list[int] = []
        self.texts: dict[int, str] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def added(self, node: Node, before: list[int], text: str) -> None:
        self.shown = [*before, node.id]
        self.paths[node.id] = self.shown
        self.texts[node.id] = text
        self.store.save_node(self.conversation, node)

    def draw_id(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.paths))) if self.paths else None

    @rule(role=ROLES, text=TEXTS, state=STATES)
    def append(self, role: str, text: str, state: str) -> None:
        if role != "assistant" and state == "streaming":
            state = "complete"  # only replies stream
        node = self.conversation.append(role, text, state=state)  # type: ignore[arg-type]  # drawn
        self.added(node, self.shown, text)

    @rule(data=st.data(), text=TEXTS)
    def edit(self, data: st.DataObject, text: str) -> None:
        if (chosen := self.draw_id(data)) is not None:
            node = self.conversation.edit(chosen, text)
            self.added(node, self.paths[chosen][:-1], text)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        chosen = self.draw_id(data)
        self.conversation.rewind(chosen)
        self.shown = [] if chosen is None else self.paths[chosen]

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        if (chosen := self.draw_id(data)) is not None:
            self.conversation.select(chosen)
            self.shown = self.paths[chosen]
            while behind := [i for i, path in self.paths.items() if path[:-1] == self.shown]:
                self.shown = self.paths[max(behind)]

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if (chosen := self.draw_id(data)) is not None:
            forked = self.conversation.fork(chosen)
            texts = [self.texts[i] for i in self.paths[chosen]]
            assert [node.content for node in forked.path()] == texts
            self.store.save_whole(forked)
            assert self.store.load(forked.id) == forked

    @rule(count=st.integers(0, 3))
    def drop_oldest(self, count: int) -> None:
        questions = [m for m in self.conversation.to_messages() if m.role == "user"]
        dropped = self.conversation.drop_oldest_turns(count)
        left = [m for m in self.conversation.to_messages() if m.role == "user"]
        assert left == questions[dropped:]
        assert dropped == max(min(count, len(questions) - 1), 0)

    @rule()
    def open_again(self) -> None:
        self.store.save_conversation(self.conversation)
        loaded = self.store.load(self.conversation.id)
        for node in self.conversation.nodes.values():
            node.state = "stopped" if node.state == "streaming" else node.state
        assert loaded == self.conversation
        self.conversation = loaded

    @invariant()
    def nothing_is_lost_and_the_path_is_the_shown_one(self) -> None:
        if not hasattr(self, "conversation"):
            return
        conversation = self.conversation
        assert [node.id for node in conversation.path()] == self.shown
        assert {i: node.content for i, node in conversation.nodes.items()} == self.texts
        dropped = [node.id for node in conversation.dropped()]
        assert self.shown[: len(dropped)] == dropped
        for node_id in self.paths:
            siblings = [node.id for node in conversation.siblings(node_id)]
            same = [i for i, path in self.paths.items() if path[:-1] == self.paths[node_id][:-1]]
            assert siblings == sorted(same)


TestConversationMachine = ConversationMachine.TestCase
TestConversationMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)
