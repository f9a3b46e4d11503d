"""Lets a script that knows nothing of stamps run on the classes of this package.

``python -m torchrl.data.replay_buffers.generations SCRIPT [ARG ...]`` runs it here. In its process
and in those that it spawns or forks, each public name of ``torchrl.data`` that this package has a
class for means a *stand-in*: that class with ``track_generations`` and ``guard_priorities`` on,
wherever they are supported. Nothing happens at import; :func:`install` does it.

A spawned process begins by importing its parent's main module. For a script run here this is
``spawned.py``, which installs the stand-ins before it runs the script in its own turn. Each process
leaves a report behind, and the first one sums them up in its last line.

The same names in submodules, such as ``torchrl.data.replay_buffers.replay_buffers``, keep their
meaning: pickle finds TorchRL's own classes there. A script that takes stamps out of a sample, or
sends a buffer where a table can't follow, gets the error that tells so, as with our classes. Ray's
actors and the other ends of RPC are guarded, too, but are no children: the line leaves them out.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

import torchrl.data
from torch.compiler import is_compiling
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Writer

from ..buffers.classes import (
    ConditionalPriorityUpdates,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ..buffers.ensemble import ReplayBufferEnsemble, WriterEnsemble
from ..core.table import SlotGenerations
from ..core.tally import Tally, stats_of
from ..remote.remote import RayReplayBuffer, RemoteTensorDictReplayBuffer
from ..writers.max_value import TensorDictMaxValueWriter
from ..writers.ring import RoundRobinWriter, TensorDictRoundRobinWriter

# How a spawned process knows the script and where to leave its report.
VARIABLE = "TORCHRL_GENERATIONS_LAUNCH"
SPAWNED = f"{__package__}.spawned"

# Whoever ends at a negative priority does so when the process has waited for its children.
LAST = -100


class Report:
    """What this process guarded. The buffers' own locks guard the tallies; its own, the rest."""

    def __init__(self) -> None:
        self.tallies: set[Tally] = set()
        self.begin()

    def begin(self) -> None:
        """Begins to report, at first and in a process that was forked."""
        self.lock = threading.Lock()
        self.guarded: Counter[str] = Counter()
        self.unguarded: Counter[str] = Counter()
        self.unchecked = 0  # calls that wrote priorities by slot
        for tally in self.tallies:
            tally.reset()

    def built(self, rb: GuardedBuffer) -> None:
        """Notes a buffer that this process built."""
        with self.lock:
            if rb._priority_sampler is not None:
                guards = getattr(rb, "_guard_priorities", False)
                guards = guards and rb._takes_conditional_updates()
                (self.guarded if guards else self.unguarded)[type(rb).__name__] += 1
            self.tallies.add(rb._tally)

    def received(self, rb: GuardedBuffer) -> None:
        """Notes a buffer that was copied, or sent here by the process that built it."""
        with self.lock:
            self.tallies.add(rb._tally)

    def called_unchecked(self) -> None:
        """Notes a call that wrote priorities by slot."""
        with self.lock:
            self.unchecked += 1

    def as_dict(self) -> dict[str, Any]:
        """Returns what :func:`summary` takes."""
        with self.lock:
            counts = stats_of(self.tallies) if self.tallies else {}
            return {
                "guarded": dict(self.guarded),
                "unguarded": dict(self.unguarded),
                "unchecked": self.unchecked,
                "applied": counts.get("updates_applied", 0),
                "stale": counts.get("updates_stale", 0),
            }


report = Report()


def summary(reports: list[dict[str, Any]], silent: int) -> str:
    """The last line of a run.

    Args:
        reports (list of dict): what :meth:`Report.as_dict` gave in each process.
        silent (int): how many processes ended without one.

    Examples:
        >>> summary([{"guarded": {"TensorDictPrioritizedReplayBuffer": 1}, "unguarded": {},
        ...           "unchecked": 0, "applied": 60, "stale": 4}], silent=0)
        'generations: guarded 1 TensorDictPrioritizedReplayBuffer; 4 of 64 priorities were stale'
    """
    guarded, unguarded = (
        sum((Counter(each[kind]) for each in reports), Counter())
        for kind in ("guarded", "unguarded")
    )
    unchecked, applied, stale = (
        sum(each[kind] for each in reports) for kind in ("unchecked", "applied", "stale")
    )
    sent = applied + stale
    parts = [
        f"guarded {_listed(guarded) or 'nothing'}",
        f"{stale:,} of {sent:,} priorities were stale",
    ]
    if unguarded:
        parts.append(f"not guarded: {_listed(unguarded)}")
    if unchecked:
        parts.append(f"calls that wrote priorities by slot, unchecked: {unchecked:,}")
    if silent:
        parts.append(f"children that ended without a report: {silent:,}")
    return "generations: " + "; ".join(parts)


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


