"""TorchRL's writers, which advance the stamps of the slots that they write, before the data."""

from __future__ import annotations
