"""``nanguard run``: the program behaves as under plain Python, and what nanguard has to say goes to stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nanguard
from launching import needs_gloo
from nanguard.hosted.handshake import agree

PYTHON = [sys.executable]
NANGUARD = [sys.executable, "-m", "nanguard", "run"]

TRAINS = """
    import sys, torch
    torch.manual_seed(0)
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(6):
        loss = torch.log(w - (1.0 if step in (2, 3) else 0.0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(w.tolist())
"""


def done(*command: str, cwd: Path, typed: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. ``typed`` is what a user types; ``more`` are variables of its environment."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **more}
    how: dict[str, Any] = {"capture_output": True, "text": True, "encoding": "utf-8", "check": False, "timeout": 300}
    return subprocess.run([*command], cwd=cwd, env=env, input=typed, **how)


def script(folder: Path, code: str, name: str = "train.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return str(path.relative_to(folder))


RAISES_IN_TORCH = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = nn.BCELoss()(model(torch.ones(4, 3)), torch.full((4, 1), 3.0))
"""
"""From a function of torch that asks modes, such as that of the tape."""

RAISES_IN_C = """
import torch
w = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1)
def metric(out):
    return out.t().view(-1).sum()
out = torch.ones(4, 3) * w
metric(out)
"""
"""From a function that has no line in Python, so that the last line of all is one of the tape."""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", 3),
        ("import sys; sys.exit('a message')", 1),
        ("import os; print('x', flush=True); os._exit(7)", 7),
        ("raise SystemExit", 0),
        ("def f():\n    raise ValueError('boom')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error", 1),
        ("x = = 2", 1),
        (RAISES_IN_TORCH, 1),
        (RAISES_IN_C, 1),
        ("import sys\nsys.excepthook = lambda *a: print('hooked', a[1], a[2].tb_lineno)\nraise ValueError(5)", 1),
        ("import atexit; atexit.register(print, 'at exit'); print('end')", 0),
        ("import sys; print(sys.argv, __name__, __file__, sys.path[0], __spec__, __package__, __doc__)", 0),
        ("'''A doc.'''\nimport __main__; print(__main__.__doc__, __main__.x if hasattr(__main__, 'x') else 0)", 0),
        ("from dataclasses import dataclass, fields\n@dataclass\nclass A:\n    x: int\nprint(fields(A)[0].type)", 0),
        ("import warnings; warnings.warn('careful')", 0),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))", 0),
    ],
)
def test_a_program_behaves_as_under_python(code: str, status: int, tmp_path: Path) -> None:
    name = script(tmp_path, code)
    plain, guarded = (done(*by, name, "--lr", "3", "-m", cwd=tmp_path) for by in (PYTHON, NANGUARD))
    assert plain.returncode == guarded.returncode == status
    assert guarded.stdout == plain.stdout
    ours = [line for line in guarded.stderr.splitlines() if line.startswith("nanguard: ")]
    theirs = [line for line in guarded.stderr.splitlines() if not line.startswith("nanguard: ")]
    assert theirs == plain.stderr.splitlines()
    assert len(ours) == (0 if status == 7 else 1)


def test_so_does_a_module(tmp_path: Path) -> None:
    script(tmp_path, "", "pkg/__init__.py")
    script(tmp_path, "VALUE = 3", "pkg/part.py")
    script(
        tmp_path, "from .part import VALUE; import sys; print(VALUE, __name__, __package__, sys.argv)", "pkg/train.py"
    )
    script(tmp_path, "print('main of a package', __package__)", "pkg/__main__.py")
    for module in ("pkg.train", "pkg"):
        plain = done(*PYTHON, "-m", module, "--lr", "1", cwd=tmp_path)
        guarded = done(*NANGUARD, "-m", module, "--lr", "1", cwd=tmp_path)
        assert plain.returncode == 0
        assert (guarded.returncode, guarded.stdout) == (0, plain.stdout)


def test_torch_is_imported_by_the_program_and_not_before(tmp_path: Path) -> None:
    code = """
        import os, sys
        assert "torch" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "3"
        import torch
        print(torch.get_num_threads(), type(__builtins__).__name__, torch.__spec__.loader.__class__.__name__)
    """
    name = script(tmp_path, code)
    plain, guarded = (done(*by, name, cwd=tmp_path) for by in (PYTHON, NANGUARD))
    assert plain.returncode == 0, plain.stderr
    assert (guarded.returncode, guarded.stdout) == (0, plain.stdout), guarded.stderr


