"""``nanguard check`` finds every non-finite value in any checkpoint, and never runs what it reads."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import io
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from helpers import INF, NAN, TinyNet, loss_fn, make_batches
from nanguard.checkpoint import CheckReport, FileReport, TensorReport, check, values, view
from nanguard.cli import app

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = tuple(getattr(torch, n) for n in dir(torch) if n.startswith("float8_"))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = TinyNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn(model, make_batches(1)[0]).backward()
    optimizer.step()
    return model, optimizer


def healthy() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 8000, "loss": 0.5}


def sick() -> dict[str, Any]:
    """Four faults in tensors, and one in a number."""
    state = healthy()
    state["model"]["inp.weight"][0, :3] = NAN
    state["model"]["out.bias"][1] = INF
    state["model"]["norm.running_var"][:] = -INF
    state["optimizer"]["state"][2]["exp_avg"][0] = NAN
    state["optimizer"]["param_groups"][0]["lr"] = NAN
    return state


SICK = {
    "model.inp.weight": (3, 0, 0),
    "model.out.bias": (0, 1, 0),
    "model.norm.running_var": (0, 0, 12),
    "optimizer.state.2.exp_avg": (1, 0, 0),
}


def only(report: CheckReport) -> FileReport:
    (file,) = report.files
    return file


def found(file: FileReport) -> dict[str, tuple[int, int, int]]:
    return {t.name: (t.num_nan, t.num_posinf, t.num_neginf) for t in file.tensors if t.num_nonfinite}


def tensor(file: FileReport, name: str) -> TensorReport:
    (one,) = [t for t in file.tensors if t.name == name]
    return one


def save_distributed(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process only
        dcp.save(state, checkpoint_id=folder)


def flat(state: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of a state by dotted name, written another way than the library does it."""
    if isinstance(state, Tensor):
        return {name: state}
    members = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {n: t for key, value in members for n, t in flat(value, f"{name}.{key}".lstrip(".")).items()}


def write_torch(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def write_legacy(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def write_safetensors(state: dict[str, Any], folder: Path) -> Path:
    save_file(flat(state), folder / "model.safetensors")
    return folder / "model.safetensors"


def write_index(state: dict[str, Any], folder: Path, save: Callable[[Any, Path], None] = save_file) -> Path:
    tensors = flat(state)
    shard_of = {name: f"model-{place % 3}.safetensors" for place, name in enumerate(tensors)}
    for shard in set(shard_of.values()):
        save({n: t for n, t in tensors.items() if shard_of[n] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shard_of}))
    return index


def write_distributed(state: dict[str, Any], folder: Path) -> Path:
    save_distributed(state, folder / "dcp")
    return folder / "dcp"


WRITERS = [write_torch, write_legacy, write_safetensors, write_index, write_distributed]
every_format = pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__.removeprefix("write_"))
keeps_numbers = (write_torch, write_legacy, write_distributed)


# ---- formats ---------------------------------------------------------------------------------------------------------


@every_format
def test_a_healthy_checkpoint_is_clean(write: Callable[..., Path], tmp_path: Path) -> None:
    state = healthy()
    file = only(check(write(state, tmp_path)))
    assert file.verdict.startswith("clean: ")
    assert (file.status, file.clean, file.problems, file.numbers) == (0, True, (), ())
    expected = {n: (str(t.dtype), tuple(t.shape), t.numel()) for n, t in flat(state).items()}
    assert {t.name: (f"torch.{t.dtype}", t.shape, t.num_values) for t in file.tensors} == expected
    assert file.num_values == sum(t.numel() for t in flat(state).values() if t.is_floating_point())


@every_format
def test_every_fault_is_found_under_its_name(write: Callable[..., Path], tmp_path: Path) -> None:
    file = only(check(write(sick(), tmp_path)))
    assert found(file) == SICK
    assert file.status == 1
    assert [t.num_nonfinite for t in file.nonfinite] == [12, 3, 1, 1]  # the worst first
    names = [n.name for n in file.numbers]
    assert names == (["optimizer.param_groups.0.lr"] if write in keeps_numbers else [])


