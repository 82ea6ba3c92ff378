"""The arithmetic of a hyper-connection, shared by the launches for few tokens and for chunks.

The hc streams, and the weights of one kind, are tuples: of scalars for one token, of vectors or
tiles for several. So nothing here moves between threads.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.tuples import appended, nothing


@triton.jit
def sigmoid(z):
    """1 / (1 + e^-z)."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def sinkhorn(c, iterations, eps, HC: tl.constexpr):
    """HC * HC values c_jk, scalars or vectors of tokens: softmax over k and Sinkhorn."""
    soft = nothing()
    for j in tl.static_range(HC):
        top = c[j * HC]
        for k in tl.static_range(1, HC):
            top = tl.maximum(top, c[j * HC + k])
        total = tl.exp(c[j * HC] - top)
        for k in tl.static_range(1, HC):
            total += tl.exp(c[j * HC + k] - top)
        inverse = 1.0 / total
        for k in tl.static_range(HC):
            soft = appended(soft, tl.exp(c[j * HC + k] - top) * inverse + eps)
    c = _divide_columns(soft, eps, HC)
    for _ in range(iterations - 1):
        rows = nothing()
        for j in tl.static_range(HC):
            total = (c[j * HC] + c[j * HC + 1]) + (c[j * HC + 2] + c[j * HC + 3])
            inverse = 1.0 / (total + eps)
            for k in tl.static_range(HC):
                rows = appended(rows, c[j * HC + k] * inverse)
        c = _divide_columns(rows, eps, HC)
    return c


@triton.jit
def _divide_columns(c, eps, HC: tl.constexpr):
    inverse = nothing()
    for k in tl.static_range(HC):
        total = (c[k] + c[HC + k]) + (c[2 * HC + k] + c[3 * HC + k])
        inverse = appended(inverse, 1.0 / (total + eps))
    divided = nothing()
    for i in tl.static_range(HC * HC):
        divided = appended(divided, c[i] * inverse[i % HC])
    return divided


@triton.jit
def written(x, o, post, comb, HC: tl.constexpr):
    """The streams X'_k = post_k o + sum_j comb_jk X_j."""
    new = nothing()
    for k in tl.static_range(HC):
        mixed = comb[k] * x[0]
        for j in tl.static_range(1, HC):
            mixed += comb[j * HC + k] * x[j]
        new = appended(new, post[k] * o + mixed)
    return new


@triton.jit
def output(o_ptr, extra_ptr, other_ptr, at, mask, HAS_EXTRA: tl.constexpr, HAS_OTHER: tl.constexpr):
    """Elements of a sublayer's output with what is added to it."""
    value = tl.load(o_ptr + at, mask=mask, other=0.0)
    if HAS_EXTRA:
        value += tl.load(extra_ptr + at, mask=mask, other=0.0)
    if HAS_OTHER:
        value += tl.load(other_ptr + at, mask=mask, other=0.0)
    return value
