"""The first write of a ``shared_init`` storage, when its writer may be killed in the middle.

TorchRL lets the first process that writes make the files, and the others wait for an event. If the
first one dies, its semaphore stays taken and the event is never set: everybody waits for ever. All
tracking writers hold the table's lock here, which the kernel releases, so a flag is enough: whoever
comes next finds it unset and begins anew.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from torchrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage

from .cells import Cells
from .file_half import POLL
from .lock import StorageLock

# How long a process that does not hold the lock waits for another's first write.
PATIENCE = 10.0
_BEGUN, _DONE = 0, 1


class FirstWrite:
    """Stands in for the ``_init_lock`` and the ``_init_event`` of a storage.

    Args:
        storage (LazyTensorStorage): the storage, made with ``shared_init=True``.
        lock (StorageLock): the lock of its table, which every tracking writer holds.
    """

    def __init__(self, storage: LazyTensorStorage, lock: StorageLock) -> None:
        self._storage = storage
        self._lock = lock
        self._flags = Cells([0, int(storage._init_event.is_set())])
        self._flags.share()

    @property
    def failed(self) -> bool:
        """Whether a first write began and did not end. Meaningful under the lock."""
        return bool(self._flags.view[_BEGUN]) and not self._flags.view[_DONE]

    def acquire(self, block: bool = True) -> bool:
        """Begins a first write, after clearing away what one that failed has left."""
        if self.failed:
            if isinstance(self._storage, LazyMemmapStorage):
                self._storage.existsok = True
            else:  # a folder that TorchRL made for this purpose
                for left in Path(self._storage._init_directory).iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._flags.view[_BEGUN] = 1
        return True

    def release(self) -> None:
        """The table's lock does it."""

    def is_set(self) -> bool:
        """Whether the storage is there for everybody."""
        return bool(self._flags.view[_DONE])

    def set(self) -> None:
        """Ends the first write; TorchRL also calls it when that raised, which ends nothing."""
        if self._storage._storage is not None:
            self._flags.view[_DONE] = 1

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the storage is there.

        Raises:
            RuntimeError: if that takes too long, or this thread holds the lock and so prevents it.
        """
        deadline = time.monotonic() + (PATIENCE if timeout is None else timeout)
        while not self.is_set():
            if self._lock.is_held() or time.monotonic() >= deadline:
                raise RuntimeError(
                    "The storage has no records: its first write, in another process, has not "
                    "ended. If that process died, the next write begins it anew."
                )
            time.sleep(POLL)
        return True
