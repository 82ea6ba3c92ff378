"""Quantities as a person reads them."""

from __future__ import annotations

import pytest

from dsv4_chat.units import bytes_text, seconds_text, speed_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (99.95 * 1024, "100 KiB"),
        (1023.9 * 1024, "1.0 MiB"),
        (19_212_424, "18.3 MiB"),
        (284 << 30, "284 GiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_bytes_take_the_unit_that_keeps_them_short(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7830, "2 h 10 min"),
    ],
)
def test_durations_take_two_units_at_most(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_speed_is_in_gigabytes_of_powers_of_ten() -> None:
    assert speed_text(3_661_189_106) == "3.66 GB/s"
