"""Documentation that cannot drift: names, errors and hooks are listed, links lead somewhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import meshcore
from meshcore import errors, hookspecs
from meshcore.backend import Backend

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/README.md")],
)
REFERENCE = (DOCS / "reference.md").read_text()
ERRORS = (DOCS / "errors.md").read_text()

ERROR_CLASSES = sorted(
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.MeshcoreError)
)
HOOKS = sorted(
    name
    for name, value in vars(hookspecs).items()
    if getattr(value, f"{hookspecs.PROJECT_NAME}_spec", None) is not None
)
PARTS = [
    (cls.__name__, name)
    for cls in (
        meshcore.ChunkManager,
        meshcore.DeviceMesh,
        meshcore.AxisRoles,
        meshcore.DeviceMeshManager,
        meshcore.ChunkPlan,
        meshcore.ChunkLayout,
        meshcore.TransferProfile,
        meshcore.TensorRegistry,
    )
    for name, value in vars(cls).items()
    if not name.startswith("_")
    and (inspect.isroutine(value) or isinstance(value, property | classmethod))
]
VERBS = [name for name in vars(Backend) if not name.startswith("_")]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", [n for n in meshcore.__all__ if n not in ERROR_CLASSES])
def test_every_public_name_is_in_the_reference(name):
    assert re.search(rf"^\| `{name}[`(]", REFERENCE, re.M), f"docs/reference.md has no row {name}"


@pytest.mark.parametrize(("cls", "name"), PARTS)
def test_every_public_method_is_in_the_reference(cls, name):
    assert re.search(rf"`{name}[`(]", REFERENCE), f"docs/reference.md does not mention {cls}.{name}"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_of_a_backend_is_in_the_guide(name):
    guide = (DOCS / "writing-a-backend.md").read_text()
    assert re.search(rf"`{name}[`(]", guide)


def test_there_are_hooks():
    assert HOOKS == ["meshcore_backend_info", "meshcore_create_backend"]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_with_its_arguments(name):
    arguments = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    assert f"### `{name}({arguments})`" in REFERENCE


@pytest.mark.parametrize("name", [n for n in ERROR_CLASSES if n != "MeshcoreError"])
def test_every_error_is_documented_with_its_builtin(name):
    row = re.search(rf"^\| `{name}` \| `(\w+)` \| (.+) \|$", ERRORS, re.M)
    assert row, f"docs/errors.md has no row {name}"
    builtin = getattr(__import__("builtins"), row[1])
    assert issubclass(getattr(errors, name), builtin)
    assert len(row[2]) > 20


@pytest.mark.parametrize("name", ERROR_CLASSES)
def test_every_error_is_public(name):
    assert name in meshcore.__all__


@pytest.mark.parametrize("text", [REFERENCE, ERRORS], ids=["reference", "errors"])
def test_what_is_listed_exists(text):
    for name in re.findall(r"^\| `([A-Za-z_]\w*)", text, re.M):
        known = [meshcore, errors, meshcore.ChunkManager]
        assert any(hasattr(owner, name) for owner in known), f"{name} does not exist"


# --- links --------------------------------------------------------------------------------------


def anchors_of(path: Path) -> set[str]:
    """Anchors of a page's headings, as the usual renderers make them."""
    out = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        out.add(plain.strip().replace(" ", "-"))
    return out


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{relative(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors_of(there), f"{relative(page)} links to {target}"


def test_every_page_can_be_reached():
    index = (DOCS / "index.md").read_text() + (DOCS / "adr" / "README.md").read_text()
    for page in DOCS.rglob("*.md"):
        if page.name not in {"index.md", "README.md"}:
            assert page.name in index, f"no index links to {relative(page)}"
    assert "docs/index.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("adr/0*.md")), ids=relative)
def test_a_decision_has_its_four_parts(page):
    text = page.read_text()
    for part in ("**Context.**", "**Decision.**", "**Refused.**", "**Consequences.**"):
        assert part in text
    assert text.startswith(f"# {page.name[:4]}: ")


@pytest.mark.parametrize("fragment", sorted((ROOT / "changelog.d").iterdir()), ids=relative)
def test_changelog_fragments_are_named_by_issue_and_type(fragment):
    assert re.fullmatch(
        r"\d+\.(feature|bugfix|removal|doc|misc)(\.\d+)?\.md|\.gitkeep", fragment.name
    )
