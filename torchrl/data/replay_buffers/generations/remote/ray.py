"""A tracking buffer in a Ray actor, its clients, and what runs in the actor.

An actor that Ray starts again after a crash begins with an empty buffer, while learners still hold
handles of the one before. Its table starts at a random base, so that none of them reads live on a
new record; those of a checkpoint's records live again when it is loaded (*No resurrection*).
"""

from __future__ import annotations

import importlib.util
import types
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Storage, ray_buffer

from ..buffers.background import copy_to_host
from ..buffers.classes import ReplayBuffer
from ..buffers.services import SERVICES, Service
from ..core.restore import retire
from ..core.result import PriorityUpdateResult

if importlib.util.find_spec("ray") is not None:
    import ray

# The mix-in of a buffer's actor stands before the buffer's class.
if TYPE_CHECKING:
    _Buffer = ReplayBuffer
else:
    _Buffer = object


def in_actor(cls: type) -> type:
    """Returns the class that a buffer class has in a Ray actor."""
    return types.new_class(cls.__name__, (_Actor, cls))


class _Actor(_Buffer):
    """What a buffer does differently in a Ray actor.

    Args:
        delayed_init (bool): see :class:`torchrl.data.ReplayBuffer`.
    """

    def __init__(self, *args: Any, delayed_init: bool = False, **kwargs: Any) -> None:
        # Two of TorchRL's classes do not take what its own actor is given: the one a storage that
        # is still to be made, the other ``delayed_init``.
        storage = kwargs.get("storage")
        makes_tree = isinstance(self, torchrl_buffers.PrioritizedReplayBuffer)
        if makes_tree and storage is not None and not isinstance(storage, Storage):
            kwargs["storage"] = storage()
        if not isinstance(self, torchrl_buffers.TensorDictPrioritizedReplayBuffer) or delayed_init:
            kwargs["delayed_init"] = delayed_init
        super().__init__(*args, **kwargs)

    def _init(self) -> None:
        before = self._initialized
        super()._init()
        if not before and _is_restarted():
            for buffer in getattr(self, "_rbs", [self]):  # an ensemble's members
                if buffer._table is not None:
                    retire(buffer._table)

    # Ray asks for both to report what the constructor raised, when there is no buffer to look into.
    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return type(self).__name__


def _is_restarted() -> bool:
    """Whether Ray has started the actor that this runs in again after a crash."""
    with warnings.catch_warnings():
        # Of Ray's, about what Ray itself calls in there.
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class _ConditionalCalls:
    """The calls that a buffer's actor answers beyond TorchRL's.

    ``_actor`` is the actor's handle.
    """

    _actor: Any

    def update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> PriorityUpdateResult:
        """Writes the priorities of the records that are still in their slots, in one round trip.

        See :meth:`ReplayBuffer.update_priority_if_present` for arguments, result and errors.

        Raises:
            ray.exceptions.RayActorError: if the actor is dead.
        """
        slots = index.get("index") if is_tensor_collection(index) else index  # of an ensemble
        (index, generation, priority), arrive = copy_to_host(index, generation, priority)
        arrive()
        update = self._method("update_priority_if_present")
        result = ray.get(update.remote(index=index, generation=generation, priority=priority))
        return _beside(slots, result)

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the priorities of a sample's records that are still in their slots.

        See :meth:`ReplayBuffer.update_tensordict_priority_if_present`. All of ``data`` travels; it
        needs no more than ``data.select("index", "index_generation", priority_key)``.

        Raises:
            ray.exceptions.RayActorError: if the actor is dead.
        """
        update = self._method("update_tensordict_priority_if_present")
        index = data.get("index", None) if is_tensor_collection(data) else None
        host = data if index is None else data.to("cpu")  # else the actor says what is missing
        return _beside(index, ray.get(update.remote(host)))

    def submit_update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> NoReturn:
        """Not over Ray: a future of the actor's process does not travel.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "submit_update_priority_if_present() needs a buffer in this process. Over Ray call "
            "update_priority_if_present() of a client() in a thread of your own."
        )

    def reset_stats(self) -> None:
        """Lets the counts of conditional updates in :meth:`stats` begin at zero again."""
        ray.get(self._method("reset_stats").remote())

    def _guards_samples(self) -> bool:
        """Whether the actor's buffer can make the update of a sample conditional."""
        guards = getattr(self._actor, "_guards_samples", None)
        return guards is not None and bool(ray.get(guards.remote()))

    def _method(self, name: str) -> Any:
        method = getattr(self._actor, name, None)
        if method is None:
            raise RuntimeError(
                f"{name}() needs a buffer with stamps: the actor's buffer is one of TorchRL's. "
                "Give RayReplayBuffer one of generations' classes as replay_buffer_cls, and "
                "track_generations=True."
            )
        return method


def _beside(index: Any, result: PriorityUpdateResult) -> PriorityUpdateResult:
    """The result with its mask on the device of the caller's index."""
    if not isinstance(index, torch.Tensor) or index.is_cpu:
        return result
    return PriorityUpdateResult.of(result.updated_mask.to(index.device))


