"""Makes methods of the package fail, inside the Python of a library under test.

A `.pth` file of a prefix that only the test uses imports this module when the interpreter starts.
"""

# ruff: noqa: ARG001 -- the signatures are those of the methods

from __future__ import annotations

import errno
from typing import Any, NoReturn

import torch

from edgedsv4 import DeviceLostError, Engine, ExpertReadError, NumericError, Session, StorageError

_new_session = Engine.new_session
_LARGE = 4097


def lose_device(self: Session) -> NoReturn:
    raise DeviceLostError("cuda:0 stopped answering")


def run_out_of_device_memory(self: Engine, *, context: int | None = None) -> Session:
    if context == _LARGE:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return _new_session(self, context=context)


def run_out_of_memory(self: Engine) -> NoReturn:
    raise MemoryError


def meet_nan(self: Session, token_ids: Any, **_: Any) -> NoReturn:
    raise NumericError("NaN in layer 3")


def divide(self: Session, count: int) -> NoReturn:
    raise ZeroDivisionError("a defect")


def miss_expert(self: Session, token_ids: Any, **_: Any) -> NoReturn:
    raise ExpertReadError("expert 7 cannot be read")


def fill_disk(self: Session, path: str, **_: Any) -> NoReturn:
    raise StorageError("no space left", path=path, errno=errno.ENOSPC)


Session.mark_turn = lose_device
Session.evaluate = meet_nan
Session.rewind = divide
Session.sync = miss_expert
Session.save = fill_disk
Engine.new_session = run_out_of_device_memory
Engine.memory = run_out_of_memory
