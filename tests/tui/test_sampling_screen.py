"""The sampling panel: every field, what is wrong with it, and what is applied."""

from __future__ import annotations

import dataclasses

import pytest
from dialog_host import result_after, results_of, shown
from stored_screens import CompareScreen
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input, Static, TextArea

from dsv4_chat.sampling_text import SAMPLING_KEYS
from dsv4_chat.screens.choice_line import ChoiceLine
from dsv4_chat.screens.sampling import ReplyChoices, SamplingScreen
from edgedsv4 import SamplingOptions

NOW = ReplyChoices(
    sampling=SamplingOptions(temperature=0.7, seed=5, logit_bias={3: -1.5}),
    thinking="high",
    system="Be brief.",
)
DEFAULTS = ReplyChoices(sampling=SamplingOptions(top_k=40), thinking="none", system="")


def panel() -> SamplingScreen:
    return SamplingScreen(NOW, DEFAULTS, ("none", "high", "max"))


async def write(pilot: Pilot[None], key: str, text: str) -> None:
    field = pilot.app.screen.query_one(f"#{key}", Input)
    field.focus()
    field.value = text
    await pilot.pause()


def error_of(pilot: Pilot[None], key: str) -> str:
    return str(pilot.app.screen.query_one(f"#error-{key}", Static).content)


VALUES: dict[str, tuple[str, object]] = {
    "temperature": ("0", 0.0),
    "top_k": ("40", 40),
    "top_p": (".9", 0.9),
    "min_p": ("0.05", 0.05),
    "repetition_penalty": ("1.1", 1.1),
    "presence_penalty": ("-2", -2.0),
    "frequency_penalty": ("1e-3", 0.001),
    "logit_bias": ("7=-inf, 8=2", {7: float("-inf"), 8: 2.0}),
    "seed": ("", None),
    "max_tokens": ("1,000", 1000),
}
ERRORS = {
    "temperature": ("300", "temperature must be 0..100, found 300.0"),
    "top_p": ("x", "top_p must be a number, found 'x'"),
    "seed": ("1.5", "seed must be a whole number, found '1.5'"),
    "logit_bias": ("7", "logit_bias must be pairs such as 42=-1.5, 7=-inf; found '7'"),
}
MODES = [
    (["right"], "max"),
    (["left"], "none"),
    (["space", "right"], "none"),
    (["left", "left"], "max"),
]


async def test_keys_apply_or_close() -> None:
    cases = {"enter": NOW, "ctrl+s": NOW, "escape": None, "ctrl+p": None, "ctrl+c": None}
    async with shown(panel()) as pilot:
        given = {key: await result_after(pilot, panel(), ["down", key]) for key in cases}
    assert given == cases


async def test_closing_changes_nothing() -> None:
    async with shown(panel()) as pilot:
        await write(pilot, "temperature", "0.1")
        await pilot.press("escape")
        await pilot.pause()
        assert results_of(pilot) == [None]


async def test_every_option_can_be_typed() -> None:
    assert tuple(VALUES) == SAMPLING_KEYS
    async with shown(panel()) as pilot:
        for key, (text, _) in VALUES.items():
            await write(pilot, key, text)
        await pilot.press("enter")
        await pilot.pause()
        expected = SamplingOptions(**{key: value for key, (_, value) in VALUES.items()})  # type: ignore[arg-type]  # one of each type
        assert results_of(pilot) == [dataclasses.replace(NOW, sampling=expected)]


async def test_wrong_value_is_said_beside_its_field() -> None:
    async with shown(panel()) as pilot:
        for key, (text, _) in ERRORS.items():
            await write(pilot, key, text)
        assert {key: error_of(pilot, key) for key in SAMPLING_KEYS} == {
            key: ERRORS[key][1] if key in ERRORS else "" for key in SAMPLING_KEYS
        }


async def test_nothing_is_applied_while_a_value_is_wrong() -> None:
    async with shown(panel()) as pilot:
        await write(pilot, "temperature", "300")
        await pilot.press("enter", "ctrl+s")
        await pilot.pause()
        assert results_of(pilot) == []


