"""FP8 rows and FP4 index keys coded one number at a time, straight from the definition."""

from __future__ import annotations

import math
import struct

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(code: int) -> float:
    """Value of an e4m3fn code by its definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = {code: e4m3_value(code) for code in range(256) if code & 0x7F != 0x7F}


def nearest(value: float, table: dict[int, float]) -> int:
    """Code of the nearest value with the sign of `value`; ties to the even code."""
    sign = math.copysign(1.0, value)
    same = {c: v for c, v in table.items() if math.copysign(1.0, v) == sign}
    return min(same, key=lambda c: (abs(same[c] - value), c & 1))


def power_of_two_above(value: float) -> int:
    """Exponent of the smallest power of two >= value."""
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


def fp8_row(values: list[float], rope_dim: int) -> tuple[bytes, bytes]:
    """Reference encoder of one key/value row already in bfloat16."""
    nope = values[: len(values) - rope_dim]
    codes, scales = bytearray(), bytearray()
    for first in range(0, len(nope), 64):
        group = nope[first : first + 64]
        amax = struct.unpack("<f", struct.pack("<f", max(1e-4, *map(abs, group))))[0]
        exponent = power_of_two_above(struct.unpack("<f", struct.pack("<f", amax / 448))[0])
        scales.append(exponent + 127)
        codes += bytes(nearest(max(-448.0, min(448.0, v / 2.0**exponent)), E4M3) for v in group)
    tail = b"".join(struct.pack("<f", v)[2:] for v in values[len(values) - rope_dim :])
    return bytes(codes) + tail, bytes(scales).ljust(-(-len(scales) // 8) * 8, b"\0")


def fp4_row(values: list[float]) -> tuple[bytes, bytes]:
    """Reference encoder of one index key already in bfloat16."""
    table = {**dict(enumerate(E2M1)), **{8 + c: -v for c, v in enumerate(E2M1)}}
    nibbles: list[int] = []
    scales = bytearray()
    for first in range(0, len(values), 32):
        group = values[first : first + 32]
        ratio = struct.unpack("<f", struct.pack("<f", max(6 * 2.0**-126, *map(abs, group)) / 6))[0]
        exponent = power_of_two_above(ratio)
        scales.append(exponent + 127)
        nibbles += [nearest(max(-6.0, min(6.0, v / 2.0**exponent)), table) for v in group]
    pairs = zip(nibbles[0::2], nibbles[1::2], strict=True)
    return bytes(low | high << 4 for low, high in pairs), bytes(scales)
