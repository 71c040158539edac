"""The doctor says what is certain about a program, and is silent about what only looks like it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from nanguard.checkup import machine
from nanguard.checkup.record import Checkup, CheckupFinding, Fact
from nanguard.checkup.rules import RULES, examine
from nanguard.checkup.script import Script
from nanguard.cli import app
from nanguard.errors import ScriptError

ROOT = Path(__file__).parent.parent

HEAD = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
"""

# For each rule a program with the mistake, the marked line being the guilty one, and near misses without it.
CASES: dict[str, tuple[str, list[str]]] = {
    "fp16-without-scaler": (
        """
        for x, y in data:
            with torch.autocast("cuda", dtype=torch.float16):  # here
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        """,
        [
            """
            for x, y in data:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            """,
            """
            scaler = torch.amp.GradScaler()
            for x, y in data:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            """,
            """
            def train(x, y):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            def predict(x):
                with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
                    return model(x)
            """,
            """
            for x, y in data:
                with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
                    loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            """,
            """
            for x, y in data:
                with torch.autocast("cuda"):
                    loss = F.mse_loss(model(x), y)
                (loss * 1024).backward()
                optimizer.step()
            """,
            """
            from accelerate import Accelerator
            for x, y in data:
                with torch.autocast("cuda"):
                    loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            """,
        ],
    ),
    "clip-before-unscale": (
        """
        for x in data:
            scaler.scale(model(x)).backward()
            clip_grad_norm_(model.parameters(), 1.0)  # here
            scaler.step(optimizer)
            scaler.update()
        """,
        [
            """
            for x in data:
                scaler.scale(model(x)).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            """,
            """
            for x in data:
                model(x).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            """,
            """
            def amp_step(x):
                scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                scaler.update()
            def plain_step(x):
                model(x).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            """,
        ],
    ),
    "scaler-without-update": (
        """
        for x in data:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)  # here
        """,
        [
            """
            for x in data:
                scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                scaler.update()
            """,
            """
            for x in data:
                scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                after_step(scaler)
            """,
        ],
    ),
    "scaler-that-does-not-scale": (
        """
        scaler = torch.amp.GradScaler("cuda")
        for x in data:
            model(x).backward()
            scaler.step(optimizer)  # here
            scaler.update()
        """,
        [
            """
            scaler = torch.amp.GradScaler("cuda")
            for x in data:
                scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                scaler.update()
            """,
            """
            scaler = torch.amp.GradScaler("cuda")
            for x in data:
                backward(model(x), scaler)
                model(x).backward()
                scaler.step(optimizer)
            """,
        ],
    ),
    "half-with-adam": (
        """
        model = Net().half()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # here
        """,
        [
            """
            model = Net().half()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
            """,
            """
            model = Net().to(torch.bfloat16)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            """,
            """
            model = Net()
            if args.half:
                model.half()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            """,
            """
            model = Net()
            teacher = Net().half()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            """,
            """
            model = Net()
            model.half()
            model.float()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            """,
        ],
    ),
    "bce-in-autocast": (
        """
        criterion = nn.BCELoss()
        for x, y in data:
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)  # here
        """,
        [
            """
            criterion = nn.BCEWithLogitsLoss()
            for x, y in data:
                with torch.autocast("cuda"):
                    loss = criterion(model(x), y)
            """,
            """
            criterion = nn.BCELoss()
            for x, y in data:
                with torch.autocast("cuda"):
                    p = model(x)
                loss = criterion(p.float(), y)
            """,
            """
            for x, y in data:
                with torch.autocast("cuda"):
                    with torch.autocast("cuda", enabled=False):
                        loss = F.binary_cross_entropy(model(x).float(), y)
            """,
        ],
    ),
    "no-zero-grad": (
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = torch.zeros(3)
        for x in data:
            model(x).backward()
            optimizer.step()  # here
        """,
        [
            """
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in data:
                model.zero_grad()
                model(x).backward()
                optimizer.step()
            """,
            """
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in data:
                model(x).backward()
                optimizer.step()
                clear(optimizer)
            """,
            """
            optimizer = torch.optim.SGD([w], lr=0.1)
            for x in data:
                f(x, w).backward()
                optimizer.step()
                w.grad = None
            """,
            """
            for trial in trials:
                optimizer = torch.optim.SGD(make().parameters(), lr=0.1)
                model(x).backward()
                optimizer.step()
            """,
            """
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in data:
                model(x).backward()
            optimizer.step()
            """,
        ],
    ),
    "clip-after-step": (
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in data:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            clip_grad_norm_(model.parameters(), 1.0)  # here
        """,
        [
            """
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in data:
                model(x).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            """,
            """
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            a.backward()
            optimizer.step()
            other.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            """,
        ],
    ),
    "cross-entropy-of-probabilities": (
        """
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(dim=1)).to(device)
        criterion = nn.CrossEntropyLoss()
        for x, y in data:
            loss = criterion(model(x), y)  # here
        """,
        [
            """
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
            criterion = nn.CrossEntropyLoss()
            for x, y in data:
                loss = criterion(model(x), y)
            """,
            "loss = F.cross_entropy(model(x), teacher(x).softmax(dim=1))",
            "loss = F.cross_entropy(x.log_softmax(dim=1), y)",
            """
            p = model(x)
            p = p.softmax(dim=1) if args.eval else p
            loss = F.cross_entropy(p, y)
            """,
        ],
    ),
    "nll-of-no-logarithms": (
        """
        probabilities = F.softmax(model(x), dim=1)
        loss = F.nll_loss(probabilities, y)  # here
        """,
        [
            "loss = F.nll_loss(F.log_softmax(model(x), dim=1), y)",
            """
            model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
            loss = nn.NLLLoss()(model(x), y)
            """,
            "loss = F.nll_loss(model(x), y)",
        ],
    ),
    "eps-of-zero": (
        "norm = nn.LayerNorm(64, eps=0)  # here",
        [
            "norm = nn.LayerNorm(64, eps=1e-12)",
            "norm = nn.LayerNorm(64, eps=args.eps)",
            "optimizer = torch.optim.SGD(parameters, lr=0.0)",
            "norm = nn.LayerNorm(0)",
        ],
    ),
    "log-of-softmax": (
        "entropy = -(p * torch.log(torch.softmax(x, dim=-1))).sum()  # here",
        [
            "entropy = -(p * torch.log_softmax(x, dim=-1)).sum()",
            "entropy = -(p * torch.log(torch.softmax(x, dim=-1) + 1e-9)).sum()",
            "entropy = -(p * torch.softmax(x, dim=-1).clamp(min=1e-9).log()).sum()",
            "entropy = math.log(softmax(x))",
        ],
    ),
    "schedule-before-step": (
        """
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        for epoch in range(3):
            schedule.step()  # here
            for x in data:
                model(x).backward()
                optimizer.step()
        """,
        [
            """
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            for epoch in range(3):
                for x in data:
                    model(x).backward()
                    optimizer.step()
                schedule.step()
            """,
            """
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            for epoch in range(3):
                if epoch > 0:
                    schedule.step()
                optimizer.step()
            """,
            """
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            for _ in range(done):
                schedule.step()
            for x in data:
                optimizer.step()
            """,
        ],
    ),
    "anomaly-left-on": (
        "torch.autograd.set_detect_anomaly(True)  # here",
        [
            "torch.autograd.set_detect_anomaly(args.debug)",
            "torch.autograd.set_detect_anomaly(False)",
            """
            if args.debug:
                torch.autograd.set_detect_anomaly(True)
            """,
        ],
    ),
    "scaler-with-bf16": (
        """
        scaler = torch.amp.GradScaler("cuda")  # here
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        """,
        [
            """
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=args.dtype):
                loss = model(x)
            """,
            """
            scaler = torch.amp.GradScaler("cuda", enabled=False)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            """,
            """
            scaler = torch.amp.GradScaler("cuda")
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
            with torch.autocast("cuda", dtype=dtype):
                loss = model(x)
            """,
            'scaler = torch.amp.GradScaler("cuda")',
        ],
    ),
    "backward-in-autocast": (
        """
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
            loss.backward()  # here
        """,
        [
            """
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
            """,
            """
            with torch.autocast("cuda", enabled=False):
                model(x).backward()
            """,
        ],
    ),
    "fp16-on-cpu": (
        """
        with torch.autocast("cpu", dtype=torch.half):  # here
            y = model(x)
        """,
        [
            """
            with torch.autocast("cpu"):
                y = model(x)
            """,
            """
            with torch.autocast(device.type, dtype=torch.half):
                y = model(x)
            """,
        ],
    ),
    "not-fused": (
        """
        model = Net().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # here
        """,
        [
            """
            model = Net().to("cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            """,
            """
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            """,
            """
            model = Net().to("cuda")
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            """,
            """
            model = nn.Embedding(9, 9, sparse=True).to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            """,
        ],
    ),
    "loss-read-every-step": (
        """
        model.cuda()
        for x in data:
            loss = model(x)
            loss.backward()
            total += loss.item()  # here
        """,
        [
            """
            model.cuda()
            for step, x in enumerate(data):
                loss = model(x)
                loss.backward()
                if step % 100 == 0:
                    print(loss.item())
            """,
            """
            for x in data:
                loss = model(x)
                loss.backward()
                total += loss.item()
            """,
            """
            model.cuda()
            for epoch in range(3):
                for x in data:
                    loss = model(x)
                    loss.backward()
                print(loss.item())
            """,
        ],
    ),
    "old-amp": (
        """
        from torch.cuda.amp import GradScaler
        scaler = GradScaler()  # here
        """,
        ["scaler = torch.amp.GradScaler('cuda')"],
    ),
}