@every_format
def test_the_format_is_told_by_content_and_not_by_name(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(sick(), tmp_path)
    for suffix in ("", ".safetensors", ".json", ".bin"):
        renamed = path.rename(path.parent / f"renamed{suffix}")
        assert found(only(check(renamed))) == SICK
        path = renamed


def test_a_folder_is_all_that_is_in_it_and_below(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "inner").mkdir()
    write_index(healthy(), tmp_path / "hf")
    torch.save(TinyNet(), tmp_path / "hf" / "training_args.bin")  # as a trainer leaves it: not to be read safely
    write_torch(sick(), tmp_path / "hf" / "inner")
    write_distributed(healthy(), tmp_path)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    report = check(tmp_path)
    names = [str(Path(file.path).relative_to(tmp_path)) for file in report.files]
    assert names == ["dcp", "hf/inner/state.pt", "hf/model.safetensors.index.json"]  # each shard once
    assert [file.status for file in report.files] == [0, 1, 0]
    assert report.status == 1
    assert report.passed_over == (str(tmp_path / "hf" / "training_args.bin"),)
    assert check(tmp_path / "hf" / "training_args.bin").status == 2  # asked for by name, it is not passed over


def test_incidents_that_a_run_has_kept_are_passed_over_unless_asked_for(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "a" / "incidents" / "0001"
    kept.mkdir(parents=True)
    bad = {"batch.0": torch.tensor([1.0, math.nan])}
    save_file(bad, kept / "tensors.safetensors")
    (kept / "incident.json").write_text("{}")
    torch.save(healthy(), tmp_path / "runs" / "a" / "last.pt")
    report = check(tmp_path)
    assert report.status == 0
    assert [file.path for file in report.files] == [str(tmp_path / "runs" / "a" / "last.pt")]
    assert report.passed_over == (str(kept / "tensors.safetensors"),)
    told = run(tmp_path)
    assert "not checked: tensors.safetensors (saved incidents, settings and random states)" in told.stdout
    for asked in (kept, kept / "tensors.safetensors"):
        assert (check(asked).status, check(asked).passed_over) == (1, ())
    assert "Saved incidents" in only(check(kept.parent)).verdict
    (kept / "incident.json").unlink()
    assert check(tmp_path).status == 1  # a file of this name is no incident by itself


def test_shards_of_two_ranks_are_one_tensor(tmp_path: Path) -> None:
    code = """
        import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
        weight = torch.ones(6, 4)
        weight[0, 0], weight[5, 1:] = float("nan"), float("inf")  # one on each rank
        dcp.save({"weight": distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)])}, checkpoint_id="dcp")
        dist.destroy_process_group()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    both = [
        subprocess.Popen(
            [*command, str(rank), f"file://{tmp_path}/store"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    file = only(check(tmp_path / "dcp"))
    assert found(file) == {"weight": (1, 3, 0)}
    assert (tensor(file, "weight").shape, tensor(file, "weight").num_values) == ((6, 4), 24)
    for shard in (tmp_path / "dcp").glob("__1_*.distcp"):
        shard.unlink()
    assert check(tmp_path / "dcp").status == 2


@pytest.mark.parametrize("legacy", [False, True])
def test_nesting_of_any_kind(legacy: bool, tmp_path: Path) -> None:
    inner: list[Any] = [torch.tensor([NAN])]
    inner.append(inner)  # it contains itself
    deep: Any = torch.tensor(INF)
    for _ in range(150):
        deep = [deep]
    state = collections.OrderedDict(
        a={"b": [1, (torch.tensor([-INF, 1.0]), "text", None, b"bytes")]}, inner=inner, deep=deep, when={3: NAN}
    )
    torch.save(state, tmp_path / "f", _use_new_zipfile_serialization=not legacy)
    file = only(check(tmp_path / "f"))
    assert found(file) == {"a.b.1.0": (0, 0, 1), "inner.0": (1, 0, 0), "deep" + ".0" * 150: (0, 1, 0)}
    assert [n.name for n in file.numbers] == ["when.3"]


def test_a_file_nested_deeper_than_calls_go(tmp_path: Path) -> None:
    torch.save([0.0], tmp_path / "f", _use_new_zipfile_serialization=False)
    # 50,000 lists, one in the other: pickled by hand, since pickle itself would not go that deep.
    parts = pickle.dumps([NAN], protocol=2)[2:-1]
    nested = b"]" * 50_000 + parts + b"a" * 50_000
    header = (tmp_path / "f").read_bytes()
    cut = header.index(pickle.dumps([0.0], protocol=2))
    rest = header[cut + len(pickle.dumps([0.0], protocol=2)) :]
    (tmp_path / "f").write_bytes(header[:cut] + b"\x80\x02" + nested + b"." + rest)
    file = only(check(tmp_path / "f"))
    assert [n.name.count(".") for n in file.numbers] == [50_000], file.problems


def test_data_in_common_classes_is_read_without_them(tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(lr=NAN, out=Path("x")),
        "best": np.float64("nan"),
        "half": np.float16("nan"),
        "whole": np.int64(3),
        "history": np.array([[1.0, NAN], [INF, -INF]], dtype=np.float32),
        "objects": np.array([NAN, "x"], dtype=object),
        "labels": np.array(["a"]),
        "count": np.arange(3),
        "when": datetime.datetime(2026, 1, 1),
        "version": torch.__version__,
    }
    torch.save(state, tmp_path / "f.pt")
    file = only(check(tmp_path / "f.pt"))
    assert file.problems == ()
    assert found(file) == {"history": (1, 1, 1)}
    assert {n.name for n in file.numbers} == {"args.lr", "best", "half", "objects.0"}
    with pytest.raises(pickle.UnpicklingError):  # outside of the check nothing is trusted that was not before
        torch.load(tmp_path / "f.pt", weights_only=True)


def test_inf_is_a_fault_among_an_optimizers_options_and_a_note_elsewhere(tmp_path: Path) -> None:
    torch.save({"scheduler": {"best": INF}}, tmp_path / "a")
    torch.save({"optimizer": {"param_groups": [{"lr": INF}]}}, tmp_path / "b")
    torch.save({"scheduler": {"best": NAN}}, tmp_path / "c")
    assert [check(tmp_path / name).status for name in "abc"] == [0, 1, 1]
    assert [n.value for n in only(check(tmp_path / "a")).numbers] == [INF]


# ---- nothing is run --------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


class EvilSystem(Evil):
    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.proof}'",)


class EvilEval(Evil):
    def __reduce__(self) -> Any:
        return eval, (f"__import__('pathlib').Path({str(self.proof)!r}).touch()",)


@pytest.mark.parametrize("kind", [Evil, EvilSystem, EvilEval])
@pytest.mark.parametrize("way", ["zip", "legacy", "pickle", "in a state", "metadata", "bytes in shards", "shard"])
def test_a_malicious_file_is_unreadable_and_nothing_of_it_is_run(kind: type[Evil], way: str, tmp_path: Path) -> None:
    proof, path = tmp_path / "proof", tmp_path / "evil.pt"
    evil = kind(proof)
    if way == "zip":
        torch.save(evil, path)
    elif way == "legacy":
        torch.save(evil, path, _use_new_zipfile_serialization=False)
    elif way == "pickle":
        path.write_bytes(pickle.dumps(evil, protocol=2))
    elif way == "in a state":
        torch.save({**healthy(), "evil": evil}, path)
    elif way == "metadata":
        path = write_distributed(healthy(), tmp_path)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data = evil
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    elif way == "bytes in shards":
        path = tmp_path / "dcp"
        save_distributed({"w": torch.ones(2), "evil": Holder(evil)}, path)
    else:
        path = write_index(healthy(), tmp_path)
        torch.save(evil, tmp_path / "model-1.safetensors")
    file = only(check(path))
    assert not proof.exists()
    assert file.status == 2
    assert any(word in file.verdict for word in ("code", "did not call it", "do not load"))
    loads_it_the_usual_way(path if path.is_file() and path.suffix == ".pt" else None, proof)


@dataclasses.dataclass
class Holder:
    evil: Evil


def loads_it_the_usual_way(path: Path | None, proof: Path) -> None:
    """That these files are what they are said to be: loaded the usual way, they do run."""
    if path is None:
        return
    if path.read_bytes().startswith(b"PK") or b"protocol_version" in path.read_bytes():
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert proof.exists()


class Misleading:
    """An array of NumPy, of another shape than its data."""

    def __init__(self, *shape: Any) -> None:
        self.shape = shape

    def __reduce__(self) -> Any:
        make, args, state = np.ones(1).__reduce__()
        return make, args, (state[0], self.shape, *state[2:])


@pytest.mark.parametrize("shape", [("word",), (2,), (-1, -1)])
def test_data_that_is_made_to_mislead_is_unreadable(shape: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "a": Misleading(*shape)}, tmp_path / "f.pt")
    assert "damaged or malicious" in only(check(tmp_path / "f.pt")).verdict


def test_a_metadata_of_any_class_but_its_own_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(subprocess.Popen))
    assert "asks for subprocess.Popen" in check(tmp_path).files[0].verdict


def test_a_module_says_what_to_do_instead(tmp_path: Path) -> None:
    torch.save(TinyNet(), tmp_path / "model.pt")
    verdict = only(check(tmp_path / "model.pt")).verdict
    assert "needs helpers.TinyNet" in verdict
    assert "model.state_dict()" in verdict


def test_names_in_a_file_do_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        file = only(check(index))
        assert file.status == 2
        assert file.tensors == ()


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_safetensors_with_headers_of_every_length(tmp_path: Path) -> None:
    for length in range(40):  # rounded up to eight, so every first byte that there is
        save_file({"w" * 8 * length or "w": torch.tensor([NAN])}, tmp_path / "f")
        assert check(tmp_path / "f").status == 1


@every_format
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_unreadable(write: Callable[..., Path], kept: float, tmp_path: Path) -> None:
    path = write(healthy(), tmp_path)
    victim = {"dcp": path / "__0_0.distcp", "model.safetensors.index.json": tmp_path / "model-1.safetensors"}.get(
        path.name, path
    )
    whole = victim.read_bytes()
    victim.write_bytes(whole[: int(len(whole) * kept)])
    file = only(check(path))
    assert file.status == 2
    assert file.problems
    assert any(word in file.verdict for word in ("truncated", "damaged", "empty"))


def test_a_shard_that_is_nowhere_stored_is_missed(tmp_path: Path) -> None:
    folder = write_distributed(healthy(), tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.out.weight"}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert only(check(folder)).problems == ("model.out.weight: 0 of its 1 shards are stored",)


def test_a_truncated_metadata_is_unreadable(tmp_path: Path) -> None:
    folder = write_distributed(healthy(), tmp_path)
    whole = (folder / ".metadata").read_bytes()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        (folder / ".metadata").write_bytes(whole[:length])
        assert "truncated or damaged" in only(check(folder)).verdict
    (folder / ".metadata").unlink()
    assert "not completely saved" in only(check(folder)).verdict


@pytest.mark.parametrize("write", [write_torch, write_legacy, write_safetensors])
def test_a_flipped_header_is_unreadable(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(healthy(), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(bytes(b ^ 0xFF for b in whole[:16]) + whole[16:])
    file = only(check(path))
    assert file.status == 2
    assert "damaged" in file.verdict


@pytest.mark.parametrize("write", [write_torch, write_legacy, write_safetensors, write_distributed])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
@example(where=0.0, bits=255)
def test_no_damage_of_one_byte_makes_it_raise(
    write: Callable[..., Path], where: float, bits: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write({"a": torch.ones(3), "b": [torch.tensor([2.0, 3.0])]}, tmp_path_factory.mktemp("damage"))
    victim = path / ".metadata" if path.is_dir() else path
    data = bytearray(victim.read_bytes())
    data[int(where * len(data))] ^= bits
    victim.write_bytes(data)
    assert check(path).status in (0, 1, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"PK", "not a checkpoint"),
        (b"\x80", "truncated or damaged"),
        (b"\x00" * 4096, "not a checkpoint"),
        (b"hello", "not a checkpoint"),
        (b'{"a": 1}', "not an index"),
        (b'{"meta":{"weight_map": 3}}', "not an index"),
        (b'{"weight_map": {"w": "missing.safetensors"}}', "missing.safetensors: missing"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    ],
)
def test_other_contents_are_unreadable_and_it_is_said_why(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(content)
    file = only(check(tmp_path / "f.pt"))
    assert file.status == 2
    assert why in file.verdict


def test_other_archives_are_unreadable_and_it_is_said_why(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather not
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), tmp_path / "script.pt")
    torch.save(healthy(), tmp_path / "new.pt", pickle_protocol=4)
    whys = [only(check(tmp_path / name)).verdict for name in ("a.npz", "script.pt", "new.pt")]
    assert "not written by torch.save" in whys[0]
    assert "TorchScript" in whys[1]
    assert "protocol" in whys[2]


def test_an_empty_folder_a_missing_file_and_a_lone_shard(tmp_path: Path) -> None:
    assert "no checkpoint in this folder" in only(check(tmp_path)).verdict
    assert only(check(tmp_path / "missing.pt")).verdict == "unreadable: no such file"
    folder = write_distributed(healthy(), tmp_path)
    assert "Check its folder" in only(check(folder / "__0_0.distcp")).verdict
    assert check(folder / ".metadata").status == 0


def test_what_can_be_read_of_a_broken_set_is_reported(tmp_path: Path) -> None:
    index = write_index(sick(), tmp_path)
    whole = only(check(index))
    (tmp_path / "model-1.safetensors").unlink()
    file = only(check(index))
    assert file.status == 2
    assert "its shard model-1.safetensors: missing" in file.verdict
    assert 0 < len(file.tensors) < len(whole.tensors)
    assert found(file).items() < SICK.items()
    assert file.verdict.startswith("NOT clean: ")


def test_a_tensor_that_the_index_promises_and_no_shard_has(tmp_path: Path) -> None:
    index = write_index(healthy(), tmp_path)
    listed = json.loads(index.read_text())
    listed["weight_map"]["model.lost.weight"] = "model-0.safetensors"
    index.write_text(json.dumps(listed))
    assert "model.lost.weight: not in its shard" in only(check(index)).verdict


# ---- counting --------------------------------------------------------------------------------------------------------


def counted(t: Tensor) -> dict[str, int]:
    return {k: v for k, v in values.count(t).items() if v}


def counted_plainly(t: Tensor) -> dict[str, int]:
    """One value at a time, in Python's floats, where every number of these dtypes is exact."""
    smallest = torch.finfo(t.dtype).smallest_normal
    names: collections.Counter[str] = collections.Counter(num_values=t.numel())
    for x in t.double().flatten().tolist():
        size = abs(x)
        names["num_nan"] += math.isnan(x)
        names["num_posinf"] += x == INF
        names["num_neginf"] += x == -INF
        names["num_zero"] += x == 0
        names["num_subnormal"] += 0 < size < smallest
        if t.dtype is not torch.float16:
            names["num_over_fp16"] += 65504 < size < INF
            names["num_under_fp16"] += 0 < size <= 2.0**-25
            names["num_over_bf16"] += torch.finfo(torch.bfloat16).max < size < INF
    return {k: v for k, v in names.items() if v}


EDGES = [0.0, 1.0, 65504.0, 65520.0, 2.0**-24, 2.0**-25, 2.0**-26, 2.0**-149, 6.1e-5, 6.2e-5, 3.3895e38, 3.4e38, 1e300]
EDGES += [1.1754944e-38, 2.2250738585072014e-308, 5e-324, 1e-310, INF, NAN]


@given(
    st.sampled_from(FLOATS),
    st.lists(st.one_of(st.floats(), st.sampled_from(EDGES).flatmap(lambda x: st.sampled_from([x, -x]))), min_size=1),
)
@settings(deadline=None)
def test_counts_are_those_of_counting_one_by_one(dtype: torch.dtype, numbers: list[float]) -> None:
    t = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert counted(t) == counted_plainly(t)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_numbers_of_16_bits_are_counted_right(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    assert counted(every) == counted_plainly(every)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_all_numbers_of_8_bits_are_counted_right(dtype: torch.dtype, tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.save(every, tmp_path / "f")
    report = tensor(only(check(tmp_path / "f")), "tensor")
    x = every.float()
    assert found(only(check(tmp_path / "f"))) == {
        "tensor": (int(x.isnan().sum()), int(x.isposinf().sum()), int(x.isneginf().sum()))
    }
    assert report.num_zero == int((x == 0).sum())
    assert report.notes == ()


def test_counting_does_not_depend_on_how_this_process_treats_subnormal_numbers() -> None:
    t = torch.full((10,), 1e-40)
    expected = counted(t)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert counted(t) == expected
    finally:
        torch.set_flush_denormal(False)
    assert expected["num_subnormal"] == 10


@pytest.mark.parametrize(
    "shape",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:].t(),
        lambda t: t.view(60, 10, 10).permute(2, 0, 1),
        lambda t: t[::2].unsqueeze(0),
        lambda t: t.flatten(),
        lambda t: t.unfold(0, 3, 2),
    ],
)
def test_strides_and_chunks_make_no_difference(
    shape: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    t = torch.randn(60, 100)
    t[torch.rand_like(t) < 0.1] = NAN
    t[torch.rand_like(t) < 0.1] = -INF
    view = shape(t)
    for size in (1, 7, 64, 10**6):
        monkeypatch.setattr(values, "CHUNK", size)
        seen: list[int] = []
        counts = values.count(view, seen.append)
        assert {k: v for k, v in counts.items() if v} == counted_plainly(view)
        assert sum(seen) == view.numel()
        assert max(seen) <= size


def test_an_expanded_tensor_is_counted_without_being_made(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([[NAN], [1.0]]).expand(2, 10**13)}, tmp_path / "f")
    file = only(check(tmp_path / "f"))
    assert found(file) == {"w": (10**13, 0, 0)}
    assert file.num_values == 2 * 10**13


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of these kinds beta
def test_tensors_of_every_kind(tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, NAN], [0.0, 2.0]])
    state = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 1)),
        "complex": torch.tensor([complex(NAN, 1), complex(INF, NAN)]),
        "conjugate": torch.tensor([complex(1, INF)]).conj(),
        "negative": torch.tensor([complex(1, INF)]).conj().imag,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])]),
        "parameter": nn.Parameter(torch.tensor([NAN])),
        "empty": torch.empty(0),
        "number": torch.tensor(NAN),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "integer": torch.arange(3),
        "truth": torch.tensor([True]),
    }
    torch.save(state, tmp_path / "f")
    file = only(check(tmp_path / "f"))
    assert file.problems == ()
    assert found(file) == {
        "coo": (1, 0, 0),
        "csr": (1, 0, 0),
        "csc": (1, 0, 0),
        "bsr": (1, 0, 0),
        "complex": (2, 1, 0),
        "conjugate": (0, 0, 1),
        "negative": (0, 0, 1),
        "nested": (1, 0, 0),
        "parameter": (1, 0, 0),
        "number": (1, 0, 0),
    }
    assert [tensor(file, name).num_zero for name in ("coo", "csr", "csc")] == [2, 2, 2]
    assert {t.name for t in file.tensors if t.skipped} == {"quantised", "meta", "integer", "truth"}


