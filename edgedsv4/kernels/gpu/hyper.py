"""Hyper-connections of few tokens: write a sublayer's output, then mix, read and normalise.

The formulas are those of `kernels/mhc.py`. A step is two launches. The first has a program per
block of columns: it writes X'_k = post_k o + sum_j comb_jk X_j into the streams and leaves partial
sums of two kinds, over its columns: those of fn . X' and of the Gram matrix X'_j . X'_k. The second
adds the partial sums in order of the blocks, which gives every program all there is to know: the
weights of the mix, and the mean square of y = sum_j pre_j X'_j, which is pre^T Gram pre / D. So
each writes its columns of the normalised y without having seen the others. Where the streams nearly
cancel in y that form would lose digits, and the squares of y are added up instead.

Partial sums are float32 [rows, T, blocks]: the rows of fn, then the Gram matrix's (j, k), j <= k.
Longer chunks are in `hyper_chunk.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu import hyper_chunk
from edgedsv4.kernels.gpu.hyper_kernels import read_kernel, write_kernel
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import overlap_options

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.byte_vector import ByteVector
    from edgedsv4.kernels.mhc import HyperConstants

STREAMS = 4
"""hc; sums over the streams are unrolled, and no released model has another number."""
FEW_TOKENS = 8
"""More go to the kernels that share fn between tokens."""
GRAM_ROWS = STREAMS * (STREAMS + 1) // 2

# (columns of a program, warps): 128 bytes of each row of fn, 128 programs for 4096 columns.
WRITE = (32, 4)
# One warp adds the partial sums without a barrier.
READ = (128, 1)


def hyper_work_floats(tokens: int, hidden: int) -> int:
    """float32 elements of `work` that steps of up to `tokens` tokens need."""
    few = min(tokens, FEW_TOKENS)
    rows = (2 + STREAMS) * STREAMS + GRAM_ROWS
    need = rows * few * cdiv(hidden, WRITE[0])
    return need if tokens <= FEW_TOKENS else max(need, hyper_chunk.work_floats(tokens, hidden))


def hyper_step(
    x: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    o: Tensor | None,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
    work: Tensor,
    precise: bool = False,
    extra: Tensor | None = None,
    rounded: ByteVector | None = None,
    overlap: bool = False,
    other: Tensor | None = None,
) -> None:
    """Write the previous sublayer's output to the streams and read the next one's input.

    Args:
        x: [T, D] float32 out, the normalised read.
        post: [T, hc] float32; in: of the sublayer that made `o`, out: of the next one.
        comb: [T, hc, hc] float32, source stream first; in and out as `post`.
        streams: [T, hc, D] float32, in place.
        o: [T, D] float32, what the previous sublayer computed; None when there was none, and then
            `post` and `comb` are only written.
        fn: [(2 + hc) * hc, hc * D] float32, rows pre, post, comb.
        base: [(2 + hc) * hc] float32.
        scale: [3] float32.
        norm: [D] float32, weight of the RMS norm.
        constants: Sinkhorn iterations and epsilons.
        work: float32, at least `hyper_work_floats(T, D)`; contents are of no account.
        precise: products with fn in plain float32, for chunks of many tokens.
        extra: [T, D] float32 to be added to `o`, for few tokens alone.
        rounded: place for x rounded to bytes, for one token alone.
        overlap: see `nvidia.overlap_options`; for few tokens alone.
        other: [T, D] float32 to be added after `extra`, likewise.

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    tokens, hidden = _check(streams, o, (post, comb), (fn, base, scale, norm), work)
    if rounded is not None and (tokens != 1 or rounded.columns != hidden):
        raise ShapeError(f"hyper: {tokens} tokens of {hidden} to {rounded.columns} bytes")
    rows = (2 + STREAMS) * STREAMS
    if x.shape != (tokens, hidden) or fn.shape[0] != rows or scale.shape != (3,):
        raise ShapeError(f"hyper: x, fn, scale are {[tuple(t.shape) for t in (x, fn, scale)]}")
    for addition in (extra, other):
        _check_extra(o, addition, tokens)
    if tokens > FEW_TOKENS:
        hyper_chunk.chunk_read(
            x,
            post,
            comb,
            streams,
            o,
            fn=fn,
            base=base,
            scale=scale,
            norm=norm,
            constants=constants,
            work=work,
            precise=precise,
        )
        return
    blocks = _write(streams, (o, extra, other), post, comb, fn, work, overlap=overlap)
    _read(
        x,
        streams,
        (post, comb),
        (base, scale, norm),
        constants,
        work,
        blocks=blocks,
        rounded=rounded,
        overlap=overlap,
    )


def _places(rounded: ByteVector | None, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x, x) if rounded is None else (rounded.words, rounded.scales)


