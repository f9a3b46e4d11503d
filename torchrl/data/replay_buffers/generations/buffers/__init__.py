"""TorchRL's buffers over a table: writes, samples and updates as single steps under its lock."""

from __future__ import annotations