def test_dtypes_of_safetensors(tmp_path: Path) -> None:
    bad = {str(d): torch.tensor([1.0, NAN]).to(d) for d in (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)}
    save_file({**bad, "i": torch.arange(3), "b": torch.tensor([True])}, tmp_path / "f")
    file = only(check(tmp_path / "f"))
    assert found(file) == dict.fromkeys(bad, (1, 0, 0))
    assert {t.name for t in file.tensors if t.skipped} == {"i", "b"}


def test_safetensors_of_a_dtype_that_has_no_nan(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + b"\xff\xff")
    file = only(check(tmp_path / "f"))
    assert (file.status, tensor(file, "w").skipped) == (0, "F4 has no NaN or Inf")


# ---- notes -----------------------------------------------------------------------------------------------------------


def notes(name: str, t: Tensor, tmp_path: Path) -> tuple[str, ...]:
    torch.save({name: t}, tmp_path / "f")
    file = only(check(tmp_path / "f"))
    assert file.clean
    return tensor(file, name).notes


def test_notes(tmp_path: Path) -> None:
    ones = torch.ones(100)
    one_small, one_tiny, one_large = ones.clone(), ones.clone(), ones.clone()
    one_small[0], one_tiny[0], one_large[0] = 1e-9, 1e-40, 70000.0
    assert notes("w", ones, tmp_path) == ()
    assert notes("w", torch.zeros(2), tmp_path) == ("zero",)
    assert notes("w", torch.zeros(1), tmp_path) == ()
    assert notes("w", one_large, tmp_path) == ("over_fp16",)
    assert notes("w", torch.tensor([3.4e38]), tmp_path) == ("over_fp16", "over_bf16")
    assert notes("w", one_small, tmp_path) == ("under_fp16",)
    assert notes("w", torch.cat([one_small, ones]), tmp_path) == ()  # half a percent
    assert notes("w", one_tiny, tmp_path) == ("subnormal", "under_fp16")
    assert notes("w", torch.full((3,), 1e-6).half(), tmp_path) == ("subnormal",)
    # Of the values that are not zero, however many are.
    assert notes("w", torch.cat([one_small, torch.zeros(10_000)]), tmp_path) == ("under_fp16",)


