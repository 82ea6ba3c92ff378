"""Whether few tokens' experts are computed by the CPU faster than they travel to the card.

Of T tokens with k of E experts each, U = E (1 - (1 - k / E)^T) experts are used, by n = T k / U
tokens each. The CPU reads each once and multiplies n times, t = max(S / read rate, n work / speed);
the card waits for S bytes of each over the bus. The constants are measured when a model is opened,
for `auto`. Measured figures differ from one opening to the next, and so would the bits of a prompt:
the CPU has other roundings than the card. `on` promises the same text every time, so there the
chunk and the machine alone decide (`few_tokens`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from edgedsv4.kernels.native.library import library, new_run, pointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgedsv4.config import ModelConfig
    from edgedsv4.model.host_experts import HostExperts

READ_BYTES = 256 << 20
"""Read to measure memory, more than caches hold."""
_LINK_BYTES = 64 << 20
WIDE_TOKENS_PER_EXPERT, TOKENS_PER_EXPERT = 4, 2
"""Tokens that an expert has at most when the CPU computes it with `on`: by int8 products of 512
bits, and by others. 16 cores took 0.10, 0.17 and 0.30 ms for an expert of V4-Flash (IQ2_XXS) with
1, 4 and 8 tokens, and a prompt with 12 in each 4.6 s; the bus brings one in 0.13 ms (PCIe 5) or
0.28 ms (PCIe 4), and that prompt took 1.3 s.
"""
_WIDE = frozenset(("avx512-vnni", "avx512-vbmi", "amx"))
_TOKENS = 64
_RUNS = 3


@dataclass(frozen=True, slots=True)
class ExpertRates:
    """What CPU and bus do per second."""

    read: float
    """Bytes of memory that the CPU reads."""
    operations: float
    """Multiplications and additions with weights by the CPU."""
    link: float
    """Bytes that travel to the card."""

    def prefers_cpu(self, config: ModelConfig, expert_bytes: int, tokens: int) -> bool:
        """Whether the CPU is the faster way for a chunk.

        Args:
            config: shape of the model.
            expert_bytes: of one expert as it is stored.
            tokens: T.
        """
        each = tokens_per_expert(config, tokens)
        work = 6 * config.hidden_size * config.expert_width
        by_cpu = max(expert_bytes / self.read, each * work / self.operations)
        return by_cpu < expert_bytes / self.link


def tokens_per_expert(config: ModelConfig, tokens: int) -> float:
    """Tokens that an expert of a chunk of T >= 1 tokens has, expected."""
    experts, k = config.num_experts, config.experts_per_token
    used = experts * (1 - (1 - k / experts) ** tokens)
    return tokens * k / used


def few_tokens(config: ModelConfig, instructions: str, tokens: int, *, has_int8: bool) -> bool:
    """Whether the CPU computes the experts of a chunk with `on`, whatever was measured.

    Args:
        config: shape of the model.
        instructions: of this machine's CPU, as `instruction_set` names them.
        tokens: T.
        has_int8: whether products are of int8.
    """
    is_wide = has_int8 and instructions in _WIDE
    most = WIDE_TOKENS_PER_EXPERT if is_wide else TOKENS_PER_EXPERT
    return tokens_per_expert(config, tokens) <= most


def measure_rates(
    host: HostExperts, config: ModelConfig, device: torch.device, threads: int
) -> ExpertRates:
    """Measure for some tenths of a second, with weights of the model."""
    return ExpertRates(
        read=read_rate(threads, READ_BYTES),
        operations=_operation_rate(host, config),
        link=_link_rate(device),
    )


def read_rate(threads: int, nbytes: int) -> float:
    """Bytes of main memory that so many threads read per second."""
    lib, ffi = library()
    words = torch.ones(nbytes // 8, dtype=torch.int64)
    run, total = new_run(threads), ffi.new("uint64_t *")
    data = pointer(words, "uint64_t *")
    read = partial(lib.dk_stream_sum, run.cdata, total, data, words.numel())
    return nbytes / _best(read)


def _operation_rate(host: HostExperts, config: ModelConfig) -> float:
    """With so few experts for so many tokens that caches hold what is read again."""
    k = config.experts_per_token
    layers = range(config.num_layers)
    layer, own = next(((n, ids) for n in layers if (ids := host.own(n))), (0, []))
    if not own:
        return math.inf  # Nothing is ever left to the CPU.
    memory = host.chunk(_TOKENS)
    memory.x.normal_()
    memory.ids.copy_(torch.tensor((own * k)[:k]).expand(_TOKENS, k))
    memory.weights.fill_(1.0 / k)
    work = 6 * config.hidden_size * config.expert_width * _TOKENS * k
    return work / _best(partial(host.run_chunk, layer))


def _link_rate(device: torch.device) -> float:
    if device.type == "cpu":
        return math.inf
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        there.copy_(here, non_blocking=True)
        torch.accelerator.synchronize(device)

    return _LINK_BYTES / _best(copy)


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest run; the first warms up."""
    times = []
    for _ in range(_RUNS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(min(times[1:]), 1e-9)
