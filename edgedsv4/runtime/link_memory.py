"""How fast the CPU reads memory, and how fast its kernels compute routed experts out of it.

Both rates are needed: an expert costs what is more, the reading of its bytes or the decoding of its
blocks and their products. Types that are looked up in tables (IQ2_XXS) are far from the memory's
rate on few cores, MXFP4 is near it, and which holds on a machine only a measurement tells.

Experts have the shape of V4-Flash's unless told otherwise, and there are so many of them that none
is in a cache when its turn comes again. They lie in huge pages where the system grants some, as
those of a store and of a network beside a card do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from edgedsv4.errors import ConfigError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.dequantize import decode_blocks
from edgedsv4.kernels.native.library import (
    fill_matrix,
    has_native_type,
    library,
    new_run,
    pointer,
)
from edgedsv4.kernels.quant_matmul import (
    FP4_SCALE_BLOCK,
    INT8_TYPES,
    SMALL_TOKENS,
    matrix_from_numpy,
)
from edgedsv4.model.weights import ExpertWeights
from edgedsv4.runtime.benchmark import read_rate
from edgedsv4.runtime.host_memory import HostMemory
from edgedsv4.runtime.links import DramRate

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType

AT_ONCE = 6
"""Experts of one call, as a token of a released model uses in a layer."""
_ALIGNMENT = 64
_LIMIT = 10.0
_SEED = 20_260_801
_DRAWN_BLOCKS = 1 << 12
_SMALL, _LARGE = 2.0**-14, 2.0**4
"""Largest magnitude of a usable random block: neither subnormal sums nor infinities."""
_E8M0_ONE = 127

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one routed expert."""

    hidden: int = 4096
    width: int = 2048

    @property
    def weights(self) -> int:
        """Elements of its three matrices."""
        return 3 * self.hidden * self.width


def check_block_type(name: str) -> BlockType:
    """The block type of experts to measure.

    Raises:
        ConfigError: the C kernels compute no experts of this type.
    """
    kind = BLOCK_TYPES.get(name)
    if kind is None or not has_native_type(name) or name in ("F4", "FP8_E4M3"):
        raise ConfigError(
            f"types: expected block types that the C kernels read ({', '.join(sorted(INT8_TYPES))},"
            f" F16 and others), found {name[:40]!r}",
            name="types",
        )
    return kind