@pytest.mark.parametrize("name", ["head.bias", "norm.running_mean", "q.lora_B.default.weight", "state.3.exp_avg"])
def test_what_begins_as_zeros_is_no_note(name: str, tmp_path: Path) -> None:
    assert notes(name, torch.zeros(5), tmp_path) == ()


def test_a_run_of_an_optimizer_is_full_of_what_fp16_cannot_hold_and_that_is_no_note(tmp_path: Path) -> None:
    for name in ("optimizer.state.0.step", "optim.state.layers.0.weight.exp_avg_sq", "state.0.step"):
        assert notes(name, torch.tensor([1e6, 1e-12]), tmp_path) == ()
    assert notes("optimizer.state.0.exp_avg_sq", torch.tensor([1e-40]), tmp_path) == ("subnormal",)


# ---- the library -----------------------------------------------------------------------------------------------------


def test_allowed_tensors_are_counted_and_no_fault(tmp_path: Path) -> None:
    path = write_torch(sick(), tmp_path)
    file = only(check(path, allow=["model.*", "*.lr"]))
    assert found(file) == SICK
    assert [t.name for t in file.nonfinite] == ["optimizer.state.2.exp_avg"]
    assert check(path, allow=["*"]).clean
    assert not check(path, allow=["MODEL.*", "*.lr"]).clean  # names are case-sensitive everywhere
    with pytest.raises(ValueError, match="a list of patterns"):
        check(path, allow="*.mask")


