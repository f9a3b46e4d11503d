"""Whether a checkpoint fits a buffer, found out before anything of the buffer changes.

A dump is looked at as a state whose parts are folders, and a plain buffer as an ensemble of one.
What a user's own storage, sampler or writer saves is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from .files import check_tensordict, read_json, read_pickle, read_torch
from .fit_parts import check_sampler, check_writer, stamps, writer_state
from .fit_records import Room, check_records
from .rules import (
    attempted,
    check_count,
    check_entries,
    check_same,
    integer,
    list_of,
    mapping,
    part,
)

_PARTS = ("_storage", "_sampler", "_writer")


def check_state(buffer: Any, state: Any) -> list[dict[str, Any]]:
    """Makes sure that a state, TorchRL's or ours, fits a buffer or an ensemble.

    Returns:
        The state of each member's writer.

    Raises:
        RuntimeError: for batches that another buffer has prefetched.
        TypeError: if a part of the state has another type than it must.
        ValueError: if a part is missing, out of range, or of another capacity or kind.
    """
    state = mapping(state, "state")
    members = _members(buffer, {name: part(state, name, "state") for name in _PARTS})
    for name in ("_batch_size", "_transforms"):
        part(state, name, "state")
    _check(buffer, members, state)
    return [saved["_writer"] for saved in members]


def check_dump(buffer: Any, folder: Path, ours: Any) -> None:
    """The same for the dump in a folder, with the content of our own file of it.

    Raises:
        NotImplementedError: if TorchRL has no dumps of such a storage.
        RuntimeError: also if a file is missing, garbled or too short.
    """
    numbers = sorted(file.name for file in (folder / "writer").iterdir() if file.name.isdigit())
    members = _members(
        buffer,
        {
            name: {number: folder / name[1:] / number for number in numbers} or folder / name[1:]
            for name in _PARTS
        },
    )
    flags = list_of(len(members), bool)
    check_entries(ours, "own file", {"in_place?": flags, "without?": flags})
    if numbers:
        _check_dumped_ensemble(buffer, members, folder / "storage")
    _check(buffer, members, {**_settings(buffer, folder), "_learners": ours.get("learners")})


def _members(buffer: Any, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a checkpoint has for each member: of each part a state, or the folder of a dump."""
    storage, members = saved["_storage"], buffer._member_list
    if members == (buffer,):
        if isinstance(storage, Mapping) and "0" in storage and "_storage" not in storage:
            raise ValueError(
                f"The checkpoint is of an ensemble of {len(storage)} members: this buffer is none."
            )
        return [dict(saved)]
    if isinstance(storage, Path) or "_storage" in mapping(storage, "_storage"):
        raise ValueError("The checkpoint is of one buffer: this is an ensemble.")
    for name in _PARTS:
        check_count(len(mapping(saved[name], name)), len(members))
    return [{name: part(saved[name], str(i), name) for name in _PARTS} for i in range(len(members))]


def _check_dumped_ensemble(buffer: Any, members: list[dict[str, Any]], folder: Path) -> None:
    """Checks what is beside the members' records, and notes which have none."""
    file = folder / "metadata.json"
    if file.exists():
        empty = part(mapping(read_json(file), file.name), "empty_members", file.name)
        for i in attempted(lambda: list(empty), "empty_members"):
            integer(0, len(members) - 1)(i, "empty_members")
            slots = buffer._member_list[i]._storage.max_size
            members[i]["_storage"] = Room(slots, 0, is_exact=False)
    for i, transform in enumerate(buffer._storage._transforms or ()):
        if transform is not None:
            _check_transform(transform, read_torch(folder / f"{i}_transform.pt"))


def _settings(buffer: Any, folder: Path) -> dict[str, Any]:
    """What a dump has beside records, priorities and stamps, as it stands in a state."""
    name = "buffer_metadata.json"
    metadata = mapping(read_json(folder / name), name)
    found = {
        "_batch_size": part(metadata, "batch_size", name),
        "_consume_after_n_samples": metadata.get("consume_after_n_samples"),
    }
    if (folder / "prefetch.pkl").exists():
        found["_prefetch_state"] = read_pickle(folder / "prefetch.pkl")
    if (folder / "transform.t").exists():
        found["_transforms"] = read_torch(folder / "transform.t")
    if (folder / "rng_state").exists():
        check_tensordict(folder / "rng_state")
        rng = attempted(lambda: TensorDict.load_memmap(folder / "rng_state"), "random state")
        found["_rng"] = (rng.get("rng_state"), rng.device)
    return found


def _check(buffer: Any, members: list[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Checks the settings, and of each member its parts and its learner."""
    buffer._validate_prefetch_state(state.get("_prefetch_state"))
    check_entries(
        state,
        "state",
        {
            "_batch_size?": integer(1, 2**63 - 1),
            "_consume_after_n_samples?": integer(1, 2**63 - 1),
            "_rng?": _check_random_state,
            "_learners?": list_of(len(members), Mapping, type(None)),
        },
    )
    if "_transforms" in state:
        _check_transform(buffer._transform, state["_transforms"])
    learners = state.get("_learners") or [None] * len(members)
    for rb, saved, learner in zip(buffer._member_list, members, learners, strict=True):
        writer = writer_state(rb._writer, saved["_writer"])
        room = check_records(rb._storage, saved["_storage"])
        check_writer(rb._writer, writer, room)
        # TorchRL's ensemble saves the sampler that has the tree.
        private = None if rb is buffer else rb._learner_sampler
        check_sampler(private or rb._sampler, saved["_sampler"], room)
        if rb._learner_sampler is not None and learner is not None:
            _check_learner(rb._learner_sampler, learner, room)


def _check_learner(sampler: Any, state: Any, room: Room) -> None:
    """Checks the state of the private sampler of an asynchronous learner, and what it has seen."""
    part(state, "seen", "learner")
    seen = stamps(room._replace(is_exact=False))  # the table may have grown since
    check_entries(
        state,
        "learner",
        {"seen?": seen, "sampler": lambda saved, _: check_sampler(sampler, saved, room)},
    )


def _check_random_state(rng: Any, _: str) -> None:
    attempted(lambda: torch.Generator(device=rng[1]).set_state(rng[0]), "random state")


def _check_transform(transform: nn.Module, state: Any) -> None:
    """Compares names and shapes of what transforms keep, unless one loads in a way of its own."""
    state, plain = mapping(state, "_transforms"), nn.Module
    for module in transform.modules():
        cls, hooks = type(module), module._load_state_dict_pre_hooks
        if cls._load_from_state_dict is not plain._load_from_state_dict or hooks:
            return
    if type(transform).load_state_dict is not plain.load_state_dict:
        return
    check_same("transforms", _described(state), _described(transform.state_dict()))


def _described(state: Mapping[str, Any]) -> dict[str, tuple[torch.Size, str]]:
    return {
        key: (value.shape, "Tensor")
        if isinstance(value, torch.Tensor)
        else (torch.Size([]), type(value).__name__)
        for key, value in state.items()
    }
