"""Generation-stamped replay buffers: late priorities reach their own record or none.

A learner samples slot 7, computes a TD error and writes it back as the priority of slot 7.
Meanwhile a writer may have put another record there, and the error lands on it, silently. Here each
slot has a counter, each sample carries the counters that it saw as ``"index_generation"``, and
``update_priority_if_present`` writes only where they still agree, and says where that was.

Read ``slots.py`` next: the table of counters. Then ``writers.py`` advances it, and ``buffers.py``
compares it. ``lock.py`` makes both atomic, ``sharing.py`` lets several processes in, ``checks.py``
validates an update, ``result.py`` is what it reports, and ``background.py`` lets it run later.
``remote.py`` puts a buffer behind Ray or RPC.
"""

from __future__ import annotations

from .buffers import (
    ConditionalPriorityUpdates,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from .remote import RayReplayBuffer, RemoteTensorDictReplayBuffer
from .result import PriorityUpdateResult
from .slots import SlotGenerations
from .writers import RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = [
    "ConditionalPriorityUpdates",
    "PrioritizedReplayBuffer",
    "PriorityUpdateResult",
    "RayReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "RoundRobinWriter",
    "SlotGenerations",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
]