def test_progress_ends_with_everything_done(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = write_safetensors({"a": torch.ones(3 * values.CHUNK), "b": torch.ones(7)}, tmp_path)
    check(path, progress=lambda *now: told.append(now))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert len(told) == 4
    assert told[-1] == (str(path), 3 * values.CHUNK + 7, 3 * values.CHUNK + 7)


def test_reports_are_frozen(tmp_path: Path) -> None:
    report = check(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.files[0].path = "x"  # type: ignore[misc]


def test_a_check_changes_nothing_on_disk(tmp_path: Path) -> None:
    for write in WRITERS:
        write(sick(), tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    check(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str | Path, columns: int = 80, **options: Any) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["check", *map(str, arguments)], **options)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """good.pt, bad.pt, torn.pt"""
    torch.save(healthy(), tmp_path / "good.pt")
    torch.save(sick(), tmp_path / "bad.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:2000])
    return tmp_path


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["good.pt"], 0),
        (["bad.pt"], 1),
        (["torn.pt"], 2),
        (["missing.pt"], 2),
        (["good.pt", "bad.pt"], 1),
        (["torn.pt", "bad.pt", "good.pt"], 2),
    ],
)
def test_status(names: list[str], status: int, shelf: Path) -> None:
    for options in ([], ["--quiet"], ["--json"], ["--all"]):
        result = run(*(shelf / name for name in names), *options)
        assert result.exit_code == status
        assert all(str(shelf / name) in result.stdout for name in names)  # every file is reported


