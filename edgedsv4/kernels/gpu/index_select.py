"""The k best visible rows of each token, ascending: larger score first, ties to the lower row.

-0 equals 0, NaN counts as -inf, and -inf is never taken; a token that sees at most k rows takes
them all, and its scores are not read. Missing rows are -1. The definition is
`edgedsv4.kernels.index_topk`.

A program holds a block of scores in registers as integers of the same order and finds the least
one that is taken by bisection; then the place of each taken row is a prefix sum. Past one block,
each block passes its k best on, in the order of rows, and the next launch does the same with their
list. What a block leaves out has k better rows in it, so the result is exact, and it does not
depend on the order in which programs run. The number of launches follows from the capacity; which
of them have work is decided on the device.
"""

from __future__ import annotations

from torch import Tensor

from edgedsv4.errors import CapacityError, ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options

_SHRINK = 8
"""A launch leaves a list this many times shorter."""
_LEAST_BLOCK, _LARGEST_BLOCK = 128, 32768
_ELEMENTS_PER_WARP = 512
_NOT_TAKEN = tl.constexpr(-0x7F800001)  # integer of -inf
_INFINITE = tl.constexpr(0x7F800000)  # integer of inf
_INT_MIN = tl.constexpr(-0x80000000)
_INT_MAX = tl.constexpr(0x7FFFFFFF)


def select_scratch_ints(tokens: int, capacity: int, topk: int) -> int:
    """Elements of the int32 scratch of `select_rows`; 0 when one block holds all rows."""
    return 2 * tokens * sum(_lists(capacity, topk))


