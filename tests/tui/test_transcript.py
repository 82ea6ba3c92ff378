"""A long conversation exists as widgets only near the view, and nothing jumps."""

from __future__ import annotations

import threading

from chat_pilot import Chat, chatting
from scripted_model import ScriptedModel, Wait

from dsv4_chat.conversation import Conversation
from dsv4_chat.widgets.transcript import MAX_CHARACTERS, size_of


def long_conversation(questions: int = 60) -> Conversation:
    conversation = Conversation(clock=lambda: 1.0)
    for number in range(questions):
        conversation.append("user", f"question {number}")
        answer = "\n\n".join(f"Answer {number}, part {part}." for part in range(12))
        conversation.append("assistant", f"{answer}\n\n{'word ' * 200}")
    return conversation


async def show(chat: Chat, conversation: Conversation) -> None:
    chat.app.keeper.use(conversation)
    await chat.screen.dialogue.show()
    await chat.pilot.pause()


def numbers(chat: Chat) -> list[int]:
    return [turn.node.id for turn in chat.screen.transcript.mounted_turns]


async def scrolled(chat: Chat, key: str) -> None:
    await chat.press(key)
    await chat.until(lambda: not chat.screen.transcript._is_moving)
    await chat.pilot.pause()


async def test_only_the_last_turns_are_mounted() -> None:
    async with chatting() as chat:
        await show(chat, long_conversation())
        assert len(numbers(chat)) <= 8
        assert numbers(chat)[-1] == 120
        assert chat.screen.transcript.is_vertical_scroll_end


async def test_scrolling_up_reaches_the_first_turn_in_order_and_stays_small() -> None:
    async with chatting() as chat:
        await show(chat, long_conversation(16))
        most = 0
        for _ in range(200):
            await scrolled(chat, "pageup")
            mounted = chat.screen.transcript.mounted_turns
            ids = numbers(chat)
            assert ids == list(range(ids[0], ids[-1] + 1))
            most = max(most, sum(size_of(turn.node) for turn in mounted))
            if ids[0] == 1 and chat.screen.transcript.scroll_offset.y == 0:
                break
        else:
            raise AssertionError("the first turn was not reached")
        assert most < 2 * MAX_CHARACTERS
        assert "question 0" in chat.shown


async def test_lines_stay_in_place_when_turns_are_mounted_above() -> None:
    async with chatting() as chat:
        await show(chat, long_conversation())
        transcript = chat.screen.transcript
        first = numbers(chat)[0]
        transcript.scroll_to(y=4, animate=False)
        await chat.pilot.pause()
        turn = transcript.turn_of(first)
        assert turn is not None
        before = turn.region.y
        transcript.scroll_to(y=2, animate=False)
        await chat.until(lambda: numbers(chat)[0] < first and not transcript._is_moving)
        await chat.pilot.pause()
        assert turn.region.y == before + 2


async def test_ends_are_one_key_away() -> None:
    async with chatting() as chat:
        await show(chat, long_conversation())
        await scrolled(chat, "ctrl+home")
        assert numbers(chat)[0] == 1
        assert "question 0" in chat.shown
        assert "later turns" not in chat.shown or numbers(chat)[-1] < 120
        for _ in range(3):
            await scrolled(chat, "pagedown")
        await scrolled(chat, "ctrl+end")
        assert numbers(chat)[-1] == 120
        assert chat.screen.transcript.is_vertical_scroll_end


async def test_view_follows_the_end_only_while_it_is_there() -> None:
    go, end = threading.Event(), threading.Event()
    text = "\n\n".join(f"part {number}" for number in range(40))
    script = [[text, Wait(go), f"\n\n{text}", Wait(end), f"\n\n{text}\n\nlast words"]]
    async with chatting(ScriptedModel(script=script)) as chat:
        transcript = chat.screen.transcript
        await chat.type("go")
        await chat.press("enter")
        await chat.until(lambda: transcript.max_scroll_y > 40)
        await chat.until(lambda: transcript.is_vertical_scroll_end)
        await chat.press("pageup")
        await chat.pilot.pause()
        place, height = transcript.scroll_offset.y, transcript.max_scroll_y
        go.set()
        await chat.until(lambda: transcript.max_scroll_y > height)
        await chat.pilot.pause()
        assert transcript.scroll_offset.y == place
        await scrolled(chat, "ctrl+end")
        end.set()
        await chat.idle()
        assert "last words" in chat.shown


async def test_reply_is_written_while_the_start_is_read() -> None:
    go = threading.Event()
    async with chatting(ScriptedModel(script=[["one ", Wait(go), "two"]])) as chat:
        await show(chat, long_conversation())
        await chat.type("go")
        await chat.press("enter")
        await chat.until(lambda: chat.path[-1].content == "one ")
        await scrolled(chat, "ctrl+home")
        go.set()
        await chat.idle()
        assert numbers(chat)[0] == 1
        await scrolled(chat, "ctrl+end")
        assert "one two" in chat.shown


async def test_a_new_question_from_far_above_goes_to_the_end() -> None:
    async with chatting() as chat:
        await show(chat, long_conversation())
        await scrolled(chat, "ctrl+home")
        await chat.ask("hello")
        assert "You said: hello" in chat.shown
        ids = numbers(chat)
        assert ids == list(range(ids[0], 123))


async def test_dropped_turns_stay_and_are_marked() -> None:
    async with chatting() as chat:
        conversation = long_conversation(3)
        conversation.drop_oldest_turns(2)
        await show(chat, conversation)
        dropped = [turn.has_class("dropped") for turn in chat.screen.transcript.mounted_turns]
        assert dropped == [True] * 4 + [False] * 2
