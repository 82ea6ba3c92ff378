"""Looking into an expert pack, and comparing all of it, or a sample, with its digests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgedsv4.errors import CancelledError, FormatError
from edgedsv4.formats.checkpoint import Checkpoint, open_checkpoint
from edgedsv4.formats.expert_pack import ExpertPack, read_expert_pack
from edgedsv4.formats.expert_pack_header import FORMATS, ROLES, generation
from edgedsv4.formats.expert_pack_index import index_types
from edgedsv4.formats.expert_pack_manifest import PackManifest, check_manifest
from edgedsv4.formats.expert_pack_model import locate_dense, locate_pack
from edgedsv4.formats.faults import FaultList

if TYPE_CHECKING:
    import numpy as np

SAMPLED_ENTRIES: Final = 96
_PIECE_BYTES: Final = 1 << 24
_LISTED: Final = 64

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackInspection:
    """What header, index and manifest say."""

    pack: Path
    manifest: Path
    format: str
    layers: int
    experts: int
    """Per layer."""
    top_k: int
    hidden_size: int
    expert_width: int
    block_types: tuple[str, ...]
    nbytes: int
    padding_bytes: int
    alignment: int
    bytes_per_expert: int
    """Of the largest layer, without padding."""
    bytes_per_token: int
    """Read for one token when none of its experts is in memory."""
    has_frequency: bool
    model_ref: str
    model_identity_sha256: str
    source: Path
    dense: Path | None
    """Where the rest of the model was found."""
    warnings: tuple[str, ...]

    def facts(self) -> dict[str, object]:
        """The answers in the order they are printed."""
        return {
            "pack": str(self.pack),
            "format": self.format,
            "model": self.model_ref,
            "identity": self.model_identity_sha256,
            "source": str(self.source),
            "rest of the model": "not found" if self.dense is None else str(self.dense),
            "layers": self.layers,
            "experts per layer": self.experts,
            "experts per token": self.top_k,
            "inputs, width": f"{self.hidden_size:,}, {self.expert_width:,}",
            "block types": ", ".join(self.block_types),
            "bytes": self.nbytes,
            "bytes of padding": self.padding_bytes,
            "alignment": self.alignment,
            "bytes per expert": self.bytes_per_expert,
            "bytes per token": self.bytes_per_token,
            "frequencies": "inside" if self.has_frequency else "none",
        }

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types."""
        return {
            "pack": str(self.pack),
            "manifest": str(self.manifest),
            "format": self.format,
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "hidden_size": self.hidden_size,
            "expert_width": self.expert_width,
            "block_types": list(self.block_types),
            "nbytes": self.nbytes,
            "padding_bytes": self.padding_bytes,
            "alignment": self.alignment,
            "bytes_per_expert": self.bytes_per_expert,
            "bytes_per_token": self.bytes_per_token,
            "has_frequency": self.has_frequency,
            "model_ref": self.model_ref,
            "model_identity_sha256": self.model_identity_sha256,
            "source": str(self.source),
            "dense": None if self.dense is None else str(self.dense),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PackVerification:
    """What was compared and found right."""

    pack: Path
    checked: dict[str, int]
    """What -> how many."""
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The report as JSON types."""
        return {
            "pack": str(self.pack),
            "checked": self.checked,
            "warnings": list(self.warnings),
            "problems": [],
        }


def inspect_pack(path: Path) -> PackInspection:
    """Read header, index and manifest of a pack.

    Args:
        path: the pack or its manifest.

    Raises:
        FormatError: one of them is missing or damaged, or they do not belong together.
    """
    place, manifest = locate_pack(Path(path))
    with read_expert_pack(place) as pack:
        warnings = check_manifest(manifest, pack)
        header, layout, shape = pack.header, pack.layout, pack.shape
        dense: Path | None = None
        try:
            dense = locate_dense(place, manifest)
        except FormatError as error:
            warnings = (*warnings, str(error))
        model = manifest.values["model"]
        per_expert = [layer.payload_bytes for layer in layout.layers]
        return PackInspection(
            pack=place,
            manifest=manifest.path,
            format=FORMATS[header.version],
            layers=header.num_layers,
            experts=header.num_experts,
            top_k=header.top_k,
            hidden_size=shape.hidden_size,
            expert_width=shape.expert_width,
            block_types=tuple(index_types(shape)),
            nbytes=pack.file.size,
            padding_bytes=layout.padding_bytes,
            alignment=header.alignment,
            bytes_per_expert=max(per_expert),
            bytes_per_token=header.top_k * sum(per_expert),
            has_frequency=pack.frequency is not None,
            model_ref=str(model.get("ref")) if isinstance(model, dict) else "",
            model_identity_sha256=header.model_identity.hex(),
            source=manifest.source_path,
            dense=dense,
            warnings=warnings,
        )


def verify_pack(
    path: Path,
    *,
    dense: Path | None = None,
    sampled: bool = False,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PackVerification:
    """Compare a pack, and the file with the rest of the model, with all digests there are.

    Args:
        path: the pack or its manifest.
        dense: the rest of the model; None takes what the manifest names, or what is beside the
            pack.
        sampled: read 96 matrices, chosen by the digest of the source, instead of all; of the other
            file small tensors only.
        on_progress: called as ("checking the pack", done, total), then with "checking the rest".
        should_stop: asked after every piece; True ends the work.

    Raises:
        FormatError: something differs (up to 64 faults are listed), or a file is missing or
            damaged.
        CancelledError: `should_stop` said so.
    """
    place, manifest = locate_pack(Path(path))
    with ExitStack() as stack:
        # Opened alone first: what is wrong with the pack matters without the rest of the model.
        pack = stack.enter_context(read_expert_pack(place))
        warnings = check_manifest(manifest, pack)
        check = _Check(pack, manifest, on_progress, should_stop)
        check.entries(sampled=sampled)
        rest = locate_dense(place, manifest) if dense is None else Path(dense)
        whole = stack.enter_context(open_checkpoint(place, dense=rest))
        check.dense(whole, sampled=sampled)
        check.faults.raise_if_any("the expert pack is damaged", "checksum")
        return PackVerification(
            pack=place,
            checked=check.checked,
            warnings=(*warnings, *check.warnings),
        )


class _Check:
    """One verification."""

    def __init__(
        self,
        pack: ExpertPack,
        manifest: PackManifest,
        on_progress: Progress | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self._pack, self._manifest = pack, manifest
        self._on_progress, self._should_stop = on_progress, should_stop
        self.faults = FaultList(pack.path)
        self.checked: dict[str, int] = {}
        self.warnings: list[str] = []

    def entries(self, *, sampled: bool) -> None:
        """Payloads against the checksums of the index; all of the file against the manifest."""
        entries = self._pack.entries
        chosen: Iterable[int] = range(len(entries))
        if sampled and len(entries) > SAMPLED_ENTRIES:
            # The same sample for everybody who has this pack.
            draw = random.Random(self._pack.header.source_sha256.hex()[:16])
            chosen = sorted(draw.sample(range(len(entries)), SAMPLED_ENTRIES))
        numbers = list(chosen)
        total = sum(int(entries[at]["pack_nbytes"]) for at in numbers)
        if not sampled:
            total += self._pack.file.size
        told = self._counting("checking the pack", total)
        for at in numbers:
            if len(self.faults) < _LISTED:
                self._entry(entries[at], told)
        self.checked["matrices"] = len(numbers)
        self._generations()
        if not sampled:
            found = self._digest(0, self._pack.file.size, told)
            if found != self._manifest.pack_sha256:
                self.faults.add(
                    f"the file has the SHA-256 {found}, its manifest says"
                    f" {self._manifest.pack_sha256}"
                )
            self._zeros()
        self._pack.file.check_unchanged()

    def dense(self, whole: Checkpoint, *, sampled: bool) -> None:
        """The rest of the model against the manifest; opening it compared small tensors."""
        self.checked["tensors of the rest"] = 0
        if sampled:
            return
        tensors = self._manifest.tensors
        told = self._counting("checking the rest", sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            record = whole.tensors[tensor.name]
            digest = hashlib.sha256()
            for at in range(record.offset, record.offset + record.nbytes, _PIECE_BYTES):
                count = min(_PIECE_BYTES, record.offset + record.nbytes - at)
                digest.update(record.file.view(at, count).data)
                told(count)
            if digest.hexdigest() != tensor.sha256:
                self.faults.add(
                    f"tensor {tensor.name} of {record.file.path} has other bytes than its digest"
                )
        self.checked["tensors of the rest"] = len(tensors)

    def _entry(self, entry: np.void, told: Callable[[int], None]) -> None:
        found = self._digest(int(entry["pack_offset"]), int(entry["pack_nbytes"]), told)
        if found != entry["checksum"].tobytes().hex():
            self.faults.add(
                f"layer {entry['layer']}, expert {entry['expert']}, {ROLES[entry['role']]}, at byte"
                f" {entry['pack_offset']:,}: the bytes do not have the checksum of the index"
            )

    def _generations(self) -> None:
        """Numbers that other programs wrote may follow another rule, and nothing depends on it."""
        header = self._pack.header
        numbers = self._pack.entries["generation"][:: len(ROLES)].tolist()
        for at, number in enumerate(numbers):
            layer, expert = divmod(at, header.num_experts)
            if number != generation(header.model_identity, header.source_sha256, layer, expert):
                self.warnings.append(
                    f"the generation of layer {layer}, expert {expert} does not follow from the"
                    " digests"
                )
                return

    def _zeros(self) -> None:
        """Between index and experts there is nothing."""
        end, start = self._pack.header.index_end, self._pack.header.data_start
        for at in range(end, start, _PIECE_BYTES):
            if self._pack.file.view(at, min(_PIECE_BYTES, start - at)).any():
                self.warnings.append("there are bytes between the index and the first expert")
                return

    def _digest(self, offset: int, nbytes: int, told: Callable[[int], None]) -> str:
        digest = hashlib.sha256()
        for at in range(offset, offset + nbytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, offset + nbytes - at)
            digest.update(self._pack.file.view(at, count).data)
            told(count)
        return digest.hexdigest()

    def _counting(self, label: str, total: int) -> Callable[[int], None]:
        done = 0

        def told(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self._on_progress is not None:
                self._on_progress(label, done, total)
            if self._should_stop is not None and self._should_stop():
                raise CancelledError("stopped before all of the pack was compared")

        return told
