"""A model in two parts: the routed experts in a pack, everything else in the file of its source.

Opening such a model makes one `Checkpoint` of both. The experts become stacks with gaps; those of
the other file are left out, so it does not matter whether they are in it. That the parts belong
together is seen from the manifest: names, shapes and types of all other tensors, and the digests of
some small ones, which differ between any two models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack_header import ROLES
from edgedsv4.formats.expert_pack_manifest import (
    MANIFEST_SUFFIX,
    PackManifest,
    manifest_path,
    read_manifest,
)
from edgedsv4.formats.faults import FaultList
from edgedsv4.formats.tensor_record import TensorRecord

if TYPE_CHECKING:
    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.formats.expert_pack import ExpertPack

_STACKED: Final = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps(?:\.weight)?")
_SINGLE: Final = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:ffn|mlp)\.experts\..+")
_OFFICIAL_ROLES: Final = ("w1", "w3", "w2")
_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 1 << 16


def locate_pack(path: Path) -> tuple[Path, PackManifest]:
    """The pack and its manifest, of which either may be named.

    Raises:
        FormatError: the manifest is missing or cannot be used, or the pack of a manifest is gone.
    """
    if not path.name.endswith(MANIFEST_SUFFIX):
        return path, read_manifest(manifest_path(path))
    manifest = read_manifest(path)
    beside = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
    for candidate in (beside, manifest.pack_path):
        if candidate.is_file():
            return candidate, manifest
    raise FormatError(
        f"its expert pack is not there: neither {beside} nor {manifest.pack_path}",
        path=path,
        fault="missing",
    )


def locate_dense(pack: Path, manifest: PackManifest) -> Path:
    """The file or directory with everything but the experts.

    Raises:
        FormatError: none of the places where it may be has one.
    """
    named = [manifest.source_path, *([manifest.dense_path] if manifest.dense_path else [])]
    for candidate in (*named, *(pack.parent / path.name for path in named)):
        if candidate.exists():
            return candidate
    beside = [
        found
        for found in sorted(pack.parent.glob("*.gguf"))
        if not found.name.startswith(("mtp-", "."))
    ]
    sets = {re.sub(r"-\d{5,}-of-(\d{5,})\.gguf$", r"-of-\1", found.name) for found in beside}
    if len(sets) == 1:
        return beside[0]
    raise FormatError(
        "an expert pack holds the routed experts only, and the model's other file is not there:"
        f" looked for {', '.join(str(path) for path in named)} and for a single GGUF file beside"
        " the pack; name it as dense_model (--dense)",
        path=pack,
        fault="missing",
    )


def attach_experts(
    dense: Checkpoint, pack: ExpertPack, manifest: PackManifest, path: Path
) -> Checkpoint:
    """One model of both parts; use the result in place of either and close only that.

    Args:
        dense: everything but the experts, with or without them.
        pack: the experts.
        manifest: of the pack, already compared with it.
        path: what was asked for.

    Raises:
        FormatError: they are parts of different models.
    """
    _check_same_model(dense, pack, manifest)
    digest = hashlib.sha256(f"{dense.identity_sha256}+{manifest.index_sha256}".encode())
    layers = pack.header.num_layers
    kept = {name: record for name, record in dense.tensors.items() if not is_routed(name, layers)}
    for record in _expert_records(dense, pack):
        kept[record.name] = record
    return replace(
        dense,
        path=path,
        tensors=kept,
        identity_sha256=digest.hexdigest(),
        files=(*dense.files, pack.file),
        pack=pack,
        dense_path=dense.path,
    )


def is_routed(name: str, num_layers: int) -> bool:
    """Whether a tensor holds routed experts of one of the first `num_layers` layers."""
    found = _STACKED.fullmatch(name) or _SINGLE.fullmatch(name)
    return found is not None and int(found[1]) < num_layers


def _check_same_model(dense: Checkpoint, pack: ExpertPack, manifest: PackManifest) -> None:
    config, header = dense.config, pack.header
    faults = FaultList(pack.path)
    for name, found, expected in (
        ("layers", header.num_layers, config.num_layers),
        ("experts", header.num_experts, config.num_experts),
        ("experts per token", header.top_k, config.experts_per_token),
        ("inputs of an expert", pack.shape.hidden_size, config.hidden_size),
        ("width of an expert", pack.shape.expert_width, config.expert_width),
    ):
        if found != expected:
            faults.add(f"{name}: {found:,} in the expert pack, {expected:,} in {dense.path}")
    for tensor in manifest.tensors:
        record = dense.tensors.get(tensor.name)
        if record is None:
            faults.add(f"tensor {tensor.name} is not in {dense.path}")
            continue
        own = record.block_type.name, record.nbytes
        is_same = own == (tensor.type_name, tensor.nbytes)
        # The order of the dims in manifests of other programs is not known.
        if not is_same or tensor.shape not in (record.shape, record.shape[::-1]):
            faults.add(
                f"tensor {tensor.name} is {own[0]} {list(record.shape)} in {dense.path}, the"
                f" manifest says {tensor.type_name} {list(tensor.shape)}"
            )
    if not len(faults):
        _check_samples(dense, manifest, faults)
        _check_size(dense, pack, manifest, faults)
    faults.raise_if_any("the expert pack is of another model", "mismatch")


def _check_samples(dense: Checkpoint, manifest: PackManifest, faults: FaultList) -> None:
    small = [tensor for tensor in manifest.tensors if 0 < tensor.nbytes <= _SAMPLE_BYTES]
    for tensor in small[:: 1 + len(small) // _SAMPLES]:
        data = dense.tensors[tensor.name].data()
        if hashlib.sha256(data.data).hexdigest() != tensor.sha256:
            faults.add(
                f"tensor {tensor.name} of {dense.path} has other values than the model that the"
                " expert pack was made from"
            )


def _check_size(
    dense: Checkpoint, pack: ExpertPack, manifest: PackManifest, faults: FaultList
) -> None:
    """A whole source must have its size; one without the experts has another."""
    size = sum(file.size for file in dense.files)
    is_whole = any(is_routed(name, pack.header.num_layers) for name in dense.tensors)
    if is_whole and size != manifest.source_size:
        faults.add(
            f"{dense.path} has {size:,} bytes, the model that the expert pack was made from had"
            f" {manifest.source_size:,}"
        )


def _expert_records(dense: Checkpoint, pack: ExpertPack) -> Iterator[TensorRecord]:
    """One stack per layer and matrix, whose parts are an object apart."""
    count = pack.header.num_experts
    for layer, types in enumerate(pack.shape.types):
        for role, name in enumerate(ROLES):
            offset, nbytes = pack.place(layer, 0, role)
            own = f"blk.{layer}.ffn_{name}_exps.weight"
            if dense.kind == "official":
                own = f"layers.{layer}.ffn.experts.{_OFFICIAL_ROLES[role]}.weight"
            yield TensorRecord(
                name=own,
                shape=(count, *pack.shape.dims(role)),
                block_type=types[role],
                nbytes=count * nbytes,
                offset=offset,
                file=pack.file,
                stride=pack.layout.layers[layer].stride,
            )
