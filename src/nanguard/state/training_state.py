"""All that a training run is made of, by name: what a snapshot copies, and how it is put back.

Tensors are found anew each time, since programs add and replace them. What is no tensor (learning rates, schedules,
step counts kept as numbers, random states) is copied into plain *facts*.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.state.names import names_of, plain_name, unwrapped
from nanguard.state.rng import RngReader, RngState
from nanguard.state.schedule import Schedule, ScheduleNote
from nanguard.state.trees import named_tensors, with_dots

Facts = dict[str, Any]
Saved = Callable[[str], Tensor]


class Component(Protocol):
    """Something of the guard's own that is part of a run: the loss scale, limits learned for clipping, a trend."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Its state on the device: the tensors themselves."""

    def facts(self) -> Any:
        """The rest of its state, as JSON can hold it."""

    def restore(self, facts: Any) -> None:
        """Puts ``facts`` back. Tensors have been written to by then."""


class TrainingState:
    """The one list of what a run consists of. ``components`` are parts of the guard, by name. Nothing here syncs."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        *,
        device: torch.device,
        schedule: Schedule,
        rng_reader: RngReader,
        ema: Any = None,
        components: Mapping[str, Component] | None = None,
    ) -> None:
        self.model, self.optimizers, self.ema, self.device = model, optimizers, ema, device
        self.schedule, self.rng_reader = schedule, rng_reader
        self._components = dict(components or {})
        self._names = names_of(model)

    def look_again(self) -> None:
        """Takes in parameters that the model has got since."""
        self._names = names_of(self.model)

    def name_of(self, param: Tensor) -> str:
        """A parameter's name, as the user wrote it."""
        if id(param) not in self._names:
            self._names = names_of(self.model)
        return self._names.get(id(param), f"<parameter of shape {tuple(param.shape)}, not in the model>")

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step may change, as it is now; the tensors themselves, not copies."""
        return {**dict(self._of_models()), **dict(self._of_optimizers()), **dict(self._of_components())}

    def of_model(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model alone."""
        return dict(_slots(unwrapped(self.model), "model"))

    def buffer_names(self) -> set[str]:
        """Names of what is written already in the forward pass."""
        return {name for name, _ in _slots(unwrapped(self.model), "model", buffers_only=True)}

    def facts(self) -> Facts:
        """Everything else, copied."""
        note = self.schedule.note(everything=True)
        return {
            "schedule": {"options": note.options, "schedulers": note.schedulers, "factor": note.factor},
            "optimizers": [
                {self._name(param): _skeleton(state, f"optimizer.{i}.{self._name(param)}") for param, state in each}
                for i, each in self._states()
            ],
            "rng": self.rng_reader.now().as_dict(),
            "models": [name for name, _ in self._of_models()],
            "extra": {path: copy.deepcopy(module.get_extra_state()) for path, module in self._with_extra_state()},
            "parameters": {name: list(tensor.shape) for name, tensor in self._parameters()},
            "kinds": [type(optimizer).__name__ for optimizer in self.optimizers],
            "none": [name for name, owner, key in self._buffer_places() if _compat.buffers_of(owner)[key] is None],
            "components": {name: component.facts() for name, component in self._components.items()},
            "component_tensors": [name for name, _ in self._of_components()],
        }

    @torch.no_grad()
    def restore(
        self, facts: Facts, saved: Callable[[str], Tensor], put_back: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Puts everything back. ``saved`` gives one copy, ``put_back`` writes copies into live tensors of their names.

        Tensors that are still there are written to, so that whoever holds them (a captured graph, the user) sees it.
        """
        self._check(facts)
        live = self.tensors()
        wanted = set(facts["models"]) | set(facts["component_tensors"])
        for skeletons in facts["optimizers"]:
            for skeleton in skeletons.values():
                wanted |= set(_references(skeleton))
        put_back({name: live[name] for name in wanted & live.keys() if _fits(live[name], saved(name))})
        self._replace_buffers(facts["models"], live, saved, none=set(facts["none"]))
        self._replace_states(facts["optimizers"], live, saved)
        for path, module in self._with_extra_state():
            if path in facts["extra"]:
                module.set_extra_state(copy.deepcopy(facts["extra"][path]))
        self.schedule.restore(ScheduleNote(**facts["schedule"]))
        for name, component in self._components.items():
            component.restore(facts["components"][name])
        self.drop_gradients()
        RngState.from_dict(facts["rng"]).restore(self.device)

    def drop_gradients(self) -> None:
        """Sets all gradients of the optimizers' parameters to None."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None

    def _check(self, facts: Facts) -> None:
        """Raises ``ValueError`` where the run is not the one that was copied, before anything is written."""
        now, then = {name: list(tensor.shape) for name, tensor in self._parameters()}, facts["parameters"]
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        odd = sorted(name for name in now.keys() | then.keys() if now.get(name, then.get(name)) != then.get(name))
        odd += sorted(then.keys() - now.keys())
        if odd or kinds != facts["kinds"]:
            optimizers = f"optimizers {facts['kinds']}, now {kinds}"
            what = f"{odd[0]} and {len(odd) - 1} more differ" if odd else optimizers
            raise ValueError(
                f"the snapshot of step {facts['step']} is of another model or optimizer ({what}): nothing was put back"
            )

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, (owner, key) in _places(unwrapped(self.model), "model"):
            parameter = _compat.parameters_of(owner).get(key)
            if parameter is not None:
                yield name, parameter

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that keep something of their own in a checkpoint."""
        for path, module in unwrapped(self.model).named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield plain_name(path), module

    def _buffer_places(self) -> Iterator[tuple[str, nn.Module, str]]:
        for name, (owner, key) in _places(unwrapped(self.model), "model", buffers_only=True):
            yield name, owner, key

    def _of_models(self) -> Iterator[tuple[str, Tensor]]:
        yield from _slots(unwrapped(self.model), "model")
        if self.ema is not None:
            yield from _slots(self.ema, "ema")

    def _of_optimizers(self) -> Iterator[tuple[str, Tensor]]:
        for i, states in self._states():
            for param, state in states:
                yield from named_tensors(state, f"optimizer.{i}.{self._name(param)}", with_dots)

    def _of_components(self) -> Iterator[tuple[str, Tensor]]:
        for name, component in self._components.items():
            yield from ((f"{name}.{key}", tensor) for key, tensor in component.tensors().items())

    def _states(self) -> Iterator[tuple[int, list[tuple[Any, Any]]]]:
        for i, optimizer in enumerate(self.optimizers):
            yield i, list(optimizer.state.items())

    def _name(self, key: Any) -> str:
        """Of a parameter; some optimizers have state under other keys as well."""
        return self.name_of(key) if isinstance(key, Tensor) else repr(key)

    def _replace_buffers(
        self, names: Iterable[str], live: Mapping[str, Tensor], saved: Saved, *, none: set[str]
    ) -> None:
        """Buffers that have gone, or are of another shape now, as tensors of their own; None where there was none."""
        for name, owner, key in self._buffer_places():
            if name in none:
                _compat.buffers_of(owner)[key] = None
        places = {name: place for name, place in _places(unwrapped(self.model), "model") if name in names}
        for name, (owner, key) in places.items():
            if key in _compat.buffers_of(owner) and (name not in live or not _fits(live[name], saved(name))):
                _compat.buffers_of(owner)[key] = saved(name).clone().to(self.device)

    def _replace_states(self, skeletons: list[dict[str, Any]], live: Mapping[str, Tensor], saved: Saved) -> None:
        """Optimizer state with exactly the entries it had: made where missing, gone where it was not there yet."""

        def leaf(name: str, device: str) -> Tensor:
            if name in live and _fits(live[name], saved(name)):
                return live[name]
            return saved(name).clone().to(device)

        for optimizer, skeleton in zip(self.optimizers, skeletons, strict=True):
            owners = {self._name(key): key for key in optimizer.state}
            owners |= {self._name(p): p for group in optimizer.param_groups for p in group["params"]}
            for param in list(optimizer.state):
                if self._name(param) not in skeleton:
                    del optimizer.state[param]
            for name, node in skeleton.items():
                optimizer.state[owners[name]] = _filled(node, leaf)


def _slots(module: nn.Module, prefix: str, *, buffers_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, those that are there; one that has two names once."""
    seen: set[int] = set()
    for name, (owner, key) in _places(module, prefix, buffers_only=buffers_only):
        buffers = _compat.buffers_of(owner)
        tensor = buffers[key] if key in buffers else _compat.parameters_of(owner).get(key)
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _places(
    module: nn.Module, prefix: str, *, buffers_only: bool = False
) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    for path, owner in module.named_modules():
        for key in (*(() if buffers_only else _compat.parameters_of(owner)), *_compat.buffers_of(owner)):
            yield f"{prefix}.{plain_name(f'{path}.{key}')}", (owner, key)


def _fits(live: Tensor, saved: Tensor) -> bool:
    return live.shape == saved.shape and live.layout is torch.strided and not live.is_inference()


# An optimizer's state as a tree of plain containers, tensors replaced by their names: every node is a dict of one key.


def _skeleton(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"tensor": [path, str(value.device)]}
    if isinstance(value, dict):
        return {"dict": [[key, _skeleton(child, f"{path}.{key}")] for key, child in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_skeleton(child, f"{path}.{i}") for i, child in enumerate(value)]}
    return {"value": copy.deepcopy(value)}


def _references(node: dict[str, Any]) -> Iterator[str]:
    ((kind, content),) = node.items()
    if kind == "tensor":
        yield content[0]
    elif kind != "value":
        for child in content:
            yield from _references(child[1] if kind == "dict" else child)


def _filled(node: dict[str, Any], leaf: Callable[[str, str], Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return leaf(*content)
    if kind == "dict":
        return {key: _filled(child, leaf) for key, child in content}
    if kind == "value":
        return content
    filled = [_filled(child, leaf) for child in content]
    return filled if kind == "list" else tuple(filled)
