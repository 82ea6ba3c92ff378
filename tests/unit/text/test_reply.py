"""Replies parsed into thinking, content and tool calls, rule by rule."""

# ruff: noqa: RUF001, RUF003 (the full-width bar is part of the token texts)

from __future__ import annotations

import json
from typing import Any

import pytest

from edgedsv4.errors import ConfigError
from edgedsv4.text.messages import Message, ToolCall
from edgedsv4.text.prompt import PromptOptions, render_prompt
from edgedsv4.text.reply import Reply, ReplyParser, TextEvent, ThinkingEvent, ToolCallEvent

OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
CALL, END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"


def parameter(name: str, value: str, kind: str = "true") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>'


def parsed(text: str, finish: str = "stop", **options: Any) -> Reply:
    """The reply, checked to be the same when the text comes whole and character by character."""
    replies = []
    for pieces in ([text], list(text)):
        parser = ReplyParser(**options)
        for piece in pieces:
            parser.push(piece)
        parser.finish(finish)
        replies.append(parser.reply)
    assert replies[0] == replies[1]
    return replies[0]


def calls(text: str, **options: Any) -> list[tuple[str, object]]:
    return [(c.name, json.loads(c.arguments)) for c in parsed(text, **options).tool_calls]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n\nhi\n", "hi\n"),
        ("hi\n\n", "hi\n\n"),
        ("\n\n", ""),
        ("\n</think>\nhi</think>x", "\nhix"),
        ("hi\n\n</think>\n\nyo", "hi\n\n\n\nyo"),
        ("a ｜DSML｜ b", "a ｜DSML｜ b"),
        ("a <｜DS", "a <｜DS"),
        ("a </thin", "a </thin"),
        ("a <｜DSML｜b> c", "a <｜DSML｜b> c"),
        ("a<DSML｜tool_calls>b", "a<DSML｜tool_calls>b"),
        (f"a{CLOSE}b", f"a{CLOSE}b"),
        ("<<<", "<<<"),
        ("<think>x", "<think>x"),
        ("", ""),
    ],
)
def test_content(text: str, shown: str) -> None:
    assert parsed(text) == Reply(shown, "", (), "stop")


def test_leading_newlines_of_a_continuation_count() -> None:
    assert parsed("\n\nhi", is_continuation=True).text == "\n\nhi"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\n\nr\n\n</think>\n\nhi", "r", "hi"),
        ("r<think>s｜DSML｜</thinkx</think>hi", "r<think>s｜DSML｜</thinkx", "hi"),
        ("\nr\n", "r\n", ""),
        ("\n\n", "", ""),
        ("</think>hi", "", "hi"),
        ("a\n\nb</think></think>c", "a\n\nb", "c"),
        ("a</thi", "a</thi", ""),
    ],
)
def test_thinking(text: str, reasoning: str, content: str) -> None:
    assert parsed(text, starts_in="thinking") == Reply(content, reasoning, (), "stop")


def test_a_continued_thinking_keeps_its_leading_newlines() -> None:
    reply = parsed("\nr</think>\nhi", starts_in="thinking", is_continuation=True)
    assert (reply.reasoning, reply.text) == ("\nr", "hi")


@pytest.mark.parametrize("opening", [OPEN + "\n", ""])
def test_a_call_block_ends_the_thinking(opening: str) -> None:
    reply = parsed(f'r\n\n{opening}{CALL}f">{END}{CLOSE}', starts_in="thinking")
    assert (reply.reasoning, reply.text, len(reply.tool_calls)) == ("r", "", 1)


@pytest.mark.parametrize("newlines", ["", "\n", "\n\n", "\n\n\n\n"])
def test_all_newlines_before_a_block_belong_to_it(newlines: str) -> None:
    reply = parsed(f'text{newlines}{OPEN}\n{CALL}f">\n{END}\n{CLOSE}')
    assert (reply.text, len(reply.tool_calls)) == ("text", 1)


def test_nothing_behind_a_block_is_content() -> None:
    reply = parsed(f'{OPEN}{CALL}f">{END}{CLOSE}after{OPEN}{CALL}g">{END}{CLOSE}')
    assert (reply.text, [c.name for c in reply.tool_calls]) == ("", ["f"])


def test_text_between_calls_is_ignored() -> None:
    assert calls(f'{OPEN}a{CALL}f">{END}b</think>{OPEN}{CALL}g">{END}c{CLOSE}') == [
        ("f", {}),
        ("g", {}),
    ]


def test_a_bare_call_opens_a_block() -> None:
    reply = parsed(f'x\n{CALL}f">{END}\nafter{CALL}g">{END}')
    assert (reply.text, [c.name for c in reply.tool_calls]) == ("x", ["f", "g"])


