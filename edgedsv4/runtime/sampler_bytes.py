"""The state of a sampler as bytes: a magic number, a length, JSON, and the SHA-256 of all of it.

0   magic 89 44 53 56 34 50 0d 0a        16       the JSON object that `Sampler.state` returns
8   u64 bytes of the JSON object          16 + n   SHA-256 of the bytes before
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any, Final

from edgedsv4.errors import SnapshotError
from edgedsv4.formats.strict_json import parse_json_object

MAGIC: Final = b"\x89DSV4P\r\n"
_FIXED: Final = struct.Struct("<8sQ")
_DIGEST_BYTES: Final = 32


def encode_sampler(state: Mapping[str, Any]) -> bytes:
    """The state as bytes."""
    text = json.dumps(state, allow_nan=False, separators=(",", ":")).encode()
    head = _FIXED.pack(MAGIC, len(text)) + text
    return head + hashlib.sha256(head).digest()


def decode_sampler(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The state that was encoded; what its parts hold is not looked at.

    Raises:
        SnapshotError: not such bytes, too few, or changed.
    """
    whole = bytes(data)
    if not whole.startswith(MAGIC[: len(whole)]):
        raise SnapshotError("these bytes are no sampler's state")
    if len(whole) < _FIXED.size:
        raise SnapshotError(f"the sampler's state ends after {len(whole)} bytes", fault="truncated")
    _, size = _FIXED.unpack_from(whole)
    wanted = _FIXED.size + size + _DIGEST_BYTES
    if len(whole) != wanted:
        raise SnapshotError(
            f"the sampler's state has {len(whole)} bytes, expected {wanted}",
            fault="truncated" if len(whole) < wanted else "format",
        )
    head, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    if hashlib.sha256(head).digest() != digest:
        raise SnapshotError(
            "the sampler's state was changed: it does not have its checksum", fault="checksum"
        )
    try:
        return parse_json_object(head[_FIXED.size :])
    except ValueError as error:
        raise SnapshotError(f"the sampler's state {error}") from None
