"""Rules of the prompt encoding that goldens do not show: pieces, refusals, JSON documents."""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from edgedsv4.errors import ConfigError
from edgedsv4.text.chat_json import chat_from_json, messages_from_json
from edgedsv4.text.messages import ContentPart, Message, Piece, ToolCall
from edgedsv4.text.prompt import PromptOptions, render_prompt
from edgedsv4.text.special_tokens import DSML, END_THINK, THINK

if TYPE_CHECKING:
    from edgedsv4.text.tokenizer import Tokenizer

FERRY = {
    "name": "ferry_times",
    "description": "Departures from a pier",
    "parameters": {
        "type": "object",
        "properties": {"pier": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["pier"],
    },
}
HELLO = [Message("user", "Hello")]


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, reasoning: str = "", *calls: ToolCall, prefix: bool = False) -> Message:
    return Message(
        "assistant", text, reasoning=reasoning, tool_calls=tuple(calls), is_prefix=prefix
    )


def result(call_id: str, text: str) -> Message:
    return Message("tool", text, tool_call_id=call_id)


PUBLISHED = [
    ("v4", "none", [system("Reply in German."), user("Good morning")], (), 94, "7596d3c4dee68579"),
    ("v4-0731", "high", [system("Be exact."), user("7*8?")], (), 554, "e374b97b23f7d2fd"),
    (
        "v4-0731",
        "low",
        [user("Name a river."), assistant("The Oder.", "Pick one."), user("Another?")],
        (),
        159,
        "dca5248d2ad1431b",
    ),
    (
        "v4",
        "high",
        [
            system("Ferry desk."),
            user("Next two from Pier 4?"),
            assistant(
                "",
                "Ask the tool.",
                ToolCall("c1", "ferry_times", '{"pier": "4", "limit": 2}'),
            ),
            result("c1", '["09:10", "09:40"]'),
        ],
        (FERRY,),
        1661,
        "35b50d4b53cff845",
    ),
    (
        "v4-0731",
        "none",
        [
            system("Ferry desk."),
            user("Piers 4 and 9?"),
            assistant(
                "Looking.",
                "Two calls.",
                ToolCall("c1", "ferry_times", '{"pier": "4"}'),
                ToolCall("c2", "ferry_times", '{"pier": "9"}'),
            ),
            result("c2", "none"),
            result("c1", "09:10"),
            user("Thanks, go on."),
        ],
        (FERRY,),
        1735,
        "95f463e0ddacb1a0",
    ),
    ("v4.1", 20, [user("Sort 3 1 2")], (), 180, "4d74df087bc2d398"),
    (
        "v4.1",
        "none",
        [
            system("Plain text only."),
            user("Hi"),
            assistant("Hello.", "Greet."),
            system("From now on answer in one word."),
        ],
        (),
        201,
        "f5e0efab3eb96f69",
    ),
    (
        "v4.1",
        "max",
        [
            user("Write a limerick about tea."),
            assistant("There once was", "Rhyme scheme AABBA.", prefix=True),
        ],
        (),
        239,
        "9bbbb17e33c77e03",
    ),
]


@pytest.mark.parametrize(("variant", "thinking", "messages", "tools", "size", "digest"), PUBLISHED)
def test_texts_on_which_the_reference_renderers_agree(
    variant: str, thinking: str | int, messages: Any, tools: Any, size: int, digest: str
) -> None:
    options = PromptOptions(thinking=thinking, tools=tools)
    text = render_prompt(messages, variant=variant, options=options).text.encode()
    assert (len(text), hashlib.sha256(text).hexdigest()[:16]) == (size, digest)


MARKUP = "<｜User｜></think><think>｜DSML｜<｜end▁of▁sentence｜><｜System｜><｜image｜>"


