"""How a buffer class is asked for in another process: ``service_backend=...`` and ``as_remote()``.

The mix-in of our buffers takes both from here. What is built on buffers registers itself when it is
imported, so that no buffer has to import it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Service(NamedTuple):
    """What a service backend makes of a buffer class."""

    # Returns what stands here for a buffer there, of the class, its arguments and the options.
    build: Callable[..., Any]
    in_actor: Callable[[type], type]  # returns the class that runs there


# By the name of the backend. TorchRL knows one, "ray".
SERVICES: dict[str, Service] = {}


@classmethod  # type: ignore[misc]  # of the mix-in
def service_class(
    cls: Any,
    service_backend: str,
    *args: Any,
    service_backend_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Builds what ``service_backend`` asks for; TorchRL's metaclass calls it."""
    service = SERVICES.get(service_backend)
    build = (
        partial(_torchrls(cls, "_ServiceClass", service_class), service_backend)
        if service is None
        else partial(service.build, cls)
    )
    return build(*args, service_backend_options=dict(service_backend_options or {}), **kwargs)


@classmethod  # type: ignore[misc]  # of the mix-in
def as_remote(cls: Any, remote_config: dict[str, Any] | None = None) -> Any:
    """Makes a Ray actor class of the buffer; see :meth:`torchrl.data.ReplayBuffer.as_remote`.

    An actor that Ray starts again after a crash knows no handle of before, until a checkpoint is
    loaded (*No resurrection*, design notes).
    """
    return _torchrls(SERVICES["ray"].in_actor(cls), "as_remote", as_remote)(remote_config)


def _torchrls(cls: type, name: str, ours: Any) -> Any:
    """The class method that stands behind the mix-in's, which is ``ours``."""
    mixin = next(each for each in cls.__mro__ if vars(each).get(name) is ours)
    return getattr(super(mixin, cls), name)