def test_as_a_process_it_ends_with_the_same_status(shelf: Path) -> None:
    def status(*names: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "nanguard", "check", *names]
        done = subprocess.run(command, cwd=shelf, capture_output=True, text=True, check=False, timeout=300)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    assert status("good.pt") == (
        0,
        "good.pt  clean: 27 tensors, 471 values\n   note    tensors not checked: 1 integer or bool\n\n",
    )
    assert status("bad.pt")[0] == 1
    assert status("bad.pt", "torn.pt", "good.pt")[0] == 2


@pytest.mark.parametrize("columns", [80, 120])
def test_the_page_tells_the_verdict_first_and_keeps_to_its_width(columns: int, shelf: Path) -> None:
    lines = run(shelf / "bad.pt", columns=columns).stdout.splitlines()
    assert (
        lines[0] == f"{shelf / 'bad.pt'}  NOT clean: 4 of 27 tensors hold non-finite values and 1 number is non-finite"
    )
    assert [line for line in lines[1:] if len(line) > columns] == []
    rows = [line.split() for line in lines]
    assert ["model.norm.running_var", "float32", "12", "all", "-Inf"] in rows
    assert ["model.inp.weight", "float32", "72", "3", "NaN"] in rows
    assert ["number", "optimizer.param_groups.0.lr", "is", "nan"] in rows
    assert rows.index(["model.norm.running_var", "float32", "12", "all", "-Inf"]) == 2  # the worst first
    assert "--allow model.norm.running_var accepts it" in " ".join(" ".join(lines).split())


