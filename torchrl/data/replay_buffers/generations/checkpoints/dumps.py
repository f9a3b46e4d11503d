"""Dumps that are whole or not there at all.

A dump is written into a folder inside of its place, with a manifest of names and sizes last. One
rename then declares it complete, and only after that its files take the place of the earlier
dump's, one by one; whoever comes later finishes that. So a process may be killed at any moment:
what loads is the earlier dump or the new one, and never a part. Files of others in the place stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "generations_manifest.json"
_INCOMING = ".generations_incoming"
_COMPLETE = ".generations_complete"
# What TorchRL's loads() can't do without.
_PARTS = ("storage", "writer", "buffer_metadata.json")


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Gives a new folder to dump into, which takes the place of an earlier dump at the end.

    Args:
        place (Path): the folder of the dump.
    """
    place.mkdir(exist_ok=True)
    finish(place)
    incoming = place / _INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    yield incoming
    write_manifest(incoming)
    for file in _files(incoming):  # a manifest must not reach the disk before what it lists
        with open(incoming / file, "rb") as opened:
            os.fsync(opened.fileno())
    os.rename(incoming, place / _COMPLETE)
    finish(place)


def finish(place: Path) -> None:
    """Moves a dump that is complete into its place, where that was interrupted."""
    complete = place / _COMPLETE
    if (complete / MANIFEST).exists():
        sizes = json.loads((complete / MANIFEST).read_text())
        for name in _listed(place).keys() - sizes.keys():
            (place / name).unlink(missing_ok=True)
        for name in sizes:
            if (complete / name).exists():  # else it is there already
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(complete / name, place / name)
        os.replace(complete / MANIFEST, place / MANIFEST)
    shutil.rmtree(complete, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """Lists the files below ``folder`` with their sizes."""
    sizes = {name: (folder / name).stat().st_size for name in _files(folder) if name != MANIFEST}
    written = folder / (MANIFEST + ".new")
    written.write_text(json.dumps(sizes, indent=1))
    os.replace(written, folder / MANIFEST)


def check(place: Path) -> None:
    """Makes sure that a dump is whole; one without a manifest is TorchRL's, and is believed.

    Raises:
        FileNotFoundError: if there is no dump.
        RuntimeError: if a file is missing, has another size than when it was dumped, or is no JSON
            where it must be.
    """
    for part in _PARTS:
        if not (place / part).exists():
            raise FileNotFoundError(f"There is no whole dump in {place}: {part} is missing.")
    listed = _listed(place)
    for name, size in listed.items():
        file = place / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            raise RuntimeError(
                f"The dump in {place} is not whole: {name} had {size} bytes and has "
                f"{'gone' if found is None else found}."
            )
    # Only the dump's own files: there may be others, and what an interrupted dump left behind.
    for name in listed or ["buffer_metadata.json", *_below(place, "[!.]*/*.json")]:
        if not name.endswith(".json"):
            continue
        try:
            json.loads((place / name).read_text())
        except ValueError as error:
            raise RuntimeError(
                f"The dump in {place} is not whole: {name} is no JSON ({error})."
            ) from error


def _listed(place: Path) -> dict[str, int]:
    manifest = place / MANIFEST
    return json.loads(manifest.read_text()) if manifest.exists() else {}


def _files(folder: Path) -> list[str]:
    return [name for name in _below(folder, "**/*") if not (folder / name).is_dir()]


def _below(folder: Path, pattern: str) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.glob(pattern))
