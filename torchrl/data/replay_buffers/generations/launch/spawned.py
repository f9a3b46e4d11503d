"""The main module of a process that a launched script has spawned; see ``launch.py``.

The spawning process names it as its own main module, so that this one begins here. It then is the
script in every other way, as its main module would be without the launcher.
"""

from __future__ import annotations

if __name__ == "__mp_main__":
    __import__(f"{__package__}.launch", fromlist=["launch"]).become_script(globals())