# ---------------------------------------------------------------------- stand-ins


class _StandInFor:
    """Mix-in of the metaclasses of stand-ins.

    TorchRL's own instances count as instances of a stand-in, too: a script asks
    ``isinstance(rb, ReplayBuffer)`` of buffers that TorchRL built, and means that.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):  # type: ignore[misc]
            return True
        return isinstance(instance, cls.__dict__.get("stands_for", ()))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "make" in cls.__dict__:
            return cls.make(*args, **kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class BufferStandIn(_StandInFor, type(torchrl_buffers.ReplayBuffer)):  # type: ignore[misc]
    """Their metaclass, where cloudpickle finds it when it sends a script's subclass."""


class WriterStandIn(_StandInFor, type(Writer)):  # type: ignore[misc]
    """The same for writers."""


class GuardedBuffer(ConditionalPriorityUpdates):
    """What stands before the class of this package in a stand-in for a buffer."""

    _writing = threading.local()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asked_to_track = _is_asked_to_track(kwargs)
        kwargs["track_generations"] = True
        if isinstance(self, TensorDictReplayBuffer):
            kwargs["guard_priorities"] = True
        super().__init__(*args, **kwargs)

    def _init(self) -> None:
        was_initialized = self._initialized
        super()._init()
        if not was_initialized:
            report.built(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        report.received(self)

    def _give_up_tracking(self) -> None:
        self._track_generations = self._guard_priorities = False

    def _check_tracks(self, writer: Any) -> None:
        if not (self._asked_to_track or writer.tracks_generations):
            self._give_up_tracking()  # a writer without stamps is the script's choice
        super()._check_tracks(writer)

    def _maybe_make_writer(self, writer: Any) -> Writer:
        given = self._writer_argument
        if given is not None and not isinstance(given, Writer):
            self._writer_argument = given = given()
        try:
            made = super()._maybe_make_writer(writer)
            if made.tracks_generations:
                SlotGenerations.attach(self._storage)
            return made
        except (TypeError, ValueError):
            # These parts can't be tracked together, which the script did not ask for.
            if self._asked_to_track or getattr(given, "_asked_to_track", False):
                raise
            self._give_up_tracking()
            if isinstance(given, TensorDictMaxValueWriter):
                given.tracks_generations = False
            elif given is not None:
                given._track_generations = False
            return super()._maybe_make_writer(writer)

    def _write(self, write: Callable[[], Any], name: str, return_generation: bool) -> Any:
        if is_compiling():
            return super()._write(write, name, return_generation)
        depth = getattr(self._writing, "depth", 0)
        self._writing.depth = depth + 1
        try:
            return super()._write(write, name, return_generation)
        finally:
            self._writing.depth = depth

    def update_priority(self, index: Any, priority: Any) -> None:
        """Writes priorities by slot, and notes it unless they came with the records."""
        if not getattr(self._writing, "depth", 0):
            report.called_unchecked()
        super().update_priority(index, priority)


class GuardedWriter(Writer):
    """What stands before the class of this package in a stand-in for a writer.

    Only a script's subclasses are built from it; the stand-in itself builds ours.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._asked_to_track = _is_asked_to_track(kwargs)
        super().__init__(*args, **{**kwargs, "track_generations": True})


def _is_asked_to_track(kwargs: dict[str, Any]) -> bool:
    """Whether a script wants stamps itself. False does not mean no: Hydra passes every default."""
    return bool(kwargs.get("track_generations", False))


def _make_writer(ours: Any) -> Callable[..., Writer]:
    def make(*args: Any, **kwargs: Any) -> Writer:
        writer: Writer = ours(*args, **{**kwargs, "track_generations": True})
        vars(writer)["_asked_to_track"] = _is_asked_to_track(kwargs)
        return writer

    return make


def _make_ensemble(*rbs: Any, **kwargs: Any) -> Any:
    """Ours takes no members of TorchRL's: a script that has some gets TorchRL's ensemble."""
    ours = all(isinstance(rb, ConditionalPriorityUpdates) for rb in rbs)
    return (ReplayBufferEnsemble if ours else torchrl_buffers.ReplayBufferEnsemble)(*rbs, **kwargs)


def _make_ray(*args: Any, **kwargs: Any) -> Any:
    """The buffer in the actor is a stand-in; its counts stay there."""
    return RayReplayBuffer(*args, **{"replay_buffer_cls": StandIns.ReplayBuffer, **kwargs})


def _make_remote(*args: Any, **kwargs: Any) -> Any:
    """Ours itself, since RPC looks its methods up in the class that has them."""
    return RemoteTensorDictReplayBuffer(
        *args, **{**kwargs, "track_generations": True, "guard_priorities": True}
    )


def _stand_in(ours: type, before: tuple[type, ...] = (), make: Any = None) -> type:
    stock = getattr(torchrl_buffers, ours.__name__)
    metaclass: Any = WriterStandIn if issubclass(ours, Writer) else BufferStandIn
    contents: dict[str, Any] = {"__module__": __name__, "__doc__": ours.__doc__}
    contents["stands_for"] = stock
    if make is not None:
        contents["make"] = staticmethod(make)
    made: type = metaclass(ours.__name__, (*before, ours), contents)
    return made


_STAND_INS = [
    *(
        _stand_in(ours, (GuardedBuffer,))
        for ours in (
            ReplayBuffer,
            PrioritizedReplayBuffer,
            TensorDictReplayBuffer,
            TensorDictPrioritizedReplayBuffer,
        )
    ),
    *(
        _stand_in(ours, (GuardedWriter,), _make_writer(ours))
        for ours in (RoundRobinWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter)
    ),
    _stand_in(WriterEnsemble, make=WriterEnsemble),
    _stand_in(ReplayBufferEnsemble, make=_make_ensemble),
    _stand_in(RayReplayBuffer, make=_make_ray),
    _stand_in(RemoteTensorDictReplayBuffer, make=_make_remote),
]


class StandIns:
    """The stand-ins by name, where pickle finds them."""

    ReplayBuffer: Any


for _made in _STAND_INS:
    _made.__qualname__ = f"{StandIns.__name__}.{_made.__name__}"
    setattr(StandIns, _made.__name__, _made)


def install() -> None:
    """Lets the public names of ``torchrl.data`` mean the stand-ins, in this process."""
    for stand_in in _STAND_INS:
        for module in (torchrl.data, torchrl_buffers):
            setattr(module, stand_in.__name__, stand_in)


# ---------------------------------------------------------------------- running a script


def run(script: Path, arguments: list[str]) -> None:
    """Runs a script as the main module, on the stand-ins; its children run on them too.

    When the process ends, and its children have, it prints the :func:`summary` to stderr.

    Args:
        script (Path): the file.
        arguments (list of str): what the script finds in ``sys.argv`` after its own name.
    """
    script = script.absolute()
    reports = tempfile.mkdtemp(prefix="torchrl_generations_")
    os.environ[VARIABLE] = json.dumps({"script": str(script), "reports": reports})
    util.Finalize(None, _finish, args=(reports,), exitpriority=LAST)
    _prepare()

    main = ModuleType("__main__")
    main.__spec__ = importlib.util.find_spec(SPAWNED)  # what a spawned process begins with
    sys.argv = [str(script), *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.parent)
    sys.modules["__main__"] = main
    _execute(script, vars(main))


def become_script(namespace: dict[str, Any]) -> None:
    """Runs the script in the main module of a spawned process.

    Args:
        namespace (dict): the module's.
    """
    script = Path(_launched()["script"])
    _prepare()
    _begin_child(report)
    sys.argv[0] = str(script)
    namespace.pop("annotations", None)
    _execute(script, namespace)


def _prepare() -> None:
    """Readies this process and the children that it will fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=report.begin)
    util.register_after_fork(report, _begin_child)
    install()


def _execute(script: Path, namespace: dict[str, Any]) -> None:
    with io.open_code(str(script)) as file:
        code = compile(file.read(), str(script), "exec", dont_inherit=True)
    namespace.update(__file__=str(script), __package__=None, __cached__=None)
    exec(code, namespace)


def _launched() -> dict[str, str]:
    launched: dict[str, str] = json.loads(os.environ[VARIABLE])
    return launched


def _begin_child(report: Report) -> None:
    """Announces a report of this process, and writes it when the process ends."""
    file = Path(_launched()["reports"]) / f"{os.getpid()}.json"
    file.touch()

    def write() -> None:
        file.write_text(json.dumps(report.as_dict()))

    util.Finalize(None, write, exitpriority=LAST)


def _finish(reports: str) -> None:
    """Prints the last line of the first process."""
    children = [file.read_text() for file in Path(reports).iterdir()]
    shutil.rmtree(reports)
    told = [json.loads(text) for text in children if text]
    line = summary([report.as_dict(), *told], silent=len(children) - len(told))
    sys.stderr.write(f"{line}\n")
