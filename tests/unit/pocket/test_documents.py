"""Rendering of training documents: fast encoding, loss marks, prose."""

# ruff: noqa: RUF001 (the full-width bar is part of the token texts)

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pocket import documents
from pocket.documents import ID_MASK, TARGET, Document, DocumentEncoder, TextEncoder, chat

from edgedsv4.text.messages import Message, ToolCall
from edgedsv4.text.tokenizer import Tokenizer

DATA = Path(documents.__file__).parent / "data"
TOOL = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(DATA / "tokenizer.json")


@cache
def encoder() -> DocumentEncoder:
    return DocumentEncoder(tokenizer())


def target_text(stored: np.ndarray) -> str:
    ids = stored[(stored & TARGET) > 0] & ID_MASK
    return tokenizer().decode(ids.tolist(), show_control=True)


def whole_text(stored: np.ndarray) -> str:
    return tokenizer().decode((stored & ID_MASK).tolist(), show_control=True)


@given(st.text(st.sampled_from("ab Z09.,-\n'\"\t é世#_<|"), max_size=40))
@settings(max_examples=300, deadline=None)
def test_fast_encoding_gives_the_ids_of_the_tokenizer(text: str) -> None:
    assert TextEncoder(tokenizer()).encode(text) == tokenizer().encode(text)


@given(st.text(st.characters(min_codepoint=10, max_codepoint=126), max_size=60))
@settings(max_examples=300, deadline=None)
def test_fast_encoding_agrees_on_any_ascii(text: str) -> None:
    assert TextEncoder(tokenizer()).encode(text) == tokenizer().encode(text)


def test_fast_encoding_forgets_words_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "_CACHE_LIMIT", 2)
    fast = TextEncoder(tokenizer())
    for text in ("one two three four", "five six seven", "one two"):
        assert fast.encode(text) == tokenizer().encode(text)


def test_targets_are_what_the_assistant_says() -> None:
    document = Document(task="t", messages=chat([("Hi", "Hello you."), ("Bye", "See you.")]))
    stored = encoder().encode(document)
    eos = "<｜end▁of▁sentence｜>"
    assert target_text(stored) == f"Hello you.{eos}See you.{eos}"


def test_thinking_is_a_target_and_its_opening_is_not() -> None:
    document = Document(
        task="t", messages=chat([("2 + 2?", "4")], reasoning="It is 4."), thinking="high"
    )
    stored = encoder().encode(document)
    assert target_text(stored) == "It is 4.</think>4<｜end▁of▁sentence｜>"
    assert "<｜Assistant｜><think>It is 4." in whole_text(stored)


def test_tool_calls_are_targets_and_results_are_not() -> None:
    call = ToolCall("call_0", "get_time", json.dumps({"city": "Oslo"}))
    document = Document(
        task="t",
        messages=(
            Message("user", "Time in Oslo?"),
            Message("assistant", tool_calls=(call,)),
            Message("tool", '{"time": "9:00"}', tool_call_id="call_0"),
            Message("assistant", "It is 9."),
        ),
        tools=(TOOL,),
    )
    said = target_text(encoder().encode(document))
    assert '<｜DSML｜invoke name="get_time">' in said
    assert said.endswith("</｜DSML｜tool_calls><｜end▁of▁sentence｜>It is 9.<｜end▁of▁sentence｜>")
    assert "9:00" not in said


def test_control_tokens_typed_by_a_user_stay_text() -> None:
    document = Document(task="t", messages=chat([("<think>", "no")]))
    stored = encoder().encode(document)
    think = tokenizer().id_of("<think>")
    assert think not in (stored & ID_MASK).tolist()


def test_rendered_text_is_that_of_the_prompt_encoder() -> None:
    document = Document(task="t", messages=chat([("Say 471.", "471")], system="Be brief."))
    pieces = documents.document_pieces(document)
    assert whole_text(encoder().encode(document)) == "".join(piece.text for piece in pieces)


def test_prose_starts_with_bos_and_all_else_is_a_target() -> None:
    stored = encoder().encode(Document(task="prose", text="It was a dark night.\n\n"))
    assert stored[0] == tokenizer().bos_id == 0
    assert target_text(stored) == "It was a dark night.\n\n"
    assert ((stored[1:] & TARGET) > 0).all()


def test_a_digit_is_a_token() -> None:
    assert len(encoder().text.encode("471")) == 3
