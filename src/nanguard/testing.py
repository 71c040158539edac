"""Fault injection for any training loop: prove that a NaN, an Inf or a flipped bit does no harm.

Faults depend only on their own seed: no random number generator is used, and a step that is run again gets the
same faults. This needs no guard, no GPU and no change to the model.

    >>> import torch
    >>> from nanguard.testing import Fault, inject
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with inject(model, Fault(into="gradient", name="0.weight", value="nan", steps=(1,))) as injector:
    ...     for step in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         if model[0].weight.grad.isfinite().all():  # the protection under test
    ...             optimizer.step()
    >>> [(fired.step, fired.name) for fired in injector.fired], bool(model[0].weight.isfinite().all())
    ([(1, '0.weight')], True)
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard import _compat

__all__ = ["Fault", "Fired", "Injector", "inject"]

_IN_PLACE = ("weight", "buffer", "optimizer_state")
_PLACES = ("input", "activation", "gradient", *_IN_PLACE, "loss")
_WORDS = re.compile(r"nan|-?inf|huge|bitflip(:\d+)?")
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: where it goes, what it writes, and when. Give exactly one of `steps` and `probability`.

    into: "input", the first floating tensor in the arguments of the outermost module, in a copy;
        "activation", the output of the module `name`; "gradient", that of the parameter `name`, before it is
        accumulated or averaged between ranks; "weight", "buffer" and "optimizer_state", in place, at the start
        of the step; "loss", what `Injector.loss` is given.
    name: as in "fc.weight"; for optimizer state as in "fc.weight.exp_avg"; for an input None, a key or a path
        ("0.image").
    value: "nan", "inf", "-inf", "huge" (a tenth of the largest finite number), "bitflip" (of the top exponent
        bit; "bitflip:0" of the lowest bit), or a number.
    ranks: None for all. Without torch.distributed the rank is 0.
    probability: of firing at a step. It depends only on (seed, step, rank), so faults with the same seed fire
        together.
    times: the maximum number of times it fires; 1 is a transient fault, whose replay is clean. None for every
        time its step is computed; for weights, buffers and optimizer state, once for each step number.
    element: flat index of the element to overwrite (in a sparse gradient, of its values); None draws it from the
        seed.
    """

    into: str
    name: str | None = None
    value: str | float = "nan"
    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    probability: float = 0.0
    seed: int = 0
    times: int | None = None
    element: int | Literal["all"] | None = None

    def __post_init__(self) -> None:
        is_named = isinstance(self.name, str) and (self.into != "optimizer_state" or "." in self.name)
        named = is_named != (self.into == "loss") or (self.into == "input" and self.name is None)
        known = isinstance(self.value, (int, float)) or _WORDS.fullmatch(str(self.value))
        for key, fits, accepted in (
            ("into", self.into in _PLACES, f"one of {', '.join(_PLACES)}"),
            ("name", named, "a name; for optimizer_state as in 'fc.weight.exp_avg'; for loss None"),
            ("value", known, "a number, nan, inf, -inf, huge, bitflip, or as in bitflip:0"),
            ("steps", _ints(0, self.steps), "a tuple of step numbers, as in (3,)"),
            ("ranks", self.ranks is None or (self.ranks and _ints(0, self.ranks)), "None, or as in (0,)"),
            ("probability", 0 <= self.probability <= 1, "a number from 0 to 1"),
            ("seed", isinstance(self.seed, int), "an integer"),
            ("times", self.times is None or _ints(1, (self.times,)), "None, or an integer from 1"),
            ("steps", bool(self.steps) != bool(self.probability), "as in (3,), or a probability: only one"),
            ("element", self.element in (None, "all") or _ints(0, (self.element,)), "None, 'all' or from 0"),
        ):
            _check(fits, f"{key}={getattr(self, key)!r}", accepted)


@dataclass(frozen=True, kw_only=True)
class Fired:
    """A fault that was injected. `name` is spelled as in the model; for an input it is the path."""

    fault: Fault
    step: int
    rank: int
    name: str


