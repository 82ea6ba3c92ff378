"""The operations beside products with weights, one call each at the mid model's sizes.

One token is what a decode step pays per layer, 256 tokens are a chunk of a prefill. Each result is
compared with float64 before anything is timed. Times are of a call from Python, some microseconds
of which are the call itself; a whole layer is one call in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import harness
import torch
from harness import Figure
from mid_model import mid_config
from torch import Tensor

from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.index_scores import index_scores
from edgedsv4.kernels.mhc import HyperConstants, hyper_read, hyper_write
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.kernels.rope import RopeTable, apply_rope, rope_frequencies, rope_table
from edgedsv4.kernels.router import route
from edgedsv4.kernels.sparse_attention import sparse_attention
from edgedsv4.kernels.swiglu import swiglu

LIMIT = 1e-5
KEYS = 4096
THREADS = 2
CONFIG = mid_config()
CONSTANTS = HyperConstants(CONFIG.hc_sinkhorn_iterations, CONFIG.hc_eps, CONFIG.rms_norm_eps)


@dataclass(frozen=True)
class Case:
    """One operation at one size."""

    name: str
    call: Callable[..., Tensor]
    """Takes the arguments and `backend`; returns the result that is compared."""
    arguments: tuple[Tensor | None, ...]
    operations: int = 0
    """Multiplications and additions, where they are what counts."""

    def run(self, backend: str) -> Tensor:
        return self.call(*self.arguments, backend=backend)

    def check(self) -> None:
        """Refuse to time a wrong result."""
        wide = [
            argument.double() if argument is not None and argument.is_floating_point() else argument
            for argument in self.arguments
        ]
        expected = self.call(*wide, backend="reference")
        error = float((self.run("auto").double() - expected).norm() / expected.norm())
        if not error < LIMIT:
            raise SystemExit(f"{self.name}: error {error:.3g}, no time is reported")

    @property
    def nbytes(self) -> int:
        """Bytes of arguments and result."""
        tensors = [t for t in self.arguments if t is not None] + [self.run("auto")]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cases(tokens: int) -> Iterator[Case]:
    """Every operation, for that many tokens."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    hidden, heads, dim = CONFIG.hidden_size, CONFIG.num_heads, CONFIG.head_dim
    streams = draw(tokens, CONFIG.hc_streams, hidden)
    mixing = draw(CONFIG.hc_rows, CONFIG.hc_streams * hidden) / 90
    coefficients = (mixing, draw(CONFIG.hc_rows), draw(3), draw(hidden))
    read = hyper_read(streams, *coefficients, CONSTANTS)
    yield Case("hyper_read", _hyper_read, (streams, *coefficients))
    yield Case("hyper_write", hyper_write, (streams, draw(tokens, hidden), read.post, read.comb))
    yield Case("rms_norm", _rms_norm, (draw(tokens, hidden), draw(hidden)))
    frequencies = rope_frequencies(CONFIG.rope_dim, CONFIG.rope_theta, None)
    table = rope_table(torch.arange(tokens), frequencies, torch.float32)
    yield Case("rope", _rope, (draw(tokens, heads, dim), table.cos, table.sin))
    index = (tokens, CONFIG.index_heads, CONFIG.index_dim)
    yield Case("hadamard", hadamard, (draw(*index),))
    width = CONFIG.experts_per_token * CONFIG.expert_width
    yield Case("swiglu", _swiglu, (draw(tokens, width), draw(tokens, width)))
    experts = CONFIG.num_experts
    yield Case("router", _route, (draw(tokens, experts), draw(experts) / 10))
    yield Case(
        f"index_scores of {KEYS:,} keys",
        index_scores,
        (draw(*index), draw(KEYS, CONFIG.index_dim), draw(tokens, CONFIG.index_heads)),
        operations=2 * tokens * KEYS * CONFIG.index_heads * CONFIG.index_dim,
    )
    rows = CONFIG.window + CONFIG.index_topk
    ids = torch.randint(KEYS, (tokens, rows), generator=generator)
    yield Case(
        f"sparse_attention to {rows} rows",
        sparse_attention,
        (draw(tokens, heads, dim), draw(KEYS, dim), ids, draw(heads)),
        operations=4 * tokens * heads * rows * dim,
    )


def _hyper_read(*arguments: Tensor, backend: str) -> Tensor:
    return hyper_read(*arguments, CONSTANTS, backend=backend).x  # type: ignore[call-arg, arg-type]


def _rms_norm(x: Tensor, weight: Tensor, *, backend: str) -> Tensor:
    return rms_norm(x, weight, CONFIG.rms_norm_eps, backend=backend)  # type: ignore[arg-type]


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str) -> Tensor:
    return apply_rope(x, RopeTable(cos, sin), backend=backend)  # type: ignore[arg-type]


def _swiglu(gate: Tensor, up: Tensor, *, backend: str) -> Tensor:
    return swiglu(gate, up, CONFIG.swiglu_limits[0], backend=backend)  # type: ignore[arg-type]


def _route(logits: Tensor, bias: Tensor, *, backend: str) -> Tensor:
    k, scale = CONFIG.experts_per_token, CONFIG.routed_scale
    return route(logits, bias, k, scale, backend=backend)[1]  # type: ignore[arg-type]


def measure(repeats: int) -> list[Figure]:
    """Microseconds, rates, and how many times faster than the reference, by operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        chosen = [(tokens, case) for tokens in (1, 256) for case in cases(tokens)]
        return [figure for tokens, case in chosen for figure in _figures(tokens, case, repeats)]
    finally:
        torch.set_num_threads(before)


def _figures(tokens: int, case: Case, repeats: int) -> Iterator[Figure]:
    case.check()
    name = f"{case.name}, {tokens} token{'s' * (tokens > 1)}"
    seconds = harness.seconds(lambda: case.run("auto"), repeats)
    reference = harness.seconds(lambda: case.run("reference"), repeats)
    yield Figure("operations", name, 1e6 * seconds, "µs", repeats)
    yield Figure("operations", name, case.nbytes / seconds / 1e9, "GB/s", repeats)
    if case.operations:
        yield Figure("operations", name, case.operations / seconds / 1e9, "GFLOP/s", repeats)
    yield Figure("operations", name, reference / seconds, "times the reference", repeats)


if __name__ == "__main__":
    harness.main(measure)
