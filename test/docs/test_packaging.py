"""A wheel, an editable install and a link each add our package, and nothing else, to TorchRL."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torchrl

ROOT = Path(__file__).parents[2]
PACKAGE = Path("torchrl/data/replay_buffers/generations")
TORCHRL = Path(torchrl.__file__).parent


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: object, cwd: Path, python: Path | str = sys.executable) -> None:
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    command, *rest = arguments
    run(sys.executable, "-m", "pip", "--python", python, command, *offline, *rest, cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the working tree, since a build leaves files in it."""
    skipped = shutil.ignore_patterns(".*", "build", "dist", "outputs", "*.egg-info", "__pycache__")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "checkout", ignore=skipped)


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", folder, ".", cwd=checkout)
    (wheel,) = folder.iterdir()
    return wheel


def new_environment(folder: Path) -> Path:
    """The packages of a new environment that has TorchRL but not this project.

    TorchRL's tree is a copy, since an install writes into it. Everything else is linked.
    """
    venv.create(folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for path in TORCHRL.parent.iterdir():
        ours = path.name.startswith(("torchrl_generations", "__editable__"))
        if not ours and path not in (TORCHRL, TORCHRL.parent / "__pycache__"):
            (site_packages / path.name).symlink_to(path)
    ignored = shutil.ignore_patterns("generations")
    shutil.copytree(TORCHRL, site_packages / "torchrl", ignore=ignored)
    return site_packages


@pytest.fixture
def site_packages(tmp_path):
    return new_environment(tmp_path / "environment")


@pytest.fixture(scope="module")
def with_wheel(wheel, tmp_path_factory):
    """The packages of an environment that has the wheel."""
    site_packages = new_environment(tmp_path_factory.mktemp("with_wheel") / "environment")
    pip("install", wheel, cwd=site_packages, python=python_of(site_packages))
    return site_packages


def python_of(site_packages: Path) -> Path:
    return site_packages.parents[2] / "bin/python"


# What takes long to import is the same in each folder, and imported once.
IMPORTING = f"""
import os, sys
import tensordict
for cwd in sys.argv[1:]:
    if not os.fork():
        os.chdir(cwd)
        import {".".join(PACKAGE.parts)} as generations
        print(generations.__file__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def imported_from(site_packages: Path, *cwds: Path) -> list[Path]:
    """The folders that `import` takes our package from when Python starts in each of `cwds`."""
    printed = run(python_of(site_packages), "-c", IMPORTING, *cwds, cwd=cwds[0])
    return [Path(line).parent for line in printed.splitlines()]


def test_wheel_holds_our_package_only(wheel, checkout):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {
        path.relative_to(checkout).as_posix() for path in checkout.glob(f"{PACKAGE}/**/*.py")
    }
    assert f"{PACKAGE}/__init__.py" in modules
    assert held == modules | {f"{PACKAGE}/py.typed"}


def test_wheel_imports_from_anywhere(with_wheel, checkout, tmp_path):
    assert imported_from(with_wheel, checkout, tmp_path) == [with_wheel / PACKAGE] * 2


def test_editable_install_imports_from_anywhere(site_packages, checkout, tmp_path):
    pip("install", "--editable", checkout, cwd=tmp_path, python=python_of(site_packages))
    assert imported_from(site_packages, checkout, tmp_path) == [checkout / PACKAGE] * 2


def test_folder_linked_into_torchrl_imports_from_anywhere(site_packages, checkout, tmp_path):
    (site_packages / PACKAGE).symlink_to(checkout / PACKAGE)
    assert imported_from(site_packages, checkout, tmp_path) == [site_packages / PACKAGE] * 2


def test_sdist_brings_the_tests_and_they_pass_on_the_installed_wheel(
    with_wheel, checkout, tmp_path
):
    program = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    name = run(sys.executable, "-c", program, cwd=checkout).splitlines()[-1]
    with tarfile.open(checkout / "dist" / name) as sdist:
        sdist.extractall(tmp_path, filter="data")
    unpacked = tmp_path / name.removesuffix(".tar.gz")
    for folder in ("test", "docs/source", "benchmarks"):
        left_out = {"gallery", "generated", "__pycache__", "benchmark.csv"}
        for path in (checkout / folder).rglob("*"):
            if path.is_file() and not left_out & set(path.relative_to(checkout).parts):
                assert (unpacked / path.relative_to(checkout)).exists(), path
    shutil.rmtree(unpacked / "torchrl")  # so that nothing but the wheel can be tested

    tests = [
        f"test/{name}.py" for name in ("core/test_result", "core/test_trees", "processes/test_lock")
    ]
    printed = run(python_of(with_wheel), "-m", "pytest", "-q", *tests, cwd=unpacked)

    assert " passed" in printed
    assert imported_from(with_wheel, unpacked) == [with_wheel / PACKAGE]
