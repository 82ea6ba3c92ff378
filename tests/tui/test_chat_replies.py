"""Questions and replies in the chat: order, stopping, versions, editing and forking."""

from __future__ import annotations

import threading

from chat_pilot import Chat, chatting
from scripted_model import Call, Ends, Prefill, ScriptedModel, Thinking, Wait, stream

from dsv4_chat.settings import Settings
from dsv4_chat.widgets.answer_text import AnswerText
from dsv4_chat.widgets.turn import Thinking as ThinkingFold
from dsv4_chat.widgets.turn import ToolCard, Turn

STORY = " ".join(f"word{number}" for number in range(400))


def shown_answer(chat: Chat) -> str:
    return list(chat.screen.query(AnswerText))[-1].text


async def test_question_and_answer_are_shown() -> None:
    async with chatting() as chat:
        await chat.ask("hello")
        assert chat.said == ["hello", "You said: hello"]
        assert "You said: hello" in chat.shown
        assert chat.prompt.text == ""
        assert chat.screen.focused is chat.prompt


async def test_model_is_used_in_one_thread_beside_the_screen() -> None:
    async with chatting() as chat:
        await chat.ask("hello")
        await chat.ask("again")
        assert len(chat.model.threads) == 1
        assert threading.get_ident() not in chat.model.threads


async def test_nothing_is_lost_or_reordered_at_300_tokens_per_second() -> None:
    script = [[Thinking("so "), *stream(STORY, seconds=1 / 300)]]
    async with chatting(ScriptedModel(script=script)) as chat:
        await chat.ask("a story")
        assert chat.path[-1].content == STORY
        assert shown_answer(chat) == STORY
        assert chat.path[-1].reasoning == "so "


async def test_nothing_is_lost_when_all_comes_at_once() -> None:
    async with chatting(ScriptedModel(script=[[*stream(STORY)]])) as chat:
        await chat.ask("a story")
        assert shown_answer(chat) == chat.path[-1].content == STORY


async def test_keys_work_while_a_reply_is_written() -> None:
    go = threading.Event()
    async with chatting(ScriptedModel(script=[["Once ", Wait(go), "more"]])) as chat:
        await chat.type("a story")
        await chat.press("enter")
        await chat.until(lambda: chat.screen.dialogue.run is not None)
        await chat.press(*"next")
        assert chat.prompt.text == "next"
        await chat.press("enter")
        assert chat.prompt.text == "next"
        assert "Esc stops it" in chat.toasts[-1]
        go.set()
        await chat.idle()
        assert chat.said == ["a story", "Once more"]


async def test_stopping_keeps_what_came() -> None:
    for key in ("escape", "ctrl+c"):
        never = threading.Event()
        async with chatting(ScriptedModel(script=[["Once upon ", Wait(never)]])) as chat:
            await chat.type("a story")
            await chat.press("enter")
            await chat.until(lambda: len(chat.path) == 2 and chat.path[-1].content)
            await chat.press(key)
            await chat.idle()
            assert chat.path[-1].state == "stopped"
            assert "Once upon" in chat.shown
            assert "stopped" in chat.shown


async def test_stopping_before_the_model_begins_still_stops() -> None:
    async with chatting(ScriptedModel(script=[["never said"]])) as chat:
        held = threading.Event()
        busy = chat.app.thread.submit(lambda: held.wait(20))
        await chat.type("hello")
        await chat.press("enter")
        await chat.until(lambda: chat.screen.dialogue.run is not None)
        await chat.press("escape")
        held.set()
        await busy
        await chat.idle()
        assert chat.path[-1].state == "stopped"
        assert chat.path[-1].content == ""


async def test_regenerating_adds_a_version_and_arrows_go_between_them() -> None:
    async with chatting(ScriptedModel(script=[["first"], ["second"]])) as chat:
        await chat.ask("hello")
        await chat.press("ctrl+r")
        await chat.idle()
        assert chat.said == ["hello", "second"]
        assert "◀ 2/2 ▶" in chat.shown
        await chat.press("shift+tab", "left")
        await chat.idle()
        assert chat.said == ["hello", "first"]
        await chat.press("right")
        await chat.idle()
        assert chat.said == ["hello", "second"]
        await chat.press("right")
        await chat.idle()
        assert chat.said == ["hello", "second"]


