"""A while in which this process is as that of a launched script."""

from __future__ import annotations

import contextlib
import sys

import torchrl.data
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers.generations import ReplayBuffer
from torchrl.data.replay_buffers.generations.buffers.services import SERVICES
from torchrl.data.replay_buffers.generations.launch import names


@contextlib.contextmanager
def installed():
    """Installs the names of the launcher, and undoes it."""
    ours = [cls.__name__ for cls in (*names.BUFFERS, *names.WRITERS)]
    places = [(module, name) for module in (torchrl.data, torchrl_buffers) for name in ours]
    meant = [getattr(*place) for place in places]
    metaclasses = [type(cls) for cls in names.BUFFERS]
    modules = [
        module
        for module in sys.modules.values()
        if module.__name__.startswith(f"{torchrl_buffers.__name__}.generations")
        and vars(module).get("torchrl_buffers") is torchrl_buffers
    ]
    bases, service = ReplayBuffer.__bases__, SERVICES["ray"]
    names.install()
    try:
        yield
    finally:
        for place, stock in zip(places, meant, strict=True):
            setattr(*place, stock)
        for module in modules:
            module.torchrl_buffers = torchrl_buffers
        ReplayBuffer.__bases__ = bases
        for cls, metaclass in zip(names.BUFFERS, metaclasses, strict=True):
            cls.__class__ = metaclass
        SERVICES["ray"] = service
