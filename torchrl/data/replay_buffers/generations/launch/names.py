"""Lets the public names of ``torchrl.data`` mean our classes, with their defaults switched.

Nothing happens at import; :func:`install` does it, in a process whose script knows nothing of
stamps. From then on a buffer that can guard its priorities does so without being asked, and what
TorchRL lets a script do is never refused: where a guard can't be had, or an update can't be made
conditional, the buffer does what TorchRL's does, and the report counts it.

The same names in submodules, such as ``torchrl.data.replay_buffers.replay_buffers``, keep their
meaning: pickle finds TorchRL's own classes there. A script that takes stamps out of a sample, or
sends a guarded buffer where a table can't follow, gets the error that tells so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torchrl.data
from tensordict import TensorDictBase
from torch.compiler import is_compiling
from torchrl.data import replay_buffers
from torchrl.data.replay_buffers import Writer

from ..buffers import updates
from ..buffers.classes import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ..buffers.conditional import ConditionalPriorityUpdates
from ..buffers.ensemble import ReplayBufferEnsemble
from ..buffers.ensemble_writer import WriterEnsemble
from ..buffers.recording import Records
from ..buffers.services import SERVICES, Service
from ..buffers.torchrls import ours
from ..core.table import SlotGenerations
from ..remote.ray import RayReplayBuffer, in_actor
from ..remote.rpc import RemoteTensorDictReplayBuffer
from ..writers.max_value import TensorDictMaxValueWriter
from ..writers.ring import RoundRobinWriter
from ..writers.tensordict_ring import TensorDictRoundRobinWriter
from .report import REPORT

BUFFERS = (
    ReplayBuffer,
    PrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    ReplayBufferEnsemble,
    RayReplayBuffer,
    RemoteTensorDictReplayBuffer,
)
WRITERS = (RoundRobinWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter, WriterEnsemble)

# What the names mean without the launcher.
TORCHRLS = types.SimpleNamespace(**vars(replay_buffers))
STOCK: dict[type, Any] = {cls: getattr(TORCHRLS, cls.__name__) for cls in BUFFERS}

_PACKAGE = __name__.removesuffix(".launch.names")


# Whether a thread is inside of a buffer's call; what that calls in turn is not the script's.
_calls = threading.local()


class NamedBuffer(type(replay_buffers.ReplayBuffer)):  # type: ignore[misc]
    """The metaclass of our buffers in a launched process.

    A script asks ``isinstance(rb, ReplayBuffer)`` of buffers that TorchRL built, too, and puts them
    into ensembles.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, STOCK.get(cls, ()))

    @functools.wraps(type(replay_buffers.ReplayBuffer).__call__)
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds a buffer."""
        try:
            return super().__call__(*args, **kwargs)
        except (TypeError, ValueError):
            if cls is not ReplayBufferEnsemble:
                raise
            return STOCK[cls](*args, **kwargs)  # of members that ours does not take


@ours
class GuardedBuffer(ConditionalPriorityUpdates):
    """What stands between our buffers and their mix-in in a launched process."""

    _guard_priorities: bool

    def _init(self) -> None:
        if self._initialized:
            return
        super()._init()
        if self._priority_sampler is not None:
            guards = getattr(self, "_guard_priorities", False) and updates.are_possible(self)
            REPORT.built(type(self).__name__, guards)
        REPORT.counts(self._tally)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        REPORT.counts(self._tally)

    def _maybe_make_writer(self, writer: Any) -> Writer:
        if self._priority_sampler is None or not isinstance(self, TensorDictReplayBuffer):
            return super()._maybe_make_writer(writer)
        given = self._writer_argument
        if given is not None and not isinstance(given, Writer):
            self._writer_argument = given = given()
        asked = self._track_generations or getattr(given, "tracks_generations", False)
        try:
            self._switch_tracking(given, on=True)
            made = super()._maybe_make_writer(writer)
            if made.tracks_generations:
                SlotGenerations.attach(self._storage)
            self._guard_priorities = made.tracks_generations
            return made
        except (TypeError, ValueError):
            if asked:
                raise
            # These parts can't be tracked together, which the script did not ask for.
            self._switch_tracking(given, on=False)
            return super()._maybe_make_writer(writer)

    def _switch_tracking(self, writer: Any, on: bool) -> None:
        self._track_generations = on
        if isinstance(writer, TensorDictMaxValueWriter):
            writer.tracks_generations = on
        elif isinstance(writer, RoundRobinWriter):
            writer._track_generations = on

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Puts one record into the buffer; the priority that it carries is its own."""
        with _called():
            return self._written(super().add, "add", *args, **kwargs)

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        """Puts records into the buffer; the priorities that they carry are their own."""
        with _called():
            return self._written(super().extend, "extend", *args, **kwargs)

    def _written(self, write: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except ValueError:
            # Nothing is written yet. TorchRL takes priorities that are out of range.
            return getattr(super(Records, self), name)(*args, **kwargs)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Writes priorities by slot, and notes it where a script asks for it."""
        with _called() as by_script:
            if by_script:
                REPORT.called_unchecked()
            super().update_priority(index, priority)

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> Any:
        """Makes the update of a sample conditional; what can't be is done as TorchRL does it."""
        try:
            return super().update_tensordict_priority_if_present(data)
        except (KeyError, TypeError, ValueError):
            # Nothing is written yet. What follows counts as a call by slot.
            torchrls: Any = super(TensorDictReplayBuffer, self)
            return torchrls.update_tensordict_priority(data)


def _called() -> contextlib.AbstractContextManager[bool]:
    """Tells whether a call is the script's, not one that a buffer makes inside of another."""
    return contextlib.nullcontext(False) if is_compiling() else _counted()


@contextlib.contextmanager
def _counted() -> Iterator[bool]:
    inside = getattr(_calls, "inside", False)
    _calls.inside = True
    try:
        yield not inside
    finally:
        _calls.inside = inside


class LaunchedActor:
    """What stands before a buffer's class in an actor, and begins with :func:`install` there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install()
        super().__init__(*args, **kwargs)


def _in_launched_actor(cls: type) -> type:
    return types.new_class(cls.__name__, (LaunchedActor, in_actor(cls)))


def install() -> None:
    """Lets the public names of ``torchrl.data`` mean our classes, in this process."""
    for name, module in list(sys.modules.items()):
        # The modules of this package go on to mean TorchRL's.
        if name.startswith(_PACKAGE) and getattr(module, "torchrl_buffers", None) is replay_buffers:
            vars(module)["torchrl_buffers"] = TORCHRLS
    for cls in (*BUFFERS, *WRITERS):
        for public in (torchrl.data, replay_buffers):
            setattr(public, cls.__name__, cls)
    for cls in BUFFERS:
        cls.__class__ = NamedBuffer  # type: ignore[method-assign]
    mixin, *others = ReplayBuffer.__bases__
    if mixin is ConditionalPriorityUpdates:
        ReplayBuffer.__bases__ = (GuardedBuffer, *others)
    SERVICES["ray"] = Service(SERVICES["ray"].build, _in_launched_actor)
