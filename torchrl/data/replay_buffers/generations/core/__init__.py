"""The idea: a counter per slot, and a priority update that compares it. Begin with ``table.py``."""

from __future__ import annotations
