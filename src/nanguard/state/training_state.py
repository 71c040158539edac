"""Everything that a training run consists of, by name: how it is copied, put back, checked, cast and left untouched.

Tensors are looked up anew each time, since programs add and replace them. What is not a tensor (learning rates,
schedules, step counts kept as numbers, random states) is copied into plain *facts*.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.state.casts import to_fp32_
from nanguard.state.module_attributes import ModuleAttributes
from nanguard.state.names import names_of, plain_name, unwrapped
from nanguard.state.nonfinite import nonfinite_names
from nanguard.state.optimizer_state import Node, States, filled, references, skeletons, tensors_of
from nanguard.state.rng import RngReader, RngState
from nanguard.state.schedule import Schedule, ScheduleNote
from nanguard.state.tensor_places import Places, buffers_in, shapes_in, tensor_places, tensors_in
from nanguard.state.undo import Undo

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
    """The one list of what a run consists of. ``components`` are parts of the guard, by name.

    Nothing here syncs, except what says so.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        *,
        device: torch.device,
        schedule: Schedule,
        ema: Any = None,
        components: Mapping[str, Component] | None = None,
    ) -> None:
        self.model, self.optimizers, self.ema, self.device = model, optimizers, ema, device
        self.schedule, self.rng_reader = schedule, RngReader(device)
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

    # ---- looking up ----------------------------------------------------------------------------------------------

    @property
    def own_model(self) -> nn.Module:
        """The user's model inside DDP and ``torch.compile``."""
        return unwrapped(self.model)

    def parameters(self) -> dict[str, Tensor]:
        """Of the model, by the names that the user knows."""
        return {plain_name(name): p for name, p in self.own_model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Of the model, by the names that the user knows."""
        return {plain_name(name): b for name, b in self.own_model.named_buffers()}

    def optimizer_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name (``exp_avg of head.weight``), parameter and tensor of the optimizers' state."""
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                owner = self.name_of(param) if isinstance(param, Tensor) else ""
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        yield f"{key} of {owner}", owner, value

    def module(self, name: str) -> nn.Module | None:
        """A module of the model, None if there is none of this name."""
        try:
            return self.own_model.get_submodule(name)
        except AttributeError:
            return None

    def optimizer_of(self, name: str) -> Optimizer:
        """The optimizer that steps a parameter; the first one if none does."""
        param = self.parameters().get(name)
        for optimizer in self.optimizers:
            if any(p is param for p in _params(optimizer)):
                return optimizer
        return self.optimizers[0]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step may change, as it is now; the tensors themselves, not copies."""
        return self._tensors(self._places(), self._states())

    def _tensors(self, places: Places, states: States) -> dict[str, Tensor]:
        return {**self._of_models(places), **tensors_of(states), **dict(self._of_components())}

    def nonfinite(self) -> tuple[str, ...]:
        """Names of ``tensors()`` that hold NaN or Inf. Syncs."""
        return nonfinite_names(self.tensors())

    def unsound(self) -> tuple[str, ...]:
        """``nonfinite()`` without buffers that hold Inf but no NaN, which may be masks. Syncs."""
        live, buffers = self.tensors(), self.buffer_names()
        bad = nonfinite_names(live)
        return tuple(name for name in bad if name not in buffers or bool(torch.isnan(live[name]).any()))

    def of_model(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model alone, by their names in ``tensors()``."""
        return tensors_in(self._places())

    def buffer_names(self) -> set[str]:
        """Names in ``tensors()`` of what the forward pass may write to."""
        return buffers_in(self._places())

    # ---- copying and putting back --------------------------------------------------------------------------------

    def now(self) -> tuple[dict[str, Tensor], set[str], Callable[[], Facts]]:
        """``tensors()``, ``buffer_names()``, and a function that copies everything else.

        The modules are looked through once: snapshots are taken often.
        """
        places, states = self._places(), self._states()
        return self._tensors(places, states), buffers_in(places), lambda: self._facts(places, states)

    def _facts(self, places: Places, states: States) -> Facts:
        note = self.schedule.note(everything=True)
        return {
            "schedule": {"options": note.options, "schedulers": note.schedulers, "factor": note.factor},
            "optimizers": skeletons(states),
            "rng": self.rng_reader.now().as_dict(),
            "models": list(self._of_models(places)),
            "extra": {path: copy.deepcopy(module.get_extra_state()) for path, module in self._with_extra_state()},
            "parameters": shapes_in(places),
            "kinds": [type(optimizer).__name__ for optimizer in self.optimizers],
            "none": [place.name for place in places if place.is_buffer and place.tensor is None],
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
        for nodes in facts["optimizers"]:
            for node in nodes.values():
                wanted |= set(references(node))
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

    def capture_update(self) -> CapturedUpdate:
        """Copies what an optimizer's step writes to, so that the step can be undone. Syncs."""
        return CapturedUpdate(self)

    def drop_gradients(self) -> None:
        """Sets all gradients of the optimizers' parameters to None."""
        for optimizer in self.optimizers:
            for param in _params(optimizer):
                param.grad = None

    @contextlib.contextmanager
    def untouched(
        self, buffers: Undo, leaves: Iterable[Tensor] = (), generators: Iterable[Generator] = ()
    ) -> Iterator[None]:
        """Runs code; afterwards buffers, gradients, random states and attributes of modules are as they were.

        Inside, no parameter has a gradient. ``buffers`` watches the model's. ``leaves`` and ``generators`` are more
        tensors that may get a gradient, and more random states, besides those of the model and its modules.
        """
        modules = list(self.model.modules())
        rng, attributes = self.rng_reader.now(), ModuleAttributes(modules)
        states = [(generator, generator.get_state()) for generator in (*_generators(modules), *generators)]
        params = [p for optimizer in self.optimizers for p in _params(optimizer)]
        grads = [(p, p.grad) for p in (*self.model.parameters(), *params, *leaves) if p.is_leaf and p.requires_grad]
        buffers.note_()
        for param, _ in grads:
            param.grad = None
        try:
            yield
        finally:
            buffers.undo_()
            for param, grad in grads:
                param.grad = grad
            for generator, state in states:
                generator.set_state(state)
            rng.restore(self.device)
            attributes.restore()

    def cast_to_fp32_(self) -> tuple[str, ...]:
        """Casts everything in fp16 or bf16 to fp32, in place, and returns the names in ``tensors()`` of what was cast.

        Every tensor stays the object it was, so optimizers, schedules, averages and DDP go on as if everything had
        been loaded in fp32. fp64 stays fp64. Gradients are dropped. If nothing is in half precision, nothing changes.

        Call it between steps, on all ranks alike: no graph of the old parameters may be alive. Compiled code compiles
        anew; CUDA graphs have to be captured again. Hooks on parameters stay. Sharded parameters, and DDP with a
        ``mixed_precision`` of its own, raise ``ValueError``, and nothing changes.
        """
        return to_fp32_((self.model,) if self.ema is None else (self.model, self.ema), self.tensors())

    # ---- the parts -----------------------------------------------------------------------------------------------

    def _check(self, facts: Facts) -> None:
        """Raises ``ValueError`` if the run is not the one that was copied, before anything is written."""
        now, then = shapes_in(self._places()), facts["parameters"]
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        odd = sorted(name for name in now.keys() | then.keys() if now.get(name, then.get(name)) != then.get(name))
        odd += sorted(then.keys() - now.keys())
        if odd or kinds != facts["kinds"]:
            optimizers = f"optimizers {facts['kinds']}, now {kinds}"
            what = f"{odd[0]} and {len(odd) - 1} more differ" if odd else optimizers
            raise ValueError(
                f"the snapshot of step {facts['step']} is of another model or optimizer ({what}): nothing was put back"
            )

    def _places(self) -> Places:
        return tensor_places(self.own_model, "model")

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that keep something of their own in a checkpoint."""
        for path, module in self.own_model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield plain_name(path), module

    def _of_models(self, places: Places) -> dict[str, Tensor]:
        found = tensors_in(places)
        if self.ema is not None:
            found.update(tensors_in(tensor_places(self.ema, "ema")))
        found.update(self._outside())
        return found

    def _outside(self) -> dict[str, Tensor]:
        """Parameters that an optimizer steps and the model does not have."""
        found: dict[str, Tensor] = {}
        for i, optimizer in enumerate(self.optimizers):
            for place, param in enumerate(_params(optimizer)):
                if id(param) not in self._names:
                    found[f"outside.{i}.{place}"] = param
        if found and self._names.keys() != (names := names_of(self.model)).keys():
            self._names = names
            return self._outside()
        return found

    def _of_components(self) -> Iterator[tuple[str, Tensor]]:
        for name, component in self._components.items():
            yield from ((f"{name}.{key}", tensor) for key, tensor in component.tensors().items())

    def _states(self) -> States:
        return [[(self._name(key), state) for key, state in o.state.items()] for o in self.optimizers]

    def _owners(self) -> list[dict[str, Any]]:
        """For each optimizer the keys that it may have state under, by name."""
        return [{self._name(key): key for key in (*o.state, *_params(o))} for o in self.optimizers]

    def _name(self, key: Any) -> str:
        """A name that no other key has; some optimizers have state under keys that are not parameters."""
        if not isinstance(key, Tensor):
            return repr(key)
        if id(key) not in self._names:
            for name, param in self._outside().items():
                if param is key:
                    return name
        return self.name_of(key)

    def _replace_buffers(
        self, names: Iterable[str], live: Mapping[str, Tensor], saved: Saved, *, none: set[str]
    ) -> None:
        """New tensors for buffers that are gone or have another shape now; those in ``none`` become None again."""
        for name, owner, key, _, is_buffer in self._places():
            if is_buffer and name in none:
                _compat.buffers_of(owner)[key] = None
            if is_buffer and name in names and (name not in live or not _fits(live[name], saved(name))):
                _compat.buffers_of(owner)[key] = saved(name).clone().to(self.device)

    def _replace_states(
        self,
        skeletons: list[dict[str, Node]],
        live: Mapping[str, Tensor],
        saved: Saved,
        owners: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Optimizer state with exactly the entries it had. ``live`` tensors are used if they fit, else copies."""

        def leaf(name: str, device: str) -> Tensor:
            if name in live and _fits(live[name], saved(name)):
                return live[name]
            return saved(name).clone().to(device)

        for optimizer, nodes, keys in zip(self.optimizers, skeletons, owners or self._owners(), strict=True):
            for key in list(optimizer.state):
                if self._name(key) not in nodes:
                    del optimizer.state[key]
            for name, node in nodes.items():
                optimizer.state[keys[name]] = filled(node, leaf, optimizer.state.get(keys[name]))


class CapturedUpdate:
    """Parameters, optimizer state and options as they were before the optimizers' step."""

    @torch.no_grad()
    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._live = self._written()
        self._copies = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self._owners, self._skeletons = state._owners(), skeletons(state._states())
        self._options = [[dict(group) for group in optimizer.param_groups] for optimizer in state.optimizers]
        self._known = {id(tensor) for tensor in self._live.values()}
        self._bad_before = {id(self._live[name]) for name in nonfinite_names(self._live)}

    def is_spoiled(self) -> bool:
        """Whether anything is non-finite now that was finite before. Syncs.

        State that the step has made may start with Inf, for example as the best loss so far, but not with NaN.
        """
        live = self._written()
        bad = [live[name] for name in nonfinite_names(live) if id(live[name]) not in self._bad_before]
        return any(id(tensor) in self._known or bool(torch.isnan(tensor).any()) for tensor in bad)

    def is_unchanged(self) -> bool:
        """Whether parameters and optimizer state hold the same values as then. Syncs."""
        return all(name in self._copies and torch.equal(t, self._copies[name]) for name, t in self._written().items())

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes everything back, into the same tensors; state that the step has made is removed."""
        state = self._state
        for name, tensor in self._live.items():
            if _fits(tensor, self._copies[name]):
                tensor.copy_(self._copies[name])
        state._replace_states(self._skeletons, self._live, self._copies.__getitem__, self._owners)
        for optimizer, options in zip(state.optimizers, self._options, strict=True):
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                for key in group.keys() - saved.keys():
                    del group[key]
                group.update({key: value for key, value in saved.items() if key != "params"})

    def _written(self) -> dict[str, Tensor]:
        params = {f"parameter.{self._state._name(p)}": p for o in self._state.optimizers for p in _params(o)}
        return {**params, **tensors_of(self._state._states())}


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _generators(modules: Iterable[nn.Module]) -> Iterator[Generator]:
    """The random generators that modules own."""
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, Generator))


def _fits(live: Tensor, saved: Tensor) -> bool:
    return live.shape == saved.shape and live.layout is torch.strided and not live.is_inference()
