"""Every example in a docstring runs, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
from torchrl.data.replay_buffers import generations

MODULES = [module.name for module in pkgutil.iter_modules(generations.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    module = importlib.import_module(f"{generations.__name__}.{name}")
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


@pytest.mark.parametrize("name", generations.__all__)
def test_each_public_name_has_an_example(name):
    documented = getattr(generations, name)
    module = importlib.import_module(documented.__module__)
    examples = (documented.__doc__ or "") + (module.__doc__ or "")
    assert ">>>" in examples
