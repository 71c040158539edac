"""The torch calls around the model in a bundle: they come back as they were, and nothing else can be called by them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import nanguard
from nanguard.autopilot.entry import begin
from nanguard.errors import BundleError, ReplayError
from nanguard.hosted.settings import Settings
from nanguard.incidents import bundle as bundle_module
from nanguard.incidents.bundle import folders
from nanguard.incidents.call_names import function_named, name_of_function
from nanguard.incidents.files import INCIDENT
from nanguard.incidents.reader import Bundle, load
from nanguard.records.diagnosis import Diagnosis
from nanguard.replay.entry import BuiltProgram
from nanguard.replay.program import from_program, program_of
from nanguard.replay.rerun import Replayed, prepare, replay

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
BAD = 2


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def saved(loss_of: Loss, folder: Path, *, trained: tuple[Tensor, ...] = (), **options: Any) -> tuple[Bundle, nn.Module]:
    """The bundle of a program whose last step is bad, and its model as it was in that step."""
    torch.manual_seed(0)
    with nanguard.install(run_dir=folder, **options):
        model = network()
        optimizer = SGD([*model.parameters(), *trained], lr=0.01)
        for step in range(BAD + 1):
            x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
            optimizer.zero_grad()
            out = model(x)
            loss = loss_of(out, x, y) if step == BAD else out.pow(2).mean() + sum(t.sum() for t in trained)
            loss.backward()
            optimizer.step()
    (found,) = folders(folder)
    return load(found), model


def again(bundle: Bundle, model: nn.Module) -> Replayed:
    return replay(prepare(bundle, BuiltProgram(model=model, loss_fn=None, is_of_run=True)))


# ---- what comes back -------------------------------------------------------------------------------------------------


def divided(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.ones(4, 1)
    weights[2] = 0
    return ((out - x.sum(1, keepdim=True)) ** 2 / weights).mean()


def log_of_zero(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    p = torch.stack([out[:, 0], out[:, 1] - out[:, 1].detach()], dim=-1).abs()
    return -torch.log(p).mean()


def cross_entropy_by_hand(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    scores = (1000 * out).exp()
    p = scores / scores.sum(dim=-1, keepdim=True)
    return -p[torch.arange(4), y].log().mean()


def sliced(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    first, *others = out.split(1, dim=-1)
    return (out[..., None, :2:1].squeeze(1) / (others[0] - others[0].detach())).sum() + first.T.sum()


def masked(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    wanted = (y > 7) & ~torch.isnan(x[:, 0])
    return out[wanted].mean()


def chosen(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    size = (out - out.detach()).pow(2).sum(-1)
    return torch.where(size > 0, size.sqrt(), torch.zeros_like(size)).sum()


def in_autocast(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = out @ out.T
        assert scores.dtype is torch.bfloat16
        return scores.mul(1e30).float().pow(2).mean()


def written_in_place(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    p = out.softmax(-1)
    p = p.clone()
    p.sub_(p.detach())
    p[0, :] += 1
    return p.log().mean()


def by_keywords(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(input=out, target=torch.full_like(y, -100), ignore_index=-100, reduction="mean")


def drawn(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.rand_like(out) + F.dropout(out, 0.5).detach()
    return (out / (noise - noise)).mean(dim=(0, 1), dtype=torch.float64)


def without_gradient(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        best, _ = out.max(dim=-1, keepdim=True)
    return torch.einsum("ij,ij->i", out, (best - best).reciprocal().expand(4, 3)).sum()


def unusual_arguments(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    same = torch.empty_like(out, memory_format=torch.contiguous_format, layout=torch.strided).zero_()
    return ((out + same.to(out.dtype)) / np.float32(0)).real.sum(dim=[0, 1])


KINDS: list[Any] = [
    divided,
    log_of_zero,
    cross_entropy_by_hand,
    sliced,
    masked,
    chosen,
    in_autocast,
    written_in_place,
    by_keywords,
    drawn,
    without_gradient,
    unusual_arguments,
]
COMPARED = ("cause", "op", "module", "phase", "because", "source", "capture")


def told(diagnosis: Diagnosis | None) -> list[Any]:
    assert diagnosis is not None
    return [getattr(diagnosis, name) for name in COMPARED]


@pytest.mark.parametrize("loss_of", KINDS)
def test_a_fault_in_a_loss_by_hand_is_reproduced(loss_of: Loss, tmp_path: Path) -> None:
    """To the last digit: dropout in the model draws the same numbers."""
    bundle, model = saved(loss_of, tmp_path)
    assert bundle.captured == ("batch", "tape")
    assert bundle.diagnosis is not None
    assert bundle.diagnosis.capture == "tape"
    replayed = again(bundle, model)
    assert replayed.status == 0, replayed.differs
    assert told(replayed.diagnosis) == told(bundle.diagnosis)
    assert not any("only the calls of the model" in note for note in replayed.notes)


def test_what_is_no_part_of_the_model_is_saved_with_it(tmp_path: Path) -> None:
    """Another network, and a tensor that is trained beside the model: as the step found them."""
    teacher = nn.Linear(6, 3).requires_grad_(False)
    spread = nn.Parameter(torch.zeros(3))

    def loss_of(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return ((out - teacher(x)) / (spread - spread.detach())).sum()

    bundle, model = saved(loss_of, tmp_path, trained=(spread,))
    assert bundle.captured == ("batch", "tape")
    replayed = again(bundle, model)
    assert told(replayed.diagnosis) == told(bundle.diagnosis)


def test_inputs_of_the_model_are_saved_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(4, 6) for _ in range(BAD + 1)]
    with nanguard.install(run_dir=tmp_path):
        model = network()
        optimizer = SGD(model.parameters(), lr=0.01)
        for step, x in enumerate(batches):
            optimizer.zero_grad()
            (model(x).pow(2).mean() / (0 if step == BAD else 1) + 0 * x.sum()).backward()
            optimizer.step()
    (found,) = folders(tmp_path)
    document = json.loads((found / INCIDENT).read_text())
    assert document["contents"]["tape"]["tensors"] == []
    assert "$saved" in json.dumps(document["contents"]["tape"]["rows"])
    assert again(load(found), model).status == 0


def test_of_a_loop_with_a_guard_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network()
    guard = nanguard.Guard(model, SGD(model.parameters(), lr=0.01), precision="bf16", run_dir=tmp_path)
    batches = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(BAD + 1)]
    for step, (x, y) in enumerate(guard.epoch(batches)):
        with guard.autocast():
            loss = divided(model(x), x, y) if step == BAD else model(x).pow(2).mean()
        guard.backward(loss)
        guard.update()
    guard.settle()
    (found,) = folders(tmp_path)
    bundle = load(found)
    replayed = replay(prepare(bundle, BuiltProgram(model=model, loss_fn=None)))
    assert told(replayed.diagnosis)[:3] == told(bundle.diagnosis)[:3] == ["div_by_zero", "div", ""]


def test_what_ran_on_a_gpu_is_run_on_the_device_of_the_model(tmp_path: Path) -> None:
    """Devices are objects, names, or in the name of the function."""

    def loss_of(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.zeros(4, 3, device=torch.device("cpu"))
        return (out.to("cpu") / weights.cpu()).mean()

    bundle, model = saved(loss_of, tmp_path)
    text = (bundle.path / INCIDENT).read_text()
    for here, there in (
        ('"$device": "cpu"', '"$device": "cuda:1"'),
        ('"torch.Tensor.cpu"', '"torch.Tensor.cuda"'),
        ('"cpu"\n', '"cuda"\n'),
    ):
        assert here in text
        text = text.replace(here, there)
    (bundle.path / INCIDENT).write_text(text)
    assert again(load(bundle.path), model).status == 0


# ---- what is left out, and why ---------------------------------------------------------------------------------------


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        return above[0]


def test_a_call_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    def loss_of(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return divided(Squash.apply(out), x, y)  # type: ignore[no-untyped-call]

    bundle, model = saved(loss_of, tmp_path)
    assert bundle.captured == ("batch",)
    why = bundle.why_not("tape")
    assert re.fullmatch(
        r"Squash\.apply \(test_saved_tape\.py:\d+\) is not a torch function that can be found again by its name", why
    )
    assert again(bundle, model).status == 1  # as ever: only the model is called


def test_a_generator_of_the_programs_own_is_named(tmp_path: Path) -> None:
    def loss_of(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(3)
        return divided(out + torch.rand(4, 3, generator=own), x, y)

    bundle, _ = saved(loss_of, tmp_path)
    assert re.fullmatch(r"rand \(test_saved_tape\.py:\d+\) draws from a random generator .*", bundle.why_not("tape"))


def test_it_is_data_and_counts_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = saved(divided, tmp_path / "meta", capture="meta")
    assert bundle.captured == ()
    table = torch.ones(1000, 1)

    def from_a_table(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return divided(out * table[y], x, y)

    monkeypatch.setattr(bundle_module, "TAPE_LIMIT", 50_000)
    assert "tape" in saved(from_a_table, tmp_path / "fits")[0].captured
    monkeypatch.setattr(bundle_module, "TAPE_LIMIT", 2_000)
    bundle, _ = saved(from_a_table, tmp_path / "large")
    assert bundle.captured == ("batch",)
    assert re.fullmatch(r"[\d,]+ bytes is over the limit of 2,000 bytes", bundle.why_not("tape"))
    assert [each["what"] for each in bundle.facts["left_out"]].count("tape") == 1


# ---- what is read can run nothing else -------------------------------------------------------------------------------


def changed(bundle: Bundle, change: Callable[[dict[str, Any]], Any]) -> Bundle:
    file = bundle.path / INCIDENT
    document = json.loads(file.read_text())
    change(document["contents"]["tape"])
    file.write_text(json.dumps(document))
    return load(bundle.path)


FORBIDDEN = [
    "torch.load",
    "torch.save",
    "torch.compile",
    "torch.hub.load",
    "torch.serialization.load",
    "torch.from_file",
    "torch.ops.load_library",
    "torch.jit.load",
    "torch.utils.data.DataLoader",
    "torch.Tensor.apply_",
    "torch.Tensor.map_",
    "torch.Tensor.set_",
    "torch.Tensor.__setstate__",
    "torch.Tensor.__reduce_ex__",
    "torch.Tensor.__class__",
    "torch.Tensor.register_hook",
    "torch.Tensor.backward",
    "torch.nn.functional.torch.load",
    "torch.nn.functional.importlib",
    "os.system",
    "builtins.eval",
    "eval",
    "",
    None,
    ["torch.add"],
]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_no_other_function_can_be_named(name: Any) -> None:
    with pytest.raises(ValueError, match="is not a torch function that a tape can hold: nothing is run"):
        function_named(name)


@pytest.mark.parametrize("name", ["torch.load", "os.system", "torch.hub.load", "torch.save", "torch.compile"])
def test_a_bundle_that_was_tampered_with_is_refused(name: str, tmp_path: Path) -> None:
    bundle, model = saved(divided, tmp_path)
    bundle = changed(bundle, lambda tape: tape["rows"][-1].update(function=name, args={"$tuple": ["x"]}))
    with pytest.raises(BundleError, match=f"'{re.escape(name)}' is not a torch function that a tape can hold"):
        again(bundle, model)


DAMAGE: list[Any] = [
    lambda tape: tape.update(rows="none"),
    lambda tape: tape.update(random=[{}]),
    lambda tape: tape.update(tensors=[1]),
    lambda tape: tape.update(parameters=[99]),
    lambda tape: tape["rows"].reverse(),
    lambda tape: tape["rows"].append(tape["rows"][0]),
    lambda tape: tape["rows"][0].update(number=-1),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [{"$made": [10**6, 0]}]}),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [{"$weight": "9.weight"}]}),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [{"$saved": "no such"}]}),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [{"$outside": 99}]}),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [{"$function": "eval"}]}),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [{"$fields": {"__array_interface__": {}}}]}),
    lambda tape: tape["rows"][-1].update(args={"$tuple": [[{"$lost": "a function"}]]}),
    lambda tape: tape["rows"][-1].update(kwargs={"dim": {"$slice": [{"$set": []}, None, None]}}),
    lambda tape: tape["rows"][-1].update(args=[1]),
    lambda tape: tape["rows"][-1].update(kwargs=None),
    lambda tape: tape["rows"][-1].update(place=[1, 2, 3]),
    lambda tape: tape["rows"][-1].update(autocast="bfloat16"),
    lambda tape: tape["rows"][-1].update(random=77),
    lambda tape: [row.update(module="no.such") for row in tape["rows"] if "module" in row],
    lambda tape: tape["losses"][0].update(roots=[1]),
    lambda tape: tape["losses"][0].pop("last"),
]


@pytest.mark.parametrize("change", DAMAGE)
def test_damage_is_said(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    bundle, model = saved(divided, tmp_path)
    with pytest.raises(BundleError, match="the torch calls of the step cannot be read"):
        again(changed(bundle, change), model)


def test_names_lead_back_to_the_function() -> None:
    for function in (Tensor.div, Tensor.__getitem__, torch.where, F.cross_entropy, F.gelu, torch.einsum, torch.ones):
        name = name_of_function(function)
        assert name is not None
        assert function_named(name) == function
    assert function_named("torch.Tensor.T.__get__")(torch.ones(2, 3)).shape == (3, 2)
    assert name_of_function(print) is None
    assert name_of_function([]) is None


@pytest.mark.parametrize("memory", ["as it is", "filled with NaN"])
def test_a_row_that_cannot_be_run_here_leaves_the_calls_of_the_model(
    memory: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What is in new memory that dropout then writes a mask to is not blamed for it."""
    if memory != "as it is":
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
        torch.use_deterministic_algorithms(True)  # then torch fills memory that it gives out
    bundle, model = saved(divided, tmp_path)

    def sum_over_no_dimension(tape: dict[str, Any]) -> None:
        (row,) = (each for each in tape["rows"] if each.get("function") == "torch.Tensor.sum")
        row["args"]["$tuple"][1] = 99

    bundle = changed(bundle, sum_over_no_dimension)
    replayed = again(bundle, model)
    assert replayed.status == 1
    assert any("only the calls of the model were run again, not those around it" in note for note in replayed.notes), (
        replayed.notes
    )