def test_quiet_is_one_line_a_file(shelf: Path) -> None:
    lines = run(shelf / "good.pt", shelf / "bad.pt", shelf / "torn.pt", "-q").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [str(shelf / name) for name in ("good.pt", "bad.pt", "torn.pt")]
    assert "clean: 27 tensors" in lines[0]
    assert "truncated or damaged" in lines[2]


def test_json_is_json_to_the_letter(shelf: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    result = run(shelf / "good.pt", shelf / "bad.pt", shelf / "torn.pt", "--json")
    data = json.loads(result.stdout, parse_constant=refuse)
    good, bad, torn = data["files"]
    assert (data["schema"], data["status"]) == (1, 2)
    assert [file["status"] for file in (good, bad, torn)] == [0, 1, 2]
    assert {t["name"]: (t["num_nan"], t["num_posinf"], t["num_neginf"]) for t in bad["tensors"]} == SICK
    assert bad["numbers"] == [{"name": "optimizer.param_groups.0.lr", "value": "nan", "allowed": False}]
    assert good["tensors"] == []
    assert len(torn["problems"]) == 1
    assert data["error"] == f"{shelf / 'torn.pt'}: {torn['problems'][0]}"
    assert json.loads(run(shelf / "nope", "--json").stdout)["error"] == f"{shelf / 'nope'}: no such file"
    assert "error" not in json.loads(run(shelf / "bad.pt", "--json").stdout)
    every = json.loads(run(shelf / "good.pt", "--json", "--all").stdout)["files"][0]["tensors"]
    assert len(every) == 27


def test_a_long_list_is_cut_and_all_shows_it(tmp_path: Path) -> None:
    torch.save({f"layer{i:02}": torch.tensor([NAN, 1.0]) for i in range(25)}, tmp_path / "f.pt")
    assert run(tmp_path / "f.pt").stdout.count("layer") == 20
    assert "and 5 more; --all" in run(tmp_path / "f.pt").stdout
    assert run(tmp_path / "f.pt", "--all").stdout.count("layer") == 25


def test_allow_on_the_command_line(shelf: Path) -> None:
    assert run(shelf / "bad.pt", "--allow", "model.*", "--allow", "optimizer.*").exit_code == 0
    result = run(shelf / "bad.pt", "--allow", "model.*", "--allow", "nobody.*")
    assert result.exit_code == 1
    assert "non-finite and allowed: model." in result.stdout
    assert "'nobody.*' matches no tensor" in result.stderr
    assert "'model.*' matches" not in result.stderr


@pytest.mark.parametrize("end", ["\n", "\0"])
def test_names_from_stdin(end: str, shelf: Path) -> None:
    names = end.join([str(shelf / "good.pt"), str(shelf / "bad.pt"), ""])
    result = run("-", "--quiet", input=names)
    assert (result.exit_code, len(result.stdout.splitlines())) == (1, 2)


def test_names_from_a_file_cannot_steer_the_terminal_or_the_markup(tmp_path: Path) -> None:
    torch.save({"\x1b[2J[red]w[/red]\n": torch.tensor([NAN]), ":smile:": torch.tensor([NAN])}, tmp_path / "f.pt")
    out = run(tmp_path / "f.pt", columns=200).stdout
    assert "\x1b" not in out
    assert r"\x1b[2J[red]w[/red]\n" in out
    assert ":smile:" in out


def test_the_bar_shows_on_a_terminal_for_long_work_only() -> None:
    def shown(terminal: bool, total: int) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        bar = view.Bar(console)
        bar.tell("big.pt", total // 2, total)
        bar.tell("big.pt", total, total)
        bar.close()
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert "big.pt" in shown(True, view.Bar.LONG)
    assert shown(True, view.Bar.LONG - 1) == ""
    assert shown(False, view.Bar.LONG) == ""
