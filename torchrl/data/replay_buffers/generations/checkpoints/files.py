"""The files of a dump, read without a change to them: a RuntimeError says which is not whole."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file."""
    return _read(file, lambda: json.loads(file.read_text()))


def read_pickle(file: Path) -> Any:
    """Returns what TorchRL pickled; its own load unpickles it just so."""
    return _read(file, lambda: pickle.loads(file.read_bytes()))


def read_torch(file: Path) -> Any:
    """Returns what ``torch.save`` wrote: tensors and plain values, or it is refused."""
    return _read(file, lambda: torch.load(file, weights_only=True))


def _read(file: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        raise not_whole(f"{file.name} in {file.parent} can't be read: {error}.") from error


def not_whole(why: str) -> RuntimeError:
    """The error for a dump that is damaged."""
    return RuntimeError(f"The dump is not whole: {why}")


def inside(folder: Path, name: str) -> Path:
    """The file or folder that a dump names in its own folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise RuntimeError(f"The dump must name files inside of {folder}: got {name!r}.")
    return folder / path


def read_memmap(file: Path, shape: Any, dtype: Any) -> torch.Tensor:
    """Returns a copy of the tensor in a memory-mapped file; shape and dtype are as in JSON."""
    size, found = check_memmap(file, shape, dtype)
    if not size.numel():
        return torch.empty(size, dtype=found, device="cpu")
    content = bytearray(file.read_bytes()[: size.numel() * found.itemsize])
    return torch.frombuffer(content, dtype=found).reshape(size)


def check_memmap(file: Path, shape: Any, dtype: Any) -> tuple[torch.Size, torch.dtype]:
    """Returns the shape and the dtype in a file that is long enough: a load would lengthen it."""
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or not isinstance(found, torch.dtype):
        raise not_whole(
            f"{file.name} in {file.parent} has no shape and dtype: got {shape!r} and {dtype!r}."
        )
    size = torch.Size(shape)
    needed, there = size.numel() * found.itemsize, file.stat().st_size if file.is_file() else None
    if there is None or there < needed:
        raise not_whole(
            f"{file.name} in {file.parent} needs {needed} bytes: "
            f"{'it is gone' if there is None else f'got {there}'}."
        )
    return size, found


def check_tensordict(folder: Path) -> None:
    """Makes sure that every file of a memory-mapped tensordict is as long as it must be."""
    metadata = read_json(folder / "meta.json")
    if not isinstance(metadata, dict):
        raise not_whole(f"meta.json in {folder} is no dict.")
    for key, entry in metadata.items():
        if isinstance(entry, dict) and "dtype" in entry:
            file, shape = inside(folder, f"{key}.memmap"), entry.get("shape")
            if entry.get("is_nested"):  # its rows have shapes of their own, in a file of theirs
                check_memmap(folder / f"{key}.shape.memmap", shape, "int64")
                shape = []
            check_memmap(file, shape, entry["dtype"])
        elif isinstance(entry, dict) and "type" in entry:
            check_tensordict(inside(folder, key))
    for below in sorted(folder.iterdir()):
        is_of_a_stack = "stack_dim" in metadata and below.name.isdigit()
        if below.is_dir() and (is_of_a_stack or below.name == "_tensordict"):  # of a tensorclass
            check_tensordict(below)
