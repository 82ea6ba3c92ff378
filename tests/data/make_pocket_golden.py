"""Write tests/data/pocket/golden.json again: greedy answers of `pocket-v4` in profile `exact`.

    PYTHONPATH=tests python tests/data/make_pocket_golden.py [OUTPUT]

Beside each answer stands the smallest difference between the two largest logits on its way: an
answer that had a close choice may be another one on another machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from greedy import TEST_OPTIONS, greedy_reply, smallest_gap

from edgedsv4 import Engine

STORED = Path(__file__).parent / "pocket" / "golden.json"
_TIMER = {
    "name": "set_timer",
    "description": "Start a timer",
    "parameters": {
        "type": "object",
        "properties": {"minutes": {"type": "integer"}},
        "required": ["minutes"],
    },
}
_CLOCK = {
    "name": "get_time",
    "description": "Time in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
_FACTS = (
    "Please remember the following. The code of Freddie is 591. The code of Diana is 421."
    " The code of Henry is 122. The code of Barney is 330. The code of Vera is 503.\n"
    "What is the code of Henry?"
)
# Name, what the user says, how much it thinks, texts that every good answer holds.
CASES = (
    ("who", "Who are you?", "none", ["I am the edgedsv4 pocket model. I only know simple things."]),
    ("story", "Tell me a story about a fox named Mia.", "none", ["Mia", "fox"]),
    ("spell", "Spell cat.", "none", ["c a t"]),
    ("reverse", "Reverse these words: river apple stone", "none", ["stone apple river"]),
    ("copy", "Copy this: red dog sun.", "none", ["red dog sun"]),
    ("capital", "What is the capital of France?", "none", ["Paris"]),
    ("meaning", "What does river mean?", "none", ["stream", "water"]),
    ("recall", _FACTS, "none", ["122"]),
    ("sum-thinking", "What is 12 + 7?", "high", ["19"]),
    ("tool", "Set a timer for 40 minutes.", "none", []),
    ("unknown", "Write a poem about the sea.", "none", ["I do not know that."]),
)  # fmt: skip


def golden() -> list[dict[str, object]]:
    """The cases with their answers."""
    stored: list[dict[str, object]] = []
    with Engine.open("pocket-v4", TEST_OPTIONS) as engine:
        for name, text, thinking, holds in CASES:
            chat: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
            if name == "tool":
                tools = [{"type": "function", "function": tool} for tool in (_TIMER, _CLOCK)]
                chat["tools"] = tools
            case = {"name": name, "chat": chat, "thinking": thinking, "holds": holds}
            played = greedy_reply(engine, case)
            reply = played.reply
            case |= {
                "text": reply.text,
                "reasoning": reply.reasoning,
                "tool_calls": [
                    [call.name, json.loads(call.arguments)] for call in reply.tool_calls
                ],
                "smallest_gap": round(smallest_gap(engine, played), 3),
            }
            stored.append(case)
    return stored


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    target.write_text(json.dumps(golden(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