# ---- from end to end -------------------------------------------------------------------------------------------------

PROGRAM = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    x, weights = torch.randn(32, 8), torch.ones(32, 1)
    if step == 3:
        weights[4] = 0
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2 / weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanguard", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(nanguard.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


SEVERAL = """\
import torch
from torch import nn
torch.manual_seed(0)
net = nn.ModuleDict({"inp": nn.Linear(8, 4), "out": nn.Linear(4, 8)})
size, teacher = nn.Parameter(torch.ones(4)), nn.Linear(8, 8).requires_grad_(False)
optimizer = torch.optim.Adam([*net.parameters(), size])
for step in range(5):
    x = torch.randn(16, 8)
    target, h = teacher(x), net["inp"](x) * size
    h = h / (h.norm(dim=-1, keepdim=True) * (step != 3))
    optimizer.zero_grad()
    (net["out"](h) - target).pow(2).mean().backward()
    optimizer.step()
"""


AS_A_MODULE = """\
import torch
from torch import nn
from .sizes import LARGE
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.loud, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.out(self.loud(x) * 1e-4)
net = Net()
nn.init.constant_(net.loud.weight, 1.0)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
for step in range(3):
    x = torch.ones(2, 4) * (LARGE if step == 1 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(x).sum()
    loss.backward()
    optimizer.step()
"""


