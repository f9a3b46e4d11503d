"""What a table stands on: a lock, and memory that processes share. Imports nothing of ours."""

from __future__ import annotations
