"""What the entries of a checkpoint must be, and the one function that walks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

# Raises a TypeError or a ValueError with the name unless the value is what it must be.
Rule = Callable[[Any, str], None]


def must(holds: bool, name: str, rule: str, got: Any, error: type[Exception] = ValueError) -> None:
    """Raises ``error``, which says what the entry ``name`` must be, unless that holds."""
    if not holds:
        raise error(f"The checkpoint's {name} must be {rule}: got {_told(got)}.")


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return value.__name__ if isinstance(value, type) else repr(value)


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Returns ``value``, which must be a mapping."""
    must(isinstance(value, Mapping), name, "a dict", type(value), TypeError)
    return value


def part(state: Mapping[str, Any], key: str, name: str) -> Any:
    """Returns an entry of a state, which must be there."""
    if key not in state:
        raise ValueError(
            f"The checkpoint's {name} must have {key!r}: got {sorted(map(str, state))}. Load it "
            "into a buffer that is built as the saved one was."
        )
    return state[key]


def check_entries(state: Any, name: str, rules: Mapping[str, Rule]) -> None:
    """Applies to each entry its rule; one whose name ends in ``?`` may be missing or None."""
    state = mapping(state, name)
    for key, rule in rules.items():
        if not key.endswith("?"):
            rule(part(state, key, name), key)
        elif state.get(key[:-1]) is not None:
            rule(state[key[:-1]], key[:-1])


def integer(low: int, high: int) -> Rule:
    """An integer from ``low`` to ``high``; a bool is none."""

    def rule(value: Any, name: str) -> None:
        must(type(value) is int, name, "an integer", value, TypeError)
        must(low <= value <= high, name, f"an integer from {low} to {high}", value)

    return rule


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(value: Any, name: str) -> None:
    """A finite number that is not negative, in a tensor or not."""
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    must(is_number(plain), name, "a number", value, TypeError)
    must(0 <= plain < float("inf"), name, "finite and not negative", plain)


def list_of(count: int, *kinds: type) -> Rule:
    """A list with an entry of one of the kinds for each of ``count`` members."""

    def rule(value: Any, name: str) -> None:
        is_list = isinstance(value, list) and all(isinstance(entry, kinds) for entry in value)
        told = " or ".join(kind.__name__ for kind in kinds)
        must(is_list, name, f"a list of {told}", value, TypeError)
        check_count(len(value), count)

    return rule


def check_count(saved: int, members: int) -> None:
    """Refuses a checkpoint of another number of members."""
    if saved != members:
        raise ValueError(f"The checkpoint has {saved} members: this ensemble has {members}.")


def check_capacity(what: str, saved: int, slots: int, fits: bool | None = None) -> None:
    """Refuses what was saved for another capacity; ``fits`` says whether, where they may differ."""
    if not (saved == slots if fits is None else fits):
        raise ValueError(
            f"The checkpoint has {what} for {saved} slots: this buffer has {slots}. Build the "
            "buffer with the capacity of the checkpoint."
        )


def check_same(what: str, saved: Mapping[Any, Any], own: Mapping[Any, Any]) -> None:
    """Compares two descriptions of tensors by name; three that differ are told."""
    names = sorted(saved.keys() | own.keys(), key=str)
    differing = [name for name in names if saved.get(name) != own.get(name)][:3]
    if differing:
        got, there = ({name: each.get(name) for name in differing} for each in (saved, own))
        raise ValueError(
            f"The checkpoint's {what} must have the names, shapes and dtypes of this buffer's: got "
            f"{_described(got)}, and there {_described(there)}. Load it into a new buffer."
        )


def _described(tensors: Mapping[Any, Any]) -> str:
    return ", ".join(
        f"{name!r}: {tuple(found[0])} of {found[1]}" if found else f"no {name!r}"
        for name, found in tensors.items()
    )


def attempted(load: Callable[[], Any], name: str) -> Any:
    """Returns what ``load`` returns, which leaves the buffer as it is; what it raises refuses."""
    try:
        return load()
    except Exception as error:
        raise ValueError(
            f"The checkpoint's {name} does not fit this buffer: {type(error).__name__}: {error}"
        ) from error


def is_known(owner: Any, saved: Any, name: str) -> bool:
    """Whether TorchRL or we know what ``owner`` loads: a state, or the folder of a dump.

    A user's own class may load anything. A state must be a dict.
    """
    is_dump = isinstance(saved, Path)
    if not is_dump:
        mapping(saved, name)
    load = type(owner).loads if is_dump else type(owner).load_state_dict
    return str(getattr(load, "__module__", "")).startswith("torchrl.")
