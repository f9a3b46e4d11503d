"""The writers of an ensemble's members as one, whose stamps it reads."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Storage, Writer

from .ensemble_handles import members_and_slots


class WriterEnsemble(torchrl_buffers.WriterEnsemble):
    """The writers of an ensemble's members, whose stamps it reads.

    See :class:`torchrl.data.replay_buffers.WriterEnsemble`. It tracks if each of its writers does.

    Args:
        writers (Writer): the writers of the members.

    Keyword Args:
        track_generations (bool, optional): whether to insist that each writer tracks. Defaults to
            False.

    Raises:
        ValueError: for ``track_generations=True`` with a writer that does not track.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import ReplayBuffer, ReplayBufferEnsemble
        >>> members = [
        ...     ReplayBuffer(storage=LazyTensorStorage(4), track_generations=True) for _ in range(2)
        ... ]
        >>> ensemble = ReplayBufferEnsemble(*members)
        >>> _ = members[1].extend(torch.arange(5))
        >>> index = TensorDict(
        ...     {"buffer_ids": torch.tensor([1, 0, 1]), "index": torch.tensor([0, 0, 1])}, [3]
        ... )
        >>> ensemble.writer.generations_of(index)
        tensor([ 1, -1,  0])
    """

    _writers: tuple[Writer, ...]
    _storage: Storage | None

    def __init__(self, *writers: Writer, track_generations: bool = False) -> None:
        super().__init__(*writers)
        if track_generations and not self.tracks_generations:
            raise ValueError(
                "track_generations=True needs writers that track: "
                f"{named(self._writers, self._not_tracking())} not."
            )

    def _not_tracking(self) -> list[int]:
        return [i for i, writer in enumerate(self._writers) if not writer.tracks_generations]

    def generations_of(self, index: TensorDictBase) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index (TensorDictBase): ``"buffer_ids"``, the members' numbers, and ``"index"``, their
                slots, whose shape begins with that of ``"buffer_ids"``.

        Returns:
            int64 tensor of the shape and on the device of ``"index"`` (less the last dimension
            where that holds coordinates); -1 where there is no usable stamp.

        Raises:
            TypeError: if ``index`` is no such tensordict, or either part is not integer.
            ValueError: if the shapes don't fit, or a member's number is out of range.
        """
        ids, slots = members_and_slots(index, len(self._writers), "generations_of()")
        rows = slots.reshape(ids.numel(), *slots.shape[ids.ndim :])
        ids, shape = ids.reshape(-1), ids.shape
        if 0 < ids.numel() <= len(self._writers):
            # As in a sample, which has few blocks of many rows: no need to sort them.
            blocks = zip(ids.tolist(), rows, strict=True)
            found = [self._writers[member].generations_of(block) for member, block in blocks]
            return torch.stack(found).reshape(*shape, *found[0].shape)
        stamps = None
        for member in ids.unique().tolist() or [0]:
            chosen = (ids == member).nonzero()[:, 0]
            of_member = self._writers[member].generations_of(rows[chosen])
            if stamps is None:
                stamps = of_member.new_full((rows.shape[0], *of_member.shape[1:]), -1)
            stamps[chosen] = of_member
        assert stamps is not None  # an ensemble has members
        return stamps.reshape(*shape, *stamps.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        picked = super().__getitem__(index)
        if type(picked) is torchrl_buffers.WriterEnsemble:
            return WriterEnsemble(*picked._writers)
        return picked


def named(things: Any, positions: list[int]) -> str:
    """Names some members, or their writers, in an error: by number and class, with a verb."""
    named = [f"{position} ({type(things[position]).__name__})" for position in positions]
    return f"number {', '.join(named)} {'does' if len(named) == 1 else 'do'}"
