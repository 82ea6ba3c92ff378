"""Large pieces of main memory for weights: huge pages, page-locked where a GPU copies from them."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from edgedsv4.errors import CapacityError
from edgedsv4.runtime.host import available_ram_bytes

if TYPE_CHECKING:
    from types import TracebackType

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


class HostMemory:
    """One piece of memory, zero at first; `close` gives it back.

    Args:
        nbytes: size.

    Raises:
        CapacityError: the machine has not as much memory left.
    """

    def __init__(self, nbytes: int) -> None:
        free = available_ram_bytes()
        if nbytes > free:
            raise CapacityError(
                "main memory for weights", needed_bytes=nbytes, available_bytes=free
            )
        # Private: a shared mapping would be a file in memory, which gets no huge pages.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _ADVICE is not None:
            # Fewer pages to look up, and to lock; a wish, which a system may not grant.
            self._map.madvise(_ADVICE)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """[nbytes] uint8."""
        self._is_locked = False

    def lock_for_gpu(self) -> None:
        """Page-lock it, so that cards copy from it by themselves.

        Raises:
            CapacityError: the system allows no more locked memory.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
        if status:
            raise CapacityError(
                f"page-locked memory (status {status}; ulimit -l bounds it)",
                needed_bytes=self.bytes.numel(),
                available_bytes=0,
            )
        self._is_locked = True

    def close(self) -> None:
        """Unlock it; the pages go when the last view of `bytes` does."""
        if self._is_locked:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.bytes.data_ptr())
            self._is_locked = False
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
