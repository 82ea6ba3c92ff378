"""Packs are what SGLang's store demands, by a reader and a writer that share nothing with ours.

Both are made from the description of the format with `struct` alone. The reader has the checks that
SGLang's `ExpertPackStore` and its `validate` tool make when they open a pack.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from pack_models import CONFIG, write_model, write_official, write_pack

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.runtime.pack_verify import verify_pack

HEADER = struct.Struct("<24sIIIIQQQIIII32s32s32s")
ENTRY = struct.Struct("<HHBBH16s80sQQQQQQ32s32s32s4Q16s16sQQ")
ROLES = ("gate", "up", "down")


def text(field: bytes) -> str:
    return field.rstrip(b"\0").decode()


def store_opens(pack: Path, manifest: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the store checks when it opens a pack; the entries."""
    data = pack.read_bytes()
    header = HEADER.unpack_from(data)
    magic, version, header_bytes, entry_bytes, flags, count, start, alignment = header[:8]
    layers, experts, top_k, roles, identity, source, config = header[8:]
    assert magic == b"SGLANG-EXPERTPACK-v1\0\0\0\0"
    assert (version, header_bytes, entry_bytes, roles) == (1, 176, 328, 3)
    assert flags & 3 == 3
    assert alignment & (alignment - 1) == 0
    assert start % alignment == 0
    assert start >= 176 + 328 * count
    assert count == layers * experts * 3
    model = manifest["model"]
    assert (layers, experts) == (model["num_layers"], model["num_routed_experts"])
    assert top_k == model["top_k"]
    assert identity.hex() == model["model_identity_sha256"]
    assert config.hex() == model["config_sha256"]
    assert source.hex() == manifest["source"]["sha256"]
    entries = [ENTRY.unpack_from(data, 176 + 328 * at) for at in range(count)]
    check_entries(data, entries, (start, alignment, experts))
    stride = -(-3 * entries[0][12] // alignment) * alignment
    assert len(data) == start + layers * experts * stride
    assert hashlib.sha256(data[176 : 176 + 328 * count]).hexdigest() == manifest["index_sha256"]
    return entries


def check_entries(
    data: bytes, entries: list[tuple[Any, ...]], places: tuple[int, int, int]
) -> None:
    """Every entry against the layout."""
    start, alignment, experts = places
    role_bytes = entries[0][12]
    stride = -(-3 * role_bytes // alignment) * alignment
    generations: dict[tuple[int, int], set[int]] = {}
    for at, entry in enumerate(entries):
        layer, expert, role, rank, dtype_id, dtype, name = entry[:7]
        assert (layer, expert, role) == (at // 3 // experts, at // 3 % experts, at % 3)
        assert (rank, dtype_id, text(dtype)) == (2, 39, "MXFP4")
        assert text(name) == f"blk.{layer}.ffn_{ROLES[role]}_exps.weight"
        tensor_offset, tensor_nbytes, slice_offset, slice_nbytes, offset, nbytes = entry[7:13]
        assert slice_nbytes == nbytes == role_bytes == tensor_nbytes // experts
        assert slice_offset == tensor_offset + expert * slice_nbytes
        assert offset == start + (layer * experts + expert) * stride + role * role_bytes
        slice_digest, checksum = entry[14:16]
        assert checksum == slice_digest
        assert hashlib.sha256(data[offset : offset + nbytes]).digest() == checksum
        shape, scheme, transform, block, generation = entry[16:20], *entry[20:24]
        assert shape[0] * shape[1] // 32 * 17 == nbytes
        assert shape[2:] == (0, 0)
        assert (text(scheme), text(transform), block) == ("MXFP4", "identity-v1", 32)
        generations.setdefault((layer, expert), set()).add(generation)
    assert all(len(found) == 1 and 0 not in found for found in generations.values())


def manifest_of(pack: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(f"{pack}.manifest.json").read_text())
    return values


@pytest.mark.parametrize("kind", ["gguf", "official", "official with companion"])
def test_store_accepts_what_we_build(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        model, changes = write_model(tmp_path / "m.gguf"), {}
    else:
        model, changes = write_official(tmp_path / "m"), {}
        if kind != "official":
            changes = {"dense_out": tmp_path / "dense.gguf"}
    write_pack(model, tmp_path / "x", **changes)
    manifest = manifest_of(tmp_path / "x")
    entries = store_opens(tmp_path / "x", manifest)
    assert manifest["pack_path"] == str((tmp_path / "x").resolve())
    if kind == "gguf":
        # The `validate` tool compares ranges of source and pack.
        source, pack = model.read_bytes(), (tmp_path / "x").read_bytes()
        for entry in entries:
            slice_offset, nbytes, offset = entry[9], entry[10], entry[11]
            assert source[slice_offset : slice_offset + nbytes] == pack[offset : offset + nbytes]


def foreign_pack(source: Path, target: Path) -> None:
    """A pack of a GGUF file as the format's description says, with a manifest as SGLang's."""
    import gguf

    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    content = source.read_bytes()
    layers, experts, top_k = CONFIG.num_layers, CONFIG.num_experts, CONFIG.experts_per_token
    digest = hashlib.sha256(content).hexdigest()
    config = hashlib.sha256(b"{}").hexdigest()
    joined = f"sglang-deepseek-expert-pack-v1:{digest}:{config}"
    identity = hashlib.sha256(joined.encode()).hexdigest()
    count = layers * experts * 3
    start = -(-(176 + 328 * count) // 4096) * 4096
    role_bytes = int(tensors["blk.0.ffn_gate_exps.weight"].n_bytes) // experts
    stride = -(-3 * role_bytes // 4096) * 4096
    data = bytearray(start + layers * experts * stride)
    index = bytearray()
    for layer in range(layers):
        for expert in range(experts):
            seed = f"{identity}:{digest}:{layer}:{expert}".encode()
            number = int.from_bytes(hashlib.sha256(seed).digest()[:8], "little") or 1
            for role, name in enumerate(ROLES):
                tensor = tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
                at = int(tensor.data_offset) + expert * role_bytes
                own = content[at : at + role_bytes]
                place = start + (layer * experts + expert) * stride + role * role_bytes
                data[place : place + role_bytes] = own
                whole = content[tensor.data_offset : tensor.data_offset + int(tensor.n_bytes)]
                checksum = hashlib.sha256(own).digest()
                dims = [int(dim) for dim in tensor.shape[:2]]
                index += ENTRY.pack(
                    *(layer, expert, role, 2, 39, b"MXFP4", tensor.name.encode()),
                    *(int(tensor.data_offset), int(tensor.n_bytes), at, role_bytes),
                    *(place, role_bytes, hashlib.sha256(whole).digest(), checksum, checksum),
                    *(*dims, 0, 0, b"MXFP4", b"identity-v1", 32, number),
                )
    data[176 : 176 + len(index)] = index
    digests = (bytes.fromhex(text) for text in (identity, digest, config))
    numbers = (1, 176, 328, 3, count, start, 4096, layers, experts, top_k, 3)
    data[:176] = HEADER.pack(b"SGLANG-EXPERTPACK-v1", *numbers, *digests)
    target.write_bytes(data)
    sizes = {
        "index_count": count,
        "data_start": start,
        "pack_path": str(target),
        "pack_size": len(data),
        "pack_sha256": hashlib.sha256(data).hexdigest(),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "payload_bytes": layers * experts * 3 * role_bytes,
    }
    manifest = sizes | foreign_facts(source, (identity, config))
    Path(f"{target}.manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))


def foreign_facts(source: Path, digests: tuple[str, str]) -> dict[str, Any]:
    """What such a manifest says of model and source."""
    import gguf

    reader = gguf.GGUFReader(source)
    identity, config = digests
    layers, experts, top_k = CONFIG.num_layers, CONFIG.num_experts, CONFIG.experts_per_token
    content = source.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {
        "format": "SGLANG-EXPERTPACK-v1",
        "version": 1,
        "complete": True,
        "role_order": list(ROLES),
        "alignment": 4096,
        "header_bytes": 176,
        "index_entry_bytes": 328,
        "object_count": layers * experts,
        "model": {
            "ref": "deepseek-v4-flash",
            "model_identity_sha256": identity,
            "config_sha256": config,
            "num_layers": layers,
            "num_routed_experts": experts,
            "top_k": top_k,
            "single_gpu": True,
        },
        "source": {"path": str(source), "size": len(content), "sha256": digest},
        "tensors": [
            {
                "name": tensor.name,
                "shape": [int(dim) for dim in tensor.shape],
                "type": tensor.tensor_type.name,
                "type_id": int(tensor.tensor_type),
                "source_offset": int(tensor.data_offset),
                "source_nbytes": int(tensor.n_bytes),
                "source_payload_sha256": hashlib.sha256(tensor.data.tobytes()).hexdigest(),
                "category": "routed_expert" if "_exps" in tensor.name else "non_routed",
            }
            for tensor in reader.tensors
        ],
    }


def test_pack_of_another_program_is_read_and_every_checksum_passes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    foreign_pack(model, tmp_path / "x")
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint.warnings == ()
    report = verify_pack(tmp_path / "x")
    assert report.warnings == ()
    assert report.checked["matrices"] == 3 * CONFIG.num_layers * CONFIG.num_experts


def test_pack_of_another_program_has_the_bytes_of_ours(tmp_path: Path) -> None:
    """All but the digests of the configuration, which is generated, and what follows from them."""
    model = write_model(tmp_path / "m.gguf")
    foreign_pack(model, tmp_path / "theirs")
    write_pack(model, tmp_path / "ours")
    ours, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    with read_expert_pack(tmp_path / "ours") as pack:
        start, count = pack.header.data_start, pack.header.index_count
    assert ours[start:] == theirs[start:]
    assert ours[:80] == theirs[:80]
    assert ours[112:144] == theirs[112:144]
    for at in range(176, 176 + 328 * count, 328):
        assert ours[at : at + 320] == theirs[at : at + 320]
