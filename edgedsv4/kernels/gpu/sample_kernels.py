"""The launches of `sample.py`: a program per block of tokens."""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.route import ordered

# Places in the options.
U, SCALE, REPETITION, PRESENCE, FREQUENCY, TOP_K, TOP_P, MIN_P = map(tl.constexpr, range(8))
# Bits of a block's status: a logit is NaN or +inf; a token is allowed.
BAD, ALLOWED = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def argmax_kernel(work_ptr, logits_ptr, vocab_size, blocks, tokens, BN: tl.constexpr):
    """Program (block, row): the largest key of a block, and the first token that has it."""
    i_block = tl.program_id(0)
    row = tl.program_id(1)
    o_n = i_block * BN + tl.arange(0, BN)  # [BN]
    at = logits_ptr + row.to(tl.int64) * vocab_size + o_n
    key = ordered(tl.load(at, mask=o_n < vocab_size, other=float("-inf")))
    best = tl.max(key, axis=0)
    first = tl.min(tl.where(key == best, o_n, 0x7FFFFFFF), axis=0)
    place = row * blocks + i_block
    tl.store(work_ptr + place, best)
    tl.store(work_ptr + tokens * blocks + place, first)


@triton.jit
def first_best_kernel(ids_ptr, work_ptr, blocks, tokens, BLOCKS: tl.constexpr):
    """Program: one row."""
    row = tl.program_id(0)
    o_p = tl.arange(0, BLOCKS)  # [BLOCKS]
    at = work_ptr + row * blocks + o_p
    key = tl.load(at, mask=o_p < blocks, other=-2147483648)
    first = tl.load(at + tokens * blocks, mask=o_p < blocks, other=0x7FFFFFFF)
    best = tl.max(key, axis=0)
    token = tl.min(tl.where(key == best, first, 0x7FFFFFFF), axis=0)
    # The keys of +inf, and of -inf: ~0x7F800000 with the sign kept.
    is_fit = (best < 0x7F800000) & (best > -2139095041)
    tl.store(ids_ptr + row, tl.where(is_fit, token, -1))


@triton.jit
def score_kernel(
    scores_ptr,
    best_ptr,
    first_ptr,
    status_ptr,
    logits_ptr,
    bias_ptr,
    flags_ptr,
    generated_ptr,
    options_ptr,
    vocab_size,
    BN: tl.constexpr,
):
    """Program: the scores of a block, after bias and penalties."""
    i_block = tl.program_id(0)
    o_n = i_block * BN + tl.arange(0, BN)  # [BN]
    m_n = o_n < vocab_size
    logits = tl.load(logits_ptr + o_n, mask=m_n, other=float("-inf"))
    is_bad = tl.where(logits < float("inf"), 0, 1)  # NaN too
    score = logits.to(tl.float64)
    if bias_ptr is not None:
        score += tl.load(bias_ptr + o_n, mask=m_n, other=0.0)
    is_allowed = score > float("-inf")
    if flags_ptr is not None:
        repetition = tl.load(options_ptr + REPETITION)
        is_seen = tl.load(flags_ptr + o_n, mask=m_n, other=0) != 0
        scaled = tl.where(score > 0.0, score / repetition, score * repetition)
        score = tl.where(is_seen, scaled, score)
        count = tl.load(generated_ptr + o_n, mask=m_n, other=0)
        less = score - tl.load(options_ptr + PRESENCE)
        less = less - tl.load(options_ptr + FREQUENCY) * count.to(tl.float64)
        score = tl.where(count != 0, less, score)
    # Far beyond the range a product is infinite; the token is pushed down, not banned.
    score = tl.where(score > 1e300, 1e300, tl.where(score < -1e300, -1e300, score))
    score = tl.where(is_allowed, tl.where(score == 0.0, 0.0, score), float("-inf"))
    tl.store(scores_ptr + o_n, score)
    best = tl.max(score, axis=0)
    tl.store(best_ptr + i_block, best)
    tl.store(first_ptr + i_block, tl.min(tl.where(score == best, o_n, 0x7FFFFFFF), axis=0))
    allowed = tl.max(is_allowed.to(tl.int32), axis=0)
    tl.store(status_ptr + i_block, tl.max(is_bad, axis=0) * BAD + allowed * ALLOWED)