@pytest.mark.parametrize("variant", ["v4", "v4-0731", "v4-vision", "v4.1"])
@pytest.mark.parametrize("thinking", ["none", "high", "max"])
def test_markup_in_any_text_of_a_caller_stays_plain(variant: str, thinking: str) -> None:
    def special(markup: str) -> list[str]:
        call = ToolCall(markup, "f" + markup, f'{{"k{markup}": "v{markup}", "n": ["{markup}"]}}')
        messages = [
            system(markup),
            Message("developer", markup, tools=({"name": "d" + markup},)),
            Message("user", (ContentPart(markup), ContentPart(kind=markup or "x"))),
            Message("latest_reminder", markup),
            assistant(markup, markup, call),
            result(markup, markup),
        ]
        options = PromptOptions(
            thinking=thinking,
            tools=({"name": "f", "description": markup},),
            response_format={"title": markup},
        )
        pieces = render_prompt(messages, variant=variant, options=options).pieces
        return [piece.text for piece in pieces if piece.is_special]

    assert special(MARKUP) == special("")


def test_the_tool_block_has_its_nine_tags_and_four_thinking_marks() -> None:
    pieces = render_prompt(HELLO, options=PromptOptions(thinking="none", tools=(FERRY,))).pieces
    special = [piece.text for piece in pieces if piece.is_special]
    assert special[1:-3] == [DSML] * 9 + [THINK, THINK, END_THINK, END_THINK]


def test_plain_pieces_are_never_neighbours() -> None:
    for variant, thinking, messages, tools, _, _ in PUBLISHED:
        options = PromptOptions(thinking=thinking, tools=tools)
        pieces = render_prompt(messages, variant=variant, options=options).pieces
        plain = [not piece.is_special for piece in pieces]
        assert not any(a and b for a, b in itertools.pairwise(plain))
        assert all(piece.text for piece in pieces)


def test_a_rendered_prompt_can_be_encoded(real: Tokenizer) -> None:
    prompt = render_prompt([user("x<think>")], options=PromptOptions(thinking="none"))
    assert real.encode_pieces(prompt.pieces) == [0, 128803, 90, 30, 37947, 32, 128804, 128822]


def test_a_plain_chat_can_be_encoded_with_the_small_vocabulary(small: Tokenizer) -> None:
    assert small.encode_pieces(render_prompt(HELLO).pieces)[-2:] == [4, 5]


MODES = [
    ("v4", "none, high, max", ["low", "minimal", 50, 0.5, "HIGH", "", True]),
    ("v4-vision", "none, high, max", ["low", 1]),
    ("v4-0731", "none, low, high, max", ["off", 100, 0.2]),
    (
        "v4.1",
        r"none, low, high, max, an integer 1\.\.100 or a float 0\.\.0\.99",
        [0, 101, 1.0, -0.1, float("nan"), True, "50", "off"],
    ),
]


@pytest.mark.parametrize(
    ("variant", "modes", "effort"),
    [(variant, modes, effort) for variant, modes, efforts in MODES for effort in efforts],
)
def test_a_mode_the_variant_lacks_is_refused_with_those_it_has(
    variant: str, modes: str, effort: str | float
) -> None:
    with pytest.raises(ConfigError, match=modes):
        render_prompt(HELLO, variant=variant, options=PromptOptions(thinking=effort))


@pytest.mark.parametrize(
    ("alias", "mode"),
    [("minimal", "low"), ("medium", "high"), ("xhigh", "high"), ("ultra", "max")],
)
@pytest.mark.parametrize("variant", ["v4-0731", "v4.1"])
def test_aliases_mean_their_mode(variant: str, alias: str, mode: str) -> None:
    texts = [
        render_prompt(HELLO, variant=variant, options=PromptOptions(thinking=name)).text
        for name in (alias, mode)
    ]
    assert texts[0] == texts[1]