PIECES = [
    b"import torch\n",
    b"from torch.optim import *\n",
    b"torch.optim.Adam(*a, **b)\n",
    b"x = y = torch.amp.GradScaler()\n",
    b"x.step(z); z.step()\n",
    b"x.scale(l).backward()\n",
    b"torch.nn.utils.clip_grad_norm_()\n",
    b"with torch.autocast(): l.backward()\n",
    b"for i in j: l.backward(); l.item()\n",
    b"torch.optim.lr_scheduler.StepLR()\n",
    b"torch.nn.functional.cross_entropy()\n",
    b"torch.nn.Sequential()(x).log()\n",
    b"del torch\n",
    b"x: int\n",
    b"'cuda'\n",
    b"lambda: (yield)\n",
]


def found(program: str) -> list[CheckupFinding]:
    return examine(Script("train.py", (HEAD + textwrap.dedent(program)).encode()))


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert {rule.name for rule in RULES} == set(CASES)
    assert len(RULES) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_mistake_is_found_on_its_line(name: str) -> None:
    program = CASES[name][0]
    lines = (HEAD + textwrap.dedent(program)).splitlines()
    places = [finding.place for finding in found(program) if finding.rule == name]
    (guilty,) = [number for number, line in enumerate(lines, 1) if line.endswith("# here")]
    assert [place.line for place in places if place] == [guilty]
    assert places[0] is not None
    assert places[0].text == lines[guilty - 1].strip()


