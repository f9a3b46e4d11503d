"""What training loops use: trainer hooks, logs and plots of the updates, Hydra configurations."""

from __future__ import annotations
