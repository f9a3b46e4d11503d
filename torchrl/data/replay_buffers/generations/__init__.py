"""Generation-stamped replay buffers: late priorities reach their own record or none.

A learner samples slot 7, computes a TD error and writes it back as the priority of slot 7.
Meanwhile a writer may have put another record there, and the error lands on it, silently. Here each
slot has a counter, each sample carries the counters that it saw as ``"index_generation"``, and
``update_priority_if_present`` writes only where they still agree, and says where that was.

Read ``slots.py`` next: the table of counters. Then ``writers.py`` advances it, and ``buffers.py``
compares it, on what ``tracking.py`` and ``state.py`` make of TorchRL's buffers. ``lock.py`` makes
both atomic, ``sharing.py`` lets several processes in, ``checks.py`` validates an update,
``result.py`` is what it reports, ``tree.py`` writes it, and ``background.py`` lets it run later.
``coordinates.py`` knows the cells of a slot with ``ndim > 1``, ``units.py`` the anchors of
sequences, ``sampling.py`` TorchRL's samplers; ``max_value.py`` and ``users_writers.py`` are about
further writers, ``ensembles.py`` about several buffers in one, ``remote.py`` about Ray and RPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .buffers.classes import (
    ConditionalPriorityUpdates,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from .buffers.ensemble import ReplayBufferEnsemble, WriterEnsemble
from .core.result import PriorityUpdateResult
from .core.table import SlotGenerations
from .remote.remote import RayReplayBuffer, RemoteTensorDictReplayBuffer
from .writers.max_value import TensorDictMaxValueWriter
from .writers.ring import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from .training.hooks import LogPriorityUpdates, ReplayBufferTrainer

# Names whose modules bring in far more of TorchRL, and are imported when they are asked for.
_LATE = {"LogPriorityUpdates": ".training.hooks", "ReplayBufferTrainer": ".training.hooks"}

__all__ = [
    "ConditionalPriorityUpdates",
    "LogPriorityUpdates",
    "PrioritizedReplayBuffer",
    "PriorityUpdateResult",
    "RayReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "ReplayBufferTrainer",
    "RoundRobinWriter",
    "SlotGenerations",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "WriterEnsemble",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name], __name__), name)
