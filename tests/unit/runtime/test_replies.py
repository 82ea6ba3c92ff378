"""Replies from a scripted model with a real tokenizer: events, ends, and tokens that are kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from runtime_fakes import FakeModel, fake_parts
from tiny_model import tiny_config

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import CancelledError, ConfigError, ContextFullError, NumericError
from edgedsv4.formats.tokenizer_spec import TokenizerSpec
from edgedsv4.runtime.replies import DoneEvent, SampledTurns
from edgedsv4.runtime.session import Session
from edgedsv4.text import special_tokens
from edgedsv4.text.byte_alphabet import CHAR_OF_BYTE
from edgedsv4.text.messages import Message, Piece
from edgedsv4.text.prompt import PromptOptions
from edgedsv4.text.reply import TextEvent, ThinkingEvent
from edgedsv4.text.tokenizer import Tokenizer

GREEDY = SamplingOptions(temperature=0)
PLAIN = PromptOptions(thinking="none")
THINKING = PromptOptions(thinking="high")
EOS_ID = 1
_CHAT = (
    special_tokens.USER,
    special_tokens.ASSISTANT,
    special_tokens.THINK,
    special_tokens.END_THINK,
    special_tokens.DSML,
)


def make_tokenizer() -> Tokenizer:
    """Bytes, the chat's tokens, and one merge: the text "Hi" has two spellings in tokens."""
    letters = [CHAR_OF_BYTE[byte] for byte in range(256)]
    ends = [special_tokens.BOS, special_tokens.EOS, special_tokens.PAD]
    return Tokenizer.from_spec(
        TokenizerSpec(
            tokens=[*ends, *letters, *_CHAT, "Hi"],
            token_types=[3] * 3 + [1] * 256 + [3, 3, 4, 4, 4, 1],
            merges=["H i"],
            pre="joyai-llm",
            bos_id=0,
            eos_id=EOS_ID,
            pad_id=2,
            chat_template=None,
        )
    )


TOKENIZER = make_tokenizer()


def letters(text: str) -> list[int]:
    """One token per byte, as no tokenizer would write "Hi"."""
    return [3 + byte for byte in text.encode()]


def added(text: str) -> int:
    token_id = TOKENIZER.id_of(text)
    assert token_id is not None
    return token_id


class Chat:
    """A session whose model says what the test wants."""

    def __init__(self, capacity: int = 600) -> None:
        config = tiny_config(vocab_size=TOKENIZER.vocab_size, window=8, eos_id=EOS_ID)
        self.model = FakeModel(config)
        self.session = Session(fake_parts(self.model, TOKENIZER), capacity=capacity)
        self.messages: list[Message] = []

    def say(self, tokens: Sequence[int], at: int) -> None:
        """Let the model sample `tokens`, the first of them at position `at`."""
        self.model.script = dict(enumerate(tokens, start=at))

    def prompt_length(self, options: PromptOptions) -> int:
        prompt = self.session._parts.render(self.messages, options)
        return len(self.session._turns.encode(prompt.pieces, TOKENIZER))

    def ask(
        self,
        text: str,
        tokens: Sequence[int],
        options: PromptOptions = PLAIN,
        sampling: SamplingOptions = GREEDY,
    ) -> DoneEvent:
        """One exchange; the reply joins the conversation as a client would add it."""
        self.messages.append(Message("user", text))
        self.say(tokens, self.prompt_length(options))
        self.model.calls.clear()
        *_, done = self.session.reply(self.messages, sampling, prompt=options)
        assert isinstance(done, DoneEvent)
        reply = done.reply
        self.messages.append(
            Message("assistant", reply.text, reasoning=reply.reasoning, tool_calls=reply.tool_calls)
        )
        return done


@pytest.fixture
def chat() -> Chat:
    return Chat()


def test_reply_streams_text_and_ends_with_done(chat: Chat) -> None:
    chat.messages = [Message("user", "Hello")]
    chat.say([*letters("Hi!"), EOS_ID], chat.prompt_length(PLAIN))
    *events, done = chat.session.reply(chat.messages, GREEDY, prompt=PLAIN)
    assert "".join(event.text for event in events) == "Hi!"
    assert all(isinstance(event, TextEvent) for event in events)
    assert isinstance(done, DoneEvent)
    assert (done.finish_reason, done.reply.text, done.text) == ("stop", "Hi!", "")
    assert done.stats.generated_tokens == 4