async def test_editing_asks_anew_beside_the_old_question() -> None:
    async with chatting() as chat:
        await chat.ask("one")
        await chat.ask("two")
        await chat.press("ctrl+e")
        await chat.idle()
        assert chat.prompt.text == "two"
        chat.prompt.put("three")
        await chat.press("enter")
        await chat.idle()
        assert chat.said == ["one", "You said: one", "three", "You said: three"]
        assert len(chat.app.keeper.current.siblings(chat.path[2].id)) == 2


async def test_editing_a_focused_question_starts_from_there() -> None:
    async with chatting() as chat:
        await chat.ask("one")
        await chat.ask("two")
        chat.screen.query(Turn).first().focus()
        await chat.press("ctrl+e")
        await chat.idle()
        assert chat.prompt.text == "one"
        await chat.press("enter")
        await chat.idle()
        assert chat.said == ["one", "You said: one"]


async def test_leaving_an_edit_changes_nothing() -> None:
    async with chatting() as chat:
        await chat.ask("one")
        await chat.press("ctrl+e")
        await chat.idle()
        await chat.press("escape")
        assert chat.prompt.text == ""
        await chat.ask("two")
        assert chat.said == ["one", "You said: one", "two", "You said: two"]


async def test_fork_goes_on_in_a_copy_up_to_the_focused_turn() -> None:
    async with chatting() as chat:
        await chat.ask("one")
        await chat.ask("two")
        original = chat.app.keeper.current
        list(chat.screen.query(Turn))[1].focus()
        await chat.press("ctrl+f")
        await chat.idle()
        assert chat.app.keeper.current is not original
        assert chat.said == ["one", "You said: one"]
        await chat.ask("three")
        assert len(original.path()) == 4


async def test_thinking_unfolds_while_it_streams_and_folds_at_the_end() -> None:
    go = threading.Event()
    script = [[Thinking("let me see "), Wait(go), "answer"]]
    async with chatting(ScriptedModel(script=script)) as chat:
        await chat.type("hello")
        await chat.press("enter")
        await chat.until(lambda: "let me see" in chat.shown)
        go.set()
        await chat.idle()
        assert "Thinking · 3 tokens" in chat.shown
        assert "let me see" not in chat.shown
        await chat.press("shift+tab", "enter")
        assert chat.screen.query_one(ThinkingFold).is_open
        assert "let me see" in chat.shown


async def test_thinking_stays_folded_when_the_settings_say_so() -> None:
    go = threading.Event()
    script = [[Thinking("let me see "), Wait(go), "answer"]]
    async with chatting(ScriptedModel(script=script), Settings(show_thinking=False)) as chat:
        await chat.type("hello")
        await chat.press("enter")
        await chat.until(lambda: "Thinking" in chat.shown)
        assert "let me see" not in chat.shown
        go.set()
        await chat.idle()


async def test_tool_calls_are_cards_with_their_arguments() -> None:
    script = [["Looking.", Call("search", '{"query": "fox"}'), Call("broken", "{no json")]]
    async with chatting(ScriptedModel(script=script)) as chat:
        await chat.ask("hello")
        assert len(chat.screen.query(ToolCard)) == 2
        assert '"query": "fox"' in chat.shown
        assert "{no json" in chat.shown
        assert [call.name for call in chat.path[-1].tool_calls] == ["search", "broken"]


async def test_reply_at_the_token_limit_says_so() -> None:
    async with chatting(ScriptedModel(script=[["much", Ends("length")]])) as chat:
        await chat.ask("hello")
        assert "cut off" in chat.shown
        assert not chat.cards


async def test_prefill_shows_how_far_it_is() -> None:
    never = threading.Event()
    async with chatting(ScriptedModel(script=[[Prefill(300, 1200), Wait(never)]])) as chat:
        await chat.type("hello")
        await chat.press("enter")
        await chat.until(lambda: "300/1,200" in chat.shown)
        await chat.press("escape")
        await chat.idle()


async def test_html_and_control_characters_are_shown_and_not_obeyed() -> None:
    script = [["<b>bold</b> \x1b[31mred\x07"]]
    async with chatting(ScriptedModel(script=script)) as chat:
        await chat.ask("\x1b[2Jclear")
        assert "<b>bold</b>" in chat.shown
        assert "\x1b" not in chat.shown
        assert "␛[31mred" in chat.shown
