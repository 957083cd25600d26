"""Dependencies point down only: what the native layers include and link, what Python imports."""

from __future__ import annotations

import ast
import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
from support.places import ROOT

NATIVE = ROOT / "native"
PACKAGE = ROOT / "pgasdl"

# Bottom first. A layer may use those before it.
LAYERS = (
    "sys",
    "memory",
    "reduce",
    "transport",
    "pgas",
    "executor",
    "measure",
    "simulate",
    "formats",
    "python",
)

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def includes_of(layer: str) -> dict[Path, list[str]]:
    """Every project include of a layer's files."""
    sources = sorted((NATIVE / layer).rglob("*.[ch]pp"))
    return {path: INCLUDE.findall(path.read_text()) for path in sources}


def used_layers(layer: str) -> set[str]:
    """Other layers whose headers a layer includes."""
    names = {name for names in includes_of(layer).values() for name in names}
    return {name.split("/")[0] for name in names if "/" in name} - {layer}


def linked_layers(layer: str) -> set[str]:
    """The layers that a layer's CMakeLists.txt links by name."""
    text = (NATIVE / layer / "CMakeLists.txt").read_text()
    declared = re.search(r"pgasdl_layer\([^)]*?\bLINKS\s+([^)]*)\)", text)
    if declared:
        return set(declared.group(1).split())
    links: set[str] = set()
    for call in re.findall(r"target_link_libraries\(([^)]*)\)", text):
        links |= set(re.findall(r"pgasdl_(\w+)", call))
    return (links & set(LAYERS)) - {layer}


def reachable(layer: str) -> set[str]:
    """Everything that a layer links, directly or not."""
    found: set[str] = set()
    todo = [layer]
    while todo:
        for below in linked_layers(todo.pop()) - found:
            found.add(below)
            todo.append(below)
    return found


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir()}
    assert folders == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_includes_point_down(layer: str) -> None:
    below = set(LAYERS[: LAYERS.index(layer)])
    for path, names in includes_of(layer).items():
        for name in names:
            assert "/" in name, f"{path}: include {name} as {layer}/{name}"
            assert (NATIVE / name).exists(), f"{path}: {name} is no file of native/"
            assert name.split("/")[0] in below | {layer}, f"{path}: {name} lies above {layer}"


@pytest.mark.parametrize("layer", LAYERS)
def test_links_point_down_and_match_the_includes(layer: str) -> None:
    links = linked_layers(layer)
    assert links <= set(LAYERS[: LAYERS.index(layer)]), f"{layer} links upwards: {links}"
    missing = used_layers(layer) - reachable(layer)
    assert not missing, f"{layer} includes {missing} and does not link it"
    unused = links - used_layers(layer)
    assert not unused, f"{layer} links {unused} and includes nothing of it"


def test_every_source_is_compiled() -> None:
    for layer in LAYERS:
        listed = (NATIVE / layer / "CMakeLists.txt").read_text()
        for path in (NATIVE / layer).rglob("*.cpp"):
            assert re.search(rf"\b{re.escape(path.name)}\b", listed), f"{path} is in no target"


def imports_of(path: Path) -> set[str]:
    """Full names of all that a Python file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_any(path: Path, *packages: str) -> set[str]:
    """Those imports of a file that are one of ``packages`` or lie in one."""
    return {
        name
        for name in imports_of(path)
        for package in packages
        if name == package or name.startswith(package + ".")
    }


# The package's layers, bottom first, one a line: modules, and folders with all that lies in them.
# The longest name that fits decides. A module may import from its own layer and from layers below.
ROOMS = (
    ("errors", "_native"),
    ("transports", "kernel", "trust", "models", "device"),
    ("numa",),
    ("settings",),
    ("config", "buffers", "footprint", "counters"),
    ("openmetrics",),
    ("topology",),
    ("plans.plan",),
    ("plans.validation",),
    ("plans.algorithms",),
    ("plans.registry", "plans.cost"),
    ("plans",),
    ("plans.checker", "plans.plugins"),
    ("plans.check",),
    ("group", "job"),
    ("segment",),
    ("pool",),
    ("collectives",),
    ("context",),
    ("training", "input", "checkpoint"),
    ("matrix",),
    ("torch",),
    ("runtime.bootstrap",),
    ("runtime.launch",),
    ("runtime.mpi",),
    ("runtime",),
    ("torch.backend", "torch.ft", "jobs"),
    ("loopback", "__init__", "versions"),
    ("tools.chart", "tools.gpus", "tools.text"),
    ("tools.rdma", "tools.network"),
    ("tools.nodes", "tools.command", "tools.probes"),
    ("tools.topo",),
    ("simulate",),
    ("simulate.papers",),
    ("simulate.cli", "tools.bench", "tools.doctor"),
    ("tools",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def module_name(path: Path) -> str:
    """As in ``plans.cost``; a folder's ``__init__`` has the folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def level_of(module: str) -> int:
    """The layer of a module: that of the longest name in the table that is or contains it."""
    name = module
    while name not in LEVEL:
        assert "." in name, f"{module} is in no layer"
        name = name.rpartition(".")[0]
    return LEVEL[name]