def test_parameters_keep_order_kind_and_spaces() -> None:
    body = parameter("b c", " raw\n") + "\n" + parameter("n", ' {"k": [1, 2.5]} ', "false")
    reply = parsed(f'{OPEN}{CALL}f">\n{body}{parameter("", "")}{END}{CLOSE}')
    assert reply.tool_calls[0].arguments == '{"b c": " raw\\n", "n": {"k": [1, 2.5]}, "": ""}'


def test_a_value_ends_only_at_its_closing_tag() -> None:
    value = f'{END}{CLOSE}{OPEN}{CALL}g">"<｜DSML｜parameter name="x" string="true">&lt;'
    assert calls(f'{OPEN}{CALL}f">{parameter("a", value)}{END}{CLOSE}') == [("f", {"a": value})]


@pytest.mark.parametrize("value", ["bad", "", "NaN", "1e999", '"\\ud800"', "9" * 5000, "[" * 9999])
def test_a_value_that_is_no_json_stays_text(value: str) -> None:
    assert calls(f'{OPEN}{CALL}f">{parameter("a", value, "false")}{END}') == [("f", {"a": value})]


def test_of_equal_parameters_the_last_wins() -> None:
    body = parameter("a", "1") + parameter("b", "2") + parameter("a", "3")
    assert parsed(f'{OPEN}{CALL}f">{body}{END}').tool_calls[0].arguments == '{"a": "3", "b": "2"}'


@pytest.mark.parametrize("body", ['{"a": 1}', '\n {"a": 0, "a": 1}\n'])
def test_a_json_object_may_be_the_body(body: str) -> None:
    assert calls(f'{OPEN}{CALL}f">{body}{END}{CLOSE}') == [("f", {"a": 1})]


@pytest.mark.parametrize(
    "call", [f'{CALL}f">{END}', f'{CALL}f">\n\n{END}', f'{CALL}f"/>', f'{CALL}f" />']
)
def test_a_call_without_arguments(call: str) -> None:
    assert calls(f"{OPEN}\n{call}\n{CLOSE}") == [("f", {})]


def test_the_name_is_all_text_up_to_the_quote() -> None:
    assert calls(f'{OPEN}{CALL} a>b</x">{END}{CALL}">{END}') == [(" a>b</x", {}), ("", {})]


MALFORMED = [
    '<｜DSML｜parameter name="a">1</｜DSML｜parameter>',
    '<｜DSML｜parameter name="a" string="maybe">1</｜DSML｜parameter>',
    '<｜DSML｜parameter string="true" name="a">1</｜DSML｜parameter>',
    '<｜DSML｜parameter name=a string="true">1</｜DSML｜parameter>',
    "<｜DSML｜parameter>1</｜DSML｜parameter>",
    '<｜DSML｜parameter name="a" string="true"',
    "<｜DSML｜parameter",
    "[1]",
    "words",
    '{"a": 1',
]


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_call_is_dropped_alone(body: str) -> None:
    good = f'{CALL}g">{parameter("x", "1")}{END}'
    assert calls(f'{OPEN}{good}{CALL}f">{body}{END}{good}{CLOSE}') == [("g", {"x": "1"})] * 2


def test_a_malformed_parameter_drops_the_good_ones_of_its_call() -> None:
    body = parameter("a", "1") + MALFORMED[0]
    assert calls(f'{OPEN}{CALL}f">{body}{END}{CLOSE}') == []


def test_a_call_tag_that_never_closes_is_dropped_alone() -> None:
    assert calls(f'{OPEN}{CALL}f"{CALL}g">{END}{CLOSE}') == [("g", {})]


def test_the_end_of_the_block_closes_a_call() -> None:
    assert calls(f'{OPEN}{CALL}f">{parameter("a", "1")}{CLOSE}') == [("f", {"a": "1"})]


def test_the_next_call_closes_a_call() -> None:
    assert calls(f'{OPEN}{CALL}f">{parameter("a", "1")}{CALL}g">{END}') == [
        ("f", {"a": "1"}),
        ("g", {}),
    ]


CUT = f'{OPEN}\n{CALL}f">\n{parameter("a", "1")}\n{END}\n{CALL}g">\n{parameter("b", "2")}\n{END}'
FIRST_END = CUT.index(END) + len(END)


@pytest.mark.parametrize("length", range(len(CUT)))
def test_a_cut_block_gives_the_complete_calls_and_no_markup(length: int) -> None:
    reply = parsed("text\n\n" + CUT[:length])
    assert [c.name for c in reply.tool_calls] == (["f"] if length >= FIRST_END else [])
    # Fewer characters than `<｜DSML｜` are not markup yet.
    assert reply.text == ("text\n\n" + CUT[:length] if length < len("<｜DSML｜") else "text")


