"""Text laws for all inputs: how a stream is cut never matters, and encoding loses nothing."""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgedsv4.text.messages import Message
from edgedsv4.text.prompt import PromptOptions, render_prompt
from edgedsv4.text.reply import ReplyEvent, ReplyParser, ToolCallEvent
from edgedsv4.text.stream_decoder import StreamDecoder
from edgedsv4.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
FRAGMENTS = [
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="a" string="true">',
    '<｜DSML｜parameter name="b" string="false">',
    "<｜DSML｜parameter",
    "</｜DSML｜parameter>",
    *[
        "<think>",
        "</think>",
        "｜DSML｜",
        "<",
        "</",
        ">",
        "/>",
        '"',
        ' name="',
        "\n",
        "\n\n",
        "a",
        "é",
    ],
    *['{"a": 1}', "1", "</thi", "<｜DSML｜ calls>", '<｜DSML｜ invoke name="x"/>', " "],
]
REPLIES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30).map("".join)
SECTIONS = st.sampled_from(["content", "thinking", "tool_calls"])
VARIANTS = st.sampled_from(["v4", "v4.1"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.from_json(DATA / "structure" / "official" / "tokenizer.json")


def events(
    pieces: list[str], section: str, variant: str, is_continuation: bool
) -> list[ReplyEvent]:
    """All events of a reply, neighbours of one kind joined."""
    parser = ReplyParser(
        starts_in=section,  # type: ignore[arg-type]  # drawn from the three sections
        variant=variant,
        is_continuation=is_continuation,
    )
    found = [event for piece in pieces for event in parser.push(piece)]
    found += parser.finish()
    joined: list[ReplyEvent] = []
    for event in found:
        last = joined[-1] if joined else None
        if not isinstance(event, ToolCallEvent) and type(last) is type(event):
            joined[-1] = type(event)(f"{last.text if last else ''}{event.text}")
        else:
            joined.append(event)
    return joined


@settings(max_examples=300, derandomize=True, deadline=None)
@given(REPLIES, SECTIONS, VARIANTS, st.booleans(), st.data())
def test_a_reply_does_not_depend_on_how_it_is_cut(
    text: str, section: str, variant: str, is_continuation: bool, data: st.DataObject
) -> None:
    whole = events([text], section, variant, is_continuation)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert events(pieces, section, variant, is_continuation) == whole
    assert events(list(text), section, variant, is_continuation) == whole


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=7).map("".join), SECTIONS)
def test_a_reply_cut_once_anywhere_is_the_same(text: str, section: str) -> None:
    whole = events([text], section, "v4", False)
    for cut in range(len(text)):
        assert events([text[:cut], text[cut:]], section, "v4", False) == whole


@settings(max_examples=200, derandomize=True, deadline=None)
@given(REPLIES, st.sampled_from(["content", "thinking"]))
def test_what_is_shown_holds_no_call_markup(text: str, section: str) -> None:
    shown = "".join(e.text for e in events([text], section, "v4", False))
    assert "<｜DSML｜tool_calls>" not in shown
    assert not shown.endswith("<｜DSML｜")


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=20))
def test_streamed_bytes_read_like_all_bytes_at_once(tokens: list[bytes]) -> None:
    stream = StreamDecoder(lambda token_id: tokens[token_id])
    text = "".join(stream.push(i) for i in range(len(tokens))) + stream.finish()
    assert text == b"".join(tokens).decode("utf-8", "replace")


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=TEXT, match_added=st.booleans())
def test_encoding_loses_nothing(small: Tokenizer, text: str, match_added: bool) -> None:
    ids = small.encode(text, match_added=match_added)
    assert small.decode(ids, show_control=True) == text
    stream = small.stream(show_control=True)
    assert "".join(stream.push(i) for i in ids) + stream.finish() == text


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXT), min_size=1))
def test_pieces_hold_every_message_and_few_control_tokens(turns: list[tuple[str, str]]) -> None:
    messages = [Message(role, text) for role, text in turns]
    prompt = render_prompt(messages, variant="v4.1", options=PromptOptions(thinking="none"))
    assert all(text in prompt.text for _, text in turns)
    assert sum(piece.is_special for piece in prompt.pieces) <= 3 + 3 * len(turns)