def test_thinking_comes_apart_from_text(chat: Chat) -> None:
    tokens = [*letters("hm"), added(special_tokens.END_THINK), *letters("Yes."), EOS_ID]
    chat.messages = [Message("user", "?")]
    chat.say(tokens, chat.prompt_length(THINKING))
    *events, done = chat.session.reply(chat.messages, GREEDY, prompt=THINKING)
    thought = "".join(event.text for event in events if isinstance(event, ThinkingEvent))
    assert (thought, done.reply.reasoning, done.reply.text) == ("hm", "hm", "Yes.")


def test_half_a_character_is_never_shown(chat: Chat) -> None:
    chat.messages = [Message("user", "?")]
    chat.say([*letters("é漢"), EOS_ID], chat.prompt_length(PLAIN))
    *events, _ = chat.session.reply(chat.messages, GREEDY, prompt=PLAIN)
    assert [event.text for event in events if event.text] == ["é", "漢"]


def test_end_token_is_part_of_the_timeline(chat: Chat) -> None:
    chat.ask("Hello", [*letters("Hi"), EOS_ID])
    prompt = chat.session._parts.render(chat.messages, PLAIN)
    assert chat.session.token_ids[-1] == EOS_ID
    assert TOKENIZER.decode(chat.session.token_ids, show_control=True) == prompt.text


def test_sampled_tokens_are_not_tokenized_again(chat: Chat) -> None:
    chat.ask("Hello", [*letters("Hi"), EOS_ID])
    before = chat.session.token_ids
    assert TOKENIZER.encode("Hi") != letters("Hi")
    done = chat.ask("More?", [*letters("Hi Hi"), EOS_ID])
    assert done.report.reused == len(before)
    assert done.report.rebuilt == 0
    assert chat.session.token_ids[: len(before)] == before


def test_third_turn_keeps_the_tokens_of_both_replies(chat: Chat) -> None:
    chat.ask("a", [*letters("Hi"), EOS_ID])
    chat.ask("b", [*letters("HiHi"), EOS_ID])
    before = chat.session.token_ids
    assert chat.ask("c", [*letters("x"), EOS_ID]).report.reused == len(before)


def test_newlines_the_parser_drops_stay_in_the_tokens(chat: Chat) -> None:
    chat.ask("Hello", [*letters("\n\nHi"), EOS_ID])
    assert chat.messages[-1].content == "Hi"
    before = chat.session.token_ids
    assert chat.ask("More?", [*letters("x"), EOS_ID]).report.reused == len(before)


def test_dropped_reasoning_leaves_the_answer_as_it_was_sampled(chat: Chat) -> None:
    end_think = added(special_tokens.END_THINK)
    chat.ask("Hello", [*letters("Hi hm"), end_think, *letters("Hi"), EOS_ID], THINKING)
    chat.ask("More?", [*letters("hm"), end_think, *letters("x"), EOS_ID], THINKING)
    wanted = [added(special_tokens.ASSISTANT), end_think, *letters("Hi"), EOS_ID]
    ids = list(chat.session.token_ids)
    place = ids.index(added(special_tokens.ASSISTANT))
    assert ids[place : place + len(wanted)] == wanted


def test_dropped_reasoning_goes_back_to_the_turn_without_evaluating(chat: Chat) -> None:
    question = "Hello, " + "please " * 40
    tokens = [*letters("hm" * 100), added(special_tokens.END_THINK), *letters("Hi"), EOS_ID]
    chat.ask(question, tokens, THINKING)
    report = chat.ask("More?", [*letters("x"), EOS_ID], THINKING).report
    assert report.rebuilt == 0
    assert report.reused > len(question)


def test_kept_reasoning_is_reused_whole(chat: Chat) -> None:
    keeping = PromptOptions(thinking="high", drop_thinking=False)
    end_think = added(special_tokens.END_THINK)
    chat.ask("Hello", [*letters("Hi\n"), end_think, *letters("\n\nHi"), EOS_ID], keeping)
    before = chat.session.token_ids
    assert chat.ask("More?", [*letters("x"), EOS_ID], keeping).report.reused == len(before)


