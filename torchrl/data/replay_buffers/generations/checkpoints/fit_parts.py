"""Whether the priorities, the cursor, the ranks and the stamps of a checkpoint fit a buffer.

What is checked is a state, or the folder of a dump, which is read into the form of a state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SliceSampler,
    Writer,
)

from ..writers import max_value
from .files import check_tensordict, read_json, read_memmap, read_torch
from .fit_records import Room
from .rules import (
    Rule,
    attempted,
    check_capacity,
    check_entries,
    integer,
    is_known,
    is_number,
    mapping,
    must,
    number,
    part,
)
from .samplers import LEAVES, TREE, TREES, leaves_of

# TorchRL's counters of more slots grow with the records.
_GROWING = 2**20
# No base is drawn above it; whether there is room for another is looked at when the stamps come.
_MOST_STAMP = 2**62 - 1
# TorchRL's count of writes is a C int, which wraps.
_write_count = integer(-(2**31), 2**63 - 1)

# ------------------------------------------------------------------ samplers


def check_sampler(sampler: Sampler, saved: Any, room: Room) -> None:
    """Makes sure that a state, or the folder of a dump, fits a sampler; uniform ones take any."""
    is_dump, cls = isinstance(saved, Path), type(sampler)
    takes_any = (RandomSampler.load_state_dict, SliceSampler.load_state_dict)
    if not is_known(sampler, saved, "_sampler") or cls.load_state_dict in takes_any:
        return
    if not isinstance(sampler, PrioritizedSampler):
        _try(sampler, saved, room)
        return
    state = _read_priorities(sampler, saved) if is_dump else saved
    if state.get(TREES[0]) is None:
        raise ValueError(
            "The checkpoint has no priorities for a sampler of the buffer's own: this buffer has a "
            f"{cls.__name__}. Load it into a buffer that is built as the saved one was."
        )
    rules: dict[str, Rule] = dict.fromkeys(("_alpha", "_beta", "_eps"), number)
    rules |= dict.fromkeys(TREES, lambda tree, name: _check_tree(sampler, tree, name))
    rules["_max_priority"] = lambda highest, name: _check_highest(highest, name, is_dump)
    if "_schema_version" in state:
        rules["_schema_version"] = integer(0, 2**31)
    check_entries(state, "_sampler", rules)


def _read_priorities(sampler: PrioritizedSampler, folder: Path) -> Mapping[str, Any]:
    file = folder / "sampler_metadata.json"
    if not file.exists():
        return {}
    state = dict(mapping(read_json(file), "_sampler"))
    leaves = part(state, "_max_capacity", "_sampler")
    number(leaves, "_max_capacity")
    check_capacity("priorities", int(leaves), sampler.max_size, leaves == sampler.max_size)
    for name, tree in zip(TREES, ("sumtree.memmap", "mintree.memmap"), strict=True):
        state[name] = {TREE: name, LEAVES: read_memmap(folder / tree, [int(leaves)], "float64")}
    return state


def _check_tree(sampler: PrioritizedSampler, tree: Any, name: str) -> None:
    """Checks a compiled tree, or what :func:`~.samplers.sampler_state` has in its place."""
    own = getattr(sampler, name)
    is_ours = isinstance(tree, Mapping) and tree.get(TREE) == name
    leaves: Any = leaves_of(tree) if type(tree) is type(own) else is_ours and tree.get(LEAVES)
    is_row = isinstance(leaves, torch.Tensor) and leaves.ndim == 1 and leaves.is_floating_point()
    must(is_row, name, f"a {type(own).__name__} like this buffer's", type(tree), TypeError)
    check_capacity("priorities", leaves.numel(), sampler.max_size)
    bad = (~((leaves >= 0) & leaves.isfinite())).nonzero()[:1, 0]
    for slot in bad.tolist():
        raise ValueError(
            "The checkpoint's leaves of the priority tree must be finite and not negative: got "
            f"{leaves[slot].item()} for slot {slot}."
        )
    most, total = torch.finfo(sampler.dtype).max, leaves.sum(dtype=torch.float64).item()
    if name == TREES[0] and total > most:
        raise ValueError(
            f"The checkpoint's leaves of the priority tree must have a sum below {most:.4g}: got "
            f"{total:.4g}."
        )


def _check_highest(highest: Any, name: str, is_dump: bool) -> None:
    """Checks the largest priority: a state may have none, TorchRL's load of a dump needs one."""
    pair = (None, None) if highest is None and not is_dump else highest
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    must(is_pair, name, "a pair of a priority and a slot", pair, TypeError)
    for value in pair:
        if value is not None or is_dump:
            number(value, name)


def _try(sampler: Any, saved: Any, room: Room) -> None:
    """Loads into a copy, which shares nothing that a load of TorchRL's changes in place."""
    copied = copy.copy(sampler)
    for name in ("_cache", "_fragmented_index"):
        if hasattr(copied, name):
            setattr(copied, name, copy.copy(getattr(copied, name)))
    load = copied.loads if isinstance(saved, Path) else copied.load_state_dict
    if isinstance(saved, Path) and (saved / "meta.json").exists():
        check_tensordict(saved)
    attempted(lambda: load(saved), f"sampler (this buffer has a {type(sampler).__name__})")
    is_slot = integer(0, room.slots)
    for name in ("len_storage", "_known_storage_len"):
        if hasattr(copied, name):
            is_slot(getattr(copied, name), name)
    listed = getattr(copied, "_sample_list", None)
    if listed is not None:
        _check_row(listed, "slots still to sample", TypeError)
        for slot in torch.aminmax(listed) if listed.numel() else ():
            is_slot(int(slot), "slots still to sample")


