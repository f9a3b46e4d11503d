"""The site builds without a warning, names what is public, and its examples run."""

from __future__ import annotations

import ast
import doctest
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchrl.data.replay_buffers import generations

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs/source"
GENERATED = ("gallery", "generated")
PAGES = [
    page.relative_to(SOURCE)
    for page in sorted(SOURCE.rglob("*.rst"))
    if not {*GENERATED, "_templates", "tutorials"} & set(page.parts)
]
PACKAGE = Path(generations.__path__[0])


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_examples_of_a_page_run(page):
    outcome = doctest.testfile(
        str(SOURCE / page), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert outcome.failed == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, with the tutorials as pages but not run."""
    pytest.importorskip("sphinx_gallery")
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("docs")
    source = folder / "source"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns(*GENERATED))
    options = ("-n", "-W", "--keep-going", "-q", "-D", "plot_gallery=0")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, source, folder / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def documented(site):
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    return {name for kind in inventory for name in inventory[kind]}


def test_every_reference_resolves_and_every_public_name_has_an_entry(site):
    names = documented(site)
    for name in generations.__all__:
        assert f"{generations.__name__}.{name}" in names


def test_every_conditional_call_has_an_entry_in_every_buffer(site):
    names = documented(site)
    for buffer in ("ReplayBuffer", "TensorDictPrioritizedReplayBuffer", "ReplayBufferEnsemble"):
        for call in ("update_priority_if_present", "update_tensordict_priority_if_present"):
            assert f"{generations.__name__}.{buffer}.{call}" in names


def test_no_link_in_the_site_is_broken(site):
    pages = {page.resolve(): page.read_text() for page in site.rglob("*.html")}
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    broken = [
        (page.name, link)
        for page, text in pages.items()
        for link in re.findall(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]+)"', text)
        if not re.match(r"\w+:|//", link) and not _leads_somewhere(page, link, ids)
    ]
    assert len(pages) > 20
    assert broken == []


def _leads_somewhere(page, link, ids):
    path, _, anchor = link.partition("#")
    target = (page.parent / path.partition("?")[0]).resolve() if path else page
    if not target.exists():
        return False
    return not anchor or target not in ids or anchor in ids[target]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_a_page_of_the_repository_links_to_exists(page):
    links = re.findall(r"\]\(([^)#]+)\)", " ".join((ROOT / page).read_text().split()))
    files = [link for link in links if not link.startswith("https://")]
    assert [link for link in files if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_each_test_that_a_page_names_exists(page):
    named = set(re.findall(r"`(test_\w+)`", (SOURCE / page).read_text()))
    defined = {
        name
        for file in (ROOT / "test").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named - defined == set()


def text_of(node):
    """A string of the code, with three dots in place of values; None if it is none."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        return "".join(parts)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("{}", "...")
    return None


NODES = [node for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
RAISED = {
    text_of(node.args[-1])
    for node in NODES
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error") and node.args
} - {None}
NOT_FOR_USERS = {
    "module ... has no attribute ...",  # Python's own words
    "got ...",  # caught where it is raised
}
QUOTED = re.findall(r'^\w+: "(.*)"$', (SOURCE / "reference/errors.rst").read_text(), re.MULTILINE)


def pattern_of(quoted):
    parts = map(re.escape, quoted.removesuffix(" ...").split("..."))
    return re.compile(".*".join(parts), re.DOTALL)


def test_each_error_of_the_page_is_one_that_the_package_raises():
    texts = [text for text in map(text_of, NODES) if text is not None]
    assert len(QUOTED) > 100
    assert [q for q in QUOTED if not any(map(pattern_of(q).search, texts))] == []


def test_each_error_that_the_package_raises_stands_on_the_page():
    patterns = [pattern_of(quoted) for quoted in QUOTED]
    assert len(RAISED) > 100
    missing = {text for text in RAISED if not any(each.search(text) for each in patterns)}
    assert missing == NOT_FOR_USERS


def test_each_test_that_a_guide_names_is_there():
    tests = "".join(file.read_text() for file in SOURCE.parents[1].glob("test/**/test_*.py"))
    named = [
        name
        for page in SOURCE.glob("guides/*.rst")
        for name in re.findall(r"``(test_\w+)``", page.read_text())
    ]
    assert len(named) >= 8
    assert [name for name in named if f"def {name}(" not in tests] == []
