"""Writes the companion of an expert pack: a GGUF file with everything but the routed experts.

Of a GGUF source it is a copy, names and bytes as they are. An official checkpoint is converted as
`edgedsv4 convert` does it. Experts of an MTP block stay in: no pack holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgedsv4.formats.expert_pack_model import is_routed
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.formats.gguf_stream import (
    OWN_KEYS,
    MetadataEntry,
    StreamedFile,
    StreamedTensor,
    stream_gguf,
)
from edgedsv4.runtime.convert import FloatType, MtpPlace, conversion_files, lossless_plan
from edgedsv4.runtime.tensor_pieces import Bytes, raw_pieces

if TYPE_CHECKING:
    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.model.bound_weights import BoundWeights


def write_dense(
    checkpoint: Checkpoint,
    bound: BoundWeights,
    target: Path,
    types: tuple[FloatType, MtpPlace],
    counting: Callable[[int], Callable[[int], None]],
) -> tuple[Path, ...]:
    """Write the companion; it appears whole or not at all.

    Args:
        checkpoint: the source.
        bound: its weights.
        target: the file to write; replaced if it exists.
        types: type of FP8 matrices, and place of the MTP block, of an official source.
        counting: (bytes in all) -> function to call with the bytes of every piece.

    Returns:
        the files.

    Raises:
        FormatError, ConfigError, CapacityError, CancelledError, OSError: as `convert_model`.
    """
    layers = checkpoint.config.num_layers
    if checkpoint.kind == "gguf":
        files = [_copied(checkpoint, target)]
    else:
        fp8, mtp = types
        files = conversion_files(checkpoint, target, lossless_plan(bound, fp8=fp8, mtp=mtp))
    kept = [
        replace(file, tensors=[t for t in file.tensors if not is_routed(t.name, layers)])
        for file in files
    ]
    total = sum(tensor.nbytes for file in kept for tensor in file.tensors)
    return stream_gguf(kept, on_bytes=counting(total))


def _copied(checkpoint: Checkpoint, target: Path) -> StreamedFile:
    """All of a GGUF source; its tensors stay views of the files, which are open."""
    with read_gguf(checkpoint.path) as file:
        metadata = [
            MetadataEntry(key, value, file.value_types[key])
            for key, value in file.metadata.items()
            if key not in OWN_KEYS
        ]
    tensors = [
        StreamedTensor(
            record.name, record.shape, record.block_type, partial(_pieces, record.name, checkpoint)
        )
        for record in checkpoint.tensors.values()
    ]
    return StreamedFile(target, metadata, tensors)


def _pieces(name: str, checkpoint: Checkpoint) -> Iterator[Bytes]:
    return raw_pieces(checkpoint.tensors[name].data())