@pytest.mark.parametrize(
    ("text", "given", "reason"),
    [
        ("a", "stop", "stop"),
        ("a", "length", "length"),
        ("a", "cancelled", "cancelled"),
        (f'{OPEN}{CALL}f">{END}{CLOSE}', "stop", "tool_calls"),
        (f'{OPEN}{CALL}f">{END}', "stop", "tool_calls"),
        (f'{OPEN}{CALL}f">{END}', "length", "length"),
        (f'{OPEN}{CALL}f">', "stop", "stop"),
        (f"{OPEN}{CLOSE}", "stop", "stop"),
    ],
)
def test_finish_reason(text: str, given: str, reason: str) -> None:
    assert parsed(text, finish=given).finish_reason == reason


def test_a_demanded_call_starts_inside_the_block() -> None:
    text = f'{CALL}f">\n{parameter("a", "1")}\n{END}\n{CLOSE}'
    reply = parsed(text, starts_in="tool_calls")
    assert (reply.text, len(reply.tool_calls), reply.finish_reason) == ("", 1, "tool_calls")


def test_the_tags_of_v41_carry_a_space() -> None:
    text = (
        'x\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    assert calls(text, variant="v4.1") == [("f", {"a": 1})]
    assert parsed(text, variant="v4").text == text
    assert parsed(f"x{OPEN}", variant="v4.1").text == f"x{OPEN}"


def test_events_come_as_soon_as_they_are_certain() -> None:
    parser = ReplyParser(starts_in="thinking")
    assert parser.push("\nWhy") == [ThinkingEvent("Why")]
    assert parser.push("\n") == []
    assert parser.push("not</th") == [ThinkingEvent("\nnot")]
    assert parser.push("ink>\n\nBe") == [TextEvent("Be")]
    assert parser.push("cause <") == [TextEvent("cause ")]
    assert parser.push("3\n\n<｜DSML｜") == [TextEvent("<3")]
    assert parser.push(f'tool_calls>{CALL}f">') == []
    assert parser.push(END) == [ToolCallEvent(0, "call_0", "f", "{}")]
    assert parser.push(f'{CALL}g"/>') == [ToolCallEvent(1, "call_1", "g", "{}")]
    assert not parser.is_complete
    assert parser.push(CLOSE) == []
    assert parser.is_complete
    assert parser.push("more") == []
    assert parser.finish() == []
    assert parser.reply == Reply(
        "Because <3",
        "Why\nnot",
        (ToolCall("call_0", "f", "{}"), ToolCall("call_1", "g", "{}")),
        "tool_calls",
    )


def test_finishing_gives_out_what_was_held_back() -> None:
    parser = ReplyParser()
    assert parser.push("a\n</thi") == [TextEvent("a")]
    assert parser.finish() == [TextEvent("\n</thi")]
    assert parser.finish() == []


def test_a_finished_parser_takes_no_more() -> None:
    parser = ReplyParser()
    parser.finish()
    with pytest.raises(ConfigError, match="finished"):
        parser.push("x")


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="starts_in must be one of content, thinking"):
        ReplyParser(starts_in="answer")  # type: ignore[arg-type]  # what is being tested


ARGUMENTS = [
    '{"pier": "4", "limit": 2, "deep": {"a": [1.5, null, true, "é\\n"]}, "x y": "<b>"}',
    "{}",
    '{"text": "</｜DSML｜invoke></think>\\n"}',
    '{"text": "\\n\\n  \\t"}',
]


@pytest.mark.parametrize("variant", ["v4", "v4-0731", "v4-vision", "v4.1"])
@pytest.mark.parametrize("thinking", ["none", "high"])
def test_a_rendered_turn_parses_back(variant: str, thinking: str) -> None:
    made = tuple(
        ToolCall(f"call_{i}", f"tool-{i}", arguments) for i, arguments in enumerate(ARGUMENTS)
    )
    question = Message("user", "q")
    answer = Message("assistant", "a\n\nb", reasoning="r\ns", tool_calls=made)
    options = PromptOptions(thinking=thinking)
    prompt = render_prompt([question], variant=variant, options=options)
    whole = render_prompt([question, answer], variant=variant, options=options).text
    text = whole.removeprefix(prompt.text).removesuffix("<｜end▁of▁sentence｜>")
    reply = parsed(text, starts_in=prompt.opens_in, variant=variant)
    assert reply == Reply("a\n\nb", "r\ns" if thinking == "high" else "", made, "tool_calls")