class _Client(_ConditionalCalls, ray_buffer._RayReplayBufferClient):
    """A picklable client that sends everything through Ray."""


class _DistributedClient(_ConditionalCalls, ray_buffer._LazyDistributedReplayClient):
    """A picklable client whose samples and batches of records go through ``torch.distributed``.

    That transport carries tensors of one layout and knows no stamps. What returns some, or a mask,
    goes through the actor instead.
    """

    def extend(
        self, data: TensorDictBase, *, return_generation: bool = False, **kwargs: Any
    ) -> Any:
        """See :meth:`ReplayBuffer.extend`."""
        if return_generation:
            return self._with_handles("extend", data, **kwargs)
        return super().extend(data, **kwargs)

    def add(self, data: TensorDictBase, *, return_generation: bool = False, **kwargs: Any) -> Any:
        """See :meth:`ReplayBuffer.add`."""
        if return_generation:
            return self._with_handles("add", data, **kwargs)
        return super().add(data, **kwargs)

    def _with_handles(
        self, name: str, data: TensorDictBase, *, timeout: float | None = None
    ) -> Any:
        return ray.get(self._method(name).remote(data, return_generation=True), timeout=timeout)


class RayReplayBuffer(_ConditionalCalls, torchrl_buffers.RayReplayBuffer, ReplayBuffer):
    """A tracking replay buffer in a Ray actor, for writers and learners anywhere in the cluster.

    See :class:`torchrl.data.RayReplayBuffer`. :meth:`client` and :meth:`clients` give picklable
    clients with the same methods, to be sent to other actors. Each call is one round trip, and what
    it compares and writes is one step inside of the actor.

    If the actor is dead, a call raises Ray's ``RayActorError`` at once, which names it, and what
    the caller passed in is as it was. With ``remote_config={"max_restarts": n}`` Ray starts it
    again, with an empty buffer: handles of before are stale, until :meth:`loads` brings the records
    of a checkpoint back, and with them their handles. Use the transport ``"ray"`` then: TorchRL
    does not start the other one again.

    Keyword Args:
        replay_buffer_cls (type, optional): the class of the buffer in the actor. Defaults to
            :class:`ReplayBuffer` of this package.
        ray_init_config (dict, optional): see :class:`torchrl.data.RayReplayBuffer`.
        remote_config (dict, optional): see there.
        transport (str, optional): ``"ray"``, ``"auto"`` (the same) or ``"distributed"``. With the
            latter, batches of records and samples go through ``torch.distributed``, and what that
            has no operation for goes through the actor. Defaults to ``"auto"``.
        transport_options (dict, optional): see there.
        delayed_init (bool, optional): see there. Defaults to False.
        **kwargs: the arguments of the buffer, ``track_generations=True`` among them. Pass storage,
            sampler and writer as callables that make them.

    Examples:
        >>> import torch
        >>> from functools import partial
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
        >>> rb = RayReplayBuffer(  # doctest: +SKIP
        ...     replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        ...     alpha=0.7,
        ...     beta=0.5,
        ...     storage=partial(LazyTensorStorage, 4),
        ...     batch_size=2,
        ...     track_generations=True,
        ... )
        >>> index, generation = rb.extend(  # doctest: +SKIP
        ...     TensorDict({"obs": torch.arange(4)}, [4]), return_generation=True
        ... )
        >>> rb.client().update_priority_if_present(  # doctest: +SKIP
        ...     index=index, generation=generation, priority=torch.rand(4)
        ... ).num_updated
        4
        >>> rb.shutdown()  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        replay_buffer_cls: type[torchrl_buffers.ReplayBuffer] = ReplayBuffer,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, replay_buffer_cls=replay_buffer_cls, **kwargs)
        self._actor = self._rb  # TorchRL's name goes when the buffer is closed
        try:
            self._client = self.client()
        except BaseException:
            self.close()
            raise

    def client(self) -> Any:
        """Returns a picklable client without the right to shut the actor down."""
        if not self.is_alive:
            raise RuntimeError("client() needs an actor: this RayReplayBuffer was closed.")
        if self.transport_kind == "distributed":
            return _DistributedClient(self._rb, batch_size=self._distributed_batch_size)
        return _Client(self._rb, has_gpu=self.has_gpu)


def _build(cls: type, *args: Any, service_backend_options: dict[str, Any], **kwargs: Any) -> Any:
    """What ``service_backend="ray"`` makes of a buffer class."""
    names = ("ray_init_config", "remote_config")
    configs = {name: service_backend_options.pop(name, None) for name in names}
    if service_backend_options:
        raise TypeError(
            "service_backend_options may hold ray_init_config and remote_config: got "
            f"{sorted(service_backend_options)}."
        )
    return RayReplayBuffer(*args, replay_buffer_cls=cls, **configs, **kwargs)


SERVICES["ray"] = Service(_build, in_actor)
