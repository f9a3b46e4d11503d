"""``python -m torchrl.data.replay_buffers.generations [-m] SCRIPT [ARG ...]``; see ``launch/``."""

from __future__ import annotations

import argparse
from pathlib import Path

from .launch.launch import run


def main() -> None:
    """Runs the script that the command line names."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Runs a script with the buffers and writers of torchrl.data meaning those that "
        "stamp their records, and with conditional priority updates. It ends with a line on stderr "
        "that tells what was guarded and how many priorities were stale.",
    )
    parser.add_argument("-m", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script, a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments")
    given = parser.parse_args()
    if not given.m and not Path(given.script).is_file():
        parser.error(f"SCRIPT must be a file: got {given.script}")
    run(given.script, given.arguments, is_module=given.m)


if __name__ == "__main__":
    main()
