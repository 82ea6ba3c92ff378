"""Exports: Markdown for people, JSON that other programs read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dsv4_chat.chat_model import ReplyOutcome
from dsv4_chat.conversation import Conversation
from dsv4_chat.export import file_stem, to_json, to_markdown, write_export
from edgedsv4 import SamplingOptions, StorageError, ToolCall, messages_from_json

MARKDOWN = """\
# What is a river?

*2023-11-14 22:13*

## System

be brief

## You

What is a
river?

## Assistant

<details><summary>Thinking (3 tokens)</summary>

water

</details>

Let me look:

Call of `look_up`:

```json
{
  "word": "河"
}
```

## Tool result

````
```
stream
```
````

## Assistant

A str

*(stopped)*
"""


@pytest.fixture
def conversation(monkeypatch: pytest.MonkeyPatch) -> Conversation:
    monkeypatch.setattr("time.localtime", time.gmtime)
    conversation = Conversation(
        title="What is a river?", system="be brief", clock=lambda: 1_700_000_000.0
    )
    conversation.append("user", "What is a\nriver?\n")
    call = ToolCall(id="call_0", name="look_up", arguments='{"word": "河"}')
    reply = conversation.append("assistant", "Let me look:", reasoning="water", tool_calls=(call,))
    reply.outcome = ReplyOutcome(finish_reason="tool_calls", thinking_tokens=3)
    conversation.append_result("call_0", "```\nstream\n```")
    conversation.append("assistant", "A str", state="stopped")
    return conversation


def test_markdown_shows_every_kind_of_turn(conversation: Conversation) -> None:
    assert to_markdown(conversation) == MARKDOWN


def test_markdown_without_thinking_has_none(conversation: Conversation) -> None:
    text = to_markdown(conversation, with_thinking=False)
    assert "water" not in text
    assert "Let me look" in text


def test_markdown_shows_the_chosen_path_alone(conversation: Conversation) -> None:
    conversation.edit(1, "other question")
    assert "Let me look" not in to_markdown(conversation)


def test_arguments_that_are_no_json_are_kept(conversation: Conversation) -> None:
    conversation.node(2).tool_calls = (ToolCall(id="c", name="f", arguments="{oops"),)
    assert "```json\n{oops\n```" in to_markdown(conversation)


def test_messages_of_the_json_are_read_by_the_library(conversation: Conversation) -> None:
    document = json.loads(to_json(conversation))
    assert messages_from_json(document["messages"]) == conversation.to_messages()


def test_json_holds_the_whole_tree(conversation: Conversation) -> None:
    conversation.edit(1, "other question")
    document = json.loads(to_json(conversation))
    assert [turn["id"] for turn in document["turns"]] == [1, 2, 3, 4, 5]
    assert (document["version"], document["active"]) == (1, 5)
    assert [message["content"] for message in document["messages"]] == [
        "be brief",
        "other question",
    ]


def test_json_has_no_infinity(conversation: Conversation) -> None:
    conversation.sampling = SamplingOptions(logit_bias={3: float("-inf"), 4: 0.5})
    document = json.loads(to_json(conversation), parse_constant=pytest.fail)
    assert document["sampling"]["logit_bias"] == {"3": "-inf", "4": 0.5}


def test_json_holds_what_was_dropped_from_the_context() -> None:
    conversation = Conversation()
    for text in ("a", "b", "c"):
        conversation.append("user", text)
    conversation.drop_oldest_turns(2)
    document = json.loads(to_json(conversation))
    assert [message["content"] for message in document["messages"]] == ["a", "b", "c"]


def test_lone_surrogate_does_not_stop_an_export(tmp_path: Path) -> None:
    conversation = Conversation()
    conversation.append("user", "a \ud800")
    for kind in ("md", "json"):
        write_export(conversation, kind, folder=tmp_path)  # type: ignore[arg-type]  # both kinds


def test_made_names_do_not_collide(conversation: Conversation, tmp_path: Path) -> None:
    names = [write_export(conversation, "md", folder=tmp_path).name for _ in range(3)]
    assert names == ["what-is-a-river.md", "what-is-a-river-2.md", "what-is-a-river-3.md"]


def test_existing_file_is_not_touched(conversation: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "mine.md"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(StorageError, match=r"mine\.md: this file exists; name another one"):
        write_export(conversation, "md", path)
    assert path.read_text(encoding="utf-8") == "mine"


def test_missing_folder_is_told(conversation: Conversation, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        write_export(conversation, "md", tmp_path / "no" / "x.md")


@pytest.mark.parametrize(
    ("title", "stem"),
    [
        ("What is 12 + 7?", "what-is-12-7"),
        ("../../etc/passwd", "etc-passwd"),
        ("河川 とは", "河川-とは"),
        ("", "conversation"),
        ("?!", "conversation"),
        ("x" * 100, "x" * 48),
    ],
)
def test_file_name_is_made_of_the_title(title: str, stem: str) -> None:
    assert file_stem(title) == stem