def head_step(
    y: Tensor,
    streams: Tensor,
    o: Tensor | None,
    post: Tensor,
    comb: Tensor,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
    work: Tensor,
    precise: bool = False,
    extra: Tensor | None = None,
    overlap: bool = False,
    other: Tensor | None = None,
) -> None:
    """Write the last sublayer's output to the streams and read what the output head sees.

    Args:
        y: [R, D] float32 out, the normalised read of the last R tokens; R may be 0.
        streams: [T, hc, D] float32, in place.
        o: [T, D] float32, what the last sublayer computed; None when it is written already.
        post: [T, hc] float32, of that sublayer.
        comb: [T, hc, hc] float32, of that sublayer.
        fn: [hc, hc * D] float32.
        base: [hc] float32.
        scale: [1] float32.
        norm: [D] float32, weight of the RMS norm.
        constants: epsilons.
        work: as for `hyper_step`.
        precise: as for `hyper_step`.
        extra: as for `hyper_step`.
        overlap: as for `hyper_step`.
        other: as for `hyper_step`.

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    tokens, hidden = _check(streams, o, (post, comb), (fn, base, scale, norm), work)
    wanted = y.shape[0]
    if y.shape[1:] != (hidden,) or wanted > tokens or fn.shape[0] != STREAMS:
        raise ShapeError(f"hyper: y is {tuple(y.shape)}, fn {tuple(fn.shape)}")
    for addition in (extra, other):
        _check_extra(o, addition, tokens if wanted == tokens else FEW_TOKENS + 1)
    if o is not None and wanted < tokens:
        hyper_chunk.write_streams(streams, o, post, comb)
        o = None
    if wanted == 0:
        return
    streams = streams[tokens - wanted :]
    if wanted > FEW_TOKENS:
        hyper_chunk.chunk_read(
            y,
            post,
            comb,
            streams,
            o,
            fn=fn,
            base=base,
            scale=scale,
            norm=norm,
            constants=constants,
            work=work,
            precise=precise,
        )
        return
    blocks = _write(streams, (o, extra, other), post, comb, fn, work, overlap=overlap)
    _read(
        y,
        streams,
        (post, comb),
        (base, scale, norm),
        constants,
        work,
        blocks=blocks,
        overlap=overlap,
    )


def _read(
    y: Tensor,
    streams: Tensor,
    made: tuple[Tensor, Tensor],
    parameters: tuple[Tensor, Tensor, Tensor],
    constants: HyperConstants,
    work: Tensor,
    *,
    blocks: int,
    rounded: ByteVector | None = None,
    overlap: bool,
) -> None:
    """The second launch: y, and for another sublayer `made`, the next post and comb."""
    tokens, hidden = y.shape
    is_head = parameters[1].numel() == 1
    rows = STREAMS if is_head else (2 + STREAMS) * STREAMS
    columns, warps = READ
    launch(
        read_kernel,
        (cdiv(hidden, columns) + (not is_head), tokens),
        *(y, *made, streams, work, *parameters, *_places(rounded, y)),
        *(hidden, blocks, tokens * blocks),
        *(constants.iterations, constants.hc_eps, constants.norm_eps),
        ROWS=rows,
        HC=STREAMS,
        BN=columns,
        BLOCKS=power_of_two(blocks),
        ORDER="" if rounded is None else rounded.order,
        num_warps=warps,
        **overlap_options(overlap=overlap),
    )


def _write(
    streams: Tensor,
    written: tuple[Tensor | None, Tensor | None, Tensor | None],
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    work: Tensor,
    *,
    overlap: bool,
) -> int:
    """The first launch; returns the number of blocks whose partial sums are in `work`."""
    tokens, _, hidden = streams.shape
    o, extra, other = written
    columns, warps = WRITE
    blocks = cdiv(hidden, columns)
    launch(
        write_kernel,
        (blocks, tokens),
        *(work, streams, *(streams if part is None else part for part in written)),
        *(post, comb, fn),
        *(hidden, blocks, tokens * blocks),
        ROWS=fn.shape[0],
        PADDED_ROWS=power_of_two(fn.shape[0]),
        HC=STREAMS,
        BN=columns,
        HAS_O=o is not None,
        HAS_EXTRA=extra is not None,
        HAS_OTHER=other is not None,
        num_warps=warps,
        **overlap_options(overlap=overlap),
    )
    return blocks


def _check_extra(o: Tensor | None, extra: Tensor | None, tokens: int) -> None:
    if extra is None:
        return
    if o is None or tokens > FEW_TOKENS or extra.shape != o.shape or not extra.is_contiguous():
        raise ShapeError(
            f"hyper: an addition to the output of {tokens} tokens is {tuple(extra.shape)}, expected"
            f" that of at most {FEW_TOKENS} tokens, contiguous and like the output"
        )


def _check(
    streams: Tensor,
    o: Tensor | None,
    coefficients: tuple[Tensor, Tensor],
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    work: Tensor,
) -> tuple[int, int]:
    """T and D."""
    tokens, hc, hidden = streams.shape
    fn, base, _, norm = parameters
    if hc != STREAMS:
        raise ShapeError(f"hyper: {hc} streams, expected {STREAMS}")
    found = [tuple(t.shape) for t in (*coefficients, norm, base)]
    expected = [(tokens, hc), (tokens, hc, hc), (hidden,), fn.shape[:1]]
    if found != expected or fn.shape[1] != hc * hidden:
        raise ShapeError(f"hyper: post, comb, norm, base are {found}, expected {expected}")
    if o is not None and o.shape != (tokens, hidden):
        raise ShapeError(f"hyper: the output is {tuple(o.shape)}, expected {(tokens, hidden)}")
    tensors = (streams, *coefficients, *parameters, work, *(() if o is None else (o,)))
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ShapeError("hyper: tensors must be contiguous")
    if work.numel() < hyper_work_floats(tokens, hidden):
        raise ShapeError(
            f"hyper: work has {work.numel()} elements, {hyper_work_floats(tokens, hidden)} needed"
        )
    return tokens, hidden
