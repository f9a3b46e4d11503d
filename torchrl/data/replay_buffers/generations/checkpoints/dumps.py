"""Dumps that are one whole, for readers and dumpers of several processes.

A dumper writes into a folder of its own inside of the place, with a manifest of names and sizes
last. One rename declares that folder complete, and only then do its files take the place of the
earlier dump's, one by one. Whoever is killed on the way leaves the earlier dump or the new one:
the next dumper finishes what it finds, and a reader that comes first sees through it.

The kernel's lock on the place itself (``flock``, which needs no file and no right to write) keeps
a dumper that moves files apart from all others, and readers from dumpers. It is taken before any
table's lock. Files of others in the place stay, and no reader of a dump sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .files import not_whole, read_json

try:
    import fcntl
except ImportError:  # Windows, where a storage is for one process
    fcntl = None  # type: ignore[assignment]

MANIFEST = "generations_manifest.json"
_NEW_MANIFEST = MANIFEST + ".new"
# What stands in a place while a dump is made: never part of a dump.
_INCOMING = ".generations_incoming."
_COMPLETE = ".generations_complete"
# What TorchRL's loads() can't do without.
_PARTS = ("storage", "writer", "buffer_metadata.json")
# The size in the manifest of a place that is being rewritten.
_UNFINISHED = -1

# The locks that this process holds: by descriptor, the thread that took it and the
# folder's device and inode.
_held: dict[int, tuple[int, int, int]] = {}


def _reset_in_child() -> None:
    """Leaves the locks to the parent: a child that lives on would keep them when it dies."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_reset_in_child)


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Gives a new folder to dump into, which takes the place of an earlier dump at the end.

    If the block or anything up to the one rename that declares the dump complete fails, the
    earlier dump stays and nothing is left behind. What fails after it (a move) is finished by the
    next dump; the new dump can be loaded all the same. Hold no table's lock here.

    Raises:
        FileNotFoundError: if the place has no parent.
        OSError: if the disk is full, the file system has no ``flock``, and so on.
        RuntimeError: if an earlier manifest there names files that are not inside of the place, if
            something else is in the way, or if this thread is in a load or a dump of this place.
    """
    was_there = place.exists()
    with contextlib.ExitStack() as alive:
        incoming = _new_incoming(place, alive)
        try:
            yield incoming
            write_manifest(incoming)
            _sync(incoming, *incoming.rglob("*"))
            with _locked(place, exclusive=True):
                _finish(place)
                _check_room(place, _listed(incoming))
                os.rename(incoming, place / _COMPLETE)
                _sync(place)
                _finish(place)
        except BaseException:
            shutil.rmtree(incoming, ignore_errors=True)  # the next dumper removes what is left
            if not was_there:
                with contextlib.suppress(OSError):  # not empty: others have come meanwhile
                    place.rmdir()
            raise


@contextlib.contextmanager
def rewriting(place: Path) -> Iterator[Path]:
    """Gives ``place`` itself to dump into, for records whose own files are in it.

    Nothing else is read or dumped there meanwhile. A kill leaves no whole dump.
    """
    with _locked(place, exclusive=True):
        _finish(place)
        _write(place / MANIFEST, {_PARTS[-1]: _UNFINISHED})
        yield place
        write_manifest(place)


@contextlib.contextmanager
def opened(place: Path, *, directly: bool = False) -> Iterator[Path]:
    """Gives a folder that holds one whole dump, which does not change inside of the block.

    It is a temporary one of links to the files of the manifest, so that nothing else is read; of a
    dump without a manifest, TorchRL's, it is the place itself, as with ``directly`` for a storage
    whose own files are there. Nothing in the place is written. Dumps into it wait for the end of
    the block. Hold no table's lock when you enter.

    Raises:
        FileNotFoundError: if there is no dump.
        OSError: if the file system has no ``flock``.
        RuntimeError: if a file is missing or has another size than when it was dumped, if the
            manifest names files that are not inside of the place, or if this thread is in a dump
            of this place.
    """
    if not place.is_dir():
        raise FileNotFoundError(f"There is no whole dump in {place}: it is no folder.")
    with _locked(place, exclusive=False), contextlib.ExitStack() as overlay:
        complete = place / _COMPLETE
        is_pending = (complete / MANIFEST).exists()
        listed = _listed(complete if is_pending else place)
        files = {name: place / name for name in listed}
        if is_pending:  # a move that was interrupted: some files are here, some are there
            files.update({name: complete / name for name in listed if (complete / name).exists()})
        _check_sizes(place, files, listed)
        folder = place
        if listed and (is_pending or not directly):
            made = tempfile.TemporaryDirectory(prefix="generations_")
            folder = Path(overlay.enter_context(made))
            for name, file in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(file.resolve())
        for part in _PARTS:
            if not (folder / part).exists():
                raise FileNotFoundError(f"There is no whole dump in {place}: {part} is missing.")
        yield folder


def write_manifest(folder: Path) -> None:
    """Lists the files below ``folder`` with their sizes."""
    below = [file for file in sorted(folder.rglob("*")) if not file.is_dir()]
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in below}
    _write(folder / MANIFEST, {n: size for n, size in sizes.items() if not _is_control(n)})


def _write(manifest: Path, sizes: dict[str, int]) -> None:
    written = manifest.with_name(_NEW_MANIFEST)
    written.write_text(json.dumps(sizes, indent=1))
    _sync(written)
    os.replace(written, manifest)


# ------------------------------------------------------------------ dumpers


def _new_incoming(place: Path, alive: contextlib.ExitStack) -> Path:
    """Returns a new folder in the place, locked for as long as its dumper lives."""
    while True:
        place.mkdir(exist_ok=True)
        try:
            with _locked(place, exclusive=True):
                _listed(place)  # refuses a manifest of names that lead out, before the work
                _finish(place)
                for left in place.glob(_INCOMING + "*"):
                    _remove_if_dead(left)
                incoming = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=place))
                alive.enter_context(_locked(incoming, exclusive=True, wait=False))
                return incoming
        except FileNotFoundError:
            if place.exists():
                raise
            # Another dumper made the place, failed, and took it away again.


def _remove_if_dead(incoming: Path) -> None:
    """Removes what a dumper has left, unless it is alive and holds its own folder's lock."""
    if incoming.is_symlink() or not incoming.is_dir():
        incoming.unlink()
        return
    with contextlib.suppress(BlockingIOError), _locked(incoming, exclusive=True, wait=False):
        shutil.rmtree(incoming)


