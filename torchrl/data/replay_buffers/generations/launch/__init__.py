"""Runs a script that knows nothing of stamps on these classes."""

from __future__ import annotations
