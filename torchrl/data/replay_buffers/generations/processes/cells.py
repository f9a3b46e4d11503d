"""Lock-free int64 counters that live in shared memory once several processes use them.

TorchRL keeps cursors and lengths in ``multiprocessing.Value``s, each with a semaphore of its own.
A process that is killed inside one leaves it taken for ever, and everybody waits. These cells have
the same interface and no semaphore: the table's lock guards them, and the kernel releases that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol

import torch
from torch.multiprocessing import get_sharing_strategy

_HELD = nullcontext()


class Cells:
    """A few int64 numbers, private until :meth:`share`.

    Args:
        values (list of int): what they hold at first.
    """

    def __init__(self, values: list[int]) -> None:
        self._strategy: str | None = None
        self._bind(torch.tensor(values, dtype=torch.int64))

    def _bind(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # Reads and writes Python ints in some 40 ns; a tensor item takes a microsecond.
        self.view: memoryview = memoryview(tensor.numpy())  # type: ignore[arg-type]

    def share(self) -> None:
        """Moves the numbers into shared memory, for the processes that start from now on.

        Under the lock that guards them, as a write in between would be lost.

        Raises:
            RuntimeError: if there is no room or no descriptor. Nothing has changed then.
        """
        self.move_to(self.shared_copy())

    def shared_copy(self) -> torch.Tensor | None:
        """What :meth:`share` may fail at: a copy in shared memory, None if they are in it."""
        return self.tensor.clone().share_memory_() if self._strategy is None else None

    def move_to(self, copy: torch.Tensor | None) -> None:
        """Goes on with a :meth:`shared_copy`."""
        if copy is not None:
            # The private memory stays, for a thread that is reading it without the lock.
            self._private = self.tensor
            self._bind(copy)
            self._strategy = get_sharing_strategy()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a copy
            return {"values": list(self.view)}
        self.share()  # else the pickler would move the memory, and leave the view behind
        self.check_strategy()
        return {"tensor": self.tensor, "strategy": self._strategy}

    def check_strategy(self) -> None:
        """Refuses to be sent under another sharing strategy than before.

        Torch would move the memory, away from this process and from all that have it.

        Raises:
            RuntimeError: if it would.
        """
        strategy = get_sharing_strategy()
        if self._strategy not in (None, strategy):
            raise RuntimeError(
                f"A storage that was shared under the sharing strategy {self._strategy!r} can't be "
                f"sent under {strategy!r}: torch would move its memory away from the processes "
                "that have it. Call set_sharing_strategy() at the start of every process."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "values" in state:
            self.__init__(state["values"])  # type: ignore[misc]
        else:
            self._strategy = state["strategy"]
            self._bind(state["tensor"])


class Guard(AbstractContextManager[Any], Protocol):
    """A lock that knows whether the calling thread holds it."""

    def is_held(self) -> bool:
        """Whether it does."""


class Cell:
    """One of the numbers, with the interface of a ``multiprocessing.Value``.

    Args:
        cells (Cells): the numbers.
        position (int): which of them.
        lock (Guard): what guards it.
    """

    def __init__(self, cells: Cells, position: int, lock: Guard) -> None:
        self.cells = cells
        self.lock = lock
        self._position = position

    @property
    def value(self) -> int:
        """The number."""
        return self.cells.view[self._position]

    @value.setter
    def value(self, value: int) -> None:
        self.cells.view[self._position] = value

    def get_lock(self) -> AbstractContextManager[Any]:
        """Returns the lock that guards the number; nothing to take for the thread that holds it."""
        return _HELD if self.lock.is_held() else self.lock
