"""The house keeps its shape: public names, and imports that point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanguard

SOURCE = Path(nanguard.__file__).parent

LAYERS = [
    {"_compat", "records"},
    {"errors", "numerics", "run_folder"},
    {"state"},
    {"policy", "source"},
    {"step"},
    {"diagnosis", "incidents", "runlog"},
    {"recovery"},
    {"wiring"},
    {"diagnose", "guard", "hosted"},
    {"autopilot"},
    {"checkpoint", "checkup", "replay", "report", "testing"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""Packages, and modules that stand alone, lowest first. Each imports only from layers above it in this list."""


def modules() -> dict[str, Path]:
    files = {p.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): p for p in SOURCE.rglob("*.py")}
    return {name: path for name, path in files.items() if not name.endswith("__init__")}


def imports(path: Path) -> set[str]:
    """Packages of nanguard that a file imports, also for type checkers and inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "nanguard":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nanguard."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("nanguard.")}
    return found


def test_packages_import_one_way() -> None:
    layer = {name: level for level, names in enumerate(LAYERS) for name in names}
    packages = {name.split(".")[0] for name in modules()}
    assert packages == set(layer), "every package has its layer"
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(path) & packages - {name.split(".")[0]}
        if layer[other] >= layer[name.split(".")[0]]
    ]
    assert wrong == []


def test_every_package_has_its_row_in_the_architecture() -> None:
    text = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    packages = {name.split(".")[0] for name in modules()} - {"__main__"}
    assert [name for name in sorted(packages) if f"`{name}" not in text] == []


def test_the_names_of_classes_are_unique() -> None:
    classes = [
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in classes if classes.count(name) > 1}) == []


def test_private_names_of_torch_live_in_one_file() -> None:
    offenders = [
        f"{name}: {ast.unparse(node)}"
        for name, path in modules().items()
        if name != "_compat"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith(("torch._", "dist._"))
        and "__" not in ast.unparse(node)
    ]
    assert offenders == []


def test_the_public_names_are_these() -> None:
    assert nanguard.__all__ == [
        "AGC",
        "Diagnosis",
        "Divergence",
        "DropBadGradients",
        "Guard",
        "Halt",
        "LossScale",
        "LowerLR",
        "NanguardError",
        "NonFiniteError",
        "Observer",
        "Policy",
        "ProtocolError",
        "RaisePrecision",
        "Rollback",
        "Skip",
        "Snapshots",
        "ZScore",
        "__version__",
        "diagnose",
        "install",
        "read_run",
    ]
    assert all(hasattr(nanguard, name) for name in nanguard.__all__)
    assert dir(nanguard) == nanguard.__all__
    with pytest.raises(AttributeError, match="no attribute 'Gaurd'"):
        _ = nanguard.Gaurd


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, nanguard; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


def test_importing_the_library_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules.update(rich=None, typer=None, numpy=None); import nanguard.guard, nanguard.testing; "
        "print(nanguard.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.strip() == nanguard.__version__, done.stderr


@pytest.mark.parametrize("path", sorted(modules().values()), ids=lambda p: p.stem)
def test_a_file_is_short_enough_to_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