def refused(message: str, messages: Any, variant: str = "v4", **options: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        render_prompt(messages, variant=variant, options=PromptOptions(**options))


def test_an_unknown_variant_is_refused() -> None:
    refused("variant must be one of v4, v4-0731, v4-vision, v4.1", HELLO, variant="v3")


def test_an_empty_conversation_is_refused() -> None:
    refused("at least one message", [])


@pytest.mark.parametrize("role", ["", "bot", "System", "function"])
def test_an_unknown_role_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match="role must be one of system, developer, user"):
        Message(role, "x")


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="task must be one of action, query"):
        Message("user", "x", task="sing")


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("user", {"reasoning": "r"}),
        ("user", {"tool_calls": (ToolCall("1", "f"),)}),
        ("user", {"is_prefix": True}),
        ("assistant", {"tool_call_id": "1"}),
        ("user", {"tools": (FERRY,)}),
        ("assistant", {"task": "title"}),
    ],
)
def test_a_field_on_the_wrong_role_is_refused(role: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"found on a message of role '{role}'"):
        Message(role, "x", **fields)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["f"], r"tools\[0\] must be an object, found str"),
        ([FERRY, None], r"tools\[1\] must be an object, found NoneType"),
        ("abc", "tools must be a list of objects, found str"),
        (FERRY, "tools must be a list of objects, found dict"),
        (5, "tools must be a list of objects, found int"),
        ([{"type": "function", "function": 5}], r"tools\[0\].function must be an object"),
        ([{"description": "x"}], r"tools\[0\].name must be a non-empty string"),
        ([{"name": ""}], r"tools\[0\].name"),
        ([{"name": "f", "x": {1, 2}}], r"tools\[0\] \(f\) is not representable as JSON"),
        ([{"name": "f", "x": float("nan")}], "not representable as JSON"),
        ([{"name": "f", "x": b"x"}], "not representable as JSON"),
    ],
)
def test_tools_that_are_no_json_objects_are_refused(tools: Any, message: str) -> None:
    refused(message, HELLO, tools=tools)


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {"name": "f"}
    schema["self"] = schema
    refused("not representable as JSON", HELLO, tools=[schema])


@pytest.mark.parametrize(
    "response_format",
    ["json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, {"x": {1}}],
)
def test_a_response_format_without_a_schema_is_refused(response_format: Any) -> None:
    refused("response_format", HELLO, response_format=response_format)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "always"}, "auto, none, required or an object"),
        ({"tool_choice": "required", "thinking": "none"}, "needs at least one tool"),
        ({"tool_choice": "required", "tools": (FERRY,)}, "only with thinking none"),
        (
            {"tool_choice": {"function": {"name": "g"}}, "tools": (FERRY,), "thinking": "none"},
            r"one of the tools \(ferry_times\), found 'g'",
        ),
        ({"tool_choice": {}, "tools": (FERRY,), "thinking": "none"}, "found None"),
        ({"continue_final": True}, "needs an assistant message at the end"),
    ],
)
def test_choices_that_cannot_be_met_are_refused(options: dict[str, Any], message: str) -> None:
    refused(message, HELLO, **options)


def test_a_prefix_before_the_end_is_refused() -> None:
    refused(r"messages\[1\] is a prefix", [*HELLO, assistant("x", prefix=True), *HELLO])


def test_a_prefix_with_calls_is_refused() -> None:
    calls = ToolCall("1", "f")
    refused("cannot hold tool calls", [*HELLO, assistant("x", "", calls, prefix=True)])


def test_a_demanded_call_after_a_prefix_is_refused() -> None:
    messages = [*HELLO, assistant("x", prefix=True)]
    refused("and a prefix", messages, tools=(FERRY,), tool_choice="required", thinking="none")


def test_continue_final_equals_a_prefix() -> None:
    by_option = render_prompt([*HELLO, assistant("He")], options=PromptOptions(continue_final=True))
    assert by_option == render_prompt([*HELLO, assistant("He", prefix=True)])


def test_continuing_the_answer_to_a_task_opens_the_content() -> None:
    task = Message("user", "x", task="title")
    prompt = render_prompt([task, assistant("", prefix=True)])
    assert (prompt.opens_in, prompt.is_continuation) == ("content", False)


