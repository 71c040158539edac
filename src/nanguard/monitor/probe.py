"""Measures every op of one training step while it runs. Nothing is copied to the host here, and nothing syncs.

The step itself is not changed: each op is called as it is, and its operands and results are only read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat, _compat_modes
from nanguard.monitor.quantities import Quantity, name_of, resolution
from nanguard.monitor.signals import attention_bound, spread_over_batch
from nanguard.state.names import plain_name

log = logging.getLogger("nanguard")

_OPERANDS = {"log": 0, "log2": 0, "log10": 0, "div": 1, "reciprocal": 0, "sqrt": 0, "rsqrt": 0}
"""Ops that fail at 0, and the place of the operand."""

_DIFFERENCES = ("sub", "rsub")
"""What they leave of nearly equal numbers is a multiple of the resolution."""

MAKERS = frozenset(
    [
        "alias",
        "arange",
        "bernoulli",
        "copy",
        "detach",
        "dropout",
        "empty",
        "empty_like",
        "empty_strided",
        "eye",
        "fill",
        "full",
        "full_like",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "normal",
        "ones",
        "ones_like",
        "rand",
        "rand_like",
        "randint",
        "randn",
        "randn_like",
        "scalar_tensor",
        "set",
        "uniform",
        "zero",
        "zeros",
        "zeros_like",
    ]
)
"""Ops whose results are constants, random numbers or memory."""

_ATTENTION = "scaled_dot_product"
"""Fused kernels show nothing of their logits. Without such a kernel the ops are seen one by one."""

_FEWEST_SAMPLES = 4
"""Of fewer samples it says little how much they differ."""

_MOST_VALUES = 50_000
"""More values than this are not measured in one step: something other than a step is running."""

Measured = tuple[Quantity, int]
"""A quantity, and how many values it has.

