"""The process half of a lock: a record lock on an unlinked file.

The kernel releases it when its holder dies, wherever that was. Record locks belong to a process and
die with *any* descriptor of the file that it closes, so there is one descriptor per lock and
process. ``flock`` would not do, since a forked child shares its parent's hold, and a semaphore dies
locked.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
import weakref
from functools import partial
from multiprocessing.reduction import DupFd
from operator import methodcaller
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

POLL = 0.001  # seconds between two looks at something that nobody tells of


class FileHalf:
    """A record lock on an unlinked file, held by the process or not.

    Args:
        descriptor (int, optional): of the file, which the instance owns. ``None`` makes a file.

    Raises:
        RuntimeError: on a platform without ``fcntl``.
        OSError: if there is no room for the file, or no descriptor.
    """

    # `del half.held` gives the lock back. It runs C functions only and is no call, and exceptions
    # that come from outside, such as Ctrl-C, arrive at Python functions and at calls.
    held = property(None, None, methodcaller("_unlock"))

    def __init__(self, descriptor: int | None = None) -> None:
        if fcntl is None:
            raise RuntimeError(
                "A storage with generation tracking can be used by several processes only where "
                "Python has the fcntl module: this platform has none."
            )
        if descriptor is None:
            descriptor, path = tempfile.mkstemp(prefix="torchrl_generations_lock_")
            os.unlink(path)
        self._fd = descriptor
        self._unlock = partial(fcntl.lockf, descriptor, fcntl.LOCK_UN)
        self.close = weakref.finalize(self, os.close, descriptor)

    def acquire(self, deadline: float | None) -> bool:
        """Takes it by ``deadline`` (``time.monotonic()``); None waits for ever.

        It may be taken although an exception comes out; giving back what is not taken does nothing.
        """
        while True:
            try:
                # Without a deadline the kernel waits, and wakes us in turn.
                fcntl.lockf(self._fd, fcntl.LOCK_EX | (0 if deadline is None else fcntl.LOCK_NB))
                return True
            except OSError as error:
                # The kernel sees processes, not threads: two that use two tables from several
                # threads look like a deadlock to it and are none.
                if error.errno not in (errno.EDEADLK, errno.EACCES, errno.EAGAIN):
                    raise
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL)

    def __reduce__(self) -> tuple[Any, ...]:
        return _file_half, (DupFd(self._fd),)


def _file_half(descriptor: Any) -> FileHalf:
    return FileHalf(descriptor.detach())