def dram_rates(threads: tuple[int, ...], nbytes: int, repeat: int) -> tuple[DramRate, ...]:
    """Reads of memory by each number of threads.

    Args:
        threads: numbers of threads.
        nbytes: bytes read in a run, far more than caches hold; a multiple of 8.
        repeat: runs of each, after one that does not count.
    """
    memory = np.ones(nbytes // 8, dtype=np.uint64)
    return tuple(
        DramRate(
            threads=count,
            runs=tuple(read_rate(memory, count, reads=1) for _ in range(repeat)),
        )
        for count in threads
    )


class ExpertBench:
    """Random experts of one block type in memory, and the C kernels that compute them.

    Args:
        name: block type of all three matrices.
        nbytes: memory to fill with experts; never fewer than a call uses.
        shape: sizes of an expert.

    Raises:
        ConfigError: the C kernels compute no experts of this type.
        BackendUnavailableError: they are not built.
    """

    def __init__(self, name: str, nbytes: int, shape: ExpertShape | None = None) -> None:
        library()
        self.kind = check_block_type(name)
        self.shape = shape or ExpertShape()
        draw = np.random.default_rng(_SEED)
        hidden, width = self.shape.hidden, self.shape.width
        self._shapes = ((width, hidden), (width, hidden), (hidden, width))
        self._models = [_random_matrix(self.kind, *size, draw) for size in self._shapes]
        self.expert_bytes = sum(
            data.nbytes + (0 if scale is None else scale.nbytes) for data, scale in self._models
        )
        self._count = max(AT_ONCE, nbytes // self.expert_bytes)
        self._next = 0
        self._kept: list[Any] = []
        self._record = self._experts()

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of storage per element, scales included."""
        return self.expert_bytes / self.shape.weights

    @property
    def count(self) -> int:
        """Experts in memory."""
        return self._count

    def expert(self, place: int) -> ExpertWeights:
        """One of them, where it lies."""
        w1, w3, w2 = self._kept[3 * place : 3 * place + 3]
        return ExpertWeights(w1=w1, w3=w3, w2=w2)

    def rate(self, threads: int, tokens: int, seconds: float) -> float:
        """Stored weights that are computed per second.

        Args:
            threads: that work.
            tokens: that every expert computes at once, >= 1.
            seconds: how long to go on; one call at least.
        """
        call = _Call(self._record, self.shape.hidden, threads, tokens)
        call.compute(self._following())
        began, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - began < seconds:
            call.compute(self._following())
            calls += 1
        return calls * AT_ONCE * self.shape.weights / (time.perf_counter() - began)

    def _following(self, count: int = AT_ONCE) -> list[int]:
        """The experts whose turn it is, which are those that were used the longest ago."""
        chosen = [(self._next + slot) % self._count for slot in range(count)]
        self._next = (self._next + count) % self._count
        return chosen

    def _experts(self) -> Any:
        """Records of all experts: the same values, each in memory of its own."""
        _, ffi = library()
        matrices = ffi.new("dk_matrix[]", 3 * self._count)
        models = [part for pair in self._models for part in pair if part is not None]
        memory = _Pieces(self._count * sum(_padded(part.nbytes) for part in models))
        for place in range(3 * self._count):
            data, scale = self._models[place % 3]
            rows, columns = self._shapes[place % 3]
            own_scale = None if scale is None else memory.copy_of(scale)
            matrix = matrix_from_numpy(memory.copy_of(data), self.kind, rows, columns, own_scale)
            fill_matrix(matrices[place], matrix)
            self._kept.append(matrix)
        record = ffi.new("dk_experts *")
        record.matrices = matrices
        record.experts, record.k, record.limit = self._count, AT_ONCE, _LIMIT
        record.width, record.hidden = self.shape.width, self.shape.hidden
        record.has_int8 = True
        self._kept.append(matrices)
        return record


class _Pieces:
    """One piece of memory, given out from its beginning on."""

    def __init__(self, nbytes: int) -> None:
        self._bytes: Bytes = HostMemory(nbytes).bytes.numpy()
        self._at = 0

    def copy_of(self, model: Bytes) -> Bytes:
        """The same bytes in memory of their own."""
        part = self._bytes[self._at : self._at + model.nbytes].reshape(model.shape)
        part[...] = model
        self._at += _padded(model.nbytes)
        return part


class _Call:
    """Some tokens with all the memory that the kernels need to compute them."""

    def __init__(self, record: Any, hidden: int, threads: int, tokens: int) -> None:
        lib, ffi = library()
        self._record, self._tokens = record, tokens
        self._run = new_run(threads)
        self._run.cdata.is_small = tokens <= SMALL_TOKENS
        generator = torch.Generator().manual_seed(_SEED)
        self._x = torch.randn(tokens, hidden, generator=generator)
        self._given = ffi.new("dk_input *")
        self._given.x, self._given.stride = pointer(self._x), hidden
        self._rounded = _aligned_bytes(lib.dk_quantized_bytes(tokens, hidden))
        memory = pointer(self._rounded, "void *")
        self._run.check(lib.dk_quantize_rows(self._run.cdata, self._given, memory, tokens, hidden))
        self._weights = torch.full((tokens, AT_ONCE), 1 / AT_ONCE)
        self._scratch = _aligned_bytes(lib.dk_experts_scratch_bytes(record, tokens))
        self.out = torch.empty(tokens, hidden)

    def compute(self, chosen: list[int]) -> None:
        """Let every one of these experts compute all tokens."""
        self.compute_ids(self.ids(chosen))

    def ids(self, chosen: list[int]) -> torch.Tensor:
        """The experts of every token, [tokens, AT_ONCE]; -1 where there are fewer."""
        row = chosen + [-1] * (AT_ONCE - len(chosen))
        return torch.tensor([row] * self._tokens, dtype=torch.int32)

    def compute_ids(self, ids: torch.Tensor) -> None:
        """As `compute`, for ids that were made before."""
        lib, _ = library()
        self._run.check(
            lib.dk_expert_ffn(
                self._run.cdata,
                pointer(self.out),
                self._given,
                pointer(ids),
                pointer(self._weights),
                self._record,
                self._tokens,
                pointer(self._scratch, "void *"),
            )
        )


def _random_matrix(
    kind: BlockType, rows: int, columns: int, draw: np.random.Generator
) -> tuple[Bytes, Bytes | None]:
    """Bytes of a matrix of random blocks, and its scales where they are apart."""
    if columns % kind.block_elements:
        raise ConfigError(
            f"types: {kind.name} needs rows of a multiple of {kind.block_elements} elements, found"
            f" {columns}",
            name="types",
        )
    blocks = _usable_blocks(kind, draw)
    chosen = draw.integers(0, len(blocks), rows * columns // kind.block_elements)
    if kind.name != "FP4_E2M1":
        return blocks[chosen].reshape(-1), None
    scale = np.full((rows, columns // FP4_SCALE_BLOCK), _E8M0_ONE, dtype=np.uint8)
    return blocks[chosen].reshape(-1), scale


def _usable_blocks(kind: BlockType, draw: np.random.Generator) -> Bytes:
    """Random blocks whose values are of the size of weights: no infinity, nothing subnormal."""
    drawn = draw.integers(0, 256, (_DRAWN_BLOCKS, kind.block_bytes), dtype=np.uint8)
    largest = decode_blocks(torch.from_numpy(drawn), kind).abs().amax(dim=1)
    usable: Bytes = drawn[((largest >= _SMALL) & (largest <= _LARGE)).numpy()]
    return usable


def _padded(nbytes: int) -> int:
    """Bytes up to where the next matrix may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _aligned_bytes(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _ALIGNMENT :]