@triton.jit
def _is_fit(status_ptr, o_p, blocks):
    """Whether no logit is NaN or +inf and some token is allowed."""
    status = tl.load(status_ptr + o_p, mask=o_p < blocks, other=0)  # [BLOCKS]
    return (tl.max(status & BAD, axis=0) == 0) & (tl.max(status & ALLOWED, axis=0) != 0)


@triton.jit
def greedy_kernel(ids_ptr, best_ptr, first_ptr, status_ptr, blocks, BLOCKS: tl.constexpr):
    """One program: the first token with the largest score."""
    o_p = tl.arange(0, BLOCKS)  # [BLOCKS]
    best = tl.load(best_ptr + o_p, mask=o_p < blocks, other=float("-inf"))
    first = tl.load(first_ptr + o_p, mask=o_p < blocks, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, axis=0), first, 0x7FFFFFFF), axis=0)
    tl.store(ids_ptr, tl.where(_is_fit(status_ptr, o_p, blocks), token, -1))


@triton.jit
def _exponential(x):
    """e^x for x <= 0, 0 below -700: the operations of the definition, in its order."""
    low = x < -700.0
    x = tl.where(low, -700.0, x)
    # The last place of 1.5 * 2^52 is 1: adding it rounds to an integer.
    n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = x - n * 0.6931471803691238
    r = r - n * 1.9082149292705877e-10
    square = r * r
    even = 0.0 * square + 1.0 / 479001600.0
    even = even * square + 1.0 / 3628800.0
    even = even * square + 1.0 / 40320.0
    even = even * square + 1.0 / 720.0
    even = even * square + 1.0 / 24.0
    even = even * square + 1.0 / 2.0
    odd = 0.0 * square + 1.0 / 6227020800.0
    odd = odd * square + 1.0 / 39916800.0
    odd = odd * square + 1.0 / 362880.0
    odd = odd * square + 1.0 / 5040.0
    odd = odd * square + 1.0 / 120.0
    odd = odd * square + 1.0 / 6.0
    value = ((odd * r + even) * square + r) + 1.0
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(low, 0.0, value * power)


@triton.jit
def _key(score):
    """uint64 in the order of float64."""
    bits = score.to(tl.int64, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ (-9223372036854775807 - 1))
    return flipped.to(tl.uint64, bitcast=True)


@triton.jit
def _goal(sums_ptr, options_ptr, blocks, BLOCKS: tl.constexpr, IS_WEIGHTED: tl.constexpr):
    """What the tokens kept must amount to."""
    if IS_WEIGHTED:
        o_p = tl.arange(0, BLOCKS)
        total = tl.sum(tl.load(sums_ptr + o_p, mask=o_p < blocks, other=0.0), axis=0)
        return tl.load(options_ptr + TOP_P) * total
    else:
        return tl.load(options_ptr + TOP_K)


@triton.jit
def _next(prefix, above, parts, goal, DIGITS: tl.constexpr):
    """One more digit of the last score kept: (leading bits, what is above them, digit)."""
    o_d = tl.arange(0, DIGITS)  # [DIGITS]
    sums = tl.sum(parts, axis=0)  # [DIGITS]
    is_below = o_d[:, None] <= o_d[None, :]
    from_here = tl.sum(tl.where(is_below, sums[None, :], 0.0), axis=1)  # [DIGITS]
    reached = tl.sum((above + from_here >= goal).to(tl.int32), axis=0)
    digit = tl.where(reached > 0, reached - 1, 0)
    above = above + tl.sum(tl.where(o_d > digit, sums, 0.0), axis=0)
    return (prefix << 4) | digit.to(tl.int64), above, digit


@triton.jit
def _load_parts(parts_ptr, turn, blocks, BLOCKS: tl.constexpr, DIGITS: tl.constexpr):
    """The sums of one round, [BLOCKS, DIGITS]."""
    o_p = tl.arange(0, BLOCKS)[:, None]
    o_d = tl.arange(0, DIGITS)[None, :]
    at = parts_ptr + ((turn & 1) * blocks + o_p) * DIGITS + o_d
    return tl.load(at, mask=o_p < blocks, other=0.0)


