"""How the site is built: ``make docs``."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes into the home folder
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TQDM_DISABLE", "1")  # else a page has each step of a progress bar

HERE = Path(__file__).parent
OURS = "torchrl.data.replay_buffers.generations"

project = "torchrl-generations"
author = "The torchrl-generations authors"
project_copyright = author
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
# The gallery reads the tutorials, and writes pages of them next to here.
exclude_patterns = ["tutorials"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "torchrl-generations"
html_show_sourcelink = False
html_copy_source = False

autosummary_generate = True
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False

# Every reference into this package has to resolve. Those to other packages' names stay plain text:
# there is no network in the build to look them up.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", rf"(?!{OURS})(torch|torchrl|tensordict|ray|concurrent|multiprocessing)\..*"),
    (r"py:class", r"optional|Writer|TensorDictBase|StorageEnsemble|SamplerEnsemble|CSVLogger"),
    (r"py:meth", r"loads|clients|stats"),  # of TorchRL's RayReplayBuffer
    # What this package does not export: bases in its modules, and names in their docstrings.
    (r"py:class", rf"{OURS}\.[a-z_.]+\.\w+"),
    (r"py:.*", r"(StorageLock|Grid|Cells)(\.\w+)?"),
    (r"py:class", r"abc\.TensorClass_nocast"),
]


def gallery_argv(gallery_conf: dict[str, Any], script_vars: dict[str, Any]) -> list[str]:
    """Options of a tutorial in the gallery: its figure goes beside the built site.

    The gallery runs a script as a main module without a file. A process that the script spawns
    needs the file to find the script's functions.
    """
    script = script_vars["example_globals"]
    script["__spec__"], script["__file__"] = None, script_vars["src_file"]
    folder = Path(gallery_conf["gallery_dirs"]) / "figures"
    return ["--output", str(HERE / folder)]


# Sphinx cannot keep a function of this file between two builds, and says so.
suppress_warnings = ["config.cache"]

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "reset_argv": gallery_argv,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
}


def write_benchmark_table() -> None:
    """Turns ``guides/benchmark.json``, a copy of what ``make bench`` wrote, into a table."""
    rows = json.loads((HERE / "guides/benchmark.json").read_text())
    with (HERE / "guides/benchmark.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["", "us a call", "ours", "TorchRL again", "TorchRL's tracking"])
        for row in rows:
            ratios = (row[key] for key in ("ratio", "control", "tracked"))
            shown = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            table.writerow([row["name"].replace("_", " "), f"{row['us']:.1f}", *shown])


def skip_member(
    app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Leaves out what TorchRL documents itself, and the calls that only take an RRef, too."""
    function = getattr(member, "fget", member)
    function = getattr(function, "__func__", function)
    doc = getattr(function, "__doc__", None) or ""
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(OURS) or "``RRef``, too" in doc:
        return True
    return None


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    write_benchmark_table()
    app.connect("autodoc-skip-member", skip_member)
