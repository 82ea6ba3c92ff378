"""The details: what is known of a model, while it answers and while it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from dialog_host import result_after, shown
from scripted_model import ScriptedModel
from stored_screens import CompareScreen
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import Static

from dsv4_chat.chat_model import ModelStatus
from dsv4_chat.screens.details import DetailsScreen, details_text
from edgedsv4 import DeviceLostError

STATUS = ModelStatus(
    length=250, capacity=1000, kv_bytes=1_024_000, tiers=(("gpu", 0.93), ("ram", 0.05))
)
EVERYTHING = {
    **ScriptedModel(length=250).details(),
    "session": {"length": 250, "capacity": 1000, "evaluated": 1234},
}


async def answer() -> Mapping[str, object]:
    return EVERYTHING


async def never() -> Mapping[str, object]:
    await asyncio.Event().wait()
    return {}


def details(read: object = answer) -> DetailsScreen:
    return DetailsScreen(read, lambda: STATUS, seconds=60)  # type: ignore[arg-type]  # one of above


def text_of(pilot: Pilot[None]) -> str:
    return str(pilot.app.screen.query_one("#text", Static).content)


def lines(text: str) -> dict[str, str]:
    """Label to value of the lines that have both."""
    parts = (line.strip().split("  ", 1) for line in text.splitlines())
    return {part[0]: part[1].strip() for part in parts if len(part) == 2}


def test_text_tells_of_every_part() -> None:
    told = lines(details_text(EVERYTHING, STATUS, 100).plain)
    assert told["filled"] == "#####............... 250 of 1,000 tokens"
    assert told["weights, mapped"] == "#################### 12.7 MiB"
    assert told["budget"] == "20.6 GiB"
    assert told["gpu"] == "###################. 93.0% of experts needed"
    assert told["native"] == "rms_norm, quant_matmul"
    assert told["instruction set"] == "avx2"
    assert told["evaluated"] == "1,234"


def test_text_holds_every_note() -> None:
    text = details_text(EVERYTHING, STATUS, 100).plain
    assert "Notes\n  - scripted says what the test wrote" in text


def test_text_fits_the_width() -> None:
    long = {
        "engine": {"path": "/models/" + "x" * 200, "kernels": {f"op{n}": "c" for n in range(40)}}
    }
    wide = [line for line in details_text(long, STATUS, 60).plain.splitlines() if len(line) > 60]
    assert wide == []


def test_text_of_a_model_that_is_not_open_is_empty() -> None:
    assert details_text({}, ModelStatus(), 80).plain == ""


def test_text_survives_parts_of_another_kind() -> None:
    odd = {"engine": [1], "memory": {"budget": "much"}, "session": None}
    assert "filled" in details_text(odd, STATUS, 80).plain


async def test_busy_model_shows_what_is_known_at_once() -> None:
    async with shown(details(never)) as pilot:
        assert text_of(pilot).startswith("The model answers as soon as its reply is written.")
        assert "250 of 1,000 tokens" in text_of(pilot)


async def test_model_is_asked_once_while_it_is_busy() -> None:
    asked = []

    async def read() -> Mapping[str, object]:
        asked.append(1)
        return await never()

    async with shown(details(read)) as pilot:
        await pilot.press("r", "r")
        assert asked == [1]


async def test_details_are_asked_for_again() -> None:
    asked = []

    async def read() -> Mapping[str, object]:
        asked.append(1)
        return {"engine": {"threads": len(asked)}}

    async with shown(details(read)) as pilot:
        await pilot.press("r")
        await pilot.pause()
        assert (len(asked), lines(text_of(pilot))["threads"]) == (2, "2")


async def test_details_are_asked_for_again_by_themselves() -> None:
    again = asyncio.Event()
    asked = []

    async def read() -> Mapping[str, object]:
        asked.append(1)
        if len(asked) == 3:
            again.set()
        return {}

    screen = DetailsScreen(read, lambda: STATUS, seconds=0.3)
    async with shown(screen):
        await asyncio.wait_for(again.wait(), 20)


async def test_failure_is_told_and_the_rest_is_kept() -> None:
    fails = False

    async def read() -> Mapping[str, object]:
        if fails:
            raise DeviceLostError("the device stopped answering")
        return EVERYTHING

    async with shown(details(read)) as pilot:
        fails = True
        await pilot.press("r")
        await pilot.pause()
        assert text_of(pilot).startswith("the device stopped answering")
        assert lines(text_of(pilot))["instruction set"] == "avx2"


async def test_details_are_copied_as_json() -> None:
    async with shown(details()) as pilot:
        await pilot.press("c")
        await pilot.pause()
        assert json.loads(pilot.app.clipboard) == EVERYTHING


async def test_keys_scroll() -> None:
    async with shown(details()) as pilot:
        places = []
        for key in ("down", "pagedown", "end", "home"):
            await pilot.press(key)
            await pilot.pause()
            places.append(pilot.app.screen.query_one(VerticalScroll).scroll_y)
        assert 0 < places[0] < places[1] <= places[2]
        assert places[3] == 0


async def test_keys_close() -> None:
    keys = ["escape", "q", "f2", "ctrl+c"]
    async with shown(details()) as pilot:
        assert [await result_after(pilot, details(), [key]) for key in keys] == [None] * 4


@pytest.mark.parametrize(
    ("size", "theme"), [((80, 24), "dark"), ((120, 40), "light"), ((200, 60), "contrast")]
)
async def test_details_look_as_stored(
    size: tuple[int, int], theme: str, compare_screen: CompareScreen
) -> None:
    async with shown(details(), size, theme) as pilot:
        await compare_screen(pilot, f"details-{size[0]}-{theme}")