@triton.jit(do_not_specialize=["turn"])
def count_kernel(
    parts_ptr,
    prefixes_ptr,
    above_ptr,
    scores_ptr,
    weights_ptr,
    sums_ptr,
    options_ptr,
    blocks,
    turn,
    IS_FIRST: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Program: what the tokens of a block amount to, by the next four bits of their scores.

    Every program finds the bits before from the sums of the round before; one keeps them.
    """
    i_block = tl.program_id(0)
    if IS_FIRST:
        prefix = tl.full([], 0, tl.int64)
        above = tl.full([], 0.0, tl.float64)
    else:
        prefix = tl.load(prefixes_ptr + turn - 1)
        above = tl.load(above_ptr + turn - 1)
        parts = _load_parts(parts_ptr, turn - 1, blocks, BLOCKS, DIGITS)
        goal = _goal(sums_ptr, options_ptr, blocks, BLOCKS, IS_WEIGHTED)
        prefix, above, _ = _next(prefix, above, parts, goal, DIGITS)
    if i_block == 0:
        tl.store(prefixes_ptr + turn, prefix)
        tl.store(above_ptr + turn, above)
    shift = (tl.full([], 60, tl.int32) - 4 * turn).to(tl.uint64)
    o_d = tl.arange(0, DIGITS)  # [DIGITS]
    acc = tl.zeros([DIGITS, CHUNK], tl.float64)
    for start in tl.static_range(0, BN, CHUNK):
        o_n = i_block * BN + start + tl.arange(0, CHUNK)  # [CHUNK]
        bits = _key(tl.load(scores_ptr + o_n)) >> shift
        # Digits of tokens with other leading bits count nowhere.
        agrees = (bits >> 4).to(tl.int64) == prefix
        digit = tl.where(agrees, (bits & 15).to(tl.int32), -1)
        amount = tl.full([CHUNK], 1.0, tl.float64)
        if IS_WEIGHTED:
            amount = tl.load(weights_ptr + o_n)
        acc += tl.where(digit[None, :] == o_d[:, None], amount[None, :], 0.0)
    at = parts_ptr + ((turn & 1) * blocks + i_block) * DIGITS + o_d
    tl.store(at, tl.sum(acc, axis=1))


@triton.jit
def _score_of(prefix, BITS: tl.constexpr):
    """The float64 whose key begins with these bits and goes on as those of its kind do."""
    SPARE: tl.constexpr = 64 - BITS
    key = prefix << SPARE
    is_positive = key < 0  # the top bit of the key
    # The rest of a score is zeros, which a key has inverted if it is negative.
    negative = ~(key | ((1 << SPARE) - 1))
    bits = tl.where(is_positive, key ^ (-9223372036854775807 - 1), negative)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _slack(total, vocab_size):
    """More than sums of the weights in two orders can differ by: 2^-52 for each addition."""
    return total * 2.220446049250313e-16 * (vocab_size + 4096)


@triton.jit
def _is_kept(
    score,
    weight,
    best,
    sums_ptr,
    is_sure_ptr,
    parts_ptr,
    prefixes_ptr,
    above_ptr,
    options_ptr,
    blocks,
    vocab_size,
    IS_TRIM: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Which tokens of a block [BN] top-k or, in a trim, top-p keeps."""
    i_block = tl.program_id(0)
    parts = _load_parts(parts_ptr, ROUNDS - 1, blocks, BLOCKS, DIGITS)
    goal = _goal(sums_ptr, options_ptr, blocks, BLOCKS, IS_TRIM)
    prefix = tl.load(prefixes_ptr + ROUNDS - 1)
    above = tl.load(above_ptr + ROUNDS - 1)
    prefix, above, digit = _next(prefix, above, parts, goal, DIGITS)
    last = (_key(score) >> (64 - 4 * ROUNDS)).to(tl.int64)
    is_tie = last == prefix
    column = tl.where(tl.arange(0, DIGITS)[None, :] == digit, parts, 0.0)
    ties = tl.sum(column, axis=1)  # [BLOCKS]
    if IS_TRIM:
        unit = _exponential((_score_of(prefix, 4 * ROUNDS) - best) * tl.load(options_ptr + SCALE))
        is_tie = is_tie & (weight > 0.0)
        ties = tl.floor(ties / unit + 0.5)
        wanted = tl.ceil((goal - above) / unit)
        slack = _slack(goal / tl.load(options_ptr + TOP_P), vocab_size)
        is_sure = (above + (wanted - 1.0) * unit <= goal - slack) & (wanted >= 1.0)
        is_sure = is_sure & (above + wanted * unit >= goal + slack)
        is_sure = is_sure & (wanted <= tl.sum(ties, axis=0))
        if i_block == 0:
            tl.store(is_sure_ptr, is_sure.to(tl.int32))
    else:
        wanted = goal - above
    before = tl.sum(tl.where(tl.arange(0, BLOCKS) < i_block, ties, 0.0), axis=0)
    rank = before + tl.cumsum(is_tie.to(tl.int32), axis=0).to(tl.float64)
    is_above = last.to(tl.uint64, bitcast=True) > prefix.to(tl.uint64, bitcast=True)
    return is_above | (is_tie & (rank <= wanted))


@triton.jit
def weigh_kernel(
    weights_ptr,
    sums_ptr,
    is_sure_ptr,
    scores_ptr,
    best_ptr,
    parts_ptr,
    prefixes_ptr,
    above_ptr,
    options_ptr,
    blocks,
    vocab_size,
    IS_TRIM: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    ROUNDS: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
):
    """Program: the weights of a block, of what top-k keeps; in a trim, of what top-p keeps."""
    i_block = tl.program_id(0)
    o_n = i_block * BN + tl.arange(0, BN)  # [BN]
    o_p = tl.arange(0, BLOCKS)  # [BLOCKS]
    score = tl.load(scores_ptr + o_n)
    best = tl.max(tl.load(best_ptr + o_p, mask=o_p < blocks, other=float("-inf")), axis=0)
    if IS_TRIM:
        weight = tl.load(weights_ptr + o_n)
    else:
        weight = _exponential((score - best) * tl.load(options_ptr + SCALE))
    if HAS_CUT:
        is_kept = _is_kept(
            *(score, weight, best, sums_ptr, is_sure_ptr, parts_ptr, prefixes_ptr, above_ptr),
            *(options_ptr, blocks, vocab_size),
            IS_TRIM,
            ROUNDS,
            BLOCKS,
            DIGITS,
        )
        weight = tl.where(is_kept, weight, 0.0)
    if HAS_MIN_P:
        weight = tl.where(weight < tl.load(options_ptr + MIN_P), 0.0, weight)
    tl.store(weights_ptr + o_n, weight)
    # The trim keeps out of the sums that other programs still read.
    tl.store(sums_ptr + IS_TRIM * blocks + i_block, tl.sum(weight, axis=0))


@triton.jit
def draw_kernel(
    ids_ptr,
    weights_ptr,
    sums_ptr,
    status_ptr,
    is_sure_ptr,
    options_ptr,
    blocks,
    HAS_TOP_P: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: the first token where the running sum exceeds u times the total."""
    o_p = tl.arange(0, BLOCKS)  # [BLOCKS]
    o_n = tl.arange(0, BN)  # [BN]
    at = sums_ptr + HAS_TOP_P * blocks + o_p
    sums = tl.load(at, mask=o_p < blocks, other=0.0)
    total = tl.sum(sums, axis=0)
    target = tl.load(options_ptr + U) * total
    running = tl.cumsum(sums, axis=0)
    i_block = tl.minimum(tl.sum((running <= target).to(tl.int32), axis=0), blocks - 1)
    before = tl.sum(tl.where(o_p < i_block, sums, 0.0), axis=0)
    inside = before + tl.cumsum(tl.load(weights_ptr + i_block * BN + o_n), axis=0)  # [BN]
    place = tl.sum((inside <= target).to(tl.int32), axis=0)
    here = tl.sum(tl.where(o_n == place, inside, 0.0), axis=0)
    previous = tl.where(place > 0, tl.sum(tl.where(o_n == place - 1, inside, 0.0), axis=0), before)
    # Sums of 64 and then of the segments, there; of BN and then of the blocks, here.
    slack = _slack(total, BN + BLOCKS)
    is_sure = (place < BN) & (here - target > slack) & (target - previous > slack)
    if HAS_TOP_P:
        is_sure = is_sure & (tl.load(is_sure_ptr) != 0)
    is_sure = is_sure & _is_fit(status_ptr, o_p, blocks)
    tl.store(ids_ptr, tl.where(is_sure, i_block * BN + place, -1))
