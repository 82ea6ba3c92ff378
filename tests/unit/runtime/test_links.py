"""Figures of a machine: looked up, written as JSON, and read back with suspicion."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_samples import CARD, DRIVE, expert_rate, links

from edgedsv4.errors import FormatError
from edgedsv4.runtime.links import (
    MAX_FILE_BYTES,
    Links,
    MachineFacts,
    mount_of,
)
from edgedsv4.runtime.rate_curves import seconds_of_call, seconds_per_weight

Document = dict[str, Any]


def document() -> Document:
    found: Document = json.loads(json.dumps(links().to_json(), allow_nan=False))
    return found


def test_median_of_the_runs_counts() -> None:
    assert links().dram_rate == 70e9


def test_memory_that_was_not_measured_has_no_rate() -> None:
    assert links(dram=()).dram_rate == 0


def test_best_reading_of_a_drive_asks_for_the_least() -> None:
    assert (DRIVE.best.request_bytes, DRIVE.best.depth) == (1 << 20, 16)


def test_rates_of_a_type_are_those_of_the_most_threads_by_tokens() -> None:
    assert [(r.threads, r.tokens) for r in links().expert_rates("MXFP4")] == [
        (8, 1),
        (8, 4),
        (8, 16),
    ]
    assert links().expert_rates("Q4_K") == ()


def test_an_expert_rate_counts_bytes_and_products() -> None:
    rate = expert_rate("MXFP4", 8, 4, 100e9)
    assert (rate.bytes_per_second, rate.products_per_second) == (50e9, 400e9)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        (0.5, 1 / 120e9),
        (1, 1 / 120e9),
        (2.5, (1 / 120e9 + 1 / 100e9) / 2),
        (16, 1 / 50e9),
        (64, 4 / 50e9),
    ],
)
def test_seconds_between_measured_tokens_lie_on_a_line(tokens: float, seconds: float) -> None:
    found = seconds_per_weight(links().expert_rates("MXFP4"), tokens)
    assert found == pytest.approx(seconds, rel=1e-12)


def with_bus(rate: float) -> Links:
    return links(card=dataclasses.replace(CARD, to_card=(rate,)))


@pytest.mark.parametrize(
    ("to_card", "tokens"),
    # Half a byte per weight: the bus copies 122, 110, 51 and 5 G weights per second, the CPU
    # computes 120 G with one token, 100 G with 4, 50 G with 16, and 50 G * 16 / n with more.
    [(61e9, 1), (55e9, 3), (25.5e9, 16), (2.5e9, 161), (1e6, None)],
)
def test_copying_beats_the_cpu_from_some_tokens_on(to_card: float, tokens: int | None) -> None:
    assert with_bus(to_card).switch_tokens("MXFP4") == tokens


def test_without_card_or_rates_nothing_switches() -> None:
    assert links(card=None).switch_tokens("MXFP4") is None
    assert links().switch_tokens("Q4_K") is None
    assert links(card=dataclasses.replace(CARD, to_card=())).switch_tokens("MXFP4") is None


def test_type_that_was_not_measured_has_no_seconds() -> None:
    assert seconds_per_weight((), 3) is None


def test_both_at_once_give_the_sum_of_their_bytes() -> None:
    overlap = links().overlap
    assert overlap is not None
    assert overlap.total == 65e9


def test_drive_is_found_by_the_mount_of_a_path(tmp_path: Path) -> None:
    mine = dataclasses.replace(DRIVE, mount=mount_of(tmp_path))
    assert links(drives=(mine,)).drive_of(tmp_path / "model.gguf") is mine
    other = dataclasses.replace(DRIVE, mount="/nowhere")
    assert links(drives=(other,)).drive_of(tmp_path) is None


def test_mount_is_a_mount() -> None:
    assert Path(mount_of(Path("absent/file"))).is_mount()


def test_what_was_measured_before_is_kept_unless_measured_again() -> None:
    old = [dataclasses.replace(DRIVE, mount=name, access="buffered") for name in ("/", "/data")]
    rates = (expert_rate("MXFP4", 8, 1, 1.0), expert_rate("Q2_K", 8, 1, 2.0))
    earlier = links(drives=tuple(old), experts=rates)
    found = links(card=None, overlap=None).with_rest_of(earlier)
    assert found.drives == (DRIVE, old[1])
    assert found.experts == (*links().experts, rates[1])
    assert (found.card, found.overlap) == (earlier.card, earlier.overlap)
    newer = dataclasses.replace(CARD, name="cuda:1")
    assert links(card=newer, overlap=None).with_rest_of(earlier).overlap is None


def test_facts_of_this_machine_are_the_same_twice() -> None:
    assert MachineFacts.of() == MachineFacts.of()


def test_figures_survive_json(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    links().write(path)
    assert Links.read(path) == links()
    links(card=None, overlap=None).write(path)
    assert Links.read(path).card is None


def changed(*place: str | int, to: Any) -> Callable[[Document], None]:
    def change(found: Any) -> None:
        for name in place[:-1]:
            found = found[name]
        found[place[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (changed("format", to="other"), "edgedsv4-links-2"),
        (changed("extra", to=1), "links: expected an object"),
        (lambda found: found.pop("dram"), "links: expected an object"),
        (changed("dram", to={}), "links.dram"),
        (changed("dram", 0, to=3), r"links.dram\[0\]"),
        (changed("dram", 0, "threads", to=0), "threads"),
        (changed("dram", 0, "threads", to=True), "threads"),
        (changed("dram", 0, "threads", to=1.0), "threads"),
        (changed("dram", 0, "threads", to=1 << 70), "threads"),
        (changed("dram", 0, "runs", to=[]), "runs: expected at least one"),
        (changed("dram", 0, "runs", 0, to=float("nan")), r"runs\[0\]"),
        (changed("dram", 0, "runs", 0, to=float("inf")), r"runs\[0\]"),
        (changed("dram", 0, "runs", 0, to=-1.0), r"runs\[0\]"),
        (changed("dram", 0, "runs", 0, to=1e-300), r"runs\[0\]"),
        (changed("dram", 0, "runs", 0, to=True), r"runs\[0\]"),
        (changed("dram", 0, "runs", to=[1.0] * 5000), "at most 4096 entries"),
        (changed("drives", 0, "access", to="cached"), "access"),
        (changed("drives", 0, "readings", to=[]), "readings: expected at least one"),
        (changed("machine", "processor", to=7), "processor"),
        (changed("machine", "processor", to="x" * 5000), "processor"),
        (changed("machine", to=None), "links.machine"),
        (changed("instructions", to=5), "instructions"),
        (changed("card", to=[]), "links.card"),
        (changed("notes", to="x"), "notes"),
    ],
)
def test_entry_that_is_wrong_is_named(
    tmp_path: Path, change: Callable[[Document], None], where: str
) -> None:
    found = document()
    change(found)
    path = tmp_path / "links.json"
    path.write_text(json.dumps(found))
    with pytest.raises(FormatError, match=where) as caught:
        Links.read(path)
    assert caught.value.path == path


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"3", b"[" * 100_000, b"null"])
def test_file_that_is_no_such_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "links.json"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        Links.read(path)


def test_file_that_is_missing_or_huge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    with pytest.raises(FormatError, match="No such file") as caught:
        Links.read(path)
    assert caught.value.fault == "missing"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(FormatError, match="at most"):
        Links.read(path)
    with pytest.raises(FormatError, match="directory"):
        Links.read(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
def test_any_replaced_entry_gives_figures_or_a_format_error(data: st.DataObject) -> None:
    found = copy.deepcopy(document())
    place: Any = found
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    with contextlib.suppress(FormatError):
        assert Links.from_json(found).dram_rate >= 0


# ---- times between and beyond those measured ----

CALLS = ((10.0, 30.0), (20.0, 40.0), (30.0, 70.0))


@pytest.mark.parametrize(
    ("weights", "seconds"),
    [
        (10, 30),
        (15, 35),
        (25, 55),
        (40, 100),  # on the line of the last two
        (5, 25),  # on the line of the first two
        (0.1, 20.1),
    ],
)
def test_calls_between_and_beyond_those_measured_lie_on_lines(
    weights: float, seconds: float
) -> None:
    assert seconds_of_call(CALLS, weights) == pytest.approx(seconds)


def test_small_call_is_never_faster_than_in_proportion() -> None:
    # The line through these is negative at 1.
    assert seconds_of_call(((10.0, 10.0), (20.0, 100.0)), 1) == pytest.approx(1)


def test_single_call_counts_in_proportion() -> None:
    assert seconds_of_call(((10.0, 30.0),), 5) == pytest.approx(15)


def test_figures_that_are_measured_again_replace_only_their_own_kind() -> None:
    earlier = links()
    assert CARD.experts[0].block_type == "MXFP4"
    other = dataclasses.replace(CARD.experts[0], block_type="Q4_K")
    call = dataclasses.replace(earlier.calls[0], block_type="Q4_K")
    now = links(card=dataclasses.replace(CARD, experts=(other,)), calls=(call,))
    found = now.with_rest_of(earlier)
    assert found.card is not None
    assert [rate.block_type for rate in found.card.experts] == ["Q4_K", "MXFP4", "MXFP4"]
    assert [rate.block_type for rate in found.calls] == ["Q4_K", "MXFP4", "MXFP4"]
    another = links(card=dataclasses.replace(CARD, name="cuda:1", experts=()))
    assert another.with_rest_of(earlier).card == another.card


def test_rates_of_card_and_calls_are_found_by_type() -> None:
    assert [rate.tokens for rate in links().card_rates("MXFP4")] == [1, 100]
    assert links(card=None).card_rates("MXFP4") == ()
    assert [rate.experts for rate in links().call_rates("MXFP4")] == [1, 6]
    assert links().call_rates("Q4_K") == ()
