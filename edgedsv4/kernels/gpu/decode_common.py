"""What the decoders of all types share: loads of planes, and pairs of codes in one word.

A GPU converts integers slowly, but widens a half float in one instruction. So two codes are cut
out of a word at a time, 16 bits apart, and each is read as a half: an integer n below 1024 is then
the subnormal number n 2^-24, which is exact. The power of two goes into the scale.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton

UP_24 = tl.constexpr(16777216.0)  # 2^24: a half's subnormal bits to the integer they are


@triton.jit
def load_plane(p, row, row_mask, k0, K, PER: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of a plane that has one for every PER columns: [BN, BK / PER], 0 outside.

    Rows are whole blocks of BLOCK columns, which tells the compiler how wide it may load. Without
    row_mask (None) and with a K it knows, a multiple of BK, nothing is masked.
    """
    column = k0 // PER + tl.arange(0, BK // PER)
    width = row_width(K, PER, BLOCK)
    return load_masked(p, row, row_mask, column, width, K, BK)


@triton.jit
def row_width(K, PER: tl.constexpr, BLOCK: tl.constexpr):
    """K / PER, known to be a multiple of BLOCK / PER."""
    if isinstance(K, int):
        return K // PER
    elif BLOCK > PER:
        return tl.multiple_of(K // PER, BLOCK // PER)
    else:
        return K // PER


@triton.jit
def load_masked(p, row, row_mask, column, width, K, BK: tl.constexpr):
    """Numbers at rows [BN] and columns [C] of a plane: [BN, C], 0 outside."""
    address = p + row[:, None] * width + column[None, :]
    if is_whole(K, BK):
        if row_mask is None:
            return tl.load(address)
        else:
            return tl.load(address, mask=row_mask[:, None], other=0)
    elif row_mask is None:
        return tl.load(address, mask=(column < width)[None, :], other=0)
    else:
        return tl.load(address, mask=row_mask[:, None] & (column < width)[None, :], other=0)


@triton.jit
def is_whole(K, BK: tl.constexpr):
    """Whether the compiler knows that K is a multiple of BK."""
    if isinstance(K, int):
        return K % BK == 0
    else:
        return False


@triton.jit
def load_words(p, row, row_mask, k0, K, PER: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr):
    """As `load_plane` with int32 numbers, as unsigned ones."""
    return load_plane(p, row, row_mask, k0, K, PER, BK, BLOCK).to(tl.uint32, bitcast=True)


@triton.jit
def spread(values, WIDTH: tl.constexpr):
    """One number per group to one per column: [BN, G] -> [BN, WIDTH]."""
    BN: tl.constexpr = values.shape[0]
    G: tl.constexpr = values.shape[1]
    if G == WIDTH:
        return values
    else:
        wide = tl.broadcast_to(values[:, :, None], (BN, G, WIDTH // G))
        return tl.reshape(wide, (BN, WIDTH))


@triton.jit
def low(pair):
    """The half float in the lower bits of a word, as f32."""
    return pair.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high(pair):
    """The half float in the upper bits of a word, as f32."""
    return (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def join4(a0, a1, a2, a3):
    """Four tiles as one with a last axis of 2 x 2, in order."""
    return tl.join(tl.join(a0, a2), tl.join(a1, a3))


@triton.jit
def join8(a0, a1, a2, a3, a4, a5, a6, a7):
    """Eight tiles as one with last axes of 2 x 2 x 2, in order."""
    return tl.join(join4(a0, a2, a4, a6), join4(a1, a3, a5, a7))


@triton.jit
def hidden(CONSTANT: tl.constexpr, p):
    """A constant, uint32, that the compiler takes for a variable: no address p has its top bit set.

    With masks that it knows, it turns the cutting of pairs into more instructions than written.
    """
    return (p.to(tl.int64, bitcast=True) >> 63).to(tl.uint32) ^ CONSTANT
