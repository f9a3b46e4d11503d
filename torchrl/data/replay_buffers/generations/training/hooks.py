"""TorchRL's trainer hook on the conditional path, and one that logs what it did.

TorchRL's own trainers make their hook themselves. They are safe with a buffer that was built with
``guard_priorities=True``, and ``LogPriorityUpdates(rb).register(trainer)`` logs what became of the
priorities.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl import trainers as torchrl_trainers
from torchrl.data import ReplayBuffer
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

# The entries of a buffer's stats() that are logged, and their names in the log.
LOGGED = ("updates_applied", "updates_stale", "stale_share")


class ReplayBufferTrainer(torchrl_trainers.ReplayBufferTrainer):
    """TorchRL's replay buffer hook, whose priorities reach only their own records.

    See :class:`torchrl.trainers.ReplayBufferTrainer` for the arguments. With a buffer of this
    package that has stamps and priorities each update is conditional, whether the buffer was built
    with ``guard_priorities=True`` or not; with any other it is TorchRL's. :meth:`register` also
    registers :class:`LogPriorityUpdates`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7,
        ...     beta=0.5,
        ...     storage=LazyTensorStorage(4),
        ...     batch_size=4,
        ...     track_generations=True,
        ... )
        >>> hook = ReplayBufferTrainer(rb)
        >>> batch = hook.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> sample = hook.sample(batch)
        >>> _ = hook.extend(TensorDict({"obs": torch.arange(4)}, [4]))  # a full lap
        >>> hook.update_priority(sample.set("td_error", torch.ones(4)))
        >>> rb.stats()["updates_stale"]
        4
    """

    def update_priority(self, batch: TensorDictBase) -> None:
        """Writes the priorities of a sample's records that are still in their slots.

        Args:
            batch (TensorDictBase): a sample, with the buffer's ``priority_key``.

        Raises:
            KeyError: if it has no ``"index"`` or ``"index_generation"``.
        """
        rb = self.replay_buffer
        guards = getattr(rb, "_guards_samples", None)  # clients of an actor have it too
        if guards is not None and guards():
            rb.update_tensordict_priority_if_present(batch)
        else:
            super().update_priority(batch)

    def register(self, trainer: Trainer, name: str = "replay_buffer") -> None:
        """Registers the hook where TorchRL registers its own, and the log of its updates."""
        super().register(trainer, name)
        LogPriorityUpdates(self.replay_buffer).register(trainer, f"{name}_updates")


class LogPriorityUpdates(TrainerHookBase):
    """Trainer hook that logs how many priorities were applied and how many came stale.

    Works with each of TorchRL's trainers and loggers. Once per collected batch it logs
    ``updates_applied``, ``updates_stale`` and ``stale_share`` of the buffer's ``stats()``, counted
    since the buffer's ``reset_stats()``; nothing for a buffer that does not count them.

    Args:
        replay_buffer (ReplayBuffer): the buffer.

    Examples:
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), track_generations=True
        ... )
        >>> LogPriorityUpdates(rb)(None)
        {'log_pbar': True, 'updates_applied': 0, 'updates_stale': 0, 'stale_share': 0.0}
    """

    def __init__(self, replay_buffer: ReplayBuffer) -> None:
        self.replay_buffer = replay_buffer

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        """Returns what the trainer logs; the batch does not matter."""
        stats = self.replay_buffer.stats()
        if LOGGED[0] not in stats:
            return None
        return {"log_pbar": True, **{name: stats[name] for name in LOGGED}}

    def register(self, trainer: Trainer, name: str = "log_priority_updates") -> None:
        """Lets the trainer call it after the optimization steps of each collected batch."""
        trainer.register_module(name, self)
        trainer.register_op("post_steps_log", self)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the counts are of this process."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing."""
