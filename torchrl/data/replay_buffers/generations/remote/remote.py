"""Tracking buffers in another process: in a Ray actor, or behind ``torch.distributed.rpc``.

What other processes send is a call of one of the buffer's methods. Comparing and writing happen
where the buffer is, under the lock of its table (*Atomicity* in the design notes), and the result
comes back in the same round trip. So nothing here compares stamps: it forwards.

An actor that Ray starts again after a crash begins with an empty buffer, while learners still hold
handles of the one before. Its table starts at a random base, so that none of them reads live on a
new record; those of a checkpoint's records live again when it is loaded (*No resurrection*).
"""

from __future__ import annotations

import importlib.util
import inspect
import types
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl._utils import accept_remote_rref_invocation
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Storage, ray_buffer

from ..buffers.background import copy_to_host
from ..buffers.classes import ReplayBuffer, TensorDictReplayBuffer
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
                    buffer._table.retire()

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
    """The calls that a client of a buffer's actor adds to TorchRL's clients."""

    _actor: Any

    def update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> PriorityUpdateResult:
        """See :meth:`ReplayBuffer.update_priority_if_present`; it runs in the actor."""
        slots = index.get("index") if is_tensor_collection(index) else index  # of an ensemble
        device = slots.device if isinstance(slots, torch.Tensor) else None
        (index, generation, priority), arrive = copy_to_host(index, generation, priority)
        arrive()
        update = self._method("update_priority_if_present")
        result = ray.get(update.remote(index=index, generation=generation, priority=priority))
        return _on(device, result)

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> PriorityUpdateResult:
        """See :meth:`ReplayBuffer.update_tensordict_priority_if_present`; it runs in the actor.

        All of ``data`` travels. It needs no more than ``data.select("index", "index_generation",
        priority_key)``.
        """
        update = self._method("update_tensordict_priority_if_present")
        index = data.get("index", None) if is_tensor_collection(data) else None
        host = data if index is None else data.to("cpu")  # else the actor says what is missing
        return _on(None if index is None else index.device, ray.get(update.remote(host)))

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
        """See :meth:`ReplayBuffer.reset_stats`; it runs in the actor."""
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


def _on(device: torch.device | None, result: PriorityUpdateResult) -> PriorityUpdateResult:
    """The result with its mask where the caller's index is."""
    if device is None or device.type == "cpu":
        return result
    return PriorityUpdateResult.of(result.updated_mask.to(device))


class _Client(_ConditionalCalls, ray_buffer._RayReplayBufferClient):
    """A picklable client that sends everything through Ray."""


class _DistributedClient(_ConditionalCalls, ray_buffer._LazyDistributedReplayClient):
    """A picklable client whose samples and batches of records go through ``torch.distributed``.

    That transport carries tensors of one layout and knows no stamps. What returns some, or a mask,
    goes through the actor instead.
    """

    def extend(
        self,
        data: TensorDictBase,
        *,
        timeout: float | None = None,
        return_generation: bool = False,
    ) -> Any:
        """See :meth:`ReplayBuffer.extend`."""
        if return_generation:
            call = self._method("extend").remote(data, return_generation=True)
            return ray.get(call, timeout=timeout)
        return super().extend(data, timeout=timeout)

    def add(
        self,
        data: TensorDictBase,
        *,
        timeout: float | None = None,
        return_generation: bool = False,
    ) -> Any:
        """See :meth:`ReplayBuffer.add`."""
        if return_generation:
            call = self._method("add").remote(data, return_generation=True)
            return ray.get(call, timeout=timeout)
        return super().add(data, timeout=timeout)


class RayReplayBuffer(torchrl_buffers.RayReplayBuffer, ReplayBuffer):
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

    def update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> PriorityUpdateResult:
        """Writes the priorities of the records that are still in their slots, in one round trip.

        See :meth:`ReplayBuffer.update_priority_if_present` for arguments, result and errors.

        Raises:
            ray.exceptions.RayActorError: if the actor is dead.
        """
        return self._client.update_priority_if_present(
            index=index, generation=generation, priority=priority
        )

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the priorities of a sample's records that are still in their slots.

        See :meth:`ReplayBuffer.update_tensordict_priority_if_present`. All of ``data`` travels; it
        needs no more than ``data.select("index", "index_generation", priority_key)``.

        Raises:
            ray.exceptions.RayActorError: if the actor is dead.
        """
        return self._client.update_tensordict_priority_if_present(data)

    def reset_stats(self) -> None:
        """Lets the counts of conditional updates in :meth:`stats` begin at zero again."""
        self._client.reset_stats()

    def _guards_samples(self) -> bool:
        return self._client._guards_samples()

    def submit_update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> Future[PriorityUpdateResult]:
        """Not over Ray: a future of the actor's process does not travel.

        Raises:
            NotImplementedError: always.
        """
        return self._client.submit_update_priority_if_present(
            index=index, generation=generation, priority=priority
        )


class RemoteTensorDictReplayBuffer(
    TensorDictReplayBuffer, torchrl_buffers.RemoteTensorDictReplayBuffer
):
    """A tracking tensordict buffer that other processes call over ``torch.distributed.rpc``.

    See :class:`torchrl.data.RemoteTensorDictReplayBuffer`. Each public method takes an ``RRef`` of
    the buffer in the place of ``self``. The call then runs where the buffer is, under the lock of
    its storage, and is one round trip. RPC turns an error that is no ``ValueError`` or
    ``TypeError`` into a ``RuntimeError`` with its text. If the process is dead, it raises
    ``RuntimeError``, and what the caller passed in is as it was.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, PrioritizedSampler
        >>> rb = RemoteTensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0),
        ...     batch_size=2,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> sample = rb.sample()
        >>> sample["td_error"] = torch.ones(2)
        >>> rb.update_tensordict_priority_if_present(sample).num_updated
        2

        Elsewhere, ``rref`` being an ``RRef`` of it:

        >>> result = torch.distributed.rpc.rpc_sync(  # doctest: +SKIP
        ...     rref.owner(),
        ...     RemoteTensorDictReplayBuffer.update_tensordict_priority_if_present,
        ...     args=(rref, sample),
        ... )
    """

    def submit_update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> Future[PriorityUpdateResult]:
        """See :meth:`ReplayBuffer.submit_update_priority_if_present`; not with an ``RRef``.

        Raises:
            NotImplementedError: for an ``RRef`` in the place of the buffer.
        """
        if not isinstance(self, RemoteTensorDictReplayBuffer):
            raise NotImplementedError(
                "submit_update_priority_if_present() needs a buffer in this process, since a "
                "future does not travel. Use torch.distributed.rpc.rpc_async() with "
                "RemoteTensorDictReplayBuffer.update_priority_if_present."
            )
        return super().submit_update_priority_if_present(
            index=index, generation=generation, priority=priority
        )


def _accept_rref(cls: type, but: str) -> None:
    """Lets every public method of a class take an ``RRef`` of an instance in its place.

    RPC sends a method by its qualified name, so the class must have it under that name itself.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if inspect.isfunction(method) and not name.startswith("_") and name != but:
            accepting: Callable[..., Any] = accept_remote_rref_invocation(method)
            accepting.__module__, accepting.__qualname__ = cls.__module__, f"{cls.__name__}.{name}"
            accepting.__doc__ = (
                f"See :meth:`TensorDictReplayBuffer.{name}`; takes an ``RRef``, too."
            )
            setattr(cls, name, accepting)


_accept_rref(RemoteTensorDictReplayBuffer, but="submit_update_priority_if_present")
