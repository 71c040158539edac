"""Runs at the start of every process of a third-party program, plain or guarded, through PYTHONPATH.

It makes the program repeatable (seeds, an end after some batches), puts one fault into its data, and when the process
ends it writes a hash of all weights. The program itself is not edited. Its settings are JSON in ``THIRD_PARTY_HOOK``.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SETTINGS: dict[str, Any] = json.loads(os.environ.get("THIRD_PARTY_HOOK", "{}"))
FAULT: dict[str, Any] = SETTINGS.get("fault") or {}
FOLDER = Path(SETTINGS.get("folder", "."))


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        action = self.actions.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ---- the weights at the end ------------------------------------------------------------------------------------------

MODULES: dict[int, Any] = {}
BARE: dict[int, Any] = {}
"""Trained tensors, also those that no module has as a parameter."""


def _after_modules(module: ModuleType) -> None:
    def keep(owner: Any, name: str, parameter: Any) -> None:
        if "seed" in SETTINGS and not MODULES:  # what runs before the program may have drawn from it
            random.seed(SETTINGS["seed"])
        MODULES.setdefault(id(owner), owner)

    module.register_module_parameter_registration_hook(keep)


def _after_optimizers(module: ModuleType) -> None:
    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            BARE.update({id(tensor): tensor for tensor in group["params"]})

    module.register_optimizer_step_post_hook(keep)


def _report() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    tensors = [
        tensor
        for module in MODULES.values()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    script = vars(sys.modules["__main__"])  # programs of bare tensors have their weights there
    bare = [*(script[name] for name in SETTINGS.get("weights", ()) if name in script), *BARE.values()]
    tensors = list({id(tensor): tensor for tensor in (*tensors, *bare)}.values())  # each once
    digest = hashlib.sha256()
    finite = True
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
        finite &= not values.is_floating_point() or bool(values.isfinite().all())
    facts = {"tensors": len(tensors), "hash": digest.hexdigest(), "finite": finite}
    (FOLDER / f"weights-{os.getpid()}.json").write_text(json.dumps(facts))


# ---- the data --------------------------------------------------------------------------------------------------------


def _note(facts: dict[str, Any]) -> None:
    with (FOLDER / "fault.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _poisoned(batch: Any, path: list[Any], row: int) -> Any:
    """The batch with the value in one row of one of its tensors, which comes out of NumPy as data usually do."""
    torch = sys.modules["torch"]
    if path:
        key, *rest = path
        changed = _poisoned(batch[key], rest, row)
        if isinstance(batch, dict):
            return {**batch, key: changed}
        return type(batch)([*batch[:key], changed, *batch[key + 1 :]])
    array = batch.numpy().copy()
    part = array[row : row + 1] if array.ndim else array
    if FAULT.get("every"):
        part[...] = float(FAULT["value"])
    else:
        part.reshape(-1)[FAULT.get("element", 0)] = float(FAULT["value"])
        array[row : row + 1] = part
    return torch.from_numpy(array)


def _after_fetch(module: ModuleType) -> None:
    """A record of the data set that is read first is bad, or one row of one batch."""
    fetch = module._MapDatasetFetcher.fetch
    fetched = 0
    length = None

    def bad_fetch(self: Any, index: Any) -> Any:
        nonlocal fetched, length
        batch = fetch(self, index)
        fetched += 1
        length = length or len(self.dataset)
        rows = [int(i) for i in index] if isinstance(index, (list, tuple)) else [int(index)]
        if "batch" in FAULT:
            row = FAULT["row"] if fetched == FAULT["batch"] else None
        else:
            row = rows.index(FAULT["index"]) if len(self.dataset) == length and FAULT["index"] in rows else None
        if row is None:
            return batch
        _note({"row": row})
        return _poisoned(batch, list(FAULT["path"]), row)

    module._MapDatasetFetcher.fetch = bad_fetch


def _after_loader(module: ModuleType) -> None:
    """The program ends after some batches."""
    following = module._BaseDataLoaderIter.__next__
    taken = 0

    def limited(self: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > SETTINGS["batches"]:
            raise SystemExit(0)
        return following(self)

    module._BaseDataLoaderIter.__next__ = limited


def _after_environments(module: ModuleType) -> None:
    """An environment that reports one bad reward or observation, and ends the program after some steps."""
    make = module.make
    taken = 0

    def made(*args: Any, **kwargs: Any) -> Any:
        env = make(*args, **kwargs)
        step = env.step

        def counted(action: Any) -> Any:
            nonlocal taken
            taken += 1
            if SETTINGS.get("env_steps") and taken > SETTINGS["env_steps"]:
                raise SystemExit(0)
            state, reward, *rest = step(action)
            if FAULT.get("kind") == "reward" and taken == FAULT["step"]:
                reward = float(FAULT["value"])
                _note({"step": taken})
            if FAULT.get("kind") == "observation" and taken == FAULT["step"]:
                state = state.copy()
                state[FAULT.get("element", 0)] = float(FAULT["value"])
                _note({"step": taken})
            return (state, reward, *rest)

        env.step = counted
        return env

    setattr(module, "make", made)  # noqa: B010


def _after_torch(module: ModuleType) -> None:
    if "seed" in SETTINGS:
        module.manual_seed(SETTINGS["seed"])
    if FAULT.get("kind") == "randn":
        _spoil_randn(module)
    if SETTINGS.get("fused"):
        for name in ("Adam", "AdamW", "SGD", "Adagrad"):
            _fuse(getattr(module.optim, name))


def _fuse(kind: Any) -> None:
    """Its optimizers are fused, unless the program chooses."""
    init = kind.__init__

    def fused_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "foreach" not in kwargs and "capturable" not in kwargs:
            kwargs.setdefault("fused", True)
        init(self, *args, **kwargs)

    kind.__init__ = fused_init


def _spoil_randn(torch: ModuleType) -> None:
    """For programs that draw their data: one call of ``torch.randn`` returns a bad value."""
    randn = torch.randn
    calls = 0

    def bad_randn(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        values = randn(*args, **kwargs)
        if calls != FAULT["call"]:
            return values
        _note({"row": FAULT["row"]})
        return _poisoned(values, [], FAULT["row"])

    setattr(torch, "randn", bad_randn)  # noqa: B010


def _after_numpy(module: ModuleType) -> None:
    if "seed" in SETTINGS:
        module.random.seed(SETTINGS["seed"])
    if FAULT.get("kind") != "numpy":
        return
    randn = module.random.randn
    calls = 0

    def bad_randn(*shape: int) -> Any:
        """For programs that draw their data: one call returns a bad value."""
        nonlocal calls
        calls += 1
        values = randn(*shape)
        if calls == FAULT["call"]:
            values.reshape(-1)[FAULT.get("element", 0)] = float(FAULT["value"])
            _note({"row": FAULT["row"]})
        return values

    module.random.randn = bad_randn


def _after_cifar(module: ModuleType) -> None:
    """Generated files do not have the checksums of the real ones."""
    setattr(module, "check_integrity", lambda path, md5=None: Path(path).is_file())  # noqa: B010


if SETTINGS:
    ACTIONS: dict[str, Callable[[ModuleType], None]] = {
        "torch": _after_torch,
        "numpy": _after_numpy,
        "torch.nn.modules.module": _after_modules,
        "torch.optim.optimizer": _after_optimizers,
        "torchvision.datasets.cifar": _after_cifar,
    }
    if "seed" in SETTINGS:
        random.seed(SETTINGS["seed"])
    if FAULT.get("kind") == "record":
        ACTIONS["torch.utils.data._utils.fetch"] = _after_fetch
    if SETTINGS.get("batches"):
        ACTIONS["torch.utils.data.dataloader"] = _after_loader
    if SETTINGS.get("env_steps") or FAULT.get("kind") in ("reward", "observation"):
        ACTIONS["gymnasium"] = _after_environments
    sys.meta_path.insert(0, AfterImport(ACTIONS))
    atexit.register(_report)
