"""The house keeps its shape: public names, and imports that point one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanguard
import nanguard.records

SOURCE = Path(nanguard.__file__).parent

LAYERS = [
    {"_compat", "_compat_data", "_compat_kernels", "_compat_modes", "records"},
    {"errors", "numerics", "run_folder"},
    {"state"},
    {"policy", "source"},
    {"step"},
    {"diagnosis", "incidents", "runlog"},
    {"monitor", "recovery"},
    {"wiring"},
    {"guard", "hosted", "standalone"},
    {"integrations"},
    {"autopilot"},
    {"checkpoint", "checkup", "preflight_checks", "replay", "report", "testing"},
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
        for module, path in modules().items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not module.startswith("integrations.")  # a callback has the name that users of its framework expect
    ]
    assert sorted({name for name in classes if classes.count(name) > 1}) == []


PRIVATE = re.compile(
    r"_(parameters|buffers|modules|orig_mod|version|schema|cdata|grad_fn|local_tensor|flat_param|call_impl|last_lr"
    r"|schedulers|scale|sampler_iter|engine_run_backward|sequence_nr|efficientzerotensor|c10d_functional"
    r"|step_supports_amp_scaling|(global_)?(optimizer|forward|backward|state_dict)_(step_)?(pre_)?hooks|saved_\w*)"
)
"""Names of torch that are private, also where nanguard has a name of its own that is the same."""

OF_FRAMEWORKS = {
    "state.names": {"_forward_module"},
    "autopilot.fabric_loops": {"_FabricOptimizer"},
    "integrations.accelerate": {"_dataloaders"},
    "integrations.fabric": {"_forward_module"},
    "integrations.lightning_fit": {"_logger_connector", "_skip_backward"},
    "integrations.logged": {"_logger_connector", "_results"},
    "integrations.transformers": {"_total_loss_scalar"},
}
"""Private names of the framework that an adapter is for. Each may break with its next release: as few as possible."""

FROM_PYTHON = {"_getframe", "_fields", "_make", "_asdict", "_replace"}


def private_names_of_others(tree: ast.AST, own: set[str]) -> list[str]:
    """Private names that are imported, or looked up on objects that are not nanguard's."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if is_private_path(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("nanguard"):
            found += [path for alias in node.names if is_private_path(path := f"{node.module}.{alias.name}")]
        elif isinstance(node, ast.Attribute) and is_private_path(node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in own | FROM_PYTHON or (PRIVATE.fullmatch(node.attr) and not on_self):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            found.append(repr(node.value))
    return found


def is_private_path(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def defined_names(tree: ast.AST) -> set[str]:
    """Functions, classes, variables, and attributes that are set."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def test_private_names_of_torch_are_in_compat() -> None:
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items() if not name.startswith("_compat")}
    own = {"_compat", "_compat_data", "_compat_kernels", "_compat_modes"}.union(*map(defined_names, trees.values()))
    offenders = [
        f"{name}: {each}"
        for name, tree in trees.items()
        for each in private_names_of_others(tree, own | OF_FRAMEWORKS.get(name, set()))
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.optim.optimizer import _use_grad_for_differentiable",
        "import torch.utils._pytree as pytree",
        "torch._foreach_norm(tensors)",
        "torch.ops.aten._efficientzerotensor.default",
        "owner._buffers[key]",
        "module._parameters",
        "func._schema.arguments",
        "getattr(model, '_orig_mod', None)",
        "vars(module).get('_modules', {})",
        "code.co_name == '_engine_run_backward'",
        "getattr(node, f'_saved_{name}')",
        "tensor._version",
    ],
)
def test_the_check_for_private_names_sees(line: str) -> None:
    assert private_names_of_others(ast.parse(line), {"_parameters", "_buffers", "_version"})


def test_the_public_names_are_these() -> None:
    assert nanguard.__all__ == [
        "AGC",
        "CallFunction",
        "Diagnosis",
        "Divergence",
        "DropBadGradients",
        "Guard",
        "Halt",
        "LossScale",
        "LowerLR",
        "Monitor",
        "NanguardError",
        "NonFiniteError",
        "Observer",
        "Policy",
        "ProtocolError",
        "RaisePrecision",
        "Rollback",
        "Skip",
        "Snapshots",
        "TakeSnapshot",
        "ZScore",
        "__version__",
        "diagnose",
        "install",
        "preflight",
        "read_run",
    ]
    assert all(hasattr(nanguard, name) for name in nanguard.__all__)
    assert dir(nanguard) == nanguard.__all__
    with pytest.raises(AttributeError, match="no attribute 'Gaurd'"):
        _ = nanguard.Gaurd


def test_types_that_users_receive_come_from_records_without_torch() -> None:
    code = (
        "import sys; from nanguard import read_run, records; from typing import get_type_hints; "
        "from nanguard.records import Action, Diagnosis, Incident, Outcome, Reading, Run, Verdict; "
        "assert get_type_hints(read_run)['return'] is Run and get_type_hints(Incident)['outcome'] is Outcome; "
        "assert all(isinstance(getattr(records, name), type) for name in records.__all__); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'Icident'"):
        _ = nanguard.records.Icident


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