def select_rows(
    selected: Tensor,
    scores: Tensor,
    position: Tensor,
    scratch: Tensor,
    bad: Tensor,
    *,
    ratio: int,
    first: int = 0,
    overlap: bool = False,
) -> None:
    """Select the rows of each token.

    Args:
        selected: written, [T, k] int32: rows in ascending order, then -1.
        scores: [T, capacity] float32, as `score_keys` leaves them.
        position: int32 [1], of the first token of the chunk.
        scratch: int32, at least `select_scratch_ints` elements.
        bad: int32 [1]; set to 1 when a score that was read is not finite.
        ratio: tokens per row: token t sees (position + t + 1) // ratio rows.
        first: index in the chunk of the first of these tokens.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if the numbers of tokens disagree, or more than 16,384 rows are asked for.
        CapacityError: if the scratch is too small.
    """
    tokens, topk = selected.shape
    capacity = scores.shape[1]
    if scores.shape[0] != tokens or 2 * topk > _LARGEST_BLOCK:
        raise ShapeError(f"select_rows: selected {[tokens, topk]}, scores {list(scores.shape)}")
    if selected.stride(1) != 1 or scores.stride(1) != 1:
        raise ShapeError("select_rows: the rows of a token must be contiguous")
    needed = select_scratch_ints(tokens, capacity, topk)
    if scratch.numel() < needed:
        raise CapacityError(
            "scratch of select_rows", needed_bytes=4 * needed, available_bytes=4 * scratch.numel()
        )
    if tokens == 0 or topk == 0:
        return
    block, lists = _block(capacity, topk), _lists(capacity, topk)
    # Of each launch: where it reads and writes lists of (keys, rows); the first reads the scores.
    source, start = scratch, 0
    for level in range(len(lists) + 1):
        length = lists[level] if level < len(lists) else 0
        target = scratch[start : start + 2 * tokens * length]
        start += 2 * tokens * length
        launch(
            _select_kernel,
            (tokens, max(1, length // topk)),
            selected,
            scores if level == 0 else source,
            target,
            bad,
            position,
            first,
            capacity,
            scores.stride(0) if level == 0 else 2 * lists[level - 1],
            lists[level - 1] if level > 0 else 0,
            length,
            selected.stride(0),
            ratio,
            TOPK=topk,
            TOPK_BLOCK=power_of_two(topk),
            BLOCK=block,
            LEVEL=level,
            num_warps=max(1, min(16, block // _ELEMENTS_PER_WARP)),
            **overlap_options(overlap=overlap),
        )
        source = target


def _block(capacity: int, topk: int) -> int:
    """Scores that a program holds; two counts of them share an integer."""
    largest = min(_LARGEST_BLOCK, _SHRINK * power_of_two(topk))
    return max(_LEAST_BLOCK, min(largest, power_of_two(capacity)))


def _lists(capacity: int, topk: int) -> list[int]:
    """Lengths of the lists between launches."""
    lengths: list[int] = []
    length, block = capacity, _block(capacity, topk)
    while length > block:
        length = -(-length // block) * topk
        lengths.append(length)
    return lengths


@triton.jit
def _ordered(scores):
    """float32 -> int32 of the same order; -0 is 0, NaN lies outside of what +-inf become."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _INT_MIN, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least_taken(keys, low, high, TOPK: tl.constexpr):
    """Least key of the TOPK largest, and how many of the keys that equal it are taken.

    Takeable keys lie in low..high (int64). When there are fewer than TOPK, all are taken.
    """
    above = 0  # keys larger than `high`
    ties = TOPK
    while low < high:
        # Two bounds a round: the exchange between warps costs as much as counting.
        third = ((high - low - 1) * 0x55555556) >> 32
        first = low + 1 + third
        second = first + third
        is_counted = (keys >= first.to(tl.int32)).to(tl.int32)
        both = tl.sum(is_counted + ((keys >= second.to(tl.int32)).to(tl.int32) << 16), axis=0)
        from_first, from_second = both & 0xFFFF, (both >> 16) & 0xFFFF
        is_first, is_second = from_first >= TOPK, from_second >= TOPK
        above = tl.where(is_second, above, tl.where(is_first, from_second, from_first))
        high = tl.where(is_second, high, tl.where(is_first, second, first) - 1)
        low = tl.where(is_second, second, tl.where(is_first, first, low))
        # Exactly TOPK from `low` on: all that equal it are taken.
        is_exact = tl.where(is_second, from_second, from_first) == TOPK
        high = tl.where(is_exact, low, high)
        ties = tl.where(is_exact, TOPK, TOPK - above)
    return low.to(tl.int32), ties


@triton.jit
def _list_length(n, TOPK: tl.constexpr, BLOCK: tl.constexpr, LEVEL: tl.constexpr):
    """Candidates of a launch; none when an earlier one was the last."""
    count = n
    for _ in tl.static_range(LEVEL):
        count = tl.where(count <= BLOCK, 0, tl.cdiv(count, BLOCK) * TOPK)
    return count


@triton.jit
def _places(keys, least, ties):
    """Which keys are taken, and where they go."""
    is_above, is_tie = keys > least, (keys == least) & (keys > _NOT_TAKEN)
    counts = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
    before = tl.cumsum(counts, axis=0) - counts
    ties_before = (before >> 16) & 0xFFFF
    taken = is_above | (is_tie & (ties_before < ties))
    return taken, (before & 0xFFFF) + tl.minimum(ties_before, ties)


@triton.jit(do_not_specialize=["first"])
def _select_kernel(
    selected_ptr,
    source_ptr,
    target_ptr,
    bad_ptr,
    position_ptr,
    first,
    capacity,
    stride_source_token,
    source_rows_offset,
    target_length,
    stride_selected_token,
    ratio,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    i_t, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_n, o_k = i_b * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOPK_BLOCK)
    p_selected = selected_ptr + i_t * stride_selected_token
    p_source = source_ptr + i_t * stride_source_token + o_n
    keys = o_n
    if LEVEL == 0:  # on their way while the position is read
        keys = _ordered(tl.load(p_source, mask=o_n < capacity, other=0.0))
    n = (tl.load(position_ptr) + first + tl.program_id(0) + 1) // ratio
    n = tl.minimum(n, capacity)
    if n <= TOPK:
        if (LEVEL == 0) & (i_b == 0):
            tl.store(p_selected + o_k, tl.where(o_k < n, o_k, -1), mask=o_k < TOPK)
        return
    count = _list_length(n, TOPK, BLOCK, LEVEL)
    if i_b * BLOCK >= count:
        return

    m_n = o_n < count
    if LEVEL > 0:
        keys = tl.load(p_source, mask=m_n, other=_NOT_TAKEN)
    low = tl.min(tl.where(m_n, keys, _INT_MAX), axis=0)
    high = tl.max(tl.where(m_n, keys, _INT_MIN), axis=0)
    if LEVEL == 0:
        tl.store(bad_ptr, 1, mask=(high >= _INFINITE) | (low <= _NOT_TAKEN))
        keys = tl.where(m_n & (keys <= _INFINITE) & (keys >= _NOT_TAKEN), keys, _NOT_TAKEN)
    low = tl.maximum(low, _NOT_TAKEN + 1).to(tl.int64)
    high = tl.minimum(high, _INFINITE).to(tl.int64)
    least, ties = _least_taken(keys, low, high, TOPK)
    taken, place = _places(keys, least, ties)

    rows = o_n
    if LEVEL > 0:
        rows = tl.load(p_source + source_rows_offset, mask=m_n, other=-1)
    m_rest = (o_k >= tl.sum(taken.to(tl.int32), axis=0)) & (o_k < TOPK)
    if count <= BLOCK:
        tl.store(p_selected + place, rows, mask=taken)
        tl.store(p_selected + o_k, -1, mask=m_rest)
    else:
        p_target = target_ptr + i_t * 2 * target_length + i_b * TOPK
        tl.store(p_target + place, keys, mask=taken)
        tl.store(p_target + target_length + place, rows, mask=taken)
        tl.store(p_target + o_k, _NOT_TAKEN, mask=m_rest)
