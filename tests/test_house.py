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
    {
        "_compat",
        "autopilot.byhand",
        "autopilot.census",
        "autopilot.children",
        "backup",
        "checkpoint.findings",
        "checkpoint.standins",
        "checkpoint.values",
        "checkup.record",
        "demo.gpt",
        "diagnosis.batches",
        "diagnosis.look",
        "diagnosis.search",
        "divergence",
        "errors",
        "incident.budget",
        "incident.surroundings",
        "mailbox",
        "naming",
        "printable",
        "rebuild",
        "report.diagnosis",
        "report.html.excerpt",
        "report.html.series",
        "report.repeats",
        "report.sparkline",
        "rng",
        "runlog",
        "schedule",
        "snapshot.codec",
        "snapshot.memory",
        "snapshot.options",
        "snapshot.packing",
        "testing",
    },
    {
        "autopilot.handshake",
        "autopilot.launch",
        "checkpoint.source",
        "checkpoint.view",
        "checkup.machine",
        "checkup.script",
        "checkup.view",
        "cli.speech",
        "data",
        "demo.text",
        "diagnosis.modules",
        "diagnosis.plans",
        "incident.entry",
        "incident.trees",
        "islands",
        "numerics.norm",
        "report.html.markup",
        "shield",
        "snapshot.bulk",
        "snapshot.files",
        "undo",
        "upcast",
    },
    {
        "autopilot.relaunch",
        "autopilot.skippable",
        "checkpoint.torchfile",
        "checkup.amp",
        "checkup.losses",
        "epoch",
        "incident.files",
        "numerics.clip",
        "numerics.finite",
        "recovery.evidence",
        "report.notebook",
        "snapshot.copies",
        "snapshot.disk",
    },
    {
        "checkpoint.distributed",
        "checkup.loop",
        "diagnosis.record",
        "discarded",
        "precision",
        "salvage",
        "snapshot.writer",
    },
    {
        "autopilot.scale",
        "checkpoint.checker",
        "checkup.rules",
        "diagnosis.evidence",
        "diagnosis.remedies",
        "diagnosis.slicing",
        "diagnosis.source",
        "records",
    },
    {
        "agree",
        "autopilot.crew",
        "autopilot.names",
        "capture",
        "cli.check",
        "cli.doctor",
        "diagnosis.authorship",
        "diagnosis.hooks",
        "diagnosis.provenance",
        "incident.bundle",
        "incident.reader",
        "ladder",
        "report.panel",
        "report.summary",
        "runs",
    },
    {
        "autopilot.listening",
        "diagnosis.ancestry",
        "diagnosis.trace",
        "follow",
        "incident.explain",
        "journal",
        "measure",
        "policy",
        "report.glance",
        "report.guard",
        "report.html.kinds",
        "report.html.prose",
        "report.html.story",
    },
    {
        "autopilot.settings",
        "cli.explain",
        "clipper",
        "diagnosis.blame",
        "report.html.cards",
        "report.html.climb",
        "report.html.table",
        "report.html.where",
        "report.watch",
        "window",
    },
    {"bench", "cli.watch", "diagnosis.causes", "report.page"},
    {"assembly", "cli.report", "diagnosis.inventory", "recovery.measures", "recovery.rehearsal", "snapshot.world"},
    {"diagnosis.watched", "recovery.culprit", "recovery.proof", "snapshot.ring"},
    {"diagnosis.live", "diagnosis.replay"},
    {"diagnosis.exam", "diagnosis.trials"},
    {"diagnosis.births", "diagnosis.strangers"},
    {"diagnosis.process"},
    {"diagnosis.doctor"},
    {"diagnosis.autopsy", "diagnose"},
    {"diagnosis.clinic", "incident.rerun"},
    {"incident.stop", "recovery.casebook"},
    {"cli.replay", "recovery.recovery"},
    {"eager", "late"},
    {"steps"},
    {"autopilot.pilot", "guard"},
    {"autopilot.roster", "autopilot.tracing", "demo.training"},
    {"autopilot.tower", "demo.show"},
    {"autopilot.patches", "cli.demo"},
    {"autopilot.entry"},
    {"autopilot.summary"},
    {"cli.run"},
    {"cli.commands"},
    {"__main__"},
]


def modules() -> dict[str, Path]:
    files = {p.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): p for p in SOURCE.rglob("*.py")}
    return {name: path for name, path in files.items() if not name.endswith("__init__")}


def imports(path: Path) -> set[str]:
    """Modules of nanguard that a file imports when it runs; for type checkers only does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nanguard":
            base = node.module.removeprefix("nanguard").lstrip(".")
            for alias in node.names:
                deeper = f"{base}.{alias.name}".lstrip(".")
                found.add(deeper if deeper in modules() else base)
    return found - {""}


def test_imports_point_one_way() -> None:
    floor = {name: level for level, names in enumerate(LAYERS) for name in names}
    assert set(modules()) == set(floor), "every module has its floor"
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(path)
        if floor[other] >= floor[name]
    ]
    assert wrong == []


def test_every_module_has_its_row_in_the_architecture() -> None:
    text = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    missing = [name for name in modules() if f"`{name.replace('.', '/')}`" not in text and name != "__main__"]
    assert missing == []


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