def replayed_after_run(folder: Path, program: str, says: str) -> str:
    """Runs a program with a fault, and replays it. What the replay prints begins with ``says``."""
    (folder / "train.py").write_text(program)
    assert command(folder, "run", "--run-dir", "a", "train.py").returncode == 0
    replayed = command(folder, "replay", "a/incidents/0001")
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.startswith(says)
    return replayed.stdout


def test_parts_of_a_model_that_are_called_one_by_one(tmp_path: Path) -> None:
    replayed_after_run(tmp_path, SEVERAL, "reproduced: division by a norm that is zero, div, train.py:10")


def test_run_and_replay(tmp_path: Path) -> None:
    printed = replayed_after_run(tmp_path, PROGRAM, "reproduced: division by zero, div, train.py:10")
    assert "only the calls of the model" not in printed
    explained = command(tmp_path, "explain", "a/incidents/0001")
    assert explained.returncode == 0
    assert "batch, tape" in explained.stdout


def test_a_program_that_was_run_as_a_module_is_run_as_one_again(tmp_path: Path) -> None:
    """With imports relative to its package, and with advice that can be followed under nanguard run."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "sizes.py").write_text("LARGE = 3e4\n")
    (package / "train.py").write_text(AS_A_MODULE)
    assert command(tmp_path, "run", "-m", "package.train").returncode == 0
    replayed = command(tmp_path, "replay", "nanguard-runs/train")
    assert replayed.returncode == 0, replayed.stderr
    assert "running -m package.train again, up to step 1\n" in replayed.stderr
    assert "nanguard run --keep-fp32 loud ..." in replayed.stdout
    assert "guard." not in replayed.stdout


def test_a_step_of_a_child_process_is_not_looked_for_in_the_program(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    with begin(Settings(run_dir=tmp_path / "a", script=str(file), is_child=True)):
        runpy.run_path(str(file))
    (found,) = folders(tmp_path / "a")
    with pytest.raises(ReplayError, match=r"in a process that train\.py had started, .* --entry train\.py:build"):
        program_of(load(found))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_steps_in_flight_do_not_hide_the_model_of_the_program(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("lr=1e-2", "lr=1e-2, fused=True"))
    with begin(Settings(run_dir=tmp_path / "a", script=str(file))):
        runpy.run_path(str(file))
    (found,) = folders(tmp_path / "a")
    bundle = load(found)
    replayed = replay(prepare(bundle, from_program(bundle, program_of(bundle))))
    assert replayed.status == 0, replayed.differs
    assert replayed.diagnosis is not None
    assert replayed.diagnosis.cause == "div_by_zero"