def inject(
    target: Any,
    *faults: Fault,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    clock: Callable[[], int] | None = None,
) -> Injector:
    """Return a context manager that injects `faults` into `target` while open, and removes its hooks on exit.

    `target` is the outermost module, or an object with `model`, `optimizers` and `current_step`, such as a
    Guard. For a module, `clock()` returns the number of the current step. Without a clock, it is the number of
    forward passes so far in training mode with gradients enabled, from 0; a backward pass belongs to the
    forward pass before it. Other passes are never changed. Names may have the prefixes of DDP and
    torch.compile or not; a compiled `target` is compiled again. Injecting does not sync, except into a sparse
    gradient on CUDA. Faults that cannot be injected are not in `fired`: into a tensor without elements, or
    into a gradient under FSDP, which does not call hooks on parameters.
    """
    if isinstance(target, nn.Module):
        given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
        return Injector(target, faults, lambda: given, clock)
    fits = all(hasattr(target, key) for key in ("model", "optimizers", "current_step"))
    _check(fits, f"target={target!r}", "a torch.nn.Module, or an object with model, optimizers and current_step")
    _check((optimizer or clock) is None, "optimizer or clock", "neither, because this target has its own")
    return Injector(target.model, faults, lambda: target.optimizers, lambda: target.current_step)


