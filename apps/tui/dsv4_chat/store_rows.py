"""Conversations and turns as rows of the database, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from dsv4_chat.chat_model import ReplyOutcome
from dsv4_chat.conversation import Conversation, Node
from edgedsv4 import SamplingOptions, ToolCall

CONVERSATION_COLUMNS: Final = (
    "id",
    "title",
    "created",
    "updated",
    "system",
    "sampling",
    "thinking",
    "active",
    "context_start",
)
NODE_COLUMNS: Final = (
    "id",
    "parent",
    "role",
    "content",
    "reasoning",
    "tool_calls",
    "tool_call_id",
    "state",
    "outcome",
    "created",
)
Row = tuple[Any, ...]


def conversation_row(conversation: Conversation) -> Row:
    """Values of `CONVERSATION_COLUMNS`."""
    return (
        conversation.id,
        storable(conversation.title),
        conversation.created,
        conversation.updated,
        storable(conversation.system),
        json.dumps(sampling_json(conversation.sampling)),
        json.dumps(conversation.thinking),
        conversation.active,
        conversation.context_start,
    )


def conversation_from_row(row: Row, nodes: dict[int, Node]) -> Conversation:
    """The conversation of a row; raises ValueError or TypeError for one that is none."""
    fields = dict(zip(CONVERSATION_COLUMNS, row, strict=True))
    sampling = json.loads(fields["sampling"])
    sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    known = {field.name for field in dataclasses.fields(SamplingOptions)}
    fields["sampling"] = SamplingOptions(**{k: v for k, v in sampling.items() if k in known})
    fields["thinking"] = json.loads(fields["thinking"])
    return Conversation(nodes=nodes, **fields)


def node_row(node: Node) -> Row:
    """Values of `NODE_COLUMNS`."""
    calls = [dataclasses.asdict(call) for call in node.tool_calls]
    outcome = None if node.outcome is None else json.dumps(dataclasses.asdict(node.outcome))
    return (
        node.id,
        node.parent,
        node.role,
        storable(node.content),
        storable(node.reasoning),
        json.dumps(calls),
        node.tool_call_id,
        node.state,
        outcome,
        node.created,
    )


def node_from_row(row: Row) -> Node:
    """The turn of a row; raises ValueError or TypeError for one that is none."""
    fields = dict(zip(NODE_COLUMNS, row, strict=True))
    fields["tool_calls"] = tuple(ToolCall(**call) for call in json.loads(fields["tool_calls"]))
    if fields["outcome"] is not None:
        fields["outcome"] = ReplyOutcome(**json.loads(fields["outcome"]))
    return Node(**fields)


def sampling_json(sampling: SamplingOptions) -> dict[str, object]:
    """Sampling options as JSON types."""
    fields = dataclasses.asdict(sampling)
    fields["logit_bias"] = {str(key): bias for key, bias in sampling.logit_bias.items()}
    return fields


def storable(text: str) -> str:
    """The text with lone surrogates replaced, which a database cannot hold."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
