"""Builds safetensors bytes by hand, legal or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Length, header (bytes, or what JSON can hold) and data; `length` overrides the true one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    path.write_bytes(raw_file(header, data, length=length))
    return path