@pytest.mark.parametrize(("name", "program"), [(n, program) for n, (_, misses) in CASES.items() for program in misses])
def test_a_near_miss_is_none(name: str, program: str) -> None:
    assert [finding for finding in found(program) if finding.rule == name] == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch.optim import Adam as A\nA(p, eps=0.0)",
        "import torch.optim as o\no.Adam(p, eps=0)",
        "import torch\nEPS = 0.0\ntorch.optim.Adam(p, eps=EPS)",
        "from torch import optim\nclass T:\n    def __init__(self):\n        self.o = optim.Adam(self.p, eps=0)",
    ],
)
def test_names_are_followed_to_where_they_come_from(source: str) -> None:
    assert [finding.rule for finding in examine(Script("t.py", source.encode()))] == ["eps-of-zero"]


@pytest.mark.parametrize(
    "source",
    [
        "from mylib import Adam\nAdam(p, eps=0)",
        "from torch.optim import Adam\nAdam = tune(Adam)\nAdam(p, eps=0)",
        "from torch.optim import *\nAdam(p, eps=0)",
        "from .torch.optim import Adam\nAdam(p, eps=0)",
        "import torch\ndef f(torch):\n    torch.optim.Adam(p, eps=0)",
        "import torch\neps = 0\neps = 1\ntorch.optim.Adam(p, eps=eps)",
        "import torch\ntorch.optim.Adam(p, eps=False)",
    ],
)
def test_what_may_be_something_else_is_left_alone(source: str) -> None:
    assert examine(Script("t.py", source.encode())) == []


