"""What kernels share: conversions with the same bits in the interpreter and on a GPU.

The interpreter multiplies bfloat16 as integers, truncates where a GPU rounds to nearest even and
loses subnormals; integer arithmetic is right in both.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import IS_INTERPRETED, tl, triton

INTERPRETED = tl.constexpr(IS_INTERPRETED)


@triton.jit
def dot_acc(a, b, acc):
    """The sum acc + a b with a float32 accumulator; operands bfloat16 or float16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """float32 -> bfloat16, nearest even (finite x)."""
    if INTERPRETED:
        u = x.to(tl.uint32, bitcast=True)
        return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_to_bf16(x):
    """float32 -> the nearest bfloat16, as float32 (finite x); integer arithmetic."""
    u = x.to(tl.uint32, bitcast=True)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return u.to(tl.float32, bitcast=True)


@triton.jit
def bf16_to_f32(bits):
    """uint16 bits of a bfloat16 -> float32, subnormals kept."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_to_f32(s):
    """uint8 exponent -> 2^(s - 127); 0 is a subnormal, 255 is NaN."""
    f = (s.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    f = tl.where(s == 0, 5.877471754111438e-39, f)
    return tl.where(s == 255, float("nan"), f)


@triton.jit
def e2m1_to_f32(q):
    """Low 4 bits of q -> 0, .5, 1, 1.5, 2, 3, 4, 6 with sign."""
    q = q.to(tl.uint16)
    bits = ((q & 8) << 12) | ((q & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e4m3_to_f32(b):
    """uint8 -> OCP e4m3 value, NaN included."""
    q = b.to(tl.uint16)
    bits = ((q & 0x80) << 8) | ((q & 0x7F) << 7)
    v = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((q & 0x7F) == 0x7F, float("nan"), v)


@triton.jit
def f32_to_e4m3(x):
    """float32 -> uint8 e4m3, nearest even, saturating at 448 (finite x); integer arithmetic."""
    s = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(x), 448.0)
    u = a.to(tl.uint32, bitcast=True)
    n = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120 << 3)
    sub = (a * 512.0 + 12582912.0).to(tl.uint32, bitcast=True) & 0xF
    return (tl.where(u < (121 << 23), sub, n) | s).to(tl.uint8)