def imported_modules(path: Path) -> set[str]:
    """The package's own modules that a file imports, also for typing and inside functions."""
    found: set[str] = set()
    for name in imports_any(path, "pgasdl"):
        inside = name.removeprefix("pgasdl").lstrip(".")
        if inside.split(".")[0] == "_native":
            found.add("_native")
            continue
        while inside and inside not in MODULES:
            inside = inside.rpartition(".")[0]
        found.add(inside or "__init__")
    return found - {module_name(path)}


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_python_point_down(module: str) -> None:
    upward = {
        name for name in imported_modules(MODULES[module]) if level_of(name) > level_of(module)
    }
    assert not upward, f"{module} imports {upward}, which lie above it"


def test_no_imports_of_python_go_in_a_circle() -> None:
    below = {module: imported_modules(path) for module, path in MODULES.items()}
    left = dict(below)
    while left:
        free = {module for module, names in left.items() if not names & left.keys()}
        assert free, f"circles among {sorted(left)}"
        left = {module: names for module, names in left.items() if module not in free}


def test_the_layers_name_what_is_there() -> None:
    for name in LEVEL:
        folder = PACKAGE / name.replace(".", "/")
        there = folder.is_dir() or folder.with_name(folder.name + ".py").exists()
        assert there or name == "_native", f"{name} is in the table and nowhere else"


def test_the_drawing_has_the_same_order() -> None:
    drawn = runpy.run_path(str(ROOT / ".github/docs/pictures/drawings.py"))
    bands = [names.split() for names, _ in drawn["PYTHON"]]
    for above, below in pairwise(bands):
        assert min(map(LEVEL.get, above)) > max(map(LEVEL.get, below)), (above, below)
    rooms = {path.parent.name for path in PACKAGE.glob("*/README.md")}
    assert rooms <= {name for names in bands for name in names}
    native = [name for name, _ in reversed(drawn["NATIVE"])]
    assert native == [layer for layer in LAYERS if layer in native]
    folders = {path.name for path in (NATIVE / "transport").iterdir() if path.is_dir()}
    assert folders == set(drawn["TRANSPORTS"])


def test_plans_know_no_runtime() -> None:
    # A plan is data, built and checked without the code that runs it.
    allowed = {"pgasdl.plans", "pgasdl.errors"}
    for path in sorted((PACKAGE / "plans").rglob("*.py")):
        for name in imports_any(path, "pgasdl"):
            inside = any(name == root or name.startswith(root + ".") for root in allowed)
            assert inside, f"{path} imports {name}"
        heavy = imports_any(path, "numpy", "torch", "ml_dtypes", "mpi4py")
        assert not heavy, f"{path} imports {heavy}"


def test_nothing_imports_the_apps_or_the_tests() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        assert not imports_any(path, "apps", "tests", "pytest"), path


def top_level_imports(path: Path) -> set[str]:
    """Top-level packages that a file imports when it is itself imported."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_optional_packages_are_imported_where_they_are_used() -> None:
    optional = {"torch", "cupy", "mpi4py", "matplotlib", "sklearn", "safetensors"}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if "bench" not in parts and "torch" not in parts:
            assert not top_level_imports(path) & optional, path
