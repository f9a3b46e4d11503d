"""Runs a script that knows nothing of stamps on the classes of this package.

``python -m torchrl.data.replay_buffers.generations SCRIPT [ARG ...]`` runs it here, with the names
that ``names.py`` installs, in its process and in those that it spawns or forks.

A spawned process begins by importing its parent's main module. For a script run here this is
``spawned.py``, which installs the names before it runs the script in its own turn. Each process
leaves a report behind, and the first one sums them up in its last line. Ray's actors and the other
ends of RPC are guarded, too, but are no children: the line leaves them out.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from multiprocessing import util
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from .names import install
from .report import REPORT, Report, summary

# How a spawned process knows the script and where to leave its report.
VARIABLE = "TORCHRL_GENERATIONS_LAUNCH"
SPAWNED = f"{__package__}.spawned"

# Whoever ends at a negative priority does so when the process has waited for its children.
LAST = -100


class Launch(NamedTuple):
    """What is run: what a process tells those that it spawns, in the environment."""

    script: str  # the absolute path of a file, or the name of a module
    is_module: bool
    reports: str  # the folder where each process leaves its report

    @classmethod
    def told(cls) -> Launch:
        """Returns what the process that spawned this one has told, or this one itself."""
        return cls(*json.loads(os.environ[VARIABLE]))

    def code(self) -> tuple[CodeType, str, str | None]:
        """Returns the code, the file that has it, and the package that relative imports mean.

        Raises:
            ImportError: if there is no module of that name.
        """
        if not self.is_module:
            with io.open_code(self.script) as file:
                code = compile(file.read(), self.script, "exec", dont_inherit=True)
            return code, self.script, None
        spec = importlib.util.find_spec(self.script)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{self.script}.__main__")
        loader: Any = None if spec is None else spec.loader
        if spec is None or loader is None or spec.origin is None:
            raise ImportError(f"-m needs a module that can be run: got {self.script!r}.")
        return loader.get_code(spec.name), spec.origin, spec.parent


def run(script: str, arguments: list[str], is_module: bool = False) -> None:
    """Runs a script as the main module, on our classes; its children run on them too.

    When the process ends, and its children have, it prints the :func:`summary` to stderr.

    Args:
        script (str): the path of the file, or the name of the module.
        arguments (list of str): what the script finds in ``sys.argv`` after its own name.
        is_module (bool): whether it is a module, as for Python's own ``-m``. Defaults to False.

    Raises:
        ImportError: if there is no module of that name.
    """
    path = script if is_module else str(Path(script).absolute())
    launch = Launch(path, is_module, tempfile.mkdtemp(prefix="torchrl_generations_"))
    os.environ[VARIABLE] = json.dumps(launch)
    outcome = {"failed": True}
    util.Finalize(None, _finish, args=(launch.reports, outcome), exitpriority=LAST)
    _prepare()

    main = ModuleType("__main__")
    main.__spec__ = importlib.util.find_spec(SPAWNED)  # what a spawned process begins with
    if not is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(path).parent)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    try:
        _execute(launch, vars(main))
    except SystemExit as exited:
        outcome["failed"] = exited.code not in (None, 0)
        raise
    outcome["failed"] = False


def become_script(namespace: dict[str, Any]) -> None:
    """Runs the script in the main module of a spawned process.

    Args:
        namespace (dict): the module's.
    """
    _prepare()
    _begin_child(REPORT)
    namespace.pop("annotations", None)
    _execute(Launch.told(), namespace)


def _prepare() -> None:
    """Readies this process and the children that it will fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=REPORT.begin)
    util.register_after_fork(REPORT, _begin_child)
    install()


def _execute(launch: Launch, namespace: dict[str, Any]) -> None:
    code, file, package = launch.code()
    if launch.is_module:
        sys.argv[0] = file
    namespace.update(__file__=file, __package__=package, __cached__=None)
    exec(code, namespace)


def _begin_child(report: Report) -> None:
    """Announces a report of this process, and writes it when the process ends."""
    file = Path(Launch.told().reports) / f"{os.getpid()}.json"
    file.touch()

    def write() -> None:
        file.write_text(json.dumps(report.as_dict()))

    util.Finalize(None, write, exitpriority=LAST)


def _finish(reports: str, outcome: dict[str, bool]) -> None:
    """Prints the last line of the first process."""
    children = [file.read_text() for file in Path(reports).iterdir()]
    shutil.rmtree(reports)
    told = [json.loads(text) for text in children if text]
    silent = len(children) - len(told)
    line = summary([REPORT.as_dict(), *told], silent, **outcome)
    sys.stderr.write(f"\n{line}\n")  # on a line of its own, whatever progress bar was there
