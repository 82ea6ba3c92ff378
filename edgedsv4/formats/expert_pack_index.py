"""The index of an expert pack: 328 bytes for each matrix of each expert, read as one array.

Everything in it but the digests follows from the header, two dims and the storage types, so it is
checked against what it must be, column by column: a pack of 33,024 entries takes a few
milliseconds. What does not fit becomes one fault per kind, with the first entry that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgedsv4.formats.block_types import BlockType, by_ggml_id, ggml_type_problem
from edgedsv4.formats.expert_pack_header import ENTRY_BYTES, ROLES, PackHeader
from edgedsv4.formats.expert_pack_layout import PackLayout, RoleSizes, lay_out
from edgedsv4.formats.faults import FaultList, quoted

Entries = npt.NDArray[np.void]
"""Structured array of `ENTRY`, in the order of the file."""
Mask = npt.NDArray[np.bool_]

_DIGEST: Final = ("u1", (32,))
ENTRY: Final = np.dtype(
    [
        ("layer", "<u2"),
        ("expert", "<u2"),
        ("role", "u1"),
        ("rank", "u1"),
        ("dtype_id", "<u2"),
        ("dtype", "u1", (16,)),
        ("tensor_name", "u1", (80,)),
        ("source_tensor_offset", "<u8"),
        ("source_tensor_nbytes", "<u8"),
        ("source_slice_offset", "<u8"),
        ("source_slice_nbytes", "<u8"),
        ("pack_offset", "<u8"),
        ("pack_nbytes", "<u8"),
        ("source_tensor_sha256", *_DIGEST),
        ("source_slice_sha256", *_DIGEST),
        ("checksum", *_DIGEST),
        ("shape", "<u8", (4,)),
        ("quant_scheme", "u1", (16,)),
        ("transform_id", "u1", (16,)),
        ("block_size", "<u8"),
        ("generation", "<u8"),
    ]
)
"""One entry; `shape` has the fastest dim first, texts end in NUL."""
TEXTS: Final = ("dtype", "tensor_name", "quant_scheme", "transform_id")
TRANSFORM: Final = "identity-v1"
_MAX_DIM: Final = 1 << 31
_MAX_OFFSET: Final = 1 << 62
_V1_TYPE: Final = "MXFP4"


@dataclass(frozen=True, slots=True)
class PackShape:
    """What the entries say of all experts alike."""

    hidden_size: int
    expert_width: int
    types: tuple[tuple[BlockType, BlockType, BlockType], ...]
    """Storage type of gate, up and down, per layer."""

    def dims(self, role: int) -> tuple[int, int]:
        """(rows, columns) of a matrix."""
        if ROLES[role] == "down":
            return self.hidden_size, self.expert_width
        return self.expert_width, self.hidden_size

    def sizes(self) -> list[RoleSizes]:
        """Bytes of gate, up and down, per layer."""
        found: list[RoleSizes] = []
        for types in self.types:
            gate, up, down = (
                rows * block_type.row_bytes(columns)
                for block_type, (rows, columns) in zip(
                    types, (self.dims(0), self.dims(1), self.dims(2)), strict=True
                )
            )
            found.append((gate, up, down))
        return found


def text_field(text: str, width: int) -> bytes:
    """A text as its field holds it.

    Raises:
        ValueError: it does not fit, or holds a NUL.
    """
    data = text.encode("utf-8")
    if not 0 < len(data) < width or b"\0" in data:
        raise ValueError(f"{text!r} does not fit a field of {width} bytes")
    return data.ljust(width, b"\0")


def field_text(field: npt.NDArray[np.uint8]) -> str:
    """The text of a field."""
    return field.tobytes().rstrip(b"\0").decode("utf-8", errors="replace")


def digest_field(digest: bytes) -> npt.NDArray[np.uint8]:
    """A digest as its field holds it."""
    return np.frombuffer(digest, dtype=np.uint8)


def make_entry(
    key: tuple[int, int, int],
    block_type: BlockType,
    dims: tuple[int, int],
    texts: tuple[str, str],
    numbers: dict[str, int],
    digests: dict[str, bytes],
) -> Entries:
    """One entry.

    Args:
        key: layer, expert, role.
        block_type: storage type.
        dims: (rows, columns).
        texts: tensor name and transform.
        numbers: the u64 fields but `block_size`, by name.
        digests: the digest fields, by name.

    Returns:
        Array of one entry.
    """
    entry = np.zeros(1, dtype=ENTRY)
    row = entry[0]
    row["layer"], row["expert"], row["role"] = key
    row["rank"], row["dtype_id"] = len(dims), block_type.ggml_id
    row["shape"][: len(dims)] = dims[::-1]
    row["block_size"] = block_type.block_elements
    name, transform = texts
    named = {"dtype": block_type.name, "quant_scheme": block_type.name}
    for field, text in (named | {"tensor_name": name, "transform_id": transform}).items():
        row[field] = digest_field(text_field(text, row[field].size))
    for field, number in numbers.items():
        row[field] = number
    for field, digest in digests.items():
        row[field] = digest_field(digest)
    return entry


def check_index(
    entries: Entries, header: PackHeader, faults: FaultList
) -> tuple[PackShape, PackLayout] | None:
    """Check every entry against what header, dims and types demand.

    Args:
        entries: [layers x experts x 3].
        header: of the same pack.
        faults: takes what is wrong.

    Returns:
        What all experts share, and where each lies; None where faults leave that open.
    """
    checks = _Checks(entries, header, faults)
    if not checks.keys():
        return None
    shape = checks.shape()
    if shape is None:
        return None
    layout = lay_out(
        shape.sizes(),
        header.num_experts,
        version=header.version,
        data_start=header.data_start,
        alignment=header.alignment,
    )
    checks.texts()
    checks.numbers(shape, layout)
    return shape, layout


class _Checks:
    """The entries of one pack while they are checked."""

    def __init__(self, entries: Entries, header: PackHeader, faults: FaultList) -> None:
        self._entries = entries
        self._header = header
        self._faults = faults
        number = np.arange(len(entries))
        self._role = number % len(ROLES)
        self._expert = number // len(ROLES) % header.num_experts
        self._layer = number // (len(ROLES) * header.num_experts)

    def keys(self) -> bool:
        """Every layer, expert and role once, in order."""
        before = len(self._faults)
        limits = {
            "layer": self._header.num_layers,
            "expert": self._header.num_experts,
            "role": len(ROLES),
        }
        for field, limit in limits.items():
            bad = self._entries[field] >= limit
            self._add(
                bad, lambda at, f=field, n=limit: f"{f} is {self._value(f, at)}, not below {n}"
            )
        if len(self._faults) == before:
            self._check_order()
        return len(self._faults) == before

    def _check_order(self) -> None:
        wide = {name: self._entries[name].astype(np.int64) for name in ("layer", "expert", "role")}
        layer, expert, role = wide["layer"], wide["expert"], wide["role"]
        key = (layer * self._header.num_experts + expert) * len(ROLES) + role
        seen = np.bincount(key, minlength=len(key))
        if (seen == 1).all():
            self._add(key != np.arange(len(key)), lambda _: "is not in the order of the index")
            return
        twice, missing = int(seen.argmax()), int(seen.argmin())
        self._faults.add(
            f"index: {self._words(twice)} is there {seen[twice]} times,"
            f" {self._words(missing)} is missing"
        )

    def shape(self) -> PackShape | None:
        """Dims and types; None if one of them cannot be used."""
        before = len(self._faults)
        first = self._entries[0]["shape"].tolist()
        hidden, width = first[0], first[1]
        if not all(1 <= dim < _MAX_DIM for dim in (hidden, width)):
            self._faults.add(f"index: an expert of {quoted(first)}, expected dims of 1..2^31-1")
            return None
        expected = np.zeros((len(ROLES), 4), dtype=np.uint64)
        expected[:, 0] = hidden, hidden, width
        expected[:, 1] = width, width, hidden
        bad = (self._entries["shape"] != expected[self._role]).any(axis=1)
        self._add(
            bad,
            lambda at: (
                f"is {self._entries[at]['shape'].tolist()},"
                f" expected {expected[self._role[at]].tolist()}"
            ),
        )
        self._add(
            self._entries["rank"] != 2, lambda at: f"rank is {self._value('rank', at)}, not 2"
        )
        types = self._types((hidden, hidden, width))
        if types is None or len(self._faults) > before:
            return None
        return PackShape(hidden, width, types)

    def _types(
        self, columns: tuple[int, int, int]
    ) -> tuple[tuple[BlockType, BlockType, BlockType], ...] | None:
        """Storage types per layer, the same for all its experts."""
        step = len(ROLES) * self._header.num_experts
        ids = self._entries["dtype_id"]
        firsts = ids.reshape(self._header.num_layers, -1)[:, : len(ROLES)]  # [layers, 3]
        same = ids == firsts[self._layer, self._role]
        self._add(~same, lambda at: f"type {ids[at]} differs from that of its layer's first expert")
        found: dict[int, BlockType] = {}
        for type_id in np.unique(firsts).tolist():
            block_type = by_ggml_id(type_id)
            problem = ggml_type_problem(type_id)
            at = int((ids == type_id).argmax())
            if block_type is None or problem is not None:
                self._faults.add(f"index: {self._words(at)} has {problem}")
            elif self._header.version == 1 and block_type.name != _V1_TYPE:
                self._faults.add(
                    f"index: {self._words(at)} is {block_type.name}, version 1 holds"
                    f" {_V1_TYPE} only"
                )
            else:
                found[type_id] = block_type
        if not set(firsts.ravel().tolist()) <= found.keys():
            return None
        for layer, role in np.ndindex(firsts.shape):
            block_type = found[int(firsts[layer, role])]
            if columns[role] % block_type.block_elements:
                self._faults.add(
                    f"index: {self._words(layer * step + role)} has rows of {columns[role]:,},"
                    f" {block_type.name} needs a multiple of {block_type.block_elements}"
                )
                return None
        rows = [[found[type_id] for type_id in row] for row in firsts.tolist()]
        return tuple((gate, up, down) for gate, up, down in rows)

    def texts(self) -> None:
        """Texts end in NUL, and say what the numbers say."""
        for field in TEXTS:
            cells = self._entries[field]
            ends = (cells == 0).argmax(axis=1)
            behind = np.arange(cells.shape[1]) >= ends[:, None]
            bad = (cells[:, -1] != 0) | (cells[:, 0] == 0) | ((cells != 0) & behind).any(axis=1)
            self._add(
                bad, lambda at, f=field: f"{f} is {self._shown(f, at)}, not a text with a NUL"
            )
        self._types_by_name()
        wanted = np.frombuffer(text_field(TRANSFORM, 16), dtype=np.uint8)
        bad = (self._entries["transform_id"] != wanted).any(axis=1)
        self._add(
            bad, lambda at: f"transform_id is {self._shown('transform_id', at)}, not {TRANSFORM}"
        )

    def _types_by_name(self) -> None:
        for type_id in np.unique(self._entries["dtype_id"]).tolist():
            block_type = by_ggml_id(type_id)
            if block_type is None:
                continue
            wanted = np.frombuffer(text_field(block_type.name, 16), dtype=np.uint8)
            own = self._entries["dtype_id"] == type_id
            for field in ("dtype", "quant_scheme"):
                bad = own & (self._entries[field] != wanted).any(axis=1)
                self._add(
                    bad,
                    lambda at, f=field, t=block_type: (
                        f"{f} is {self._shown(f, at)}, expected {t.name}"
                    ),
                )
            bad = own & (self._entries["block_size"] != block_type.block_elements)
            self._add(
                bad,
                lambda at, t=block_type: (
                    f"block_size is {self._value('block_size', at)}, expected {t.block_elements}"
                ),
            )

    def numbers(self, shape: PackShape, layout: PackLayout) -> None:
        """Sizes, places, digests and generations."""
        sizes = np.array(shape.sizes(), dtype=np.uint64)[self._layer, self._role]
        for field in ("pack_nbytes", "source_slice_nbytes"):
            self._equal(field, sizes)
        self._equal("source_tensor_nbytes", sizes * np.uint64(self._header.num_experts))
        offsets = self._entries["source_tensor_offset"]
        far = offsets >= _MAX_OFFSET
        self._add(far, lambda at: f"source_tensor_offset is {offsets[at]:,}, not below 2^62")
        if not far.any():
            self._equal("source_slice_offset", offsets + self._expert.astype(np.uint64) * sizes)
        self._equal("pack_offset", self._offsets(layout))
        bad = (self._entries["checksum"] != self._entries["source_slice_sha256"]).any(axis=1)
        self._add(bad, lambda _: "checksum differs from source_slice_sha256 of unchanged bytes")
        numbers = self._entries["generation"].reshape(-1, len(ROLES))
        bad = np.repeat((numbers != numbers[:, :1]).any(axis=1), len(ROLES))
        self._add(bad, lambda _: "generation differs between the matrices of one expert")
        self._add(self._entries["generation"] == 0, lambda _: "generation is 0")

    def _offsets(self, layout: PackLayout) -> npt.NDArray[np.uint64]:
        starts = np.array([layer.start for layer in layout.layers], dtype=np.uint64)
        strides = np.array([layer.stride for layer in layout.layers], dtype=np.uint64)
        roles = np.array([layer.role_offsets for layer in layout.layers], dtype=np.uint64)
        experts = self._expert.astype(np.uint64)
        found: npt.NDArray[np.uint64] = (
            starts[self._layer] + experts * strides[self._layer] + roles[self._layer, self._role]
        )
        return found

    def _equal(self, field: str, expected: npt.NDArray[np.uint64]) -> None:
        self._add(
            self._entries[field] != expected,
            lambda at: (
                f"{field} is {int(self._entries[at][field]):,}, expected {int(expected[at]):,}"
            ),
        )

    def _add(self, bad: Mask, words: Any) -> None:
        """One fault for all entries of a mask; `words(entry)` says what is wrong with the first."""
        count = int(np.count_nonzero(bad))
        if not count:
            return
        at = int(bad.argmax())
        more = f", and {count - 1:,} more entries alike" if count > 1 else ""
        self._faults.add(f"index: {self._words(at)}: {words(at)}{more}")

    def _words(self, at: int) -> str:
        return (
            f"entry {at} (layer {self._layer[at]}, expert {self._expert[at]},"
            f" {ROLES[self._role[at]]})"
        )

    def _value(self, field: str, at: int) -> int:
        return int(self._entries[at][field])

    def _shown(self, field: str, at: int) -> str:
        return quoted(self._entries[at][field].tobytes().rstrip(b"\0"))


def index_types(shape: PackShape) -> Sequence[str]:
    """Names of all storage types, each once."""
    return list(dict.fromkeys(kind.name for types in shape.types for kind in types))


assert ENTRY.itemsize == ENTRY_BYTES