def _finish(place: Path) -> None:
    """Moves a dump that is complete into its place, where that was interrupted. Under the lock."""
    complete = place / _COMPLETE
    if not complete.exists():
        return
    if (complete / MANIFEST).exists():
        new, old = _listed(complete), _listed(place)
        for name in old.keys() - new.keys():
            (place / name).unlink(missing_ok=True)
            _remove_empty(place, (place / name).parent)
        for name in new:
            if (complete / name).exists():  # else it is there already
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(complete / name, place / name)
        _sync(*{(place / name).parent for name in new})
        os.replace(complete / MANIFEST, place / MANIFEST)
        _sync(place)
    shutil.rmtree(complete)


def _remove_empty(place: Path, folder: Path) -> None:
    """Removes folders that are empty now: TorchRL takes some for a part of the dump."""
    while folder != place and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _check_room(place: Path, names: dict[str, int]) -> None:
    """Makes sure that every file can be moved, before the first one is."""
    replaced = {place / name for name in _listed(place)}
    for name in names:
        _check_inside(place, name)
        file = place / name
        above = [folder for folder in file.parents if place in folder.parents]
        taken = [folder for folder in above if folder.exists() and not folder.is_dir()]
        if file.is_dir():
            taken += [part for part in file.rglob("*") if not part.is_dir()] or [file]
        if not replaced.issuperset(taken):
            raise RuntimeError(
                f"dumps() can't put {name} into {place}: something that is not of an earlier dump "
                "is in the way."
            )


def _sync(*paths: Path) -> None:
    """Makes files and folders reach the disk, so that no later step overtakes them there."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ------------------------------------------------------------------ readers


def _check_sizes(place: Path, files: dict[str, Path], sizes: dict[str, int]) -> None:
    for name, file in files.items():
        found = file.stat().st_size if file.is_file() else None
        if sizes[name] == _UNFINISHED:
            raise not_whole(f"it was interrupted in {place}.")
        if found != sizes[name]:
            now = "is gone" if found is None else f"has {found}"
            raise not_whole(f"{name} in {place} had {sizes[name]} bytes and {now}.")


# ------------------------------------------------------------------ names and locks


def _listed(folder: Path) -> dict[str, int]:
    """The names and sizes of the manifest in ``folder``; empty where there is none.

    Raises:
        RuntimeError: if it is garbled, or if a name leads out of the folder.
    """
    file = folder / MANIFEST
    if not file.exists():
        return {}
    listed = read_json(file)
    if not isinstance(listed, dict) or not all(type(size) is int for size in listed.values()):
        raise not_whole(f"{MANIFEST} in {folder} has no names and sizes.")
    for name in listed:
        _check_inside(folder, name)
    return listed


def _check_inside(folder: Path, name: str) -> None:
    """Refuses a name that is not one of a plain file below ``folder``."""
    parts = PurePosixPath(name).parts
    is_plain = "\0" not in name and name == "/".join(parts) and ".." not in parts and parts
    if not is_plain or name.startswith("/") or _is_control(name):
        raise RuntimeError(
            f"The manifest in {folder} must name files inside of the folder: got {name!r}."
        )
    inside, file = folder.resolve(), (folder / name).resolve()
    if (folder.is_symlink() and folder.name == _COMPLETE) or inside not in file.parents:
        raise RuntimeError(
            f"The manifest in {folder} must name files inside of the folder: {name!r} is a link "
            f"to {file}."
        )


def _is_control(name: str) -> bool:
    first = name.split("/")[0]
    return first in (_COMPLETE, MANIFEST, _NEW_MANIFEST) or first.startswith(_INCOMING)


@contextlib.contextmanager
def _locked(folder: Path, *, exclusive: bool, wait: bool = True) -> Iterator[None]:
    """Holds the kernel's lock on a folder, on a platform that has it."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        holder = _held[descriptor] = (threading.get_ident(), found.st_dev, found.st_ino)
        if wait and list(_held.values()).count(holder) > 1:  # it would wait for itself
            raise RuntimeError(
                f"A load or a dump of this thread in {folder} is under way: in a signal handler, "
                "dump into another folder."
            )
        how = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
        _flock(folder, descriptor, how)
        yield
    finally:
        # A child that forked before the descriptor was noted shares the hold: unlock by name.
        if _held.pop(descriptor, None) is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _flock(folder: Path, descriptor: int, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        raise
    except OSError as error:
        why = "dumps() and loads() need flock() there; torch.save(rb.state_dict(), file) does not"
        raise OSError(error.errno, f"{error.strerror}: {why}", str(folder)) from error
