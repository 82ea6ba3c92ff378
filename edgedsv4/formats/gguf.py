"""Opens GGUF models: the header becomes values, the tensors become records into the mapping.

Whether a model is one file (`gguf_part`) or a set of files (`gguf_split`) is settled here; nothing
above this module can tell the difference.
"""

from __future__ import annotations

from pathlib import Path

from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf_part import GgufFile
from edgedsv4.formats.gguf_split import open_parts
from edgedsv4.formats.gguf_values import GgufType, MetadataArray, MetadataValue

__all__ = ["GgufFile", "GgufType", "MetadataArray", "MetadataValue", "read_gguf"]


def read_gguf(path: Path) -> GgufFile:
    """Open a model file: one GGUF file, or a split set of which any part is named.

    Args:
        path: the file; the other parts of a set are looked for beside it.

    Returns:
        metadata, and records of all tensors of all parts. Only headers have been read.

    Raises:
        FormatError: if a file is missing, damaged, truncated, of another format, or the parts do
            not belong together.
    """
    opened = open_parts(Path(path))
    value = opened.metadata.get("general.architecture")
    if isinstance(value, str):
        return opened
    opened.close()
    if value is None:
        what = "general.architecture is missing: not a model file"
    else:
        kind = opened.value_types["general.architecture"].name
        what = f"general.architecture is of type {kind}, expected one STRING"
    raise FormatError(what, path=path)
