"""Generation-stamped replay buffers: late priorities reach their own record or none.

Each slot of a storage has a counter. A sample carries the counters that it saw, and the priorities
computed from it are written only where slot and counter still agree, in one step under one lock.

Read ``core/table.py`` first, the counters, then ``core/update.py``, the comparison: that is the
idea. Each folder imports those above it, and no other:

- ``layout``: what an index names, a slot or with ``ndim > 1`` a cell of one;
- ``processes``: the lock, and memory that processes share;
- ``core``: the table, the conditional update, the priority trees;
- ``writers``: TorchRL's writers, which advance the counters before they touch the data;
- ``checkpoints``: saves, restores and copies after which no handle lies;
- ``buffers``: TorchRL's buffers over a table, each call one step under its lock;
- ``remote``, ``training``, ``launch``: Ray and RPC; trainers, logs, Hydra; scripts as they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .buffers.classes import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from .buffers.conditional import ConditionalPriorityUpdates
from .buffers.ensemble import ReplayBufferEnsemble
from .buffers.ensemble_writer import WriterEnsemble
from .core.result import PriorityUpdateResult
from .core.table import SlotGenerations
from .remote.ray import RayReplayBuffer
from .remote.rpc import RemoteTensorDictReplayBuffer
from .writers.max_value import TensorDictMaxValueWriter
from .writers.ring import RoundRobinWriter
from .writers.tensordict_ring import TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from .training.hooks import LogPriorityUpdates, ReplayBufferTrainer

# They bring in far more of TorchRL, and are imported when they are asked for.
_LATE = {"LogPriorityUpdates": ".training.hooks", "ReplayBufferTrainer": ".training.hooks"}

__all__ = ["PrioritizedReplayBuffer", "ReplayBuffer", "TensorDictPrioritizedReplayBuffer"]
__all__ += ["ConditionalPriorityUpdates", "ReplayBufferEnsemble", "TensorDictReplayBuffer"]
__all__ += ["RoundRobinWriter", "TensorDictMaxValueWriter", "TensorDictRoundRobinWriter"]
__all__ += ["PriorityUpdateResult", "SlotGenerations", "WriterEnsemble"]
__all__ += ["RayReplayBuffer", "RemoteTensorDictReplayBuffer"]
__all__ += ["LogPriorityUpdates", "ReplayBufferTrainer"]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