def _check_row(value: Any, name: str, error: type[Exception] = ValueError) -> None:
    is_row = isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype is torch.int64
    must(is_row, name, "int64 of shape [slots]", value, error)


# ------------------------------------------------------------------ writers


def writer_state(writer: Writer, saved: Any) -> Mapping[str, Any] | None:
    """Returns a state, or that in the folder of a dump, of a writer of the kind of ``writer``.

    None if nothing is known of it: a user's own class loads it, or an immutable one, which takes
    any.

    Raises:
        NotImplementedError: if TorchRL loads no state into such a writer.
    """
    is_dump = isinstance(saved, Path)
    is_immutable = isinstance(writer, torchrl_buffers.ImmutableDatasetWriter)
    if not is_known(writer, saved, "_writer") or is_immutable:
        return None
    keeps_best = isinstance(writer, torchrl_buffers.TensorDictMaxValueWriter)
    state = mapping(_read_writer(writer, saved, keeps_best) if is_dump else saved, "_writer")
    if keeps_best and "_current_top_values" not in state:
        raise ValueError(
            "The checkpoint has no ranks: it was saved under another writer than the "
            "TensorDictMaxValueWriter of this buffer."
        )
    if keeps_best and not is_dump and not getattr(writer, "tracks_generations", False):
        writer.load_state_dict({})  # which says that it has none
    return state


def check_writer(writer: Writer, state: Mapping[str, Any] | None, room: Room) -> None:
    """Makes sure that what :func:`writer_state` gave fits a writer."""
    if state is None:
        return
    keeps_best = isinstance(writer, torchrl_buffers.TensorDictMaxValueWriter)
    rules: dict[str, Rule] = {
        "_cursor": integer(0, max(room.slots - 1, 0)),
        **dict.fromkeys(("_generation?", "_live_generation?"), stamps(room)),
        "_lineage?": _check_lineage,
        "_write_count" if keeps_best else "_write_count?": _write_count,
    }
    if keeps_best:
        last = max(room.length - 1, 0)
        rules["_rank_key"] = _check_rank_key
        rules["_current_top_values"] = lambda ranks, _: _check_ranks(ranks, last)
    check_entries(state, "_writer", rules)


def _read_writer(writer: Writer, folder: Path, keeps_best: bool) -> Any:
    metadata = mapping(read_json(folder / "metadata.json"), "_writer")
    state = {
        "_cursor": part(metadata, "cursor", "_writer"),
        "_write_count": metadata.get("write_count"),
        "_lineage": metadata.get("lineage"),
    }
    shape = metadata.get("generation_shape")
    if shape is not None:
        file = folder / "generation.memmap"
        state["_generation"] = read_memmap(file, shape, metadata.get("generation_dtype"))
    if keeps_best and "rank_key" in metadata:
        ours = folder / max_value.STATE_FILE
        if isinstance(writer, max_value.TensorDictMaxValueWriter) and ours.exists():
            return read_torch(ours)
        file = folder / "current_top_values.memmap"
        ranks = read_memmap(file, metadata.get("shape"), metadata.get("dtype")).tolist()
        # As TorchRL's load leaves the writer's own count where there is none.
        count = state["_write_count"] or 0
        state |= {
            "_current_top_values": ranks,
            "_rank_key": metadata["rank_key"],
            "_write_count": count,
        }
    return state


def _check_lineage(lineage: Any, name: str) -> None:
    must(isinstance(lineage, str), name, "a string", lineage, TypeError)
    attempted(lambda: int(lineage, 16), name)


def stamps(room: Room) -> Rule:
    """Stamps of a table of as many slots: int64 ``[slots]``."""

    def rule(value: Any, _: str) -> None:
        _check_row(value, "stamps")
        slots = value.numel()
        must_equal = room.is_exact and room.slots <= _GROWING
        fits = slots == room.slots or (slots < room.slots and not must_equal)
        check_capacity("stamps", slots, room.slots, fits)
        for bound in torch.aminmax(value) if slots else ():
            integer(-1, _MOST_STAMP)(int(bound), "stamps")

    return rule


def _check_rank_key(key: Any, name: str) -> None:
    names = key if isinstance(key, (list, tuple)) else [key]
    are_strings = all(isinstance(name, str) for name in names)
    must(are_strings, "rank key", "a string or a tuple of them", key, TypeError)


def _check_ranks(ranks: Any, last: int) -> None:
    """Checks the pairs of rank and slot of a max-value writer, up to the slot ``last``."""
    must(isinstance(ranks, (list, tuple)), "ranks", "a list of pairs", type(ranks), TypeError)
    seen = set()
    for entry in ranks:
        is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2
        must(is_pair, "ranks", "pairs of rank and slot", entry)
        rank, slot = entry
        must(is_number(rank), "ranks", "numbers", rank, TypeError)
        if isinstance(slot, float) and slot.is_integer():  # as TorchRL's dump has it
            slot = int(slot)
        integer(0, last)(slot, "slots of ranks")
        if slot in seen:
            raise ValueError(f"The checkpoint's ranks must name a slot once: got {slot} again.")
        seen.add(slot)