def test_a_program_that_closes_stderr_goes_on(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS.replace("import sys, torch", "import sys, torch; sys.stderr.close()"))
    guarded = done(*NANGUARD, name, cwd=tmp_path)
    assert guarded.returncode == 0
    assert "nan" not in guarded.stdout


def test_a_program_that_installs_the_guard_itself(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS.replace("import sys, torch", "import torch, nanguard; nanguard.install()"))
    guarded = done(*NANGUARD, name, cwd=tmp_path)
    assert guarded.returncode == 0, guarded.stderr
    assert "6 steps, 2 not applied" in guarded.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGINT for one process")
def test_ctrl_c_ends_it_as_ever(tmp_path: Path) -> None:
    code = """
        import time
        try:
            print("ready", flush=True)
            time.sleep(600)
        finally:
            print("cleaned up", flush=True)
    """
    name = script(tmp_path, code)
    ends = []
    for by in (PYTHON, NANGUARD):
        # A shell that runs us in the background has us ignore SIGINT, and children inherit that.
        process = subprocess.Popen(
            [*by, name],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)  # it is in its sleep then
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        ends.append((process.returncode, out, [line for line in err.splitlines() if "nanguard: " not in line]))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT
    assert ends[0][1] == "cleaned up\n"


def test_processes_that_a_program_spawns_behave_as_ever(tmp_path: Path) -> None:
    code = """
        import multiprocessing as mp
        def square(x):
            return x * x
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(2) as pool:
                print(pool.map(square, [1, 2, 3]))
    """
    name = script(tmp_path, code)
    guarded = done(*NANGUARD, name, cwd=tmp_path)
    assert (guarded.returncode, guarded.stdout) == (0, "[1, 4, 9]\n"), guarded.stderr


