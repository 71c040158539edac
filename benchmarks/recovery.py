"""What keeps a run alive: real divergences on tiny models, and who gets through them with what loss.

    PYTHONPATH=src python benchmarks/recovery.py                              # everything, a few minutes on one core
    PYTHONPATH=src python benchmarks/recovery.py --seeds 5                    # the median over five seeds
    PYTHONPATH=src python benchmarks/recovery.py --only gan --contenders nanguard,plain
    PYTHONPATH=src python benchmarks/recovery.py --quick                      # does the script itself work?

Scenarios are in ``divergences.py``, contenders in ``rivals.py``; what they do is seen by ``watching.py``, from outside.
A contender that is not installed is left out and named (``pip install arc-training stabilityguard``).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from divergences import SCENARIOS, Run, Scenario
from overhead import header, write
from rivals import CONTENDERS, Plain
from watching import Watch

GOAL = 1.02  # as near to the clean run's final loss counts as recovered
METHOD = """\
Every scenario is one short training run of a tiny model that goes wrong, and the same run without the fault: the
*clean* one. All contenders train the same model on the same batches from the same weights, each used as its own
documentation says, with its defaults. The final loss is that of the model in evaluation mode and fp32 on 8,192 held-
out samples, and is given as its ratio to the clean run's. What happened is not asked for but seen from outside, by
watching the weights: a batch is *lost* when its update is not in the final weights, because it was left out, or undone
and not made again; batches that the fault itself has spoiled are lost to all who survive. *Recomputed* are forward
passes beyond the first of a batch. An *intervention* is anything that a plain loop does not do: a batch never applied,
weights or optimizer state set back or edited, a change of learning rate or precision. *Finished*: all batches were
seen, and weights, buffers and the final loss are finite. *Recovered*: finished, and within 2% of the clean run's loss.
Numbers are medians over seeds, but finished, recovered and losing no more than others mean on every seed, and
interventions on healthy runs are those of the worst."""


# ---- running ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Contenders have much to say, and all at once."""
    loggers = [logging.getLogger(name) for name in ("nanguard", "arc", "stabilityguard")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def held_out_loss(run: Run) -> float:
    score = run.score or run.loss_fn
    run.model.eval()
    with torch.no_grad():
        return score(run.model, run.held_out).item()


def is_finite(run: Run) -> bool:
    """Whether all parameters and buffers are."""
    return all(bool(t.isfinite().all()) for t in run.model.state_dict().values() if t.is_floating_point())


def measure(run: Run, contender: type[Plain]) -> dict[str, Any]:
    """Trains, and says what came of it. What a contender raises is a result, as it is for its users."""
    start, error = time.perf_counter(), None
    with quietly(), Watch(run) as watch:
        try:
            contender(run, watch).train()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    loss, sound = held_out_loss(run), is_finite(run)
    seen = len(watch.passes)
    return {
        "finished": error is None and seen == len(run.batches) and sound and math.isfinite(loss),
        "error": error,
        "sound": sound,
        "loss": loss if math.isfinite(loss) else None,
        "seen": seen,
        "lost": watch.lost() if sound else None,
        "recomputed": watch.recomputed(),
        "interventions": watch.interventions(),
        "seconds": round(time.perf_counter() - start, 2),
    }


def measure_scenario(
    scenario: Scenario, names: list[str], *, seed: int, steps: int, done: Callable[[str], None]
) -> dict[str, Any]:
    """All contenders on one scenario, after its clean twin; ``noise`` is that with every fiftieth step left out."""
    clean = measure(scenario.build(seed, steps, False), Plain)
    if not clean["finished"]:
        raise RuntimeError(f"the clean run of {scenario.title!r} did not finish: {clean}")
    thinned = scenario.build(seed, steps, False)
    thinned.batches = [b for b in thinned.batches if b.id // thinned.accumulate % 50 != 7]
    noise = measure(thinned, Plain)["loss"]
    done("clean")
    results = {}
    for name in names:
        result = measure(scenario.build(seed, steps, True), CONTENDERS[name])
        result["ratio"] = result["loss"] / clean["loss"] if result["loss"] is not None else None
        results[name] = result
        done(name)
    return {"seed": seed, "clean": clean["loss"], "noise": noise / clean["loss"], "contenders": results}


# ---- summing up ------------------------------------------------------------------------------------------------------


def middle(values: list[Any]) -> Any:
    """The median, where None (NaN, Inf, or nothing to count) is worse than any number."""
    value = statistics.median_low(math.inf if v is None else v for v in values)
    return None if value == math.inf else value


def has_recovered(result: dict[str, Any]) -> bool:
    return bool(result["finished"] and result["ratio"] <= GOAL)


def is_beaten(run: dict[str, Any], name: str) -> bool:
    """Whether another contender recovers on this seed with fewer batches lost."""
    lost = run["contenders"][name]["lost"]
    others = [other["lost"] for other in run["contenders"].values() if has_recovered(other)]
    return any(lost is None or other < lost for other in others)


def summed(row: dict[str, Any], name: str) -> dict[str, Any]:
    """One contender on one scenario. Numbers are medians over seeds; judgements count every seed, as a user has one."""
    results = [run["contenders"][name] for run in row["runs"]]
    interventions = [sum(result["interventions"].values()) for result in results]
    return {
        "finished": all(result["finished"] for result in results),
        "recovered": all(map(has_recovered, results)),
        "num_recovered": sum(map(has_recovered, results)),
        "beaten": any(is_beaten(run, name) for run in row["runs"]),
        "ratio": middle([result["ratio"] for result in results]),
        "lost": middle([result["lost"] for result in results]),
        "recomputed": middle([result["recomputed"] for result in results]),
        "interventions": middle(interventions),
        "most_interventions": max(interventions),
        "dead": sum(not result["sound"] for result in results),
        "errors": [result["error"] for result in results if result["error"]],
        "seeds": len(results),
    }


def goals(result: dict[str, Any]) -> list[str]:
    """What nanguard sets out to do here, and where it does not."""
    table, ours = result["table"], "nanguard"
    failing = {name: row for name, row in table.items() if ours in row and not SCENARIOS[name].healthy}
    healthy = {name: row for name, row in table.items() if ours in row and SCENARIOS[name].healthy}
    missed = {
        "finishes every run": [name for name, row in {**failing, **healthy}.items() if not row[ours]["finished"]],
        "ends within 2% of the clean run": [name for name, row in failing.items() if not row[ours]["recovered"]],
        "loses no more batches than any that recovers": [n for n, row in failing.items() if row[ours]["beaten"]],
        "leaves healthy runs alone": [n for n, row in healthy.items() if row[ours]["most_interventions"]],
    }
    return [f"- {what}: {'not on ' + ', '.join(where) if where else 'yes'}" for what, where in missed.items()]


# ---- reporting -------------------------------------------------------------------------------------------------------


def outcome(cell: dict[str, Any]) -> str:
    """The final loss as a ratio and the batches lost, bold where it recovered; else what became of the run."""
    ratio = "Inf" if cell["ratio"] is None else f"{cell['ratio']:,.{3 if cell['ratio'] < 10 else 0}f}"
    for word, count in (("stopped", len(cell["errors"])), ("dead", cell["dead"])):
        if count:
            often = f" on {count} of {cell['seeds']}" if count < cell["seeds"] else ""
            return f"{word}{often}" + (f", {ratio}" if cell["ratio"] is not None else "")
    if cell["recovered"]:
        return f"**{ratio}** ({cell['lost']})"
    some = f", {cell['num_recovered']} of {cell['seeds']} recovered" if cell["num_recovered"] else ""
    return f"{ratio} ({cell['lost']}){some}"


def effort(cell: dict[str, Any]) -> str:
    return f"{cell['interventions']}" + (f" + {cell['recomputed']}" if cell["recomputed"] else "")


def grid(result: dict[str, Any], names: list[str], show: Callable[[dict[str, Any]], str]) -> list[str]:
    """A table of scenarios by contenders."""
    titles = [CONTENDERS[name].title for name in result["contenders"]]
    lines = ["| | " + " | ".join(titles) + " |", "| --- |" + " ---: |" * len(titles)]
    for scenario in names:
        cells = [show(result["table"][scenario][name]) for name in result["contenders"]]
        lines.append(f"| {scenario} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def stops(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Where a contender raised, and what."""
    rows = [(name, who, cell) for name, row in result["table"].items() for who, cell in row.items()]
    return [(name, CONTENDERS[who].title, cell["errors"][0]) for name, who, cell in rows if cell["errors"]]


def summary(result: dict[str, Any], failing: list[str], healthy: list[str]) -> list[str]:
    lines = ["| | finished | recovered | recovered with the fewest lost steps | interventions on healthy runs |"]
    lines.append("| --- |" + " ---: |" * 4)
    for name in result["contenders"]:
        rows = [result["table"][scenario] for scenario in failing]
        finished, recovered = (sum(row[name][what] for row in rows) for what in ("finished", "recovered"))
        best = sum(row[name]["recovered"] and not row[name]["beaten"] for row in rows)
        touched = sum(result["table"][scenario][name]["most_interventions"] for scenario in healthy)
        counts = " | ".join(f"{count} of {len(rows)}" for count in (finished, recovered, best))
        lines.append(f"| {CONTENDERS[name].title} | {counts} | {touched} |")
    return [*lines, ""]


def markdown(result: dict[str, Any]) -> str:
    failing = [name for name in result["table"] if not SCENARIOS[name].healthy]
    healthy = [name for name in result["table"] if SCENARIOS[name].healthy]
    lines = [f"# Recovery from {len(failing)} divergences, {result['machine']}, {result['date']}", ""]
    fields = ("machine", "cpu_cores", "torch", "python", "date", "seeds")
    lines += [f"- {key.replace('_', ' ')}: {result[key]}" for key in fields]
    lines += [f"- contenders: {', '.join(result['versions'])}"]
    lines += [f"- not installed: {', '.join(result['missing'])}"] if result["missing"] else []
    lines += [f"- command: `{result['command']}`", "", METHOD, ""]
    lines += ["## In short", "", *summary(result, failing, healthy)]
    if failing:
        lines += ["## Final loss over the clean run's, and batches lost", ""]
        lines += ["**Bold**: recovered. *dead*: weights or buffers are not finite. *stopped*: an exception.", ""]
        lines += grid(result, failing, outcome)
        lines += ["## Interventions + batches recomputed", "", *grid(result, failing, effort)]
        if found := [f"- {who} stopped on {row}: {why}" for row, who, why in stops(result)]:
            lines += [*found, ""]
    if healthy:
        lines += ["## Healthy runs", "", "As above; there should be no intervention.", ""]
        lines += grid(result, healthy, outcome) + grid(result, healthy, effort)
    if "nanguard" in result["contenders"]:
        lines += ["## What nanguard sets out to do", "", *goals(result), ""]
    lines += ["## Scenarios", "", "The noise is the clean run's ratio to itself with 2% of its batches left out.", ""]
    lines += ["| | what happens | batches | clean loss | noise |", "| --- | --- | ---: | ---: | ---: |"]
    for name, row in result["scenarios"].items():
        clean, noise = (middle([run[key] for run in row["runs"]]) for key in ("clean", "noise"))
        lines.append(f"| {name} | {SCENARIOS[name].title} | {row['steps']:,} | {clean:.4f} | {noise:.4f} |")
    lines += ["", "## Contenders", ""]
    lines += [f"- {CONTENDERS[name].title}: {CONTENDERS[name].__doc__}" for name in result["contenders"]]
    return "\n".join(lines) + "\n"


def save(result: dict[str, Any], folder: Path, *, quick: bool) -> Path:
    slug = "-".join(result["machine"].lower().replace("_", "-").split()) + ("-quick" if quick else "")
    path = folder / f"recovery-{slug}-{result['date']}.json"
    write(path, json.dumps(result, allow_nan=False) + "\n")
    write(path.with_suffix(".md"), markdown(result))
    return path


# ---- command line ----------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    def names(accepted: Any) -> Any:
        def split(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in accepted]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; accepted are {', '.join(accepted)}")
            return text.split(",")

        return split

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=names(SCENARIOS), default=list(SCENARIOS), help=",".join(SCENARIOS))
    p.add_argument("--contenders", type=names(CONTENDERS), default=list(CONTENDERS), help=",".join(CONTENDERS))
    p.add_argument("--seeds", type=int, default=1, help="how many; the tables then show medians (1)")
    p.add_argument("--quick", action="store_true", help="a quarter of the batches, to try the script itself")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    return p.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)  # the models are tiny, and the number of cores would show in the numbers
    out, err = Console(file=sys.stdout), Console(file=sys.stderr)
    versions = {name: CONTENDERS[name].version() for name in args.contenders}
    present = [name for name, version in versions.items() if version]
    missing = sorted({CONTENDERS[name].package for name, version in versions.items() if not version})
    if missing:
        err.print(f" not installed: {', '.join(missing)}", style="yellow")
    where = header(torch.device("cpu"))
    result: dict[str, Any] = {
        **where,
        "command": where["command"].replace("overhead.py", "recovery.py"),
        "seeds": args.seeds,
        "contenders": present,
        "versions": sorted({str(versions[name]) for name in present}),
        "missing": missing,
        "scenarios": {},
        "table": {},
    }
    columns = (TextColumn(" {task.description:<42}"), BarColumn(28), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("", total=len(args.only) * args.seeds * (len(present) + 1))
        for name in args.only:
            scenario, runs = SCENARIOS[name], []
            steps = scenario.steps // 4 if args.quick else scenario.steps
            for seed in range(args.seeds):

                def done(who: str, name: str = name) -> None:
                    progress.update(task, advance=1, description=f"{name}: {who}")

                runs.append(measure_scenario(scenario, present, seed=seed, steps=steps, done=done))
            row = result["scenarios"][name] = {"steps": steps, "healthy": scenario.healthy, "runs": runs}
            result["table"][name] = {who: summed(row, who) for who in present}
            cells = ", ".join(f"{who} {outcome(result['table'][name][who])}" for who in present)
            progress.console.print(f" {name}: {cells}".replace("**", ""), markup=False, highlight=False, soft_wrap=True)
            path = save(result, args.out, quick=args.quick)  # now: an interrupted run keeps this much
    out.print(markdown(result), markup=False, highlight=False, soft_wrap=True)
    err.print(f" written: {path} and {path.with_suffix('.md').name}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
