"""What may follow the last expert of a version 2 pack: a JSON object with measured frequencies.

    {"format": "edgedsv4-xpack-trailer-1",
     "expert_freq": {"tokens": 100000, "counts": [[12, 0, ...], ...]}}

`counts` has one list per layer with the number of selections of each expert while `tokens` tokens
were evaluated. Other members are kept apart for later versions and ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgedsv4.formats.faults import quoted
from edgedsv4.formats.strict_json import JsonValue, parse_json_object

TRAILER_FORMAT: Final = "edgedsv4-xpack-trailer-1"
MAX_TRAILER_BYTES: Final = 1 << 21
"""A larger trailer is refused before it is parsed."""
_MAX_COUNT: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class ExpertFrequency:
    """How often each expert was selected."""

    tokens: int
    """Tokens that were evaluated, >= 1."""
    counts: npt.NDArray[np.uint64]
    """Selections, [layers, experts]."""


def parse_frequency(value: JsonValue, num_layers: int, num_experts: int) -> ExpertFrequency:
    """Check a frequency table.

    Raises:
        ValueError: it is none, or of other dims; the message continues a sentence.
    """
    if not isinstance(value, dict):
        raise ValueError("holds no frequency table")
    tokens, counts = value.get("tokens"), value.get("counts")
    if type(tokens) is not int or not 1 <= tokens < _MAX_COUNT:
        raise ValueError(f"says {quoted(tokens)} tokens, expected 1..2^53-1")
    if not isinstance(counts, list) or len(counts) != num_layers:
        raise ValueError(f"must hold counts of {num_layers} layers")
    for layer, row in enumerate(counts):
        if not isinstance(row, list) or len(row) != num_experts:
            raise ValueError(f"must hold {num_experts} counts for layer {layer}")
        if any(type(count) is not int or not 0 <= count < _MAX_COUNT for count in row):
            raise ValueError(f"holds a count for layer {layer} that is not in 0..2^53-1")
    return ExpertFrequency(tokens, np.array(counts, dtype=np.uint64))


def parse_trailer(data: bytes, num_layers: int, num_experts: int) -> ExpertFrequency | None:
    """Read a trailer; None if it says nothing of frequencies.

    Raises:
        ValueError: it is damaged; the message continues a sentence.
    """
    value = parse_json_object(data)
    if value.get("format") != TRAILER_FORMAT:
        raise ValueError(f"has the format {quoted(value.get('format'))}, not {TRAILER_FORMAT}")
    table = value.get("expert_freq")
    return None if table is None else parse_frequency(table, num_layers, num_experts)


def trailer_bytes(frequency: ExpertFrequency) -> bytes:
    """The trailer as it is written."""
    table = {"tokens": frequency.tokens, "counts": frequency.counts.tolist()}
    return json.dumps({"format": TRAILER_FORMAT, "expert_freq": table}).encode("ascii")
