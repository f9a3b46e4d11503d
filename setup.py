"""Which packages to install. Everything else is in ``pyproject.toml``.

TorchRL owns every folder above ours, so nothing but our own package may be listed.
"""

from __future__ import annotations

from setuptools import find_namespace_packages, setup

setup(packages=find_namespace_packages(include=["torchrl.data.replay_buffers.generations*"]))
