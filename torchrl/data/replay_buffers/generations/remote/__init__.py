"""Buffers in another process: in a Ray actor, or behind ``torch.distributed.rpc``."""

from __future__ import annotations
