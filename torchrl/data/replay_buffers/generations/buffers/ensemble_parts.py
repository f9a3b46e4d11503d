"""Members built of the parts that an ensemble may be given in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .classes import ReplayBuffer


def members_of_parts(
    storages: Any, samplers: Any, writers: Any, collate_fns: list[Callable[..., Any]] | None
) -> tuple[ReplayBuffer, ...]:
    """Returns a buffer of ours for each storage, sampler and writer.

    Raises:
        TypeError: if one of these is missing.
    """
    if storages is None or samplers is None or writers is None:
        raise TypeError(
            "ReplayBufferEnsemble needs all of storages, samplers and writers, or members: got "
            f"storages={storages!r}, samplers={samplers!r}, writers={writers!r}."
        )
    transforms = storages._transforms or [None] * len(storages)
    collate_fns = collate_fns or [None] * len(storages)  # type: ignore[list-item]
    parts = (storages._storages, samplers._samplers, writers._writers, transforms, collate_fns)
    return tuple(
        ReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=transform,
            collate_fn=collate_fn,
            checkpointer=storage.checkpointer,
        )
        for storage, sampler, writer, transform, collate_fn in zip(*parts, strict=True)
    )
