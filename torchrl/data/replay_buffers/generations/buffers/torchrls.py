"""What of a buffer is TorchRL's own, so that this package may take its steps one by one.

A user's class may override any step, in front of our mix-in or behind it, and then means it: such a
call goes TorchRL's way, through the user's method.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torchrl.data import replay_buffers as torchrl_buffers

# Those of TorchRL's classes whose steps are known.
_KNOWN = (
    torchrl_buffers.ReplayBuffer,
    torchrl_buffers.PrioritizedReplayBuffer,
    torchrl_buffers.TensorDictReplayBuffer,
    torchrl_buffers.TensorDictPrioritizedReplayBuffer,
)

# Their methods as they were at the import, before anybody may have patched one.
_STOCK = {cls: dict(vars(cls)) for cls in _KNOWN}

# By name, the methods of this package that stand in front of them.
_ours: dict[str, set[object]] = {}


def ours(cls: type) -> type:
    """Class decorator: the methods of this class are ours, and no user's."""
    for name, method in vars(cls).items():
        _ours.setdefault(name, set()).add(method) if callable(method) else None
    return cls


def is_torchrls(rb: Any, *names: str) -> bool:
    """Whether behind these methods of a buffer there are only known ones of TorchRL's and ours."""
    cls: type = type(rb)
    stock = _stock(cls, names)
    if stock is None or not vars(rb).keys().isdisjoint(names):
        return False
    return all(methods[name] is method for methods, name, method in stock)


@cache
def _stock(cls: type, names: tuple[str, ...]) -> list[tuple[Mapping[str, Any], str, Any]] | None:
    """Where TorchRL has its methods of these names, and what they were; None with a user's."""
    found: list[tuple[Mapping[str, Any], str, Any]] = []
    for owner in cls.__mro__:
        for name in vars(owner).keys() & set(names):
            if owner in _STOCK:
                found.append((vars(owner), name, _STOCK[owner][name]))
            elif vars(owner)[name] not in _ours.get(name, set()):
                return None
    return found