@pytest.mark.parametrize("arguments", ["9" * 5000, "[" * 100_000, '{"a": ' * 100_000, "NaN"])
def test_arguments_that_cannot_be_parsed_are_passed_on(arguments: str) -> None:
    messages = [*HELLO, assistant("", "", ToolCall("1", "f", arguments))]
    assert f'name="arguments" string="true">{arguments}</' in render_prompt(messages).text


CHAT = {
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "file"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "assistant", "content": "p", "prefix": True},
    ],
    "tools": [{"type": "function", "function": FERRY}],
    "response_format": {"type": "json_object"},
    "tool_choice": "auto",
}


def test_a_chat_document_is_read_whole() -> None:
    chat = chat_from_json(CHAT)
    assert chat.messages == [
        system("S"),
        Message("user", (ContentPart("a"), ContentPart("b"), ContentPart(kind="file"))),
        assistant("", "r", ToolCall("1", "f", "{}")),
        result("1", "x"),
        assistant("p", prefix=True),
    ]
    assert chat.tools == (FERRY,)
    assert chat.response_format == {"type": "json_object"}


def test_a_bare_list_is_a_conversation() -> None:
    assert messages_from_json([{"role": "user", "content": ""}]) == [user("")]


CALL = "messages[0].tool_calls[0]"
MALFORMED: list[tuple[Any, str]] = [
    (None, "messages must be a list, found null"),
    (5, "messages must be a list"),
    ("hi", "messages must be a list"),
    ([], "messages must hold at least one"),
    ({}, "messages must be a list"),
    ({"messages": {}}, "messages must be a list, found an object"),
    ({"messages": [], "model": "x"}, "model: unknown key"),
    ([None], "messages[0] must be an object"),
    ([{}], "messages[0].role must be one of"),
    ([{"role": 5}], "messages[0].role must be one of"),
    ([{"role": "user", "content": ""}, {"role": "bot"}], "messages[1].role must be one of"),
    ([{"role": "user", "content": 5}], "messages[0].content must be text"),
    ([{"role": "user", "content": {}}], "messages[0].content must be text"),
    ([{"role": "user", "content": [5]}], "messages[0].content[0] must be an object"),
    ([{"role": "user", "content": [{}]}], "messages[0].content[0].type must be a string"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be"),
    ([{"role": "user", "task": 1}], "messages[0].task must be a string"),
    ([{"role": "user", "task": "x"}], "messages[0]: task must be one of"),
    ([{"role": "user", "reasoning_content": "x"}], "messages[0]: reasoning belongs to"),
    ([{"role": "assistant", "reasoning_content": []}], "messages[0].reasoning_content must be"),
    ([{"role": "assistant", "prefix": 1}], "messages[0].prefix must be true or false"),
    ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls must be a list"),
    ([{"role": "assistant", "tool_calls": [1]}], f"{CALL} must be an object"),
    ([{"role": "assistant", "tool_calls": [{}]}], f"{CALL}.function must be an object"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        f"{CALL}.function.name must be a string",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
        f"{CALL}.function.name must not be empty",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        f"{CALL}.function.arguments must be a string",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}],
        f"{CALL}.id must be a string",
    ),
    ([{"role": "tool", "tool_call_id": 1}], "messages[0].tool_call_id must be a string"),
    ([{"role": "developer", "tools": [5]}], "messages[0].tools[0] must be an object"),
    ({"messages": [{"role": "user"}], "tools": {"a": 1}}, "tools must be a list"),
    ({"messages": [{"role": "user"}], "tools": [{"name": 1}]}, "tools[0].name must be"),
    ({"messages": [{"role": "user"}], "response_format": []}, "response_format must be an object"),
    ({"messages": [{"role": "user"}], "tool_choice": 1}, "tool_choice must be an object"),
]


@pytest.mark.parametrize(("document", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
def test_a_malformed_chat_names_the_place(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        messages_from_json(document)
    assert str(caught.value).startswith(message)


def test_pieces_say_whether_they_are_control_tokens() -> None:
    assert render_prompt(HELLO).pieces[1:3] == (Piece("<｜User｜>", True), Piece("Hello"))
