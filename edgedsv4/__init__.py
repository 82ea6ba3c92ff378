"""DeepSeek-V4 on one machine: open a model, keep a timeline, get a reply.

These names are the public API. Each is imported on first use, so that importing the package (and
`edgedsv4 --help`) loads neither torch nor a tokenizer, reads no environment and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.config import EngineOptions as EngineOptions
    from edgedsv4.config import ModelConfig as ModelConfig
    from edgedsv4.config import SamplingOptions as SamplingOptions
    from edgedsv4.errors import BackendUnavailableError as BackendUnavailableError
    from edgedsv4.errors import BusyError as BusyError
    from edgedsv4.errors import CancelledError as CancelledError
    from edgedsv4.errors import CapacityError as CapacityError
    from edgedsv4.errors import ConfigError as ConfigError
    from edgedsv4.errors import ContextFullError as ContextFullError
    from edgedsv4.errors import DeviceLostError as DeviceLostError
    from edgedsv4.errors import Dsv4Error as Dsv4Error
    from edgedsv4.errors import ExpertReadError as ExpertReadError
    from edgedsv4.errors import FormatError as FormatError
    from edgedsv4.errors import NumericError as NumericError
    from edgedsv4.errors import ShapeError as ShapeError
    from edgedsv4.errors import SnapshotError as SnapshotError
    from edgedsv4.errors import UnsupportedModelError as UnsupportedModelError

_HOME = {
    **dict.fromkeys(("EngineOptions", "ModelConfig", "SamplingOptions"), "edgedsv4.config"),
    **dict.fromkeys(
        (
            "BackendUnavailableError",
            "BusyError",
            "CancelledError",
            "CapacityError",
            "ConfigError",
            "ContextFullError",
            "DeviceLostError",
            "Dsv4Error",
            "ExpertReadError",
            "FormatError",
            "NumericError",
            "ShapeError",
            "SnapshotError",
            "UnsupportedModelError",
        ),
        "edgedsv4.errors",
    ),
}

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'edgedsv4' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