class Injector:
    """Returned by `inject`; open it with `with`. `fired` lists what was injected, also after exit."""

    def __init__(self, model: nn.Module, faults: Sequence[Fault], optimizers: Any, clock: Any) -> None:
        self._model, self._optimizers, self._clock = model, optimizers, clock
        self._num_passes, self._in_training = 0, True
        self.fired, self._handles = list[Fired](), list[Any]()
        self._faults = [(fault, self._place(fault)) for fault in faults]

    def loss(self, loss: Tensor) -> Tensor:
        """Return `loss` with the faults of this step, still connected to its graph. Does not sync.

        Gradients are multiplied by the same factor as the loss: a non-finite loss has non-finite gradients.
        A loss that requires no gradient, and any loss after exit, is returned unchanged.
        """
        is_trained_on = torch.is_grad_enabled() and loss.requires_grad
        for fault, _ in self._due("loss") if is_trained_on else ():
            hit: Any = loss.clone()
            self._write_(fault, hit, "loss")
            old, new = loss.detach(), hit.detach()
            factor = torch.where(old != 0, new / old, new)
            hit.register_hook(partial(torch.mul, torch.where(new == old, 1.0, factor)))
            loss = hit
        return loss

    def __enter__(self) -> Injector:
        # Before other hooks: FSDP swaps the parameters in one, and observers of a module must see the fault.
        model, keep = self._model, self._handles.append
        keep(model.register_forward_pre_hook(_Hook(self._begin), prepend=True, with_kwargs=True))
        if any(_compat.compiled_module(module) is not None for module in model.modules()):
            torch.compiler.reset()  # code compiled already would not call the hooks
        for fault, name in self._faults:
            if fault.into == "activation":
                hook = _Hook(partial(self._activation, fault, name))
                keep(model.get_submodule(name).register_forward_hook(hook, prepend=True))
            if fault.into == "gradient":
                parameter: Any = model.get_parameter(name)
                keep(parameter.register_hook(partial(self._gradient, fault, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _place(self, fault: Fault) -> str:
        """The name of the target of a fault as the model spells it; ValueError if there is none."""
        name, into, key = fault.name or "", fault.into, ""
        if into in ("input", "loss"):
            return name
        if into == "optimizer_state":
            name, _, key = name.rpartition(".")
        kind = {"activation": "module", "buffer": "buffer"}.get(into, "parameter")
        there = dict(getattr(self._model, f"named_{kind}s")(remove_duplicate=False))
        full = _resolve(kind, name, list(there))
        found, given = there[full], f"name={fault.name!r}"
        if isinstance(found, Tensor):
            _check(found.is_floating_point(), f"{given}, which is {found.dtype}", f"a floating {kind}")
            _check(found.requires_grad or into != "gradient", given, "a parameter that requires a gradient")
        if into == "optimizer_state":
            groups = [group["params"] for optimizer in self._optimizers() for group in optimizer.param_groups]
            owned = any(found is parameter for group in groups for parameter in group)
            _check(owned, given, "a parameter of the optimizer given by inject(..., optimizer=...)")
        return f"{full}.{key}" if key else full

    def _now(self) -> tuple[int, int]:
        step = self._num_passes - 1 if self._clock is None else self._clock()
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        return step, torch.distributed.get_rank() if ready else 0

    def _missing(self, what: str, why: str) -> RuntimeError:
        return RuntimeError("no {} at step {}, rank {}: {}".format(what, *self._now(), why))

    def _due(self, *places: str) -> list[tuple[Fault, str]]:
        return [(fault, name) for fault, name in self._faults if fault.into in places and self._is_due(fault)]

    def _is_due(self, fault: Fault) -> bool:
        """Whether the fault fires now, by step, rank, seed, and when it fired before."""
        step, rank = self._now()
        is_here = bool(self._handles) and step >= 0 and (fault.ranks is None or rank in fault.ranks)
        fired = [each.step for each in self.fired if each.fault is fault]
        once_a_step = fault.times is None and fault.into in _IN_PLACE
        is_spent = step in fired if once_a_step else len(fired) == fault.times
        is_drawn = _draw(fault.seed, step, rank, "fires") / 2**53 < fault.probability
        return is_here and not is_spent and (step in fault.steps or is_drawn)

    def _write_(self, fault: Fault, tensor: Tensor, name: str) -> None:
        """Write the fault into `tensor` and record it. Uses .data because autograd must not notice a fault."""
        step, rank = self._now()
        cells: Tensor = getattr(tensor.data, "to_local", lambda: tensor.data)()  # the local shard of a DTensor
        if (numel := cells.numel()) == 0:
            return
        if fault.element != "all":
            index = _draw(fault.seed, step, rank, "where") % numel if fault.element is None else fault.element
            if index >= numel:
                raise self._missing(f"element {index} of {name!r}", f"it has {numel} elements")
            for dim in reversed(range(cells.dim())):  # one by one, because strides may not allow a flat view
                index, at = divmod(index, cells.shape[dim])
                cells = cells.select(dim, at)
        _overwrite_(cells, fault.value)
        self.fired.append(Fired(fault=fault, step=step, rank=rank, name=name))

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._in_training = module.training and torch.is_grad_enabled()
        if not self._in_training:
            return None
        self._num_passes += 1
        for fault, name in self._due(*_IN_PLACE):
            self._write_(fault, self._stored(fault, name), name)
        inputs = {**dict(enumerate(args)), **kwargs}
        for fault, name in self._due("input"):
            inputs = self._replaced(fault, name, inputs)
        return tuple(inputs[i] for i in range(len(args))), {key: inputs[key] for key in kwargs}

    def _stored(self, fault: Fault, name: str) -> Tensor:
        """The current weight, buffer or state, which may have been replaced since the start."""
        if fault.into == "weight":
            return self._model.get_parameter(name)
        if fault.into == "buffer":
            return self._model.get_buffer(name)
        name, _, key = name.rpartition(".")
        parameter, state = self._model.get_parameter(name), dict[str, Any]()
        for optimizer in self._optimizers():
            state.update(optimizer.state.get(parameter, {}))
        if isinstance(found := state.get(key), Tensor) and found.is_floating_point():
            return found
        why = f"there are {list(state)}" if state else "optimizer.step() creates it, so choose a later step"
        raise self._missing(f"floating optimizer state {key!r} of {name!r}", why)

    def _activation(self, fault: Fault, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        # Ask the outermost module: frozen parts are in eval mode, checkpointed ones run under no_grad.
        fires = self._in_training and self._model.training and self._is_due(fault)
        return self._replaced(fault, name, output) if fires else None

    def _replaced(self, fault: Fault, name: str, tree: Any) -> Any:
        """A copy of `tree` with the fault in its first floating tensor (in an input, with the name in its path)."""
        is_input, paths = fault.into == "input", list[str]()

        def hit(path: str, tensor: Tensor) -> Tensor | None:
            paths.append(path)
            if is_input and name and f".{name}." not in f".{path}.":
                return None
            self._write_(fault, clone := tensor.clone(), path if is_input else name)
            return clone

        if (replaced := _first_replaced(tree, hit)) is None:
            why = f"there are {paths}" if paths else "faults cannot go into integers, so choose a later activation"
            raise self._missing(f"floating tensor for {fault.into} {name!r}", why)
        return replaced

    def _gradient(self, fault: Fault, name: str, gradient: Tensor) -> Tensor | None:
        if not self._is_due(fault):
            return None
        is_sparse = gradient.layout == torch.sparse_coo
        clone = gradient.coalesce().clone() if is_sparse else gradient.clone()
        self._write_(fault, clone.values() if is_sparse else clone, name)
        return clone


class _Hook:
    """A module hook that torch.compile calls without tracing, and that copies of the model do not inherit."""

    def __init__(self, call: Any = lambda *args: None) -> None:
        disable: Any = torch.compiler.disable
        self._call = disable(call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _check(fits: object, given: str, accepted: str) -> None:
    if not fits:
        raise ValueError(f"{given}: accepted is {accepted}")


def _ints(least: int, given: object) -> bool:
    return isinstance(given, tuple) and all(type(number) is int and number >= least for number in given)


def _draw(seed: int, step: int, rank: int, what: str) -> int:
    """A number below 2**53 that depends only on the arguments, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def _resolve(kind: str, name: str, names: list[str]) -> str:
    """Which of `names` equals `name` without prefixes of wrappers. A wrapper comes before what it wraps."""
    plain = {full: _WRAPPERS.sub("", full).strip(".") for full in (name, *names)}
    same = [name] if name in names else [full for full in names if plain[full] == plain[name]]
    close = difflib.get_close_matches(plain[name], [plain[full] for full in names], cutoff=0.5)
    _check(same, f"name={name!r}, which no {kind} of the model has", f"one like {close or names[:5]}")
    return same[0]


def _first_replaced(tree: Any, hit: Callable[[str, Tensor], Tensor | None], path: str = "") -> Any:
    """A copy of `tree` with the first floating tensor that `hit` replaces; None if there is none."""
    if isinstance(tree, Tensor):
        return hit(path[1:], tree) if tree.is_floating_point() and tree.numel() > 0 else None
    is_list = isinstance(tree, (list, tuple))
    for key, child in enumerate(tree) if is_list else tree.items() if isinstance(tree, Mapping) else ():
        if (new := _first_replaced(child, hit, f"{path}.{key}")) is not None:
            if isinstance(tree, tuple):
                items = [*tree[:key], new, *tree[key + 1 :]]
                return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
            copied: Any = copy.copy(tree)
            copied[key] = new
            return copied
    return None


def _overwrite_(cells: Tensor, value: str | float) -> None:
    """Write `value` over all of `cells`; a number too large for the dtype becomes Inf."""
    if isinstance(value, str) and value.startswith("bitflip"):
        num_bits = 8 * cells.element_size()
        bit = int(value.partition(":")[2] or num_bits - 2)
        _check(bit < num_bits, f"value={value!r}", f"bitflip:0 to bitflip:{num_bits - 1} for {cells.dtype}")
        mask = 1 << bit if bit < num_bits - 1 else -(1 << bit)
        cells.view(getattr(torch, f"int{num_bits}")).bitwise_xor_(mask)
    else:
        largest = torch.finfo(cells.dtype).max
        number = 0.1 * largest if value == "huge" else float(value)
        cells.fill_(number * float("inf") if abs(number) > largest else number)
