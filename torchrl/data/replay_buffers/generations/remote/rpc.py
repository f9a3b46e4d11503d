"""A tracking buffer that other processes call over ``torch.distributed.rpc``."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from functools import wraps
from typing import Any

from torchrl._utils import accept_remote_rref_invocation
from torchrl.data import replay_buffers as torchrl_buffers

from ..buffers.classes import TensorDictReplayBuffer
from ..core.result import PriorityUpdateResult


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


def _accept_rref(cls: type, name: str) -> None:
    """Lets a method of a class take an ``RRef`` of an instance in its place.

    RPC sends a method by its qualified name, so the class must have it under that name itself.
    """

    @accept_remote_rref_invocation
    @wraps(inspect.getattr_static(cls, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    method.__module__, method.__qualname__ = cls.__module__, f"{cls.__name__}.{name}"
    method.__doc__ = f"See :meth:`TensorDictReplayBuffer.{name}`; takes an ``RRef``, too."
    setattr(cls, name, method)


for _name in dir(RemoteTensorDictReplayBuffer):
    _is_own = _name.startswith("_") or _name in vars(RemoteTensorDictReplayBuffer)
    if not _is_own and inspect.isfunction(getattr(RemoteTensorDictReplayBuffer, _name)):
        _accept_rref(RemoteTensorDictReplayBuffer, _name)
