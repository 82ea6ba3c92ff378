"""Choosing a token on the device: the likeliest, or the one that `kernels/sample.py` would draw.

Scores, weights and comparisons are float64 with the definition's operations, unfused, so each has
the definition's bits; only sums are added up in another order. Where the choice hangs on less than
what that can change, and where the logits are not fit to choose from, the answer is -1: then the
definition decides, on the host, or says what is wrong. That happens about once in a million tokens.

Top-k and top-p keep the best tokens by rank (larger score, then lower id), so each is a last score
and the number of tokens of just that score. The score is found four bits at a time: a launch adds
up what the tokens of each of 16 values of the next bits amount to (one each for top-k, their weight
for top-p) among those that agree so far. Every launch is the same whatever the logits are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.sample_kernels import (
    argmax_kernel,
    count_kernel,
    draw_kernel,
    first_best_kernel,
    greedy_kernel,
    score_kernel,
    weigh_kernel,
)

if TYPE_CHECKING:
    from edgedsv4.kernels.sample import SamplingRules

UNDECIDED = -1
"""In place of a token id: ask the definition."""

# (tokens of a program, warps)
BLOCK, WARPS = 1024, 4
# Tokens held against all 16 digits at a time.
CHUNK = 256
DIGITS = 16
# Bits of a score that can differ, from the top: those of a float64, or of one that was a float32.
ALL_BITS, FLOAT32_BITS = 64, 36
OPTIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class SamplingWork:
    """Buffers of one sampler for a vocabulary of V tokens, on the device."""

    options: Tensor
    """[8] float64, from `options_of`."""
    scores: Tensor
    """[blocks * BLOCK] float64."""
    weights: Tensor
    """[blocks * BLOCK] float64."""
    sums: Tensor
    """[2, blocks] float64, of the weights before and after top-p."""
    best: Tensor
    """[blocks] float64, the largest score."""
    first: Tensor
    """[blocks] int32, the first token that has it."""
    status: Tensor
    """[blocks] int32, bits BAD and ALLOWED."""
    parts: Tensor
    """[2, blocks, DIGITS] float64, of this round and the one before."""
    prefixes: Tensor
    """[rounds] int64, the leading bits of the last score kept, of each round."""
    above: Tensor
    """[rounds] float64, what the tokens with greater leading bits amount to."""
    is_sure: Tensor
    """[1] int32, whether the cut of top-p is beyond doubt."""

    @classmethod
    def allocate(cls, vocab_size: int, device: torch.device | str) -> SamplingWork:
        """Uninitialised."""
        blocks = -(-vocab_size // BLOCK)

        def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rounds = ALL_BITS // 4
        return cls(
            options=empty(OPTIONS),
            scores=empty(blocks * BLOCK),
            weights=empty(blocks * BLOCK),
            sums=empty(2, blocks),
            best=empty(blocks),
            first=empty(blocks, dtype=torch.int32),
            status=empty(blocks, dtype=torch.int32),
            parts=empty(2, blocks, DIGITS),
            prefixes=empty(rounds, dtype=torch.int64),
            above=empty(rounds),
            is_sure=empty(1, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """`SeenTokens` and the logit bias, on the device; what the rules do not use may be None."""

    flags: Tensor | None
    """[V] bool or uint8."""
    generated: Tensor | None
    """[V] int32."""
    bias: Tensor | None
    """[V] float64, 0 where there is none."""


def argmax_work_ints(tokens: int, vocab_size: int) -> int:
    """int32 elements of `work` that `argmax` needs."""
    return 2 * tokens * -(-vocab_size // BLOCK)


def argmax(ids: Tensor, logits: Tensor, work: Tensor) -> None:
    """The largest logit of each row, of equal ones the first.

    Args:
        ids: [T] int32 out; -1 where a logit is NaN or +inf, or all are -inf.
        logits: [T, V] float32.
        work: int32, at least `argmax_work_ints(T, V)`.

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    tokens, vocab_size = logits.shape
    blocks = -(-vocab_size // BLOCK)
    if ids.shape != (tokens,) or work.numel() < argmax_work_ints(tokens, vocab_size):
        raise ShapeError(f"argmax: ids {tuple(ids.shape)}, logits {tuple(logits.shape)}")
    if not all(tensor.is_contiguous() for tensor in (ids, logits, work)):
        raise ShapeError("argmax: tensors must be contiguous")
    launch(
        argmax_kernel,
        (blocks, tokens),
        work,
        logits,
        vocab_size,
        blocks,
        tokens,
        BN=BLOCK,
        num_warps=WARPS,
    )
    launch(
        first_best_kernel,
        (tokens,),
        ids,
        work,
        blocks,
        tokens,
        BLOCKS=power_of_two(blocks),
        num_warps=1,
    )


def options_of(rules: SamplingRules, u: float) -> list[float]:
    """The values of `SamplingWork.options` for one draw; only the first, `u`, is new every time."""
    penalties = (rules.repetition, rules.presence, rules.frequency)
    return [u, rules.scale, *penalties, float(rules.top_k), rules.top_p, rules.min_p]


def sample(
    ids: Tensor, logits: Tensor, work: SamplingWork, counts: TokenCounts, rules: SamplingRules
) -> None:
    """Draw the token that the definition would draw.

    Which launches there are depends on the rules; their numbers, `u` included, are read from
    `work.options` on the device.

    Args:
        ids: [1] int32 out, or -1 where the definition has to decide.
        logits: [V] float32.
        work: buffers, with the options of this draw.
        counts: tokens seen, if the rules have penalties, and the bias, if they have one.
        rules: which filters are on.

    Raises:
        ShapeError: if the shapes disagree, or something that the rules need is missing.
    """
    vocab_size = rules.vocab_size
    is_penalised = (rules.repetition, rules.presence, rules.frequency) != (1.0, 0.0, 0.0)
    bias = counts.bias if rules.bias.size else None
    flags, generated = (counts.flags, counts.generated) if is_penalised else (None, None)
    needed = ([bias] if rules.bias.size else []) + ([flags, generated] if is_penalised else [])
    if any(tensor is None or tensor.shape != (vocab_size,) for tensor in (logits, *needed)):
        raise ShapeError(f"sample: logits, counts and bias must be [{vocab_size}]")
    blocks = -(-vocab_size // BLOCK)
    if work.best.shape != (blocks,):
        raise ShapeError(f"sample: work of {work.best.shape[0]} blocks, expected {blocks}")
    sizes = {"BLOCKS": power_of_two(blocks), "BN": BLOCK}
    # Without fused operations products and sums have the definition's bits.
    how = {"num_warps": WARPS, "enable_fp_fusion": False}
    launch(
        score_kernel,
        (blocks,),
        *(work.scores, work.best, work.first, work.status, logits),
        *(bias, flags, generated, work.options, vocab_size),
        BN=BLOCK,
        **how,
    )
    if not rules.scale:
        launch(
            greedy_kernel,
            (1,),
            *(ids, work.best, work.first, work.status, blocks),
            BLOCKS=sizes["BLOCKS"],
            num_warps=1,
        )
        return
    rounds = (ALL_BITS if is_penalised or rules.bias.size else FLOAT32_BITS) // 4
    has_top_k, has_top_p = 0 < rules.top_k < vocab_size, rules.top_p < 1.0
    for is_trim, has_cut in ((False, has_top_k), (True, has_top_p)):
        if has_cut:
            _find_cut(work, rounds, sizes, is_weighted=is_trim)
        if has_cut or not is_trim:
            launch(
                weigh_kernel,
                (blocks,),
                *(work.weights, work.sums, work.is_sure, work.scores, work.best),
                *(work.parts, work.prefixes, work.above, work.options, blocks, vocab_size),
                IS_TRIM=is_trim,
                HAS_CUT=has_cut,
                HAS_MIN_P=rules.min_p > 0 and is_trim == has_top_p,
                ROUNDS=rounds,
                DIGITS=DIGITS,
                **sizes,
                **how,
            )
    launch(
        draw_kernel,
        (1,),
        *(ids, work.weights, work.sums, work.status, work.is_sure, work.options, blocks),
        HAS_TOP_P=has_top_p,
        **sizes,
        **how,
    )


def _find_cut(work: SamplingWork, rounds: int, sizes: dict[str, int], *, is_weighted: bool) -> None:
    blocks = work.best.shape[0]
    for turn in range(rounds):
        launch(
            count_kernel,
            (blocks,),
            *(work.parts, work.prefixes, work.above, work.scores, work.weights, work.sums),
            *(work.options, blocks, turn),
            IS_FIRST=turn == 0,
            IS_WEIGHTED=is_weighted,
            CHUNK=CHUNK,
            DIGITS=DIGITS,
            **sizes,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
