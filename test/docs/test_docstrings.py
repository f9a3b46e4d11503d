"""Every example in a docstring runs, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
from torchrl.data.replay_buffers import generations

PREFIX = f"{generations.__name__}."
MODULES = [
    module.name.removeprefix(PREFIX)
    for module in pkgutil.walk_packages(generations.__path__, PREFIX)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    module = importlib.import_module(PREFIX + name)
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


@pytest.mark.parametrize("name", generations.__all__)
def test_each_public_name_has_an_example(name):
    documented = getattr(generations, name)
    module = importlib.import_module(documented.__module__)
    examples = (documented.__doc__ or "") + (module.__doc__ or "")
    assert ">>>" in examples
