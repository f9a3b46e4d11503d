"""The handles of an ensemble: a member's number, a slot of that member and its stamp."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from ..layout.index import integer_tensor


class Handles:
    """The handles of a call, validated: members' numbers, slots and stamps, row by row.

    Args:
        index: the tensordict of ``"buffer_ids"`` and ``"index"``.
        generation: the stamps.
        members (int): how many members there are.

    Attributes:
        shape (torch.Size): the shape of the handles as they were given.
        ids (torch.Tensor): int64 ``[rows]``.
        slots (torch.Tensor): int64 ``[rows]``, or with the trailing dimensions that came.
        stamps (torch.Tensor): the same.
    """

    def __init__(self, index: Any, generation: Any, members: int) -> None:
        name = "update_priority_if_present()"
        ids, slots = members_and_slots(index, members, name)
        stamps = integer_tensor(generation, f"{name}: generation").to(slots.device)
        shape = ids.shape
        if stamps.shape[: ids.ndim] == shape and stamps.shape[ids.ndim :].numel() != 1:
            # One number for each block of rows, as in a sample that is no tensordict.
            shape = stamps.shape
            ids = ids.reshape(*ids.shape, *(1,) * (len(shape) - ids.ndim)).expand(shape)
        if stamps.shape[: len(shape)] != shape or slots.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name} needs one generation per record: got generation of shape "
                f"{tuple(stamps.shape)} for buffer_ids of shape {tuple(ids.shape)} and index of "
                f"shape {tuple(slots.shape)}."
            )
        rows = shape.numel()
        self.shape = shape
        self.ids = ids.reshape(rows)
        self.slots = slots.reshape(rows, *slots.shape[len(shape) :])
        self.stamps = stamps.reshape(rows, *stamps.shape[len(shape) :])

    def rows_of(self, priority: torch.Tensor) -> torch.Tensor:
        """Returns priorities row by row, on the device of the handles; ``[]`` if one is for all."""
        if priority.numel() == 1:
            return priority.reshape(())
        if priority.shape[: len(self.shape)] != self.shape:
            raise ValueError(
                "update_priority_if_present() needs one priority per record, or one for all: got "
                f"priority of shape {tuple(priority.shape)} for handles of shape "
                f"{tuple(self.shape)}."
            )
        rows = priority.reshape(self.shape.numel(), *priority.shape[len(self.shape) :])
        return rows.to(self.ids.device)


def members_and_slots(index: Any, members: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of an ensemble's index, int64, on the device of the slots."""
    is_td = isinstance(index, TensorDictBase)
    given = index.get("index", None) if is_td else None
    named = index.get("buffer_ids", None) if is_td else None
    if given is None or named is None:
        raise TypeError(
            f'{name} of an ensemble needs an index with "buffer_ids" and "index", as samples carry '
            f"it: got {sorted(index.keys()) if is_td else type(index).__name__}."
        )
    slots = integer_tensor(given, f"{name}: index")
    ids = integer_tensor(named, f"{name}: buffer_ids").to(slots.device)
    if slots.shape[: ids.ndim] != ids.shape:
        raise ValueError(
            f"{name} needs one of buffer_ids per record: got buffer_ids of shape "
            f"{tuple(ids.shape)} for index of shape {tuple(slots.shape)}."
        )
    if ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= members:
            raise ValueError(
                f"{name} needs buffer_ids from 0 to {members - 1}: got {low if low < 0 else high}."
            )
    return ids, slots
