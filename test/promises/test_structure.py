"""The package stays a house that one can read: small files, one direction, short routes."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from common import CAPACITY, PER
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import generations

PACKAGE = Path(generations.__path__[0])
NAME = generations.__name__
# Each folder may import those before it.
FOLDERS = [
    *("layout", "processes", "core", "writers", "checkpoints", "buffers"),
    *("remote", "training", "launch"),
]

not_reached = pytest.mark.xfail(strict=True, reason="aimed at, and not reached yet")


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The name of a module within the package; that of the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}

# ------------------------------------------------------------------ sizes


def test_no_module_has_more_than_400_lines():
    sizes = {name: lines_of(path) for name, path in MODULES.items()}
    assert {name: lines for name, lines in sizes.items() if lines > 400} == {}


def test_no_class_has_more_than_30_methods():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    methods = {
        f"{name}.{node.name}": sum(isinstance(part, functions) for part in node.body)
        for name, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: number for name, number in methods.items() if number > 30} == {}


@pytest.mark.parametrize(
    ("part", "most"),
    [
        pytest.param(".", 6600, marks=not_reached),
        ("core", 1500),
        ("core/table.py", 300),
        ("__init__.py", 60),
    ],
)
def test_a_part_has_at_most_so_many_lines(part, most):
    path = PACKAGE / part
    assert sum(map(lines_of, path.rglob("*.py") if path.is_dir() else [path])) <= most


# ------------------------------------------------------------------ arrows


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module without those that only a type checker reads, and parts of texts."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for otherwise in child.orelse:
                yield from nodes_that_run(otherwise)
        else:
            yield from nodes_that_run(child)


def names_imported(module: str) -> Iterator[str]:
    """Full names that a module imports anywhere, and strings that can name a module of ours."""
    package = f"{NAME}.{module}".rstrip(".")
    if MODULES[module].name != "__init__.py":
        package = package.rpartition(".")[0]
    for node in nodes_that_run(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level]
            start = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield start
            yield from (f"{start}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As import_module() takes it, or within a table of names for it.
            text = re.sub(r"^\.(?=\w)", f"{NAME}.", node.value)
            if text != NAME:  # the name of the package is no import of it
                yield text


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The modules of ours that each module imports, also while it runs."""
    names = {NAME if not module else f"{NAME}.{module}": module for module in MODULES}
    return {
        module: {names[name] for name in names_imported(module) if name in names} - {module}
        for module in MODULES
    }


def test_the_arrows_are_found_wherever_they_stand():
    assert "core.table" in arrows()[""]
    assert "training.hooks" in arrows()[""]  # by import_module()
    assert "core.table" in arrows()["writers.ring"]


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(f"These import each other: {error.args[1]}")


def test_the_folders_import_in_one_direction():
    allowed = {folder: FOLDERS[: at + 1] for at, folder in enumerate(FOLDERS)}
    within = {module: module.partition(".")[0] for module in MODULES}
    assert {within[module] for module in MODULES if "." in module} == {*FOLDERS}
    wrong = [
        f"{module} -> {to}"
        for module, found in arrows().items()
        for to in found
        if "." in module and within[to] not in allowed[within[module]]
    ]
    assert wrong == []


# ------------------------------------------------------------------ routes


def entered(call: Callable[[], Any]) -> set[CodeType]:
    """The functions of ours that a call enters, traced in a thread of its own."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            codes.add(frame.f_code)

    def traced() -> None:
        sys.settrace(note)
        call()

    thread = threading.Thread(target=traced)
    thread.start()
    thread.join()
    return codes


def docstring_lines(path: Path) -> set[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def lines_read(codes: set[CodeType]) -> set[tuple[str, int]]:
    """The lines of functions, each once, without docstrings and empty ones."""
    found = set()
    for code in codes:
        lines, first = inspect.getsourcelines(code)
        skipped = docstring_lines(Path(code.co_filename))
        for number, text in enumerate(lines, first):
            if text.strip() and number not in skipped:
                found.add((code.co_filename, number))
    return found


def route(of: str) -> set[CodeType]:
    """What the second of two equal calls enters, on a full buffer of the plainest kind."""
    rb = generations.TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(CAPACITY), batch_size=4, track_generations=True
    )
    records = TensorDict({"id": torch.arange(CAPACITY)}, [CAPACITY])
    rb.extend(records)
    samples = []
    for _ in range(3):
        rb.extend(records)
        samples.append(rb.sample())
        samples[-1]["td_error"] = torch.ones(4)
        rb.update_tensordict_priority_if_present(samples[-1])
    calls = {
        "extend": lambda: rb.extend(records),
        "sample": rb.sample,
        "update": lambda: rb.update_tensordict_priority_if_present(samples[-1]),
    }
    return entered(calls[of])


def test_a_trace_sees_what_a_call_enters():
    assert "extend" in {code.co_name for code in route("extend")}


@not_reached
@pytest.mark.parametrize("of", ["extend", "sample", "update"])
def test_a_route_touches_at_most_five_files(of):
    files = {name_of(Path(code.co_filename)) for code in route(of)}
    assert len(files) <= 5, files


@pytest.mark.parametrize("of", [pytest.param("extend", marks=not_reached), "sample", "update"])
def test_a_route_has_at_most_350_lines(of):
    assert len(lines_read(route(of))) <= 350
