"""Rendered prompts against conversations whose text was written by hand (tests/data/prompts)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgedsv4.text.chat_json import messages_from_json
from edgedsv4.text.prompt import Prompt, PromptOptions, render_prompt

DATA = Path(__file__).parents[2] / "data" / "prompts"
GOLDENS = [
    pytest.param(golden, id=f"{path.stem}-{golden['name']}")
    for path in sorted(DATA.glob("*.json"))
    for golden in json.loads(path.read_text(encoding="utf-8"))
]


def rendered(golden: dict[str, Any]) -> Prompt:
    return render_prompt(
        messages_from_json(golden["messages"]),
        variant=golden["variant"],
        options=PromptOptions(**golden["options"]),
    )


def expected_text(golden: dict[str, Any]) -> str:
    return "".join(
        part if isinstance(part, str) else (DATA / part["file"]).read_text(encoding="utf-8")
        for part in golden["expected"]
    )


@pytest.mark.parametrize("golden", GOLDENS)
def test_rendered_text_equals_the_hand_written_one(golden: dict[str, Any]) -> None:
    assert rendered(golden).text == expected_text(golden)


@pytest.mark.parametrize("golden", GOLDENS)
def test_the_open_section_is_the_hand_written_one(golden: dict[str, Any]) -> None:
    prompt = rendered(golden)
    found = (prompt.opens_in, prompt.is_continuation, prompt.awaits_reply)
    assert found == (golden["opens_in"], golden["is_continuation"], golden["awaits_reply"])


def test_there_are_at_least_forty_goldens() -> None:
    assert len(GOLDENS) >= 40