# A call of f(Hi="Hi"); each # stands for the token that all call tags have in common.
CALL_WITH_GAPS = (
    '\n<#tool_calls>\n<#invoke name="f">\n'
    '<#parameter name="Hi" string="true">Hi</#parameter>\n</#invoke>\n</#tool_calls>'
)


def test_tool_call_is_parsed_and_its_tokens_are_kept() -> None:
    tools = PromptOptions(
        thinking="none", tools=[{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    )
    chat = Chat(capacity=3000)
    call = [
        token_id
        for part in CALL_WITH_GAPS.split("#")
        for token_id in (added(special_tokens.DSML), *letters(part))
    ][1:]
    done = chat.ask("Call it", [*letters("Hi"), *call, EOS_ID], tools)
    assert done.finish_reason == "tool_calls"
    assert [(c.name, c.arguments) for c in done.reply.tool_calls] == [("f", '{"Hi": "Hi"}')]
    before = chat.session.token_ids
    chat.messages.append(Message("tool", "7", tool_call_id=done.reply.tool_calls[0].id))
    report = chat.ask("So?", [*letters("7"), EOS_ID], tools).report
    assert report.reused == len(before)


def test_edited_reply_is_tokenized_as_text(chat: Chat) -> None:
    chat.ask("Hello", [*letters("Hi"), EOS_ID])
    chat.messages[-1] = Message("assistant", "Hi!")
    chat.ask("More?", [*letters("x"), EOS_ID])
    place = chat.session.token_ids.index(added(special_tokens.END_THINK))
    assert chat.session.token_ids[place + 1 : place + 3] == (added_free("Hi"), *letters("!"))


def added_free(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text)
    return token_id


def test_text_that_spells_a_control_token_is_not_taken_for_one(chat: Chat) -> None:
    spelled = "</think>"
    chat.ask("Hello", [*letters(f"a{spelled}b"), EOS_ID])
    turns = chat.session._turns
    prompt = chat.session._parts.render(
        [Message("user", "Hello"), Message("assistant", f"a{spelled}b")], PLAIN
    )
    ids = turns.encode(prompt.pieces, TOKENIZER)
    assert ids.count(added(special_tokens.END_THINK)) == 1


def test_retry_evaluates_nothing_of_the_prompt(chat: Chat) -> None:
    chat.ask("Hello", [*letters("Hi" * 100), EOS_ID])
    chat.messages.pop()
    text = chat.messages.pop().content
    assert isinstance(text, str)
    report = chat.ask(text, [*letters("x"), EOS_ID]).report
    assert (report.evaluated, report.rebuilt) == (0, 0)


def test_max_tokens_ends_with_length(chat: Chat) -> None:
    options = SamplingOptions(temperature=0, max_tokens=2)
    done = chat.ask("Hello", letters("Hi there"), sampling=options)
    assert (done.finish_reason, done.reply.text, done.stats.generated_tokens) == ("length", "Hi", 2)


def test_full_context_ends_with_length() -> None:
    chat = Chat(capacity=20)
    done = chat.ask("Hello", letters("Hi there, dear friend"))
    assert done.finish_reason == "length"
    assert chat.session.length == 20


def test_reply_cut_short_is_kept_when_the_talk_goes_on(chat: Chat) -> None:
    options = SamplingOptions(temperature=0, max_tokens=2)
    chat.ask("Hello", letters("Hi there"), sampling=options)
    before = chat.session.token_ids
    assert chat.ask("Go on", [*letters("x"), EOS_ID]).report.reused == len(before)


def test_prompt_without_room_for_a_token_is_refused_before_anything_happens() -> None:
    chat = Chat(capacity=10)
    reply = chat.session.reply([Message("user", "far too long for ten")], GREEDY, prompt=PLAIN)
    with pytest.raises(ContextFullError) as caught:
        next(reply)
    assert caught.value.needed > caught.value.capacity == 10
    assert chat.model.calls == []
    assert chat.session.length == 0


def test_cancel_ends_with_what_there_is_and_then_raises(chat: Chat) -> None:
    chat.messages = [Message("user", "Hello")]
    chat.say(letters("Hi there"), chat.prompt_length(PLAIN))
    reply = chat.session.reply(chat.messages, GREEDY, prompt=PLAIN)
    text = next(reply).text + next(reply).text
    chat.session.cancel()
    done = next(reply)
    assert isinstance(done, DoneEvent)
    assert (done.finish_reason, done.reply.text) == ("cancelled", text)
    with pytest.raises(CancelledError):
        next(reply)
    chat.messages.append(Message("assistant", text))
    before = chat.session.token_ids
    assert chat.ask("Go on", [*letters("x"), EOS_ID]).report.reused == len(before)


def test_closed_early_the_tokens_so_far_are_kept(chat: Chat) -> None:
    chat.messages = [Message("user", "Hello")]
    chat.say(letters("Hi there"), chat.prompt_length(PLAIN))
    reply = chat.session.reply(chat.messages, GREEDY, prompt=PLAIN)
    text = next(reply).text + next(reply).text
    reply.close()  # type: ignore[attr-defined]
    chat.messages.append(Message("assistant", text))
    before = chat.session.token_ids
    assert chat.ask("Go on", [*letters("x"), EOS_ID]).report.reused == len(before)


def test_numeric_error_keeps_the_tokens_before_it(chat: Chat) -> None:
    chat.messages = [Message("user", "Hello")]
    start = chat.prompt_length(PLAIN)
    chat.say(letters("Hi there"), start)
    chat.model.broken_position = start + 2
    reply = chat.session.reply(chat.messages, GREEDY, prompt=PLAIN)
    with pytest.raises(NumericError):
        list(reply)
    assert chat.session.token_ids[start:] == tuple(letters("Hi"))


def test_turn_boundaries_are_marked(chat: Chat) -> None:
    done = chat.ask("Hello", [*letters("Hi"), EOS_ID])
    start = done.stats.prompt_tokens
    assert chat.session.turn_positions == (start, start + 3)


def test_conversation_that_needs_no_reply_is_refused(chat: Chat) -> None:
    finished = [Message("user", "Hello"), Message("assistant", "Hi")]
    with pytest.raises(ConfigError, match="finished assistant turn"):
        next(chat.session.reply(finished, GREEDY, prompt=PLAIN))


def test_prefix_is_continued_and_kept(chat: Chat) -> None:
    opened = [Message("user", "Hello"), Message("assistant", "Hi", is_prefix=True)]
    chat.messages = list(opened)
    chat.say([*letters(" Hi"), EOS_ID], chat.prompt_length(PLAIN))
    *_, done = chat.session.reply(opened, GREEDY, prompt=PLAIN)
    assert done.reply.text == " Hi"
    before = chat.session.token_ids
    chat.messages = [Message("user", "Hello"), Message("assistant", "Hi Hi")]
    assert chat.ask("Go on", [*letters("x"), EOS_ID]).report.reused == len(before)


def test_model_without_tokenizer_cannot_reply() -> None:
    session = Session(fake_parts(FakeModel()), capacity=50)
    with pytest.raises(ConfigError, match="no tokenizer"):
        next(session.reply([Message("user", "Hello")], GREEDY))
    session.sync([1, 2])


def test_stats_count_reused_prompt_tokens(chat: Chat) -> None:
    chat.ask("Hello", [*letters("Hi"), EOS_ID])
    done = chat.ask("More?", [*letters("x"), EOS_ID])
    assert done.stats.reused_tokens == done.report.reused
    assert done.stats.prompt_tokens == done.report.reused + done.report.evaluated
    assert done.stats.prefill_seconds > 0
    assert done.stats.decode_tokens_per_second > 0


def test_least_recently_used_turns_are_forgotten() -> None:
    turns = SampledTurns(limit_tokens=4)
    forms = [(Piece(text),) for text in "abc"]
    for form in forms[:2]:
        turns.remember(form, [7, 7])
    header = Piece(special_tokens.ASSISTANT, is_special=True)
    end = Piece(special_tokens.EOS, is_special=True)

    def ids_of(form: tuple[Piece, ...]) -> list[int]:
        return turns.encode((header, *form, end), TOKENIZER)[1:-1]

    assert ids_of(forms[0]) == [7, 7]
    turns.remember(forms[2], [8, 8])
    assert ids_of(forms[0]) == [7, 7]
    assert ids_of(forms[1]) == letters("b")