async def test_error_goes_when_the_value_is_right_again() -> None:
    async with shown(panel()) as pilot:
        await write(pilot, "temperature", "300")
        await write(pilot, "temperature", "3")
        assert error_of(pilot, "temperature") == ""


async def test_applying_goes_to_the_wrong_field() -> None:
    async with shown(panel()) as pilot:
        await write(pilot, "min_p", "2")
        pilot.app.screen.query_one("#seed").focus()
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert pilot.app.focused is pilot.app.screen.query_one("#min_p")


async def test_defaults_are_written_into_the_fields() -> None:
    async with shown(panel()) as pilot:
        await write(pilot, "temperature", "300")
        await pilot.press("ctrl+r", "ctrl+s")
        await pilot.pause()
        assert results_of(pilot) == [DEFAULTS]


async def test_thinking_mode_is_chosen_with_keys() -> None:
    async with shown(panel()) as pilot:
        given = [await result_after(pilot, panel(), [*keys, "ctrl+s"]) for keys, _ in MODES]
    assert [choices.thinking for choices in given] == [mode for _, mode in MODES]


async def test_thinking_mode_is_chosen_with_a_click() -> None:
    async with shown(panel()) as pilot:
        await pilot.click(ChoiceLine, offset=(3, 0))
        assert pilot.app.screen.query_one(ChoiceLine).chosen == "none"


async def test_thinking_effort_that_is_a_number_is_kept() -> None:
    now = dataclasses.replace(NOW, thinking=40)
    async with shown(SamplingScreen(now, DEFAULTS, ("none", "high"))) as pilot:
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert results_of(pilot) == [now]


async def test_system_message_takes_several_lines() -> None:
    async with shown(panel()) as pilot:
        pilot.app.screen.query_one(TextArea).focus()
        await pilot.press("end", "enter", "o", "k", "ctrl+s")
        await pilot.pause()
        assert results_of(pilot) == [dataclasses.replace(NOW, system="Be brief.\nok")]


async def test_keys_in_a_burst_reach_the_field_they_go_to() -> None:
    async with shown(panel()) as pilot:
        for key in ("down", "9", "9"):
            pilot.app.post_message(events.Key(key, key if key.isdigit() else None))
        await pilot.pause()
        assert pilot.app.screen.query_one("#temperature", Input).value == "99"


async def test_up_and_down_go_through_the_lines_of_the_system_message() -> None:
    now = dataclasses.replace(NOW, system="one\ntwo")
    async with shown(SamplingScreen(now, DEFAULTS)) as pilot:
        pilot.app.screen.query_one(TextArea).focus()
        places = []
        for key in ("down", "up", "up"):
            await pilot.press(key)
            places.append(pilot.app.focused.id if pilot.app.focused else None)
        assert places == ["system", "system", "max_tokens"]
        await pilot.press("down", "down", "down")
        assert pilot.app.focused
        assert pilot.app.focused.id == "thinking"


async def test_up_and_down_go_through_the_fields() -> None:
    async with shown(panel()) as pilot:
        seen = []
        for _ in range(3):
            await pilot.press("down")
            seen.append(pilot.app.focused.id if pilot.app.focused else None)
        await pilot.press("up")
        assert (seen, pilot.app.focused and pilot.app.focused.id) == (
            ["temperature", "top_k", "top_p"],
            "top_k",
        )


@pytest.mark.parametrize(
    ("size", "theme"), [((80, 24), "dark"), ((80, 24), "light"), ((120, 40), "contrast")]
)
async def test_panel_looks_as_stored(
    size: tuple[int, int], theme: str, compare_screen: CompareScreen
) -> None:
    async with shown(panel(), size, theme) as pilot:
        await write(pilot, "top_p", "x")
        await write(pilot, "temperature", "300")
        await compare_screen(pilot, f"sampling-{size[0]}-{theme}")


async def test_panel_scrolls_in_a_low_terminal(compare_screen: CompareScreen) -> None:
    async with shown(panel(), (80, 14)) as pilot:
        pilot.app.screen.query_one(TextArea).focus()
        await compare_screen(pilot, "sampling-low")
