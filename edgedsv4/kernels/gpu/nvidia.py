"""What only NVIDIA's cards have: products of four bytes, kernels that start before others end.

The assembler is NVIDIA's alone, so a launcher may ask for these only where `has_byte_products` or
`overlaps` says so. The interpreter has no assembler: products of bytes are arithmetic there, with
the same bits, and there is nothing to wait for.

A kernel launched with `overlap_options(overlap=True)` may begin while the one before it in the
stream still runs (programmatic dependent launch). Every program of it must call `await_inputs`
before it reads what another kernel wrote or writes anything; before that it may read what never
changes, such as weights. As every kernel waits for the whole of the one before, all that came
earlier is done too.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import INTERPRETED


def has_byte_products(family: str) -> bool:
    """Whether a family of cards has the instructions (all of NVIDIA's that Triton knows)."""
    return family.startswith("sm_")


def overlaps(family: str) -> bool:
    """Whether kernels can begin before the one in front of them ends: from sm_90 on."""
    return family.startswith("sm_") and int(family.removeprefix("sm_")) >= 90


def overlap_options(*, overlap: bool) -> dict[str, bool]:
    """Of a launch: the kernel's constant, and the option that other compilers do not know."""
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote can be read; let the next begin.

    It can once all programs of this one have come here. If it could sooner, the one behind it could
    too, and their waiting programs would take the room of those that have work.
    """
    if OVERLAP and not INTERPRETED:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            tl.int32,
            False,
            1,
        )


@triton.jit
def dot4(a, b, acc):
    """The sum acc + a0 b0 + a1 b1 + a2 b2 + a3 b3 of signed bytes in words; int32."""
    if INTERPRETED:
        a, b = a.to(tl.int32), b.to(tl.int32)
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], tl.int32, True, 1
        )


@triton.jit
def pick4(places, low, high):
    """Four of the eight bytes of two words, by the lower four nibbles of `places`, all below 8.

    `low` and `high` are scalars that were loaded: constants would take an instruction each time.
    """
    a, b = places * 0 + low, places * 0 + high
    if INTERPRETED:
        picked = places * 0
        for i in tl.static_range(4):
            place = (places >> (4 * i)) & 7
            word = tl.where(place < 4, a, b) >> ((place & 3) * 8)
            picked |= (word & 255) << (8 * i)
        return picked
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, places], tl.uint32, True, 1
        )
