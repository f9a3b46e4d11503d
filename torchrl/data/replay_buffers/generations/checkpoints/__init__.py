"""Saving, restoring and copying buffers so that no handle names a record that is not its own."""

from __future__ import annotations