``overflow``: the lowest and the highest output. ``zero``: the smallest operand, and its limit if that is not the
smallest number of the format. Others: one value."""


class Probe(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between ``arm`` and ``disarm``, from the first call of a module of ``model`` on, every op is measured."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(m): plain_name(name) for name, m in reversed(list(model.named_modules()))}
        self._stack: list[str] = []
        self._owners: dict[int, str] = {}
        self._floors: dict[int, Tensor] = {}
        self._nodes: dict[int, str] = {}
        self._replaced: Any = None
        self._call: Any = None
        self._is_on = False
        self._made: dict[int, Quantity] = {}
        self.calls: Counter[str] = Counter()
        """How often each module was called in one call of the model, at most."""
        self._calls: Counter[str] = Counter()
        self.forms: dict[str, str] = {}
        """The format of the last output of each module in the forward pass."""
        self.left: dict[Quantity, str] = {}
        """The outermost module that an output has left as a part of its result."""
        self.failure: Exception | None = None
        self.quantities: list[Measured] = []
        self.values: list[Tensor] = []

    # ---- begin and end -------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Begin with the next call of a module, unless another probe is at work.

        Not with torch's global hooks: ``torch.compile`` warns about them.
        """
        current = _compat.module_call()
        while (other := getattr(current, "probe", None)) is not None:
            if other() is not None:
                return
            current = current.__wrapped__  # of a guard that was let go of in the middle of a step
        self._replaced = current
        self._call = _listening(weakref.ref(self), current)
        _compat.set_module_call(self._call)
        weakref.finalize(self, _put_back, self._call, current)  # a guard may be let go of in the middle of a step

    def disarm(self) -> None:
        """Stop. What was measured stays."""
        if self._call is not None and _compat.module_call() is self._call:
            _compat.set_module_call(self._replaced)
        if self._is_on:
            _compat_modes.leave_mode(self)
        self._call, self._is_on = None, False
        self._stack.clear()
        self._owners.clear()
        self._floors.clear()
        self._nodes.clear()
        self._made.clear()

    @contextlib.contextmanager
    def _inside(self, module: nn.Module) -> Iterator[None]:
        """A module is being called."""
        name = self._names.get(id(module))
        if name is None or self._call is None or _compat.is_recording():
            yield
            return
        # Not in the middle of an examination: it would leave its mode before we leave ours.
        if not self._is_on and torch.is_grad_enabled() and not _compat_modes.has_dispatch_mode():
            self._is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]
        if not self._stack:
            self._calls.clear()
        self._calls[name] += 1
        self.calls[name] = max(self.calls[name], self._calls[name])
        self._stack.append(name)
        try:
            yield
        finally:
            if self._stack:
                self._stack.pop()

    def _note_result(self, module: nn.Module, result: Any) -> None:
        """What a module has returned."""
        name = self._names.get(id(module))
        if name is not None and self._is_on:
            for tensor in _plain_tensors(result):
                quantity = self._made.get(_compat.storage_key(tensor))
                if quantity is not None:
                    self.left[quantity] = name
            if any(param.dim() >= 2 for param in _compat.parameters_of(module).values() if param is not None):
                self._measure_spread(name, result)

    @torch.no_grad()
    def _measure_spread(self, name: str, result: Any) -> None:
        """How much the result differs between samples."""
        for output in _plain_tensors(result):
            form = name_of(output.dtype)
            if form and output.dim() >= 2 and output.shape[0] >= _FEWEST_SAMPLES and output.numel():
                self.quantities.append((Quantity(kind="collapse", module=name, form=form), 1))
                self.values.append(spread_over_batch(output))

    # ---- each op -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.failure is not None or len(self.values) > _MOST_VALUES or _compat.is_recording():
            return result
        try:
            self._follow(func, args, kwargs or {}, result)
        except Exception as error:  # measuring must not make the step fail
            log.debug("an op could not be measured: %s", func, exc_info=True)
            self.failure = error
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        node = _compat.current_node()
        if node is None and not torch.is_grad_enabled():
            return
        op = str(func.overloadpacket.__name__).strip("_")
        inputs, outputs = list(_plain_tensors(args)), list(_plain_tensors(result))
        module = self._module_in_backward(node) if node is not None else self._module_in_forward(inputs)
        for output in outputs:
            self._owners[_compat.storage_key(output)] = module
        if _compat.is_view(func):
            return
        with torch.no_grad():
            self._measure_outputs(op, module, outputs, is_backward=node is not None)
            self._measure_operand(op, module, args, is_backward=node is not None)
            if op.startswith(_ATTENTION) and node is None:
                self._measure_attention(module, args, kwargs)
            self._note_floor(op, inputs, outputs)

    def _module_in_forward(self, inputs: list[Tensor]) -> str:
        """The innermost module that is running. Outside of all, the one that made an operand: a loss has no module."""
        module = self._stack[-1] if self._stack else ""
        if not module:
            module = next(filter(None, (self._owners.get(_compat.storage_key(each)) for each in inputs)), "")
        number = _compat.next_sequence_nr()
        for level in (1, 2):  # the node of this op was made right before it ran
            if number is not None:
                self._nodes.setdefault(number - level, module)
        return module

    def _module_in_backward(self, node: Any) -> str:
        number = _compat.sequence_nr(node)
        return "" if number is None else self._nodes.get(number, "")

    def _measure_outputs(self, op: str, module: str, outputs: list[Tensor], *, is_backward: bool) -> None:
        if op in MAKERS:
            return
        for output in outputs:
            form = name_of(output.dtype)
            if form and output.numel():
                quantity = Quantity(kind="overflow", module=module, op=op, form=form, backward=is_backward)
                self.quantities.append((quantity, 2))
                self.values.extend(torch.aminmax(output))
                if not is_backward:
                    self.forms[module] = form
                    self._made[_compat.storage_key(output)] = quantity

    def _measure_operand(self, op: str, module: str, args: Any, *, is_backward: bool) -> None:
        place = _OPERANDS.get(op)
        operand: Any = None if place is None or place >= len(args) else args[place]
        if not _is_plain(operand) or not name_of(operand.dtype) or not operand.numel():
            return
        form = name_of(operand.dtype)
        key = _compat.storage_key(operand)
        # The module that made the operand is at fault, not the one of the other operand.
        owner = self._owners.get(key) or module if not self._stack or not self._stack[-1] else module
        quantity = Quantity(kind="zero", module=owner, op=op, form=form, backward=is_backward)
        size, floor = operand.abs(), self._floors.get(key)
        self.values.append(size.masked_fill(size == 0, math.inf).amin())
        if floor is not None:
            self.values.append(floor)
        self.quantities.append((quantity, 1 if floor is None else 2))

    def _measure_attention(self, module: str, args: Any, kwargs: Any) -> None:
        q, k = args[:2]
        if _is_plain(q) and _is_plain(k) and name_of(q.dtype) and q.numel() and k.numel():
            self.quantities.append((Quantity(kind="attention", module=module, form=name_of(q.dtype)), 1))
            self.values.append(attention_bound(q, k, kwargs.get("scale")))

    def _note_floor(self, op: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """``1 - p`` is never smaller than the resolution of 1, if it is not 0."""
        for output in outputs:
            form = name_of(output.dtype)
            if op in _DIFFERENCES and form and output.numel():
                sizes = [_largest_size(each) for each in inputs if name_of(each.dtype) and each.numel()]
                if op == "rsub":  # from a number, which is nearly always 1
                    sizes.append(torch.ones_like(sizes[0]))
                self._floors[_compat.storage_key(output)] = torch.stack(sizes).amax() * resolution(form)
            else:
                self._floors.pop(_compat.storage_key(output), None)


def _put_back(call: Any, replaced: Any) -> None:
    if _compat.module_call() is call:
        _compat.set_module_call(replaced)


def _listening(probe: weakref.ref[Probe], original: Callable[..., Any]) -> Callable[..., Any]:
    """What is called instead of a module. It does not keep its probe alive."""

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        at_work = probe()
        if at_work is None:
            return original(module, *args, **kwargs)
        with at_work._inside(module):
            result = original(module, *args, **kwargs)
        at_work._note_result(module, result)
        return result

    call.probe = probe  # type: ignore[attr-defined]
    return call


def gathered(values: list[Tensor]) -> tuple[Tensor, list[int]]:
    """All values in one float64 vector on the device of the first, and the place of each value in it. Does not sync."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault((value.device, value.dtype), []).append(place)
    device = values[0].device
    parts = [
        torch.stack([values[place] for place in places]).double().to(device, non_blocking=True)
        for places in groups.values()
    ]
    order = [place for places in groups.values() for place in places]
    return torch.cat(parts), sorted(range(len(order)), key=order.__getitem__)


def read(quantities: list[Measured], values: list[float], scale: float) -> dict[Quantity, tuple[float, float]]:
    """Value and limit of each quantity, the worst of a step, from the values on the host.

    Gradients that are multiplied by a loss scale are as large as the scale makes them: what counts is their true size.
    """
    worst: dict[Quantity, tuple[float, float]] = {}
    place = 0
    for quantity, size in quantities:
        value, limit = _value_and_limit(quantity, values[place : place + size], scale)
        place += size
        room = quantity.room(value, limit)
        before = worst.get(quantity)
        if math.isfinite(room) and (before is None or room < quantity.room(*before)):
            worst[quantity] = value, limit
    return worst


def _value_and_limit(quantity: Quantity, values: list[float], scale: float) -> tuple[float, float]:
    if quantity.kind == "overflow":
        # A mask of -inf, or one of +inf, is left out.
        value = max((abs(each) for each in values if math.isfinite(each)), default=math.nan)
        return value / scale if quantity.backward else value, quantity.usual_limit
    return values[0], values[1] if len(values) == 2 else quantity.usual_limit


def _is_plain(value: Any) -> bool:
    """Whether this is an ordinary tensor. Reading a sharded one would talk to other ranks."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided


def _plain_tensors(tree: Any) -> Any:
    if _is_plain(tree):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _plain_tensors(each)


def _largest_size(tensor: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(tensor)).abs().amax().double()
