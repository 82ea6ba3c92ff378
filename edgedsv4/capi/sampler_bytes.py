"""The state of a sampler as bytes: its JSON behind a magic, a length and a checksum."""

from __future__ import annotations

import hashlib
import json
import struct

from edgedsv4 import ConfigError, FormatError, Sampler

_MAGIC = b"DSV4SMP1"
_HEAD = struct.Struct("<8sQ32s")


def saved_sampler(sampler: Sampler) -> bytes:
    """What `restored_sampler` takes."""
    text = json.dumps(sampler.state(), separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, len(text), hashlib.sha256(text).digest()) + text


def restored_sampler(data: bytes) -> Sampler:
    """A sampler with the saved state.

    Raises:
        FormatError: other bytes than `saved_sampler` makes, or damaged ones.
    """
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise FormatError(f"state is no saved sampler: it begins with {data[:8]!r}", offset=0)
    if len(data) < _HEAD.size:
        raise FormatError("state ends inside its head", offset=len(data), fault="truncated")
    _, length, digest = _HEAD.unpack_from(data)
    text = data[_HEAD.size :]
    if len(text) < length:
        what = f"state holds {len(text):,} of {length:,} bytes"
        raise FormatError(what, offset=len(data), fault="truncated")
    if len(text) > length:
        raise FormatError(f"state has {len(text) - length:,} bytes too many")
    if hashlib.sha256(text).digest() != digest:
        raise FormatError("state does not have its checksum", fault="checksum")
    try:
        return Sampler.from_state(json.loads(text))
    except (ConfigError, ValueError, RecursionError) as error:
        raise FormatError(f"state: {error}") from None
