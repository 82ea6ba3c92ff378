"""How tests judge numbers: one error measure, one limit per output dtype, and messages that name
what is wrong.

The measure is ||got - ref||_2 / ||ref||_2 in float64. Packed outputs are compared byte for byte
instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LIMITS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-4,
    torch.bfloat16: 3.3e-3,
}
"""Largest relative error by output dtype; one rounding alone costs 2.1e-4 (f16), 1.7e-3 (bf16)."""

Array = torch.Tensor | np.ndarray


def as_float64(values: Array) -> np.ndarray:
    """The same values as a float64 array of the same shape."""
    if isinstance(values, torch.Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def relative_error(got: Array, ref: Array) -> float:
    """||got - ref||_2 / ||ref||_2; the norm of the difference where the reference is zero."""
    got64, ref64 = as_float64(got), as_float64(ref)
    difference = float(np.linalg.norm(got64 - ref64))
    norm = float(np.linalg.norm(ref64))
    return difference / norm if norm > 0 else difference


def describe_worst(got: Array, ref: Array) -> str:
    """Index and both values of the element that differs most."""
    got64, ref64 = as_float64(got), as_float64(ref)
    distance = np.abs(got64 - ref64)
    distance[np.isnan(distance)] = np.inf
    worst = np.unravel_index(int(np.argmax(distance)), distance.shape)
    index = tuple(int(i) for i in worst)
    return f"worst at {index}: got {got64[index]!r}, expected {ref64[index]!r}"


def assert_close(name: str, got: Array, ref: Array, limit: float | None = None) -> None:
    """Fail unless `got` has the shape of `ref` and a relative error within `limit`.

    Args:
        name: what is compared; opens the message.
        got: result, any dtype; its dtype picks the limit when none is given.
        ref: reference, same shape.
        limit: largest relative error; None takes `LIMITS` of the dtype of `got`.
    """
    assert tuple(got.shape) == tuple(ref.shape), f"{name}: shape {got.shape}, expected {ref.shape}"
    if as_float64(got).size == 0:
        return
    if limit is None:
        assert isinstance(got, torch.Tensor), (
            f"{name}: an array without a torch dtype needs a limit"
        )
        limit = LIMITS[got.dtype]
    error = relative_error(got, ref)
    assert error <= limit, (
        f"{name}: relative error {error:.3g} > {limit:.3g}; {describe_worst(got, ref)}"
    )


def assert_max_abs(name: str, got: Array, ref: Array, limit: float) -> None:
    """Fail unless every element of `got` lies within `limit` of `ref`."""
    assert tuple(got.shape) == tuple(ref.shape), f"{name}: shape {got.shape}, expected {ref.shape}"
    distance = np.abs(as_float64(got) - as_float64(ref))
    worst = float(distance.max(initial=0.0))
    assert worst <= limit, (
        f"{name}: differs by {worst:.3g} > {limit:.3g}; {describe_worst(got, ref)}"
    )


def assert_within_tensor_max(name: str, got: Array, ref: Array, limit: float) -> None:
    """Fail unless every element lies within `limit` times the largest magnitude of `ref`."""
    largest = float(np.abs(as_float64(ref)).max(initial=0.0))
    assert_max_abs(name, got, ref, limit * largest)


def assert_same_bits(name: str, got: torch.Tensor, ref: torch.Tensor) -> None:
    """Fail unless both tensors hold the same bytes; names the first element that differs."""
    assert got.dtype == ref.dtype, f"{name}: dtype {got.dtype}, expected {ref.dtype}"
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    left, right = (t.detach().cpu().contiguous().flatten() for t in (got, ref))
    if torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return
    size = left.element_size()
    rows = (left.view(torch.uint8) != right.view(torch.uint8)).view(-1, size).any(-1).nonzero()
    first = int(rows[0])
    index = tuple(int(i) for i in np.unravel_index(first, tuple(got.shape)))
    raise AssertionError(
        f"{name}: {len(rows)} of {left.numel()} elements differ, first at {index}:"
        f" got {left[first].item()!r}, expected {right[first].item()!r}"
    )


def log_softmax(logits: Array) -> np.ndarray:
    """Natural log of the softmax over the last axis, float64."""
    values = as_float64(logits)
    shifted = values - values.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def mean_kl(ref_logits: Array, got_logits: Array) -> float:
    """Mean over rows of KL(softmax(ref) || softmax(got)), in nats."""
    ref, got = log_softmax(ref_logits), log_softmax(got_logits)
    return float((np.exp(ref) * (ref - got)).sum(axis=-1).mean())


def top1_disagreements(ref_logits: Array, got_logits: Array) -> list[int]:
    """Rows whose largest logit stands at different token ids."""
    ref, got = as_float64(ref_logits), as_float64(got_logits)
    return [int(row) for row in np.flatnonzero(ref.argmax(-1) != got.argmax(-1))]


def first_wrong_row(got: Array, ref: Array, limit: float) -> int | None:
    """First row (position) with an element more than `limit` away; None when there is none."""
    distance = np.abs(as_float64(got) - as_float64(ref))
    wrong = np.flatnonzero(~(distance.reshape(len(distance), -1).max(axis=1) <= limit))
    return int(wrong[0]) if wrong.size else None


def assert_logits(name: str, got: Array, ref: Array, limit: float, *, top1: bool = True) -> None:
    """Fail unless logits [T, V] agree within `limit` and in their top token, by position."""
    row = first_wrong_row(got, ref, limit)
    if row is not None:
        assert_max_abs(f"{name} (first wrong position {row})", got, ref, limit)
    if top1:
        wrong = top1_disagreements(ref, got)
        assert not wrong, f"{name}: another top token at positions {wrong[:10]}"


def quiet(values: Any) -> str:
    """A short text of a list for assertion messages: the first ten entries and the count."""
    listed = list(values)
    return f"{listed[:10]}{' …' if len(listed) > 10 else ''} ({len(listed)})"