def test_the_claim_about_adam_in_fp16_is_true() -> None:
    """``half-with-adam`` is an error because of this."""
    for eps, is_sound in ((1e-8, False), (1e-4, True)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = torch.optim.Adam([weight], lr=1e-3, eps=eps)
        weight.grad = torch.full_like(weight, 1e-5)
        optimizer.step()
        assert bool(weight.isfinite().all()) is is_sound


def test_the_programs_of_this_repository_have_only_what_is_meant() -> None:
    told = {
        (path.name, finding.rule)
        for path in [*ROOT.glob("examples/*.py"), *ROOT.glob("src/nanguard/**/*.py")]
        for finding in examine(Script.read(path))
    }
    # The demo and the example are about fp16.
    assert told == {
        ("training.py", "fp16-on-cpu"),
        ("unguarded.py", "fp16-on-cpu"),
        ("unguarded.py", "fp16-without-scaler"),
    }


@pytest.mark.parametrize(
    ("source", "why"),
    [(b"for x in", "invalid syntax"), (b"x = 1\0", "null byte"), (b"\xff\xfe", ""), (b"(" * 5000, "")],
)
def test_what_is_no_python_is_said(source: bytes, why: str) -> None:
    with pytest.raises(ScriptError, match=f"(?s)t.py.* cannot be parsed by this Python.*{why}"):
        Script("t.py", source)


def looked_at(source: bytes) -> list[CheckupFinding] | str:
    """What is found, or the beginning of the message that says why nothing is."""
    try:
        return examine(Script("t.py", source))
    except ScriptError as error:
        return str(error)[:4]


@pytest.mark.parametrize(
    "source",
    ["x" + ".a" * 20_000 + " = 1", "import torch\ntorch.log(" + "f(" * 90 + ")" * 90 + ")", "f" + "()" * 20_000],
)
def test_deep_nesting_is_looked_at_or_refused(source: str) -> None:
    assert looked_at(source.encode()) in ([], "t.py")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join)))
def test_any_bytes_are_looked_at_or_refused(source: bytes) -> None:
    told = looked_at(source)
    assert told == "t.py" or all(isinstance(finding, CheckupFinding) and finding.place for finding in told)