CHILDREN = """
    import os, sys
    import torch
    import torch.multiprocessing as mp
    import nanguard

    def train(index, guards=False):
        if guards:
            nanguard.install()
        w = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            (w * (float("nan") if step == 1 else 1.0)).sum().backward()
            optimizer.step()
        print("nan" if w.isnan().any() else "finite", flush=True)

    def load(method):
        data = torch.utils.data.TensorDataset(torch.arange(4))
        return list(torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context=method))

    def begin(method, *args):
        process = mp.get_context(method).Process(target=train, args=args)
        process.start()
        process.join()

    if __name__ == "__main__":
        {what}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
@pytest.mark.parametrize(
    ("what", "printed", "told"),
    [
        ("mp.spawn(train, nprocs=2)", ["finite", "finite"], "2 child processes guarded too: 6 steps, 2 not applied"),
        pytest.param(
            "begin('fork', 0)",
            ["finite"],
            "1 child process guarded too: 3 steps, 1 not applied",
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            "begin('fork', 0, True)",
            ["finite"],
            "1 child process guarded too: 3 steps, 1 not applied",
            marks=pytest.mark.campaign,
        ),
        ("begin('spawn', 0, True)", ["finite"], "1 child process guarded too: 3 steps, 1 not applied"),
        ("train(0); begin('fork', 0)", ["finite", "finite"], "1 child process guarded too: 3 steps, 1 not applied"),
        ("os.fork() or (train(0), os._exit(0)); os.wait()", ["nan"], "a child process was started"),
        ("load('fork'), load('spawn')", [], ""),
        (
            "pool = mp.get_context('spawn').Pool(1); pool.map(train, [0]); pool.close(); pool.join()",
            ["nan"],
            "a child process was started",
        ),
        pytest.param("mp.get_context('spawn').Manager()", [], "", marks=pytest.mark.campaign),
    ],
)
def test_child_processes_are_guarded_too_or_it_is_said_that_they_are_not(
    what: str, printed: list[str], told: str, tmp_path: Path
) -> None:
    name = script(tmp_path, CHILDREN.replace("{what}", what))
    guarded = done(*NANGUARD, name, cwd=tmp_path)
    assert guarded.returncode == 0, guarded.stderr
    assert guarded.stdout.split() == printed
    last = guarded.stderr.partition("\nnanguard: ")[2] or guarded.stderr
    last = " ".join(last.split())  # the closing line may take several lines of a terminal
    trains = "guarded too" in told
    assert ("not applied" if trains else "made no step of an optimizer and no backward pass") in last
    assert told in last if told else "child" not in last
    assert ("(incidents are in nanguard-runs/" in last) == trains


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "cannot open nothing.py: No such file or directory"),
        (["-m", "nothing.at.all"], "cannot find the module nothing.at.all"),
        (["-m", "nothing"], "there is no module nothing"),
        (["."], "is a folder without a __main__.py"),
        (["--policy", "bold", "train.py"], "there is no recipe 'bold'"),
        (["--policy", "tts", "--halt-on-first", "train.py"], "exclude each other"),
        (["--max-norm", "0", "train.py"], "--max-norm must be a number above 0"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], message: str, tmp_path: Path) -> None:
    script(tmp_path, TRAINS)
    ended = done(*NANGUARD, *arguments, cwd=tmp_path, COLUMNS="200")
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_a_bad_step_is_told_on_stderr_and_kept(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS)
    ended = done(*NANGUARD, name, cwd=tmp_path)
    assert ended.returncode == 0
    assert "nan" not in ended.stdout
    assert "step 2  the loss is NaN: step skipped, nothing changed" in ended.stderr
    assert "train.py:7 (log, forward, fp32)" in ended.stderr
    *_, last = ended.stderr.splitlines()
    assert last.startswith(
        "nanguard: 6 steps, 2 not applied, weights and optimizer state finite; first known at step 2"
    )
    assert last.endswith(f"report {Path('nanguard-runs', 'train', 'report.html')}")
    assert (tmp_path / "nanguard-runs" / "train" / "report.html").stat().st_size > 10_000
    run = nanguard.read_run(tmp_path / "nanguard-runs" / "train")
    assert run.header["script"] == str(tmp_path / "train.py")
    assert [step.step for step in run.steps if step.skipped] == [2, 3]
    again = done(*NANGUARD, name, cwd=tmp_path)
    assert "nanguard-runs/train-2/" in again.stderr.replace(os.sep, "/")


WARNS = """
    import warnings
    import torch
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        warnings.warn("an old option")
        x = torch.rand(4, 3) * (step != 2)
        loss = (model(x) / x.sum()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_warning_of_the_program_is_not_shown_again_after_an_incident(tmp_path: Path) -> None:
    name = script(tmp_path, WARNS)
    plain, guarded = (done(*command, name, cwd=tmp_path) for command in (PYTHON, NANGUARD))
    assert "step skipped" in guarded.stderr
    assert plain.stderr.count("an old option") == guarded.stderr.count("an old option")


def test_quietly(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS)
    ended = done(*NANGUARD, "--quiet", name, cwd=tmp_path)
    assert len(ended.stderr.splitlines()) == 1
    healthy = script(tmp_path, TRAINS.replace("(2, 3)", "()"))
    assert done(*NANGUARD, "-q", healthy, cwd=tmp_path).stderr == ""


def test_the_first_bad_step_may_end_it(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS)
    ended = done(*NANGUARD, "--halt-on-first", name, cwd=tmp_path)
    assert ended.returncode == 1
    assert "NonFiniteError: non-finite loss at step 2" in ended.stderr
    assert ended.stdout == ""


NEVER_AGAIN = TRAINS.replace("range(6)", "range(300)").replace("in (2, 3)", "> 4")


@pytest.mark.parametrize("ending", [pytest.param("", marks=pytest.mark.campaign), "sys.exit(0)"])
def test_a_run_that_makes_no_progress_is_stopped_and_its_status_says_so(ending: str, tmp_path: Path) -> None:
    ended = done(*NANGUARD, script(tmp_path, NEVER_AGAIN), cwd=tmp_path)
    assert ended.returncode == 1
    assert "NonFiniteError: non-finite loss at step 105" in ended.stderr
    assert "none of the 100 steps before it was applied" in ended.stderr
    assert ended.stderr.count("logarithm of a negative number") >= 3, "in the first panels, and in the error"
    assert ended.stdout == ""
    (last,) = [line for line in ended.stderr.splitlines() if line.startswith("nanguard: 106 steps")]
    assert last.startswith("nanguard: 106 steps, 101 not applied, halted")
    kept = list((tmp_path / "nanguard-runs" / "train" / "incidents").iterdir())
    assert 10 <= len(kept) <= 20
    assert f"{101 - len(kept)} of 101 incidents not saved to disk" in last
    lines = [f"    {line}" for line in textwrap.dedent(NEVER_AGAIN).strip().splitlines()]
    caught = "\n".join(["try:", *lines, "except ArithmeticError:", "    print('caught')", ending])
    ended = done(*NANGUARD, script(tmp_path, caught, "catches.py"), cwd=tmp_path)
    assert (ended.stdout, ended.returncode) == ("caught\n", 1), "the program caught the error, and was halted"


def test_a_trace_finds_the_first_one(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS.replace("(2, 3)", "(2,)"))
    assert "train.py:7 (log, forward, fp32)" in done(*NANGUARD, name, cwd=tmp_path).stderr
    assert "train.py:7 (log, forward, fp32)" in done(*NANGUARD, "--trace", name, cwd=tmp_path).stderr


def test_policies_and_clipping_by_name(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS.replace("(2, 3)", "()"))
    plain, clipped = (done(*NANGUARD, *more, name, cwd=tmp_path) for more in ((), ("--max-norm", "0.1")))
    assert plain.stdout != clipped.stdout
    name = script(tmp_path, TRAINS.replace("range(6)", "range(12)").replace("in (2, 3)", "> 1"))
    ended = done(*NANGUARD, "--policy", "speechbrain", "--run-dir", "here", name, cwd=tmp_path)
    assert ended.returncode == 1
    assert "NonFiniteError" in ended.stderr
    assert nanguard.read_run(tmp_path / "here").header["policy"]["ladder"]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_where_nothing_can_be_written_it_runs_without_a_log(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS)
    tmp_path.chmod(0o500)
    try:
        ended = done(*NANGUARD, name, cwd=tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert ended.returncode == 0
    assert "there will be no run log" in ended.stderr


def test_several_ranks_decide_together(tmp_path: Path) -> None:
    code = """
        import os, sys, torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for step in range(6):
            x = torch.randn(8, 4)
            if step == 3 and rank == 1:
                x[0, 0] = float("inf")
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save({**model.module.state_dict(), "steps": optimizer.state_dict()["state"][0]["step"]}, f"rank{rank}.pt")
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
    """
    name = script(tmp_path, code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    ended = done(*launcher, "--nproc-per-node", "2", "-m", "nanguard", "run", name, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for key in ("0.weight", "2.weight", "steps"):
        assert torch.equal(states[0][key], states[1][key])
        assert torch.isfinite(states[0][key]).all()
    assert states[0]["steps"] == 5
    assert ended.stderr.count("the loss of rank 1 is NaN or Inf: step skipped, nothing changed") == 1  # one rank speaks
    assert "seen first by rank 1" in ended.stderr
    [folder] = (tmp_path / "nanguard-runs").iterdir()  # of both ranks
    assert folder.name.startswith("train-")
    assert len(nanguard.read_run(folder).incidents) == 1
    assert [path.name for path in (folder / "incidents").iterdir()] == ["0001-rank1"]


def test_help_and_completion_of_recipes() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "nanguard", "run", "--help"], capture_output=True, text=True, check=False, timeout=300
    )
    assert "nanguard run train.py --lr 3e-4" in shown.stdout
    env = {
        **os.environ,
        "_NANGUARD_COMPLETE": "complete_bash",
        "COMP_WORDS": "nanguard run --policy s",
        "COMP_CWORD": "3",
    }
    completed = subprocess.run(
        [sys.executable, "-m", "nanguard"], capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert set(completed.stdout.split()) == {"speechbrain", "separation"}


def test_the_log_is_json_lines(tmp_path: Path) -> None:
    done(*NANGUARD, "--run-dir", "log", script(tmp_path, TRAINS), cwd=tmp_path)
    events = [json.loads(line)["event"] for line in (tmp_path / "log" / "run.jsonl").read_text().splitlines()]
    assert events[0] == "run"
    assert events[-1] == "end"
    assert events.count("step") == 6
    assert events.count("incident") == 2


# ---- the folder of the run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), "print('one line')"),
        (("--run-dir", "here/it/is"), "import torch; print(torch.ones(2).tolist())"),
        # Taken in, since a module is called after it was made, and never stepped.
        (
            (),
            """
            import torch
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.AdamW(model.parameters())
            print(model(torch.ones(1, 2)).shape)
            """,
        ),
    ],
)
def test_a_program_that_makes_no_step_leaves_nothing_behind(
    options: tuple[str, ...], code: str, tmp_path: Path
) -> None:
    ended = done(*NANGUARD, *options, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


MAKES_FOLDERS = """
    import os, shutil, torch
    w = torch.ones(3, requires_grad=True)
    for moment in range(4):
        if moment == WHEN:
            MAKES
        optimizer = torch.optim.SGD([w], lr=0.1) if moment == 0 else optimizer
        w.square().sum().backward()
        optimizer.step()
        if moment == 1:
            torch.log(w - w).sum().backward()  # an incident is kept
            optimizer.step()
        optimizer.zero_grad()
    print(sorted(os.listdir("runs")))
"""


@pytest.mark.parametrize(
    ("when", "makes"),
    [
        (0, "os.makedirs('runs/train')"),  # before anything is guarded
        (1, "os.makedirs('runs/train')"),  # after the first step
        (3, "os.mkdir('runs')"),  # after an incident
        (3, "shutil.rmtree('runs', ignore_errors=True); os.mkdir('runs')"),
    ],
)
def test_a_program_has_its_own_folder_runs_to_itself(when: int, makes: str, tmp_path: Path) -> None:
    name = script(tmp_path, MAKES_FOLDERS.replace("WHEN", str(when)).replace("MAKES", makes))
    guarded = done(*NANGUARD, name, cwd=tmp_path)
    assert guarded.returncode == 0, guarded.stderr
    assert guarded.stdout == ("['train']\n" if "train" in makes else "[]\n")
    run = nanguard.read_run(tmp_path / "nanguard-runs" / "train")
    assert (len(run.steps), len(run.incidents), run.troubles) == (5, 1, ())
    assert "nanguard-runs/train/" in guarded.stderr.splitlines()[-1].replace(os.sep, "/")


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_program_that_is_killed_has_its_log_up_to_then(tmp_path: Path) -> None:
    code = TRAINS.replace("print(w.tolist())", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    ended = done(*NANGUARD, script(tmp_path, code), cwd=tmp_path)
    assert ended.returncode == -signal.SIGKILL
    run = nanguard.read_run(tmp_path / "nanguard-runs" / "train")
    assert run.header["script"] == str(tmp_path / "train.py")
    assert [record.reading.step for record in run.incidents] == [2, 3]
    assert {step.step for step in run.steps} >= {0, 1, 2, 3}


def test_two_runs_at_once_have_a_folder_each(tmp_path: Path) -> None:
    code = TRAINS.replace(
        "for step in range(6):",
        """import glob, os, time
    open(f"ready-{os.getpid()}", "w").close()
    while len(glob.glob("ready-*")) < 2:
        time.sleep(0.05)
    for step in range(6):""",
    )
    name = script(tmp_path, code)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([*NANGUARD, name], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert sorted(path.name for path in (tmp_path / "nanguard-runs").iterdir()) == ["train", "train-2"]
    for path in (tmp_path / "nanguard-runs").iterdir():
        run = nanguard.read_run(path)
        assert (len(run.headers), len(run.steps), len(run.incidents)) == (1, 6, 2)


# ---- several ranks, not all of them guarded --------------------------------------------------------------------------

RANKS = """
    import datetime, os, subprocess, sys, torch, torch.distributed as dist
    from torch import nn

    bad_rank, is_launcher = int(sys.argv[1]), "launcher" in sys.argv
    if is_launcher and "LOCAL_RANK" not in os.environ:  # as Lightning does
        import __main__
        itself = [os.path.abspath(sys.argv[0])] if __main__.__spec__ is None else ["-m", __main__.__spec__.name]
        os.environ["LOCAL_RANK"] = "0"
        subprocess.Popen([sys.executable, *itself, *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": "1"})
    rank = int(os.environ["LOCAL_RANK"])
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2, timeout=limit)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(6):
        x = torch.randn(8, 4)
        if step == 3 and rank == bad_rank:
            x[0, 0] = float("inf")
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({**model.module.state_dict(), "steps": optimizer.state_dict()["state"][0]["step"]}, f"rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        print("done", flush=True)
"""


def states_of_ranks(
    folder: Path, *, by: list[list[str]], bad_rank: int
) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """What each of two processes of one process group ends with; ``by`` is how each is started."""
    folder.mkdir()
    name = script(folder, RANKS)
    processes = [
        subprocess.Popen(
            [*command, name, str(bad_rank)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(by)
    ]
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert ended[0][0] == "done\n"
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)], [err for _, err in ended]


@needs_gloo
@pytest.mark.parametrize("guarded", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_healthy_run_with_one_guarded_rank_is_the_plain_run(guarded: int, tmp_path: Path) -> None:
    plain, _ = states_of_ranks(tmp_path / "plain", by=[PYTHON, PYTHON], bad_rank=-1)
    by = [NANGUARD if rank == guarded else PYTHON for rank in range(2)]
    # Clipping on one rank alone would make the weights of the ranks differ.
    by[guarded] = [*by[guarded], "--max-norm", "1e-3"]
    mixed, told = states_of_ranks(tmp_path / "mixed", by=by, bad_rank=-1)
    for before, after in zip(plain, mixed, strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert told[guarded].count(f"rank {guarded} is guarded, but rank {1 - guarded} runs without nanguard") == 1


@needs_gloo
@pytest.mark.parametrize("bad_rank", [pytest.param(0, marks=pytest.mark.campaign), 1])
def test_a_bad_step_with_one_guarded_rank_does_not_hang(bad_rank: int, tmp_path: Path) -> None:
    (first, second), told = states_of_ranks(tmp_path / "mixed", by=[NANGUARD, PYTHON], bad_rank=bad_rank)
    assert all(torch.isfinite(value).all() for value in first.values())
    assert not torch.isfinite(second["0.weight"]).all()  # as the warning says
    assert first["steps"] == 3
    assert "step skipped, nothing changed" in told[0]


@needs_gloo
@pytest.mark.parametrize("as_module", [False, True])
def test_ranks_that_a_program_starts_itself_are_guarded(as_module: bool, tmp_path: Path) -> None:
    name = script(tmp_path, RANKS)
    what = ["-m", "train"] if as_module else [name]
    ended = done(*NANGUARD, *what, "1", "launcher", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for key in ("0.weight", "2.weight", "steps"):
        assert torch.equal(states[0][key], states[1][key])
        assert torch.isfinite(states[0][key]).all()
    assert states[0]["steps"] == 5
    assert "seen first by rank 1" in ended.stderr
    assert ended.stderr.count("nanguard: 6 steps") == 1
    assert [path.name for path in (tmp_path / "nanguard-runs").iterdir()] == ["train"]  # ranks share a folder


def test_other_processes_are_started_as_they_are(tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys
        if len(sys.argv) > 1:
            print("child", "nanguard" in sys.modules)
            sys.exit()
        elsewhere = {**os.environ, "LOCAL_RANK": "1"}
        subprocess.run([sys.executable, "-c", "import sys; print('nanguard' in sys.modules)"], env=elsewhere)
        subprocess.run([sys.executable, sys.argv[0], "again"])
        subprocess.run(args=[sys.executable, sys.argv[0], "again"], env=elsewhere)
        subprocess.run("echo shell", shell=True, env=elsewhere)
    """
    ended = done(*NANGUARD, script(tmp_path, code), cwd=tmp_path)
    assert ended.stdout.split("\n") == ["False", "child False", "child True", "shell", ""], ended.stderr
    told = ended.stderr.replace("\n", " ")
    assert "train.py was started as a program of its own, which is NOT GUARDED" in " ".join(told.split())


def test_the_rank_that_looks_first_decides_for_all() -> None:
    """Whatever the others see later, all guarded ranks have the same answer."""
    late, ready = dist.HashStore(), dist.HashStore()
    late.set("nanguard/guarded/0", "1")
    assert not agree(late, [0, 1], wait=0.1)
    late.set("nanguard/guarded/1", "1")
    assert not agree(late, [0, 1], wait=0.1)
    for rank in range(2):
        ready.set(f"nanguard/guarded/{rank}", "1")
    assert agree(ready, [0, 1], wait=0.0)
    assert agree(ready, [0, 1], wait=0.0)
    assert not agree(ready, [0, 1, 2], wait=0.1)
