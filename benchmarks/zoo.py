"""How right a diagnosis is: runs every program of the zoo under the guard and writes down what it said.

    python benchmarks/zoo.py                                   the open cases, scored
    python benchmarks/zoo.py --cases DIR --out predictions.json

Each case is trained in the loop that zoo/README.md describes (no clipping, no loss scale but its own scaler's), through
the public API, until the guard has explained itself. Of a case only ``build``, ``precision``, ``loop`` and
``make_scaler`` are used; its labels are read by zoo/score.py alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import nanguard
from nanguard.records.diagnosis import Diagnosis

ZOO = Path(__file__).parent / "zoo"

Prediction = dict[str, Any]


def load(path: Path) -> ModuleType:
    name = f"zoo_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def predict(path: Path, device: str = "cpu") -> Prediction:
    """What the guard says about one case; ``detected`` is False where it had nothing to say."""
    case = load(path)
    facts = case.CASE
    model, optimizer, batches, loss_fn = case.build(0)
    if device != "cpu":  # parameters move in place, so that the optimizer still has them
        model.to(device)
        batches = moved(batches, device)
        for state in optimizer.state.values():  # some make it at once
            state.update({key: value if key == "step" else moved(value, device) for key, value in state.items()})
        torch.set_default_device(device)
    guard = nanguard.Guard(
        model,
        optimizer,
        precision=facts["precision"],
        loss_scale=scale_of(case) if facts.get("loop") == "scaler" else None,
        max_norm=None,
        policy=nanguard.Policy(divergence=None),
        snapshots="auto" if device == "cpu" else nanguard.Snapshots(where="host"),
    )
    backed_off: tuple[int, Diagnosis] | None = None
    try:
        for place, batch in enumerate(guard.epoch(batches)):
            before = guard.counts["backed_off"]
            guard.step(loss_fn, batch)
            if backed_off is None and guard.counts["backed_off"] > before:
                backed_off = place, _of_scale(guard, loss_fn, batch)
            if _is_explained(guard):
                break
    except nanguard.NonFiniteError:
        pass
    said = [incident for incident in guard.incidents if incident.diagnosis is not None]
    if not said and backed_off is not None:
        return _prediction(path.stem, *backed_off)
    if not said:
        return {"id": path.stem, "detected": bool(guard.incidents)}
    best = next((incident for incident in said if incident.diagnosis and incident.diagnosis.op), said[0])
    assert best.diagnosis is not None
    return _prediction(path.stem, best.diagnosis.batch, best.diagnosis)


def moved(tree: Any, device: str) -> Any:
    """With all tensors on a device."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: moved(child, device) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(moved(child, device) for child in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(moved(child, device) for child in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {field.name: moved(getattr(tree, field.name), device) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **values)
    return tree


def _is_explained(guard: nanguard.Guard) -> bool:
    """Damage that an update has done is explained when the run comes to that step again."""
    return any(i.diagnosis is not None and i.diagnosis.op for i in guard.incidents) or len(guard.incidents) > 6


def scale_of(case: ModuleType) -> nanguard.LossScale | None:
    scaler = case.make_scaler()
    if not scaler.is_enabled():
        return None
    return nanguard.LossScale(
        initial=scaler.get_scale(),
        growth=scaler.get_growth_factor(),
        backoff=scaler.get_backoff_factor(),
        interval=scaler.get_growth_interval(),
    )


def _of_scale(guard: nanguard.Guard, loss_fn: Any, batch: Any) -> Diagnosis:
    """A routine back-off is no incident; what there is to say of it can be asked for."""
    scale = guard.last_outcome.verdict.reading.scale if guard.last_outcome is not None else None
    return nanguard.diagnose(
        guard.model, loss_fn, batch, precision="fp16", loss_scale=nanguard.LossScale(initial=scale or 1.0)
    )


def _prediction(name: str, step: int | None, diagnosis: Diagnosis) -> Prediction:
    return {
        "id": name,
        "detected": True,
        "step": step,
        "phase": diagnosis.phase,
        "cause": diagnosis.cause,
        "op": diagnosis.op,
        "module": diagnosis.module,
        "line": "" if diagnosis.source is None else diagnosis.source.text,
        "remedy": next(iter(diagnosis.remedies), ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How right a diagnosis is about the programs of the zoo.")
    parser.add_argument("--cases", type=Path, default=ZOO / "cases", help="a folder of cases")
    parser.add_argument("--out", type=Path, default=Path("predictions.json"), help="where to write what was said")
    parser.add_argument("--device", default="cpu", help="where to train; the cases are written for a CPU")
    parser.add_argument("--only", nargs="*", help="ids of cases")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each diagnosis")
    args = parser.parse_args()
    if not args.cases.is_dir():
        parser.error(f"--cases {args.cases} is not a folder")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("nanguard").setLevel(logging.WARNING if args.verbose else logging.CRITICAL)
    logging.basicConfig(format="%(message)s")
    predictions, began = [], time.monotonic()
    paths = [path for path in sorted(args.cases.glob("*.py")) if not args.only or path.stem in args.only]
    for number, path in enumerate(paths, start=1):
        print(f"\r{number}/{len(paths)} {path.stem:40s}", end="", file=sys.stderr, flush=True)
        try:
            predictions.append(predict(path, args.device))
        except Exception as error:  # one program that cannot be run says nothing about the others
            print(f"\n{path.stem}: {type(error).__name__}: {error}", file=sys.stderr)
            predictions.append({"id": path.stem, "detected": False, "error": repr(error)})
        finally:
            torch.set_default_device("cpu")
    args.out.write_text(json.dumps(predictions, indent=1) + "\n")
    print(f"\r{len(paths)} cases in {time.monotonic() - began:.0f} s; written to {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
