"""The tree of a conversation: going on, going back, forking, and what the model is sent."""

from __future__ import annotations

import pytest

from dsv4_chat.chat_model import ReplyOutcome
from dsv4_chat.conversation import Conversation, title_of
from edgedsv4 import ConfigError, Message, SamplingOptions, ToolCall


def talk(*texts: str) -> Conversation:
    conversation = Conversation()
    for place, text in enumerate(texts):
        conversation.append("assistant" if place % 2 else "user", text)
    return conversation


def shown(conversation: Conversation) -> list[str]:
    return [node.content for node in conversation.path()]


def sent(conversation: Conversation) -> list[object]:
    return [message.content for message in conversation.to_messages()]


def test_new_conversation_is_empty() -> None:
    conversation = Conversation()
    assert (conversation.path(), conversation.to_messages(), conversation.title) == ([], [], "")
    assert conversation.id != Conversation().id


def test_turns_follow_each_other() -> None:
    conversation = talk("a", "b", "c")
    assert shown(conversation) == ["a", "b", "c"]
    assert [node.parent for node in conversation.path()] == [None, 1, 2]


def test_regenerated_reply_is_a_sibling() -> None:
    conversation = talk("question", "first")
    conversation.rewind(1)
    second = conversation.append("assistant", "second")
    assert shown(conversation) == ["question", "second"]
    assert [node.content for node in conversation.siblings(second.id)] == ["first", "second"]


def test_edited_first_question_is_a_sibling_without_its_answers() -> None:
    conversation = talk("old", "answer")
    edited = conversation.edit(1, "new")
    assert shown(conversation) == ["new"]
    assert [node.id for node in conversation.siblings(edited.id)] == [1, 3]


def test_select_goes_to_the_newest_turn_behind() -> None:
    conversation = talk("a", "b", "c", "d")
    conversation.edit(3, "c2")
    conversation.edit(1, "other")
    conversation.select(1)
    assert shown(conversation) == ["a", "b", "c2"]
    conversation.select(3)
    assert shown(conversation) == ["a", "b", "c", "d"]


def test_rewind_to_nothing_shows_nothing() -> None:
    conversation = talk("a", "b")
    conversation.rewind(None)
    assert shown(conversation) == []
    conversation.append("user", "again")
    assert [node.id for node in conversation.siblings(1)] == [1, 3]


@pytest.mark.parametrize("method", ["node", "rewind", "select", "siblings", "fork"])
def test_unknown_turn_is_an_error(method: str) -> None:
    with pytest.raises(ConfigError, match="no turn 9"):
        getattr(talk("a"), method)(9)


def test_fork_copies_the_shared_prefix_and_the_options() -> None:
    conversation = talk("a", "b", "c", "d")
    conversation.system, conversation.thinking = "be brief", "high"
    conversation.sampling = SamplingOptions(temperature=0)
    conversation.node(2).outcome = ReplyOutcome(generated_tokens=5)
    forked = conversation.fork(2)
    assert shown(forked) == ["a", "b"]
    assert forked.to_messages() == conversation.to_messages()[:3]
    assert (forked.thinking, forked.sampling.temperature) == ("high", 0)
    assert forked.node(2).outcome == ReplyOutcome(generated_tokens=5)
    assert (forked.title, forked.id == conversation.id) == ("a (fork)", False)


def test_fork_does_not_share_turns() -> None:
    conversation = talk("a", "b")
    forked = conversation.fork(2)
    forked.append("user", "c")
    forked.node(1).content = "changed"
    assert shown(conversation) == ["a", "b"]


def test_fork_of_a_growing_reply_is_a_stopped_one() -> None:
    conversation = talk("a")
    node = conversation.append("assistant", "half", state="streaming")
    assert conversation.fork(node.id).path()[-1].state == "stopped"


def test_messages_carry_system_thinking_calls_and_results() -> None:
    conversation = Conversation(system="be brief")
    conversation.append("user", "look it up")
    call = ToolCall(id="call_0", name="look_up")
    conversation.append("assistant", "", reasoning="hm", tool_calls=(call,))
    conversation.append_result("call_0", "found")
    assert conversation.to_messages() == [
        Message("system", "be brief"),
        Message("user", "look it up"),
        Message("assistant", "", reasoning="hm", tool_calls=(call,)),
        Message("tool", "found", tool_call_id="call_0"),
    ]


def test_growing_and_empty_replies_are_not_sent() -> None:
    conversation = talk("a")
    conversation.append("assistant", "", state="failed")
    conversation.append("user", "b")
    conversation.append("assistant", "half", state="streaming")
    assert sent(conversation) == ["a", "b"]


def test_stopped_reply_is_sent() -> None:
    conversation = talk("a")
    conversation.append("assistant", "half", state="stopped")
    assert sent(conversation) == ["a", "half"]


def test_dropped_turns_stay_visible_and_are_not_sent() -> None:
    conversation = talk("a", "b", "c", "d", "e")
    conversation.system = "s"
    assert conversation.drop_oldest_turns(1) == 1
    assert (shown(conversation), sent(conversation)) == (list("abcde"), ["s", "c", "d", "e"])
    assert [node.content for node in conversation.dropped()] == ["a", "b"]
    assert conversation.drop_oldest_turns(1) == 1
    assert sent(conversation) == ["s", "e"]


def test_last_question_is_never_dropped() -> None:
    conversation = talk("a", "b", "c")
    assert conversation.drop_oldest_turns(10) == 1
    assert conversation.drop_oldest_turns(10) == 0
    assert sent(conversation) == ["c"]


def test_nothing_to_drop_from_an_empty_conversation() -> None:
    assert Conversation().drop_oldest_turns(1) == 0


def test_drop_does_not_count_on_another_path() -> None:
    conversation = talk("a", "b", "c", "d")
    conversation.drop_oldest_turns(1)
    conversation.edit(1, "other")
    assert (sent(conversation), conversation.dropped()) == (["other"], [])


def test_fork_leaves_out_what_was_dropped() -> None:
    conversation = talk("a", "b", "c", "d")
    conversation.drop_oldest_turns(1)
    assert sent(conversation.fork(4)) == ["c", "d"]
    assert sent(conversation.fork(2)) == ["a", "b"]


def test_first_question_gives_the_title_once() -> None:
    conversation = talk("What does river mean?", "a stream")
    conversation.edit(1, "What does lake mean?")
    assert conversation.title == "What does river mean?"


@pytest.mark.parametrize(
    ("questions", "expected"),
    [
        ([], ""),
        (["  \n "], ""),
        (["\n\n  first   line \nsecond"], "first line"),
        (["", "second question"], "second question"),
        (["x" * 80], "x" * 59 + "…"),
        (["a\x1b[31mb\x07"], "a[31mb"),
        (["河川とは"], "河川とは"),
    ],
)
def test_title_is_the_first_line_shortened(questions: list[str], expected: str) -> None:
    assert title_of(questions) == expected


def test_every_change_is_noted_in_time() -> None:
    times = iter(range(100, 200))
    conversation = Conversation(clock=lambda: float(next(times)))
    seen = [conversation.updated]
    conversation.append("user", "a")
    seen.append(conversation.updated)
    conversation.rewind(None)
    seen.append(conversation.updated)
    conversation.select(1)
    seen.append(conversation.updated)
    assert seen == sorted(set(seen))
    assert conversation.created == seen[0]


def test_clock_that_goes_back_does_not_change_the_order() -> None:
    times = iter([500.0, 400.0, 300.0])
    conversation = Conversation(clock=lambda: next(times))
    conversation.append("user", "a")
    assert conversation.updated == 500.0
