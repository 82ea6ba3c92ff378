"""Builds an expert pack: the routed experts of a model, each in one piece, for reading from a disk.

The source is read once for its digests and once for its experts; memory is bounded by a few rows.
Layers that are finished stay when a build is cancelled, killed or runs out of disk, and the next
one goes on behind them. The pack gets its name when all of it is there and was read back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import edgedsv4
from edgedsv4.errors import CancelledError, ConfigError, FormatError
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_header import (
    IDENTITY_PAYLOAD,
    ROLES,
    TRIPLET_OBJECTS,
    PackHeader,
    model_identity,
)
from edgedsv4.formats.expert_pack_inventory import (
    INVENTORY_SUFFIX,
    Inventory,
    SourceFacts,
    read_inventory,
    take_inventory,
    tensor_rows,
    write_inventory,
)
from edgedsv4.formats.expert_pack_layout import PackLayout, lay_out, least_data_start
from edgedsv4.formats.expert_pack_manifest import check_manifest, manifest_path, read_manifest
from edgedsv4.formats.expert_pack_model import is_routed
from edgedsv4.formats.expert_pack_resume import BuildIdentity, json_text, write_json
from edgedsv4.formats.expert_pack_trailer import ExpertFrequency, parse_frequency, trailer_bytes
from edgedsv4.formats.expert_pack_write import PackWriter, checkpoint_path, require_space
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.formats.strict_json import read_json_object
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.pack_dense import write_dense
from edgedsv4.runtime.pack_options import PackOptions, PackReport, Progress
from edgedsv4.runtime.pack_record import BuildFacts, LayerDigests, manifest_values, now_text
from edgedsv4.runtime.pack_source import Bytes, PackSource
from edgedsv4.runtime.shipped_models import open_model

if TYPE_CHECKING:
    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.formats.mapped_file import MappedFile
    from edgedsv4.formats.tensor_record import TensorRecord
    from edgedsv4.model.bound_weights import BoundWeights

_MAX_FREQUENCY_BYTES: Final = 1 << 22
_MAX_FREQUENCY_VALUES: Final = 1 << 18
_TOOL_MODULES: Final = (
    "formats/expert_pack_header.py",
    "formats/expert_pack_index.py",
    "formats/expert_pack_layout.py",
    "formats/expert_pack_write.py",
    "runtime/pack_build.py",
    "runtime/pack_record.py",
    "runtime/pack_source.py",
    "runtime/tensor_pieces.py",
)


def build_pack(
    source: str | Path,
    target: Path,
    options: PackOptions | None = None,
    *,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PackReport:
    """Write the routed experts of a model as an expert pack with its manifest.

    Experts that are MXFP4 throughout, packed FP4 of official checkpoints included, make a version 1
    pack that SGLang reads too; anything else makes version 2. No value is changed.

    Args:
        source: a GGUF file (any part of a split set), an official checkpoint directory, or the name
            of a shipped model.
        target: the pack; replaced if it exists. Side files have its name and a suffix.
        options: choices; None takes the defaults.
        on_progress: called as ("hashing the source", done, total), then with "writing experts" and
            "checking the pack"; bytes.
        should_stop: asked after every piece; True ends the work, finished layers are kept.

    Raises:
        FormatError: the source cannot be used, is damaged (a scale of NaN included) or changed
            meanwhile; or an unfinished build belongs to another source.
        UnsupportedModelError: experts stored in a type that no pack holds without rounding.
        ConfigError: an unfinished build and no `resume`; a target that cannot be used.
        CapacityError: the disk is too small or full; finished layers are kept.
        CancelledError: `should_stop` said so.
        BusyError: another process builds the same pack.
        OSError: a file cannot be written for another reason.
    """
    chosen = options or PackOptions()
    with ExitStack() as stack:
        opened = stack.enter_context(open_model(source))
        # A shipped model comes with an MTP block of another file, which stays where it is.
        checkpoint = opened.main or opened
        build = _Build(checkpoint, Path(target), chosen, _Steps(on_progress, should_stop))
        return build.run(stack)


class _Steps:
    """Progress and cancelling of one build."""

    def __init__(
        self, on_progress: Progress | None, should_stop: Callable[[], bool] | None
    ) -> None:
        self._on_progress, self._should_stop = on_progress, should_stop

    def counting(self, label: str, total: int, done: int = 0) -> Callable[[int], None]:
        """A function to call with the bytes of every piece."""

        def told(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self._on_progress is not None:
                self._on_progress(label, done, total)
            if self._should_stop is not None and self._should_stop():
                raise CancelledError(
                    "stopped before the pack was complete; finished layers are kept, go on with"
                    " resume (--resume)"
                )

        return told


class _Build:
    """One build from beginning to end."""

    def __init__(
        self, checkpoint: Checkpoint, target: Path, options: PackOptions, steps: _Steps
    ) -> None:
        self._checkpoint, self._target = checkpoint, target
        self._options, self._steps = options, steps
        self._started = time.time()
        _check_target(target, checkpoint, options)

    def run(self, stack: ExitStack) -> PackReport:
        bound = bind_weights(self._checkpoint)
        source = PackSource(bound)
        frequency = self._frequency(source)
        if not self._options.resume:
            # Before the source is read for an hour.
            self._require_space(source)
        dense = self._dense(bound)
        facts = self._facts(source, dense, stack)
        trailer = b"" if frequency is None else trailer_bytes(frequency)
        identity = BuildIdentity(
            header=facts.header,
            tool_sha256=facts.tool_sha256,
            expected_pack_bytes=facts.layout.data_end + len(trailer),
            started_at=now_text(),
        )
        with PackWriter(
            self._target,
            identity,
            facts.layout,
            resume=self._options.resume,
            margin_bytes=self._options.safety_margin_bytes,
        ) as writer:
            resumed = len(writer.progress.layers)
            self._write(writer, facts)
            writer.finish(trailer)
            pack_sha256 = self._check(writer, facts, resumed, identity.expected_pack_bytes)
            writer.name()
            self._save_manifest(writer, facts, pack_sha256, identity.expected_pack_bytes)
            writer.clean_up()
        return self._report(facts, pack_sha256, resumed, bound)

    def _require_space(self, source: PackSource) -> None:
        config, alignment = source.config, self._options.alignment
        start = least_data_start(config.num_layers, config.num_experts, alignment)
        layout = lay_out(
            source.shape.sizes(),
            config.num_experts,
            version=1 if source.is_uniform else 2,
            data_start=start,
            alignment=alignment,
        )
        require_space(self._target, layout.data_end, self._options.safety_margin_bytes)

    def _frequency(self, source: PackSource) -> ExpertFrequency | None:
        path = self._options.frequency
        if path is None:
            return None
        if source.is_uniform:
            raise ConfigError(
                "frequency goes into version 2 packs only, and MXFP4 experts make version 1; keep"
                f" {path} as it is and name it when the model is opened"
            )
        values = read_json_object(
            path, limit_bytes=_MAX_FREQUENCY_BYTES, limit_values=_MAX_FREQUENCY_VALUES
        )
        config = source.config
        try:
            return parse_frequency(values, config.num_layers, config.num_experts)
        except ValueError as error:
            raise FormatError(str(error), path=path) from error

    def _dense(self, bound: BoundWeights) -> Path | None:
        """Write the companion, unless an earlier start of this build did.

        That of an official source is part of the digests, so a build that goes on would notice
        another one. That of a GGUF source is not, and is written anew.
        """
        path = self._options.dense_out
        if path is None:
            return None
        is_started = self._options.resume and checkpoint_path(self._target).exists()
        if is_started and path.exists() and self._checkpoint.kind == "official":
            return path
        write_dense(
            self._checkpoint,
            bound,
            path,
            (self._options.fp8, self._options.mtp),
            lambda total: self._steps.counting("writing the companion", total),
        )
        return path

    def _facts(self, source: PackSource, dense: Path | None, stack: ExitStack) -> BuildFacts:
        checkpoint, config = self._checkpoint, source.config
        files, records, facts = self._source_tensors(dense, stack)
        inventory_path = self._target.with_name(self._target.name + INVENTORY_SUFFIX)
        inventory = self._inventory(facts, files, records, inventory_path)
        config_sha256 = hashlib.sha256(_config_bytes(checkpoint)).digest()
        version = 1 if source.is_uniform else 2
        header = PackHeader(
            version=version,
            data_start=least_data_start(
                config.num_layers, config.num_experts, self._options.alignment
            ),
            alignment=self._options.alignment,
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            top_k=config.experts_per_token,
            model_identity=model_identity(inventory.sha256, config_sha256),
            source_sha256=inventory.sha256,
            config_sha256=config_sha256,
        )
        layout = _layout(source, header)
        flags = IDENTITY_PAYLOAD | TRIPLET_OBJECTS | layout.flags
        metadata = files[0].view(0, facts.data_offset)
        return BuildFacts(
            header=dataclasses.replace(header, flags=flags),
            layout=layout,
            source=source,
            inventory=inventory,
            inventory_path=inventory_path.absolute(),
            records=records,
            metadata_sha256=hashlib.sha256(metadata.data).hexdigest(),
            model_ref=checkpoint.name,
            tool_sha256=_tool_sha256(),
            dense=self._other_dense(dense, facts),
            version=edgedsv4.__version__,
        )

    def _source_tensors(
        self, dense: Path | None, stack: ExitStack
    ) -> tuple[tuple[MappedFile, ...], tuple[TensorRecord, ...], SourceFacts]:
        """Files and tensors that the digests of the pack are of.

        A GGUF source; the companion of an official one; else the official one itself, without its
        experts, whose digests are those of the packed form.
        """
        checkpoint = self._checkpoint
        layers = checkpoint.config.num_layers
        if checkpoint.kind == "official" and dense is None:
            records = tuple(
                record for name, record in checkpoint.tensors.items() if not is_routed(name, layers)
            )
            size = sum(file.size for file in checkpoint.files)
            facts = SourceFacts(
                path=checkpoint.path.resolve(),
                size=size,
                data_offset=0,
                alignment=1,
                metadata_count=0,
            )
            return checkpoint.files, records, facts
        path = checkpoint.path if checkpoint.kind == "gguf" or dense is None else dense
        file = stack.enter_context(read_gguf(path))
        facts = SourceFacts(
            path=path.resolve(),
            size=sum(part.size for part in file.files),
            data_offset=file.data_offset,
            alignment=file.alignment,
            metadata_count=len(file.metadata),
        )
        return file.files, tuple(file.tensors.values()), facts

    def _inventory(
        self,
        facts: SourceFacts,
        files: tuple[MappedFile, ...],
        records: tuple[TensorRecord, ...],
        path: Path,
    ) -> Inventory:
        """Digests of the source, from an earlier start of this build if it got so far.

        A companion is small and may be another one by now: it is always read.
        """
        is_own = facts.path == self._checkpoint.path.resolve()
        if self._options.resume and is_own and path.exists():
            found = read_inventory(path, facts)
            if found.tensors.keys() == {record.name for record in records}:
                return found
        told = self._steps.counting("hashing the source", facts.size)
        inventory = take_inventory(facts, files, records, told)
        write_inventory(path, inventory, tensor_rows(records, inventory.tensors))
        return inventory

    def _other_dense(self, dense: Path | None, facts: SourceFacts) -> tuple[Path, int, str] | None:
        """The companion, where it is not what the digests are of."""
        if dense is None or dense.resolve() == facts.path:
            return None
        with dense.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return dense.resolve(), dense.stat().st_size, digest

    def _write(self, writer: PackWriter, facts: BuildFacts) -> None:
        first, last = len(writer.progress.layers), facts.header.num_layers
        sizes = [facts.header.num_experts * layer.payload_bytes for layer in facts.layout.layers]
        told = self._steps.counting("writing experts", sum(sizes), sum(sizes[:first]))
        with ThreadPoolExecutor(1) as other:
            for layer in range(first, last):
                digests = LayerDigests(facts, layer)
                writer.write_layer(_objects(facts, layer, digests, (other, told)))
                digests.check()
                writer.end_layer(digests.entries())

    def _check(self, writer: PackWriter, facts: BuildFacts, resumed: int, size: int) -> str:
        """Read the pack back: its digest, and layers of an earlier start against their entries."""
        told = self._steps.counting("checking the pack", size)
        digest = hashlib.sha256()
        for piece in writer.pieces():
            digest.update(piece)
            told(len(piece))
        for entry in writer.progress.entries()[: resumed * facts.header.num_experts * len(ROLES)]:
            data = writer.read(int(entry["pack_offset"]), int(entry["pack_nbytes"]))
            if hashlib.sha256(data).digest() != entry["checksum"].tobytes():
                raise FormatError(
                    f"expert {entry['expert']} of layer {entry['layer']}, written by an earlier"
                    " start, has other bytes than its digest; delete the unfinished files and"
                    " build again",
                    path=writer.partial,
                    offset=int(entry["pack_offset"]),
                    fault="checksum",
                )
        return digest.hexdigest()

    def _save_manifest(
        self, writer: PackWriter, facts: BuildFacts, pack_sha256: str, size: int
    ) -> None:
        values = manifest_values(
            facts, writer.target, writer.progress.entries(), (pack_sha256, size), self._started
        )
        path = manifest_path(writer.target)
        write_json(path, json_text(values))
        with read_expert_pack(writer.target) as pack:
            check_manifest(read_manifest(path), pack)

    def _report(
        self, facts: BuildFacts, pack_sha256: str, resumed: int, bound: BoundWeights
    ) -> PackReport:
        types: dict[str, int] = {}
        for roles in facts.source.roles:
            for role in roles:
                name = role.block_type.name
                types[name] = types.get(name, 0) + role.nbytes * facts.header.num_experts
        return PackReport(
            pack=self._target,
            manifest=manifest_path(self._target),
            dense=self._options.dense_out,
            version=facts.header.version,
            layers=facts.header.num_layers,
            experts=facts.header.num_experts,
            nbytes=self._target.stat().st_size,
            pack_sha256=pack_sha256,
            block_types=types,
            resumed_layers=resumed,
            notes=(*self._checkpoint.warnings, *bound.warnings),
            seconds=time.time() - self._started,
        )


def _layout(source: PackSource, header: PackHeader) -> PackLayout:
    return lay_out(
        source.shape.sizes(),
        header.num_experts,
        version=header.version,
        data_start=header.data_start,
        alignment=header.alignment,
    )


def _objects(
    facts: BuildFacts,
    layer: int,
    digests: LayerDigests,
    means: tuple[ThreadPoolExecutor, Callable[[int], None]],
) -> Iterator[list[Iterator[Bytes]]]:
    """The experts of a layer in pieces, hashed by another thread while they are written."""
    other, told = means

    def hashed(expert: int, role: int) -> Iterator[Bytes]:
        own, stack = [hashlib.sha256()], digests.stacks[role]
        if stack is not None:
            own.append(stack)
        for piece in facts.source.pieces(layer, expert, role):
            done = [other.submit(digest.update, piece.data) for digest in own]
            yield piece
            for update in done:
                update.result()
            told(piece.nbytes)
        digests.slices[expert, role] = own[0].digest()

    for expert in range(facts.header.num_experts):
        yield [hashed(expert, role) for role in range(len(ROLES))]


def _config_bytes(checkpoint: Checkpoint) -> bytes:
    """The configuration whose digest is in the header: as stored, or as the GGUF header tells."""
    if checkpoint.kind == "official":
        return (checkpoint.path / "config.json").read_bytes()
    config = dataclasses.asdict(checkpoint.config)
    for name in ("swiglu_limits", "shared_swiglu_limits"):
        config[name] = [limit if limit < float("inf") else None for limit in config[name]]
    return json.dumps(config, indent=2).encode("utf-8")


def _tool_sha256() -> str:
    """Digest of the program text that decides what is written."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for name in _TOOL_MODULES:
        digest.update(name.encode("ascii") + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def _check_target(target: Path, checkpoint: Checkpoint, options: PackOptions) -> None:
    if checkpoint.pack is not None:
        raise ConfigError(
            f"{checkpoint.path} is an expert pack already; name what it was made from"
        )
    own = {file.path.resolve() for file in checkpoint.files}
    written = [target, manifest_path(target), *([options.dense_out] if options.dense_out else [])]
    paths = [path.resolve() for path in written]
    if own & set(paths):
        raise ConfigError(f"{target} is the source itself; name another file to write")
    if len(set(paths)) != len(paths):
        raise ConfigError(f"dense_out must be another file than the pack, found {target}")
    for path in written:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: no such directory; make it first")
