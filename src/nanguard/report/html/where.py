"""The environment of the runs: versions, device, precision, policy, and the host as recorded in incidents."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanguard.records.markup import Markup, tag
from nanguard.records.words import counted
from nanguard.report.html.table import scrolled

if TYPE_CHECKING:
    from nanguard.report.html.story import Story

_NAMES = {
    "nanguard": "nanguard",
    "torch": "torch",
    "python": "Python",
    "device": "device",
    "precision": "precision",
    "sync": "mode",
    "ranks": "ranks",
    "optimizers": "optimizers",
    "groups": "parameter groups",
    "parameters": "parameters",
}
_FROM_BUNDLE = {"device_name": "device name", "cuda": "CUDA", "platform": "platform", "world_size": "world size"}


def environment(stories: Sequence[Story]) -> Markup:
    """A table with a column for each run; rows in which the runs differ are marked."""
    columns = [dict(_facts(story)) for story in stories]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = None
    if len(stories) > 1:
        cells = (tag("th", story.label, scope="col") for story in stories)
        head = tag("thead", tag("tr", tag("td"), cells))
    body = [_row(name, [column.get(name, "–") for column in columns]) for name in names]
    table = tag("table", head, tag("tbody", body), class_="facts")
    return scrolled(table, "Environment")


def _row(name: str, values: Sequence[str]) -> Markup:
    differs = len(set(values)) > 1
    mark = tag("span", " differs", class_="differs") if differs else None
    return tag("tr", tag("th", name, mark, scope="row"), (tag("td", value) for value in values))


def _facts(story: Story) -> Iterator[tuple[str, str]]:
    header = story.run.header
    yield "log", str(story.run.path)
    if isinstance(script := header.get("script"), str):
        argv = header.get("argv")
        rest = argv if isinstance(argv, list) and all(isinstance(each, str) for each in argv) else []
        module = header.get("module")
        what = ["-m", module] if isinstance(module, str) else [script]
        yield "program", shlex.join([*what, *(rest[1:] if rest[:1] == [script] else rest)])
    for key, name in _NAMES.items():
        if header.get(key) not in (None, "", []):
            yield name, _value(header[key])
    further = [event.fields for event in story.run.events if event.event == "optimizer"]
    if further:
        each = [
            f"{_value(told.get('optimizer', ''))} ({_value(told.get('optimizers', ''))})" for told in (header, *further)
        ]
        yield "guarded separately", ", ".join(each[:40])
    if len(story.run.headers) > 1:
        yield "processes", f"{counted(len(story.run.headers), 'time')} started"
    policy = header.get("policy")
    if isinstance(policy, Mapping):
        if "max_norm" in policy:
            yield "clipping by the policy", "none" if policy["max_norm"] is None else f"to {_value(policy['max_norm'])}"
        if policy.get("divergence"):
            yield "divergence", _value(policy["divergence"])
    bundle = next((fault.bundle for fault in story.faults if fault.bundle is not None), None)
    if bundle is not None:
        found = bundle.facts["environment"]
        for key, name in _FROM_BUNDLE.items():
            if found.get(key) not in (None, ""):
                yield name, _value(found[key])
        flags = found.get("flags")
        for key, value in flags.items() if isinstance(flags, dict) else ():
            if value is not None:
                yield key.replace("_", " "), _value(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(each) for each in value[:40])
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(each)}" for key, each in list(value.items())[:40])
    return value if isinstance(value, str) else json.dumps(value)
