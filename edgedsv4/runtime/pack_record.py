"""What a build writes down: index entries, and the manifest beside the finished pack."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack_header import FORMATS, ROLES, PackHeader, generation
from edgedsv4.formats.expert_pack_index import TRANSFORM, Entries, make_entry
from edgedsv4.formats.expert_pack_inventory import rows_sha256, tensor_rows
from edgedsv4.formats.expert_pack_manifest import header_numbers
from edgedsv4.formats.expert_pack_model import is_routed

if TYPE_CHECKING:
    from edgedsv4.formats.expert_pack_inventory import Inventory
    from edgedsv4.formats.expert_pack_layout import PackLayout
    from edgedsv4.formats.tensor_record import TensorRecord
    from edgedsv4.runtime.pack_source import PackSource, StackedRole

_MODEL_NUMBERS: Final = ("num_layers", "num_routed_experts", "top_k")
_DESCRIPTION: Final = "the bytes of the GGUF slice of each expert, unchanged, three to an object"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """Everything about a build that was known before the first byte was written."""

    header: PackHeader
    layout: PackLayout
    source: PackSource
    inventory: Inventory
    inventory_path: Path
    records: tuple[TensorRecord, ...]
    """Tensors of the inventory."""
    metadata_sha256: str
    """Of the GGUF header of the source; of nothing where it is no GGUF file."""
    model_ref: str
    tool_sha256: str
    dense: tuple[Path, int, str] | None
    """(path, size, hex digest) of a companion that is not the source itself."""
    version: str
    """Of this program."""


class LayerDigests:
    """Digests of one layer while it is written.

    A stack that was hashed in the same run need not be hashed again: its file is watched. One whose
    digest comes from an inventory of an earlier run is, and so is one that no file holds as such.

    Attributes:
        slices: (expert, role) -> digest.
        stacks: per role, of all experts one after the other; None where it is known.
    """

    def __init__(self, facts: BuildFacts, layer: int) -> None:
        self._facts, self._layer = facts, layer
        self._known = [facts.inventory.tensors.get(role.name) for role in facts.source.roles[layer]]
        self.slices: dict[tuple[int, int], bytes] = {}
        self.stacks = [
            None if known is not None and not facts.inventory.is_stored else hashlib.sha256()
            for known in self._known
        ]

    def check(self) -> None:
        """Compare what was packed with what the inventory says.

        Raises:
            FormatError: the inventory is of another file.
        """
        roles = self._facts.source.roles[self._layer]
        for role, stack, known in zip(roles, self.stacks, self._known, strict=True):
            if known is not None and stack is not None and stack.hexdigest() != known:
                raise FormatError(
                    f"tensor {role.name} does not have the digest in"
                    f" {self._facts.inventory_path.name}: the source changed since; delete that"
                    " file and the unfinished pack",
                    path=self._facts.inventory.facts.path,
                    fault="checksum",
                )

    def entries(self) -> Entries:
        """The index entries of the layer, once all of it was hashed."""
        header = self._facts.header
        found: list[Entries] = []
        for expert in range(header.num_experts):
            number = generation(header.model_identity, header.source_sha256, self._layer, expert)
            found += [self._entry(expert, role, number) for role in range(len(ROLES))]
        return np.concatenate(found)

    def _entry(self, expert: int, role: int, number: int) -> Entries:
        facts, layer = self._facts, self._layer
        source = facts.source.roles[layer][role]
        offset, nbytes = facts.layout.layers[layer].place(expert, role)
        own, stack = self.slices[expert, role], self.stacks[role]
        known = bytes.fromhex(self._known[role] or "") if stack is None else stack.digest()
        return make_entry(
            (layer, expert, role),
            source.block_type,
            facts.source.shape.dims(role),
            (source.name, TRANSFORM),
            {
                "source_tensor_offset": source.offset,
                "source_tensor_nbytes": source.nbytes * facts.header.num_experts,
                "source_slice_offset": source.offset + expert * source.nbytes,
                "source_slice_nbytes": nbytes,
                "pack_offset": offset,
                "pack_nbytes": nbytes,
                "generation": number,
            },
            {
                "source_tensor_sha256": known,
                "source_slice_sha256": own,
                "checksum": own,
            },
        )


def manifest_values(
    facts: BuildFacts, target: Path, entries: Entries, digests: tuple[str, int], started: float
) -> dict[str, object]:
    """The manifest of a finished pack.

    Args:
        facts: of the build.
        target: the pack.
        entries: its index.
        digests: (hex digest, size) of the whole file.
        started: `time.time()` at the start.
    """
    header, layout, source = facts.header, facts.layout, facts.source
    numbers = header_numbers(header)
    pack_sha256, pack_size = digests
    tensors = _tensors(facts, entries)
    routed = sum(tensor["category"] == "routed_expert" for tensor in tensors)
    values: dict[str, object] = {
        name: value for name, value in numbers.items() if name not in _MODEL_NUMBERS
    }
    return values | {
        "format": FORMATS[header.version],
        "complete": True,
        "created_at": _iso(time.time()),
        "layout": "triplet_identity",
        "role_order": list(ROLES),
        "pack_path": str(target),
        "pack_size": pack_size,
        "pack_sha256": pack_sha256,
        "index_sha256": hashlib.sha256(entries.tobytes()).hexdigest(),
        "payload_bytes": layout.payload_bytes,
        "padding_bytes": layout.padding_bytes,
        **_object_sizes(facts),
        "model": {
            "ref": facts.model_ref,
            "model_identity_sha256": header.model_identity.hex(),
            "config_sha256": header.config_sha256.hex(),
            "num_layers": header.num_layers,
            "num_routed_experts": header.num_experts,
            "top_k": header.top_k,
            "single_gpu": True,
        },
        "source": _source(facts),
        "coverage": {
            "layers": list(range(header.num_layers)),
            "experts_per_layer": header.num_experts,
            "roles": list(ROLES),
            "routed_tensor_count": routed,
            "non_routed_tensor_count": len(tensors) - routed,
        },
        "transform": {
            "id": TRANSFORM,
            "description": _DESCRIPTION,
            "reversible": True,
            "tool_sha256": facts.tool_sha256,
        },
        "builder": {
            "git_sha": None,
            "program": f"edgedsv4 {facts.version}",
            "python": platform.python_version(),
            "command": "edgedsv4 pack build",
            "started_at": _iso(started),
            "elapsed_s": round(time.time() - started, 3),
        },
        "tensors": sorted(tensors, key=lambda tensor: str(tensor["name"])),
        **_dense(facts),
        **_layers(facts, source),
    }


def now_text() -> str:
    """The time, ISO 8601, UTC."""
    return _iso(time.time())


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _object_sizes(facts: BuildFacts) -> dict[str, object]:
    """Sizes of one expert; null where they are not one number."""
    layers = facts.layout.layers
    sizes = {
        "object_payload_bytes": {layer.payload_bytes for layer in layers},
        "object_stride": {layer.stride for layer in layers},
        "role_bytes": {nbytes for layer in layers for nbytes in layer.role_nbytes},
    }
    return {name: found.pop() if len(found) == 1 else None for name, found in sizes.items()}


def _layers(facts: BuildFacts, source: PackSource) -> dict[str, object]:
    """Types and sizes per layer, which version 1 has no use for."""
    if facts.header.version == 1:
        return {}
    return {
        "layers": [
            {
                "role_types": [role.block_type.name for role in roles],
                "role_bytes": list(layer.role_nbytes),
                "object_stride": layer.stride,
            }
            for roles, layer in zip(source.roles, facts.layout.layers, strict=True)
        ]
    }


def _source(facts: BuildFacts) -> dict[str, object]:
    inventory = facts.inventory
    rows = tensor_rows(facts.records, inventory.tensors)
    found: dict[str, object] = {
        "path": str(inventory.facts.path),
        "size": inventory.facts.size,
        "sha256": inventory.sha256.hex(),
        "gguf_data_offset": inventory.facts.data_offset,
        "gguf_metadata_sha256": facts.metadata_sha256,
        "inventory_path": str(facts.inventory_path),
        "inventory_sha256": rows_sha256(rows),
        "tensor_count": len(rows),
    }
    if inventory.files:
        found["files"] = [
            {"name": name, "size": size, "sha256": sha256} for name, size, sha256 in inventory.files
        ]
    return found


def _dense(facts: BuildFacts) -> dict[str, object]:
    if facts.dense is None:
        return {}
    path, size, sha256 = facts.dense
    return {"dense": {"path": str(path), "size": size, "sha256": sha256}}


def _tensors(facts: BuildFacts, entries: Entries) -> list[dict[str, object]]:
    """Every tensor of the source, and stacks of experts that it has in another form."""
    layers = facts.header.num_layers
    found = [
        _tensor(
            record.name,
            record.shape,
            record.block_type.name,
            {
                "type_id": record.block_type.ggml_id,
                "source_offset": record.offset,
                "source_nbytes": record.nbytes,
                "source_payload_sha256": facts.inventory.tensors[record.name],
            },
            routed=is_routed(record.name, layers),
        )
        for record in facts.records
    ]
    names = {record.name for record in facts.records}
    if any(is_routed(name, layers) for name in names):
        return found
    shape = facts.source.shape
    for layer, roles in enumerate(facts.source.roles):
        for role, stack in enumerate(roles):
            found.append(_stack(facts, stack, entries, (layer, role), shape.dims(role)))
    return found


def _stack(
    facts: BuildFacts,
    stack: StackedRole,
    entries: Entries,
    place: tuple[int, int],
    dims: tuple[int, int],
) -> dict[str, object]:
    layer, role = place
    first = entries[layer * facts.header.num_experts * len(ROLES) + role]
    return _tensor(
        stack.name,
        (facts.header.num_experts, *dims),
        stack.block_type.name,
        {
            "type_id": stack.block_type.ggml_id,
            "source_offset": stack.offset,
            "source_nbytes": stack.nbytes * facts.header.num_experts,
            "source_payload_sha256": first["source_tensor_sha256"].tobytes().hex(),
        },
        routed=True,
    )


def _tensor(
    name: str,
    shape: Sequence[int],
    type_name: str,
    values: Mapping[str, object],
    *,
    routed: bool,
) -> dict[str, object]:
    is_inline = routed and type_name == "MXFP4"
    return {
        "name": name,
        "shape": list(reversed(shape)),
        "type": type_name,
        **values,
        "category": "routed_expert" if routed else "non_routed",
        "mapping": "expert_pack_identity" if routed else "gguf_direct_identity",
        "scale_storage": "inline_quant_block" if is_inline else "tensor_native",
    }
