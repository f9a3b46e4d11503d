"""Sample units that expand an anchor into a window: the handle of an update is the anchor's.

A ``Sequence`` sample holds the records around each sampled anchor, and the anchor itself need not
be among them. A priority belongs to the anchor. So a sample carries the anchor's stamp, taken under
the lock that the anchor was sampled under, as ``"anchor_generation"`` next to ``"anchor_index"``.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import SampleUnit, Sequence, Storage
from torchrl.data.replay_buffers.utils import _reduce

from ..core.table import TABLE_ATTRIBUTE, SlotGenerations

ANCHOR_KEYS = ("anchor_index", "anchor_generation")


class StampedSequence(Sequence):
    """A ``Sequence`` unit whose samples carry the stamps of their anchors.

    Args:
        unit (Sequence): the unit that expands the anchors.
    """

    def __init__(self, unit: Sequence) -> None:
        self.__dict__.update(vars(unit))
        self.unit = unit

    def expand(
        self, index: torch.Tensor | tuple[torch.Tensor, ...], info: dict[str, Any], storage: Storage
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], dict[str, Any]]:
        """Expands the anchors and adds their stamps; the buffer calls it under the lock."""
        index, info = self.unit.expand(index, info, storage)
        table: SlotGenerations = getattr(storage, TABLE_ATTRIBUTE)
        info["anchor_generation"] = table.of(info["anchor_index"])
        return index, info


def stamped_unit(unit: SampleUnit | None, tracks: bool) -> SampleUnit | None:
    """The form of ``unit`` for a buffer whose writer tracks, or for one whose writer does not."""
    plain = unit.unit if isinstance(unit, StampedSequence) else unit
    return StampedSequence(plain) if tracks and isinstance(plain, Sequence) else plain


def anchor_priorities(
    data: TensorDictBase, priority: torch.Tensor, reduction: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduces the priorities of a ``Sequence`` sample's rows to one for each of its anchors.

    Of the rows of an anchor's windows, those count that ``"validity_mask"`` does not exclude, and
    the largest wins, as in ``update_tensordict_priority``.

    Args:
        data (TensorDictBase): the sample, with the keys :data:`ANCHOR_KEYS`.
        priority (torch.Tensor): one number per row of the sample, or several, first reduced.
        reduction (str): how to reduce several.

    Returns:
        Index (``[anchors]``, or ``[anchors, ndim]`` of coordinates), stamps and priorities
        (``[anchors]``) of the different anchors, and for each row of the sample which of them is
        its own (int64, in the sample's shape).
    """
    rows = data.numel()
    anchor, generation = (data.get(key).reshape(rows, -1) for key in ANCHOR_KEYS)
    # Where samples are put together, an anchor may stand there with two stamps.
    handles, which = torch.unique(torch.cat([anchor, generation], 1), dim=0, return_inverse=True)
    values = torch.as_tensor(priority, device=anchor.device).reshape(rows, -1)
    values = _reduce(values, reduction, dim=1) if values.shape[1] > 1 else values[:, 0]
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    valid = data.get("validity_mask", None)
    if valid is not None:
        values = values.masked_fill(~valid.reshape(rows, -1).all(1), -torch.inf)
    largest = values.new_full((handles.shape[0],), -torch.inf)
    largest = largest.scatter_reduce(0, which, values, "amax")
    index = handles[:, :-1]
    if index.shape[1] == 1:
        index = index[:, 0]
    return index, handles[:, -1], largest, which.reshape(data.shape)
