"""The four buffers: TorchRL's, with the mix-in in front."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Writer
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..core.result import PriorityUpdateResult
from ..layout.grid import Grid
from .conditional import ConditionalPriorityUpdates
from .torchrls import ours
from .writes import ENABLE_TRACKING


@ours
class ReplayBuffer(ConditionalPriorityUpdates, torchrl_buffers.ReplayBuffer):
    """A replay buffer whose samples carry generation stamps.

    See :class:`torchrl.data.ReplayBuffer` for the arguments that are not listed here.

    Keyword Args:
        track_generations (bool, optional): whether to stamp records. Defaults to False.
        writer (Writer or Callable[[], Writer], optional): a writer of this package, a user's, or
            one of TorchRL's that does not track.

    Examples:
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage, PrioritizedSampler
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0),
        ...     batch_size=2,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(torch.arange(4))
        >>> data, info = rb.sample(return_info=True)
        >>> result = rb.update_priority_if_present(
        ...     index=info["index"], generation=info["index_generation"], priority=2.0
        ... )
        >>> result.num_updated, result.num_stale
        (2, 0)
    """


@ours
class PrioritizedReplayBuffer(ReplayBuffer, torchrl_buffers.PrioritizedReplayBuffer):
    """A prioritized replay buffer with generation stamps and conditional priority updates.

    See :class:`torchrl.data.PrioritizedReplayBuffer` for the arguments that are not listed here.

    Keyword Args:
        alpha (float): exponent of the priorities.
        beta (float): exponent of the importance weights.
        writer (Writer or Callable[[], Writer], optional): see :class:`ReplayBuffer`.
        shared (bool, optional): see :class:`torchrl.data.ReplayBuffer`. Defaults to False.
        generator (torch.Generator, optional): source of randomness of the samples.
        track_generations (bool, optional): whether to stamp records. Defaults to False.

    Raises:
        ValueError: for ``shared=True`` with prefetching.

    Examples:
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage
        >>> rb = PrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), track_generations=True
        ... )
        >>> index, generation = rb.extend(torch.arange(4), return_generation=True)
        >>> rb.update_priority_if_present(
        ...     index=index, generation=generation, priority=torch.rand(4)
        ... ).num_updated
        4
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        writer: Writer | Callable[[], Writer] | None = None,
        shared: bool = False,
        generator: torch.Generator | None = None,
        track_generations: bool = False,
        **kwargs: Any,
    ) -> None:
        if shared and kwargs.get("prefetch"):
            raise ValueError(
                "shared=True needs prefetch=None or 0, since threads do not reach other processes: "
                f"got prefetch={kwargs['prefetch']}."
            )
        self._generator_argument = generator
        super().__init__(
            alpha=alpha, beta=beta, writer=writer, track_generations=track_generations, **kwargs
        )
        if shared:
            self.share()


@ours
class TensorDictReplayBuffer(ReplayBuffer, torchrl_buffers.TensorDictReplayBuffer):
    """A tensordict replay buffer whose samples carry generation stamps.

    See :class:`torchrl.data.TensorDictReplayBuffer` for the arguments that are not listed here, and
    :class:`ReplayBuffer` for ``track_generations`` and ``writer``.

    Keyword Args:
        guard_priorities (bool, optional): whether :meth:`update_tensordict_priority`, which
            TorchRL's trainers and recipes call, is conditional. Defaults to False.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, PrioritizedSampler
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0),
        ...     batch_size=2,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> sample = rb.sample()
        >>> sample["td_error"] = torch.tensor([0.5, 0.25])
        >>> rb.update_tensordict_priority_if_present(sample).num_updated
        2
    """

    _guard_priorities: bool

    def __init__(self, *args: Any, guard_priorities: bool = False, **kwargs: Any) -> None:
        self._guard_priorities = guard_priorities
        super().__init__(*args, **kwargs)

    @_maybe_delay_init
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdateResult | None:
        """Writes the priorities of a sample by slot; see TorchRL's method of the same name.

        With ``guard_priorities=True`` it is :meth:`update_tensordict_priority_if_present`, so that
        code which knows nothing of stamps is safe. If the buffer does not track, it warns
        and writes by slot all the same; without priorities, it writes nothing.

        Args:
            data (TensorDictBase): a sample of this buffer.

        Returns:
            PriorityUpdateResult: of a conditional update; else None.

        Raises:
            KeyError: if a conditional update finds no ``"index"`` or ``"index_generation"``.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl.data import LazyTensorStorage
            >>> rb = TensorDictPrioritizedReplayBuffer(
            ...     alpha=0.7,
            ...     beta=0.5,
            ...     storage=LazyTensorStorage(4),
            ...     batch_size=4,
            ...     track_generations=True,
            ...     guard_priorities=True,
            ... )
            >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
            >>> sample = rb.sample()
            >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))  # a full lap
            >>> sample["td_error"] = torch.ones(4)
            >>> rb.update_tensordict_priority(sample).num_stale
            4
        """
        if self._guard_priorities:
            if self._guards_samples():
                return self.update_tensordict_priority_if_present(data)
            if not self._writer.tracks_generations and self._priority_sampler is not None:
                warnings.warn(
                    "guard_priorities=True guards nothing without stamps: "
                    f"update_tensordict_priority() writes by slot. {ENABLE_TRACKING}",
                    stacklevel=3,  # TorchRL's decorator is in between
                )
        if not self._in_write._is_owned() or self._storage.ndim == 1 or self._table is None:
            return super().update_tensordict_priority(data)
        # With ndim > 2 TorchRL's add() takes the slots in the coordinates for the cells.
        priority = data.get(self.priority_key, None)
        if priority is not None:
            index = data.get("index").reshape(-1, self._storage.ndim)
            self.update_priority(index, priority.reshape(len(index), -1))
        return None

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        update_priority: bool | None = None,
        return_generation: bool = False,
    ) -> Any:
        """Puts a batch of records into the buffer; see :meth:`ReplayBuffer.extend`."""
        return super().extend(
            tensordicts, update_priority=update_priority, return_generation=return_generation
        )

    def _set_index_in_td(self, tensordict: TensorDictBase, index: Any) -> None:
        layout = None if self._table is None else self._table.layout
        if (
            isinstance(layout, Grid) and tensordict.shape == layout.row
        ):  # TorchRL fails at one record
            tensordict.set("index", index.reshape(*layout.row, layout.ndim))
        else:
            super()._set_index_in_td(tensordict, index)


@ours
class TensorDictPrioritizedReplayBuffer(
    TensorDictReplayBuffer, torchrl_buffers.TensorDictPrioritizedReplayBuffer
):
    """A prioritized tensordict replay buffer with stamps and conditional priority updates.

    See :class:`torchrl.data.TensorDictPrioritizedReplayBuffer` for the other arguments,
    :class:`ReplayBuffer` for ``track_generations`` and ``writer``, and
    :class:`TensorDictReplayBuffer` for ``guard_priorities``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7,
        ...     beta=0.5,
        ...     storage=LazyTensorStorage(4),
        ...     batch_size=4,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> sample = rb.sample()
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))  # a full lap
        >>> sample["td_error"] = torch.ones(4)
        >>> result = rb.update_tensordict_priority_if_present(sample)
        >>> result.num_updated, result.num_stale
        (0, 4)
    """