def test_a_program_is_never_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nopen({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(7)\n")
    assert CliRunner().invoke(app, ["doctor", str(script)]).exit_code in (0, 1)
    assert not (tmp_path / "ran").exists()


# ---- the machine -----------------------------------------------------------------------------------------------------


def rules_of(findings: list[CheckupFinding]) -> set[str]:
    return {finding.rule for finding in findings}


def test_the_machine_is_described(tmp_path: Path) -> None:
    facts, _ = machine.look(tmp_path, {"TORCH_LOGS": "+dynamo", "HOME": "/root"})
    told = {fact.name: fact.value for fact in facts}
    assert told["torch"].startswith(torch.__version__)
    assert told["TORCH_LOGS"] == "+dynamo"
    assert {"Python", "CPU", "TF32", "deterministic", "fp32 matmul precision", "plotly", "pandas"} <= set(told)
    assert "HOME" not in told
    assert "GiB" in told["free disk"]


@pytest.mark.parametrize(
    ("environ", "number"),
    [({}, 0), ({"CUDA_LAUNCH_BLOCKING": "1"}, 1), ({"CUDA_LAUNCH_BLOCKING": "0", "NVIDIA_TF32_OVERRIDE": "1"}, 1)],
)
def test_variables_that_cost_something_are_found(environ: dict[str, str], number: int, tmp_path: Path) -> None:
    _, findings = machine.look(tmp_path, environ)
    assert len([finding for finding in findings if finding.rule == "environment"]) == number


def test_old_versions_and_little_disk_are_found(tmp_path: Path) -> None:
    assert rules_of(list(machine._torch_findings("2.5.1+cu121"))) == {"torch-version"}
    assert rules_of(list(machine._torch_findings("2.6.0"))) == set()
    assert rules_of(list(machine._torch_findings("2.10.0a0+git1234"))) == set()
    assert rules_of(list(machine._python_findings((3, 9)))) == {"python-version"}
    assert rules_of(list(machine._python_findings((3, 12)))) == set()
    assert rules_of(list(machine._disk_findings(tmp_path, 2**20))) == {"little-disk"}
    assert rules_of(list(machine._disk_findings(tmp_path, 2**40))) == set()


def test_the_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert machine._free_disk(tmp_path / "a" / "b") is not None


# ---- the command -----------------------------------------------------------------------------------------------------


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in machine.VARIABLES}
    env |= {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environ}
    command = [sys.executable, "-m", "nanguard", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=env, timeout=300, check=False)


@pytest.fixture
def bad_script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(HEAD + textwrap.dedent(CASES["no-zero-grad"][0]).replace("  # here", "  # \x1b[31m[bold]"))
    return path


def test_nothing_to_change_ends_with_status_0(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD)
    done = doctor(str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f"{script}: nothing to change")
    assert done.stderr == ""
    machine = doctor(str(script), CUDA_LAUNCH_BLOCKING="1")
    assert machine.returncode == 1
    assert f"\n{script}: nothing to change\n1 thing to change: " in machine.stdout


def test_something_to_change_ends_with_status_1_and_names_the_line(bad_script: Path) -> None:
    done = doctor(str(bad_script))
    assert done.returncode == 1, done.stderr
    assert f"{bad_script}:10" in done.stdout
    assert "optimizer.step()  # \\x1b[31m[bold]" in done.stdout
    assert "\x1b" not in done.stdout
    assert "1 thing to change: 1 error" in done.stdout


def test_the_environment_counts(tmp_path: Path) -> None:
    done = doctor("--run-dir", str(tmp_path), CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 1
    assert "CUDA_LAUNCH_BLOCKING=1 is set" in done.stdout


def test_json_is_one_object_with_all_of_it(bad_script: Path) -> None:
    done = doctor(str(bad_script), "--json")
    told = json.loads(done.stdout)
    assert (told["schema"], told["status"], done.returncode) == (1, 1, 1)
    assert told["machine"]["torch"].startswith(torch.__version__)
    (finding,) = told["findings"]
    assert (finding["rule"], finding["severity"], finding["place"]["line"]) == ("no-zero-grad", "error", 10)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_cannot_be_read_ends_with_status_2(flags: list[str], tmp_path: Path) -> None:
    torn = tmp_path / "torn.py"
    torn.write_text("def f(:\n")
    for path in (tmp_path / "none.py", tmp_path, torn):
        result = CliRunner().invoke(app, ["doctor", str(path), *flags])
        assert result.exit_code == 2
        assert path.name in result.output
        assert "Traceback" not in result.output
        if flags:
            assert json.loads(result.stdout)["status"] == 2
            assert path.name in json.loads(result.stdout)["error"]


def test_the_status_is_that_of_the_findings() -> None:
    finding = CheckupFinding(rule="r", severity="advice", what="w", why="y", change="c")
    assert Checkup(facts=(Fact(name="n", value="v"),), findings=()).status == 0
    assert Checkup(facts=(), findings=(finding,)).status == 1
