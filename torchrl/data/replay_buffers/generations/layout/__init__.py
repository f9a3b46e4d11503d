"""What an index names: slots, cells, handles. Imports nothing of ours."""

from __future__ import annotations
