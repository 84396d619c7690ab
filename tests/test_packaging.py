"""What is shipped, under which names, and which file may import which."""

import ast
import importlib.util
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gramfx

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("gramfx/*.py"), *ROOT.glob("gramfx/*/*.py")])

#: Lowest first. A file imports only from layers below its own, or from its own, never in a circle.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "axes", "constants", "forms", "source"),
    ("terms", "machine", "devices"),
    ("torch_compat", "align", "plan", "pairwise_pieces", "pairwise_tiles"),
    (
        "recurrence_kernels",
        "trials",
        "distributed",
        "pairwise_aten",
        "pairwise_kernels",
        "pairwise_mend",
        "cuda_compat",
    ),
    ("functions",),
    ("recurrence", "pairwise_launch"),
    ("pairwise",),
    ("recurrent", "nested"),
    ("tree", "discovery", "graph", "arrays", "substitutes", "ragged"),
    ("factors", "sketch", "provenance", "program", "readings", "rules"),
    ("attributes",),
    ("fused",),
    ("emit", "uses", "captured", "memory"),
    ("ops", "cost", "fallback", "export", "tracing", "sized"),
    ("following",),
    ("planning",),
    ("gramians", "eager", "regimes", "measure"),
    ("agreement",),
    ("capture",),
    ("passes",),
    ("baseline", "gradients"),
    ("fitting",),
    ("pipeline", "view"),
    ("artifacts",),
    ("runtime", "regions"),
    ("kept",),
    ("api", "autograd"),
    ("jacobian", "cross"),
    ("inside", "engine"),
    ("backend",),
    ("",),
    ("cli",),
    ("__main__",),
)


def settings() -> dict[str, object]:
    """The setuptools table."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def test_packages_match_the_folders() -> None:
    """No folder with Python files is left out of the wheel."""
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert settings()["packages"] == sorted(folders)


def test_passes_is_linked_not_copied() -> None:
    """One folder, under one name."""
    link = ROOT / "gramfx" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")
    assert settings()["package-dir"] == {"gramfx": "gramfx", "gramfx.passes": "passes"}


@pytest.mark.parametrize("name", ["passes", "other.passes"])
def test_passes_refuses_other_names(name: str) -> None:
    """A second copy of the passes under another name would have classes of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "passes" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"gramfx\.passes"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_public_names() -> None:
    """What ``import gramfx`` offers is what it lists, and each has a docstring."""
    assert {"STAGES", "Stage", "Step", "transform"} <= set(gramfx.__all__)
    for name in gramfx.__all__:
        public = getattr(gramfx, name)
        assert isinstance(public, tuple) or public.__doc__


def test_version_is_the_same_everywhere() -> None:
    """In the package, its metadata, and the changelog."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert gramfx.__version__ == project["version"]
    assert f"## {gramfx.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_importing_gramfx_needs_no_command_line() -> None:
    """The library loads neither typer, rich nor scikit-learn."""
    code = "import sys, gramfx; print(*{'typer', 'rich', 'sklearn', 'gramfx.cli'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


def module_of(path: Path) -> str:
    """``gramfx.rules.table`` for gramfx/rules/table.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in SOURCES}


def imports_of(path: Path) -> set[str]:
    """The modules of gramfx that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = full & MODULES
            found |= submodules or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in MODULES}


def part_of(module: str) -> str:
    """The first name below gramfx, ``""`` for gramfx itself: what a layer lists."""
    return [*module.split("."), ""][1]


def test_every_file_has_a_layer() -> None:
    """And no layer lists a file that is gone."""
    listed = [part for layer in LAYERS for part in layer]
    assert len(listed) == len(set(listed))
    assert set(listed) == {part_of(module) for module in MODULES}


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_point_down(path: Path) -> None:
    """A file imports only from lower layers, or from its own package."""
    level = {part: index for index, layer in enumerate(LAYERS) for part in layer}
    own = part_of(module_of(path))
    up = {name for name in imports_of(path) if part_of(name) != own and level[part_of(name)] >= level[own]}
    assert not up


@pytest.mark.parametrize("package", ["gramfx.rules", "gramfx.passes"])
def test_no_circles_inside_a_package(package: str) -> None:
    """Siblings may share a table, not each other."""
    edges = {module_of(path): imports_of(path) for path in SOURCES if module_of(path).startswith(package + ".")}
    done: set[str] = set()
    while ready := {name for name, needs in edges.items() if name not in done and not (needs & edges.keys()) - done}:
        done |= ready
    assert done == edges.keys()


def test_readme_shows_the_signature() -> None:
    """Of ``transform``, with its defaults."""
    parameters = inspect.signature(gramfx.transform).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    text = f"`gramfx.transform({', '.join(shown)})`".replace("'", '"')
    assert text in (ROOT / "README.md").read_text()
