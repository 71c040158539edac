"""Single modules that run in fp32 inside a model that runs in half precision: islands."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from nanguard import _compat
from nanguard.state.names import plain_name, unwrapped
from nanguard.state.trees import mapped

_HALF = (torch.float16, torch.bfloat16)
_PREPARE = "__prepare_scriptable__"


class Islands:
    """The modules of ``model`` that are kept in fp32; none at first, except those it was copied or loaded with.

    A kept module runs with autocast off and half-precision inputs cast to fp32, and so does its backward pass (called
    outside of autocast, as torch advises). Half-precision parameters and buffers are used as fp32 copies. Outputs are
    cast back to the half type of the inputs, to bf16 if there are both. They stay in fp32 if all inputs were, or under
    autocast if some were: an fp32 residual stream cast to fp16 could overflow. A result without dimensions (a loss)
    stays in fp32 too. If everything is in fp32, as in validation without autocast, nothing is cast.

    What an island cannot see: a module that is used without calling it (``F.linear(x, embed.weight)``, the
    ``out_proj`` of ``nn.MultiheadAttention``, the fast path of ``nn.TransformerEncoderLayer`` in evaluation), autocast
    turned on inside the module's own forward, and half tensors that are neither arguments, parameters nor buffers.
    What a kept module writes in place into a half argument, or into a container of such, is written to its copy.

    Names are those of the model without DDP and ``torch.compile``; compiled code takes changes up by itself. A module
    with two names has the first. Copies and pickles of the model have the same islands, with their own weights.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._is_replicated = any(isinstance(module, DataParallel) for module in model.modules())
        self._device_type = device_type
        self._modules, self._names = _modules_and_names(unwrapped(model))
        found = {name: module.__dict__.get("forward") for name, module in self._modules.items()}
        self._islands = {name: island for name, island in found.items() if isinstance(island, _Island)}

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept, in model order; the model itself is ``""``."""
        return tuple(name for name in self._modules if name in self._islands)

    def keep(self, *patterns: str | nn.Module) -> tuple[str, ...]:
        """Keeps modules in fp32 from now on and returns the names of those that were not kept before.

        A pattern is a name, a module, or has wildcards, as in ``"decoder.layers.*.attn"``; ``*`` matches dots too.
        ``""`` is the model itself, ``"*"`` everything in it. Raises ``ValueError`` if a pattern matches nothing that
        can be called; then nothing is kept.
        """
        matched = self._matched(patterns)
        if matched and self._is_replicated:
            raise ValueError("the model is in DataParallel, whose replicas would all run the first one: use DDP")
        new = tuple(name for name in self._modules if name in matched and name not in self._islands)
        for name in new:
            self._islands[name] = _Island(self._modules[name], self._device_type)
        return new

    def can_keep(self, name: str) -> bool:
        """Whether there is a module of this name that is called: a list of modules or parameters is not."""
        return name in self._modules and type(self._modules[name]).forward is not nn.Module.forward

    def outermost(self) -> tuple[str, ...]:
        """The model itself, ``""``; if it is a mere container, which is never called, the outermost modules in it."""
        found: list[str] = []
        for name in self._modules:
            is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
            if _has_forward(self._modules[name]) and not is_inside:
                found.append(name)
        return tuple(found)

    def release(self, *patterns: str | nn.Module) -> tuple[str, ...]:
        """Lets kept modules run as before, all of them without a pattern, and returns the names of these."""
        matched = self._matched(patterns) if patterns else set(self._islands)
        old = tuple(name for name in self.names if name in matched)
        for name in old:
            self._islands.pop(name).remove()
        return old

    def put_back(self) -> None:
        """Before a step: puts back the islands that ``torch.jit.script`` had to remove."""
        for island in self._islands.values():
            island.put_back()

    def state_dict(self) -> list[str]:
        return list(self.names)

    def load_state_dict(self, state: Iterable[str]) -> None:
        """Keeps exactly these. A name the model does not have is a ``ValueError``, and nothing changes."""
        wanted = list(state)
        unknown = [name for name in wanted if name not in self._names]
        if unknown:
            raise ValueError(self._no_such(unknown))
        wanted = [self._names[name] for name in wanted]
        self._matched(wanted)
        surplus = [name for name in self.names if name not in wanted]
        if surplus:
            self.release(*surplus)
        self.keep(*wanted)

    def _matched(self, patterns: Iterable[str | nn.Module]) -> set[str]:
        """The first names of all matching modules. Raises ``ValueError`` if a pattern matches nothing."""
        meant = [(pattern, self._meant(pattern)) for pattern in patterns]
        nothing = [pattern for pattern, names in meant if not names]
        if nothing:
            raise ValueError(self._no_such(nothing))
        return {name for _, names in meant for name in names}

    def _meant(self, pattern: str | nn.Module) -> set[str]:
        if isinstance(pattern, nn.Module):
            module = unwrapped(pattern)
            hits = [name for name, each in self._modules.items() if each is module]
        elif pattern in self._names:
            hits = [pattern]
        else:
            hits = [name for name in self._names if name and fnmatchcase(name, pattern)]
        return {self._names[name] for name in hits if _has_forward(self._modules[self._names[name]])}

    def _no_such(self, patterns: Iterable[str | nn.Module]) -> str:
        """Why each of these matches nothing, and what was perhaps meant."""
        there = [name for name, first in self._names.items() if name and _has_forward(self._modules[first])]
        why = []
        for pattern in patterns:
            if pattern in self._names:
                why.append(
                    f"{pattern!r} has no forward that could run in fp32: name what is in it, as in '{pattern}.*'"
                )
            elif isinstance(pattern, nn.Module):
                why.append(f"no module of the model is this {type(pattern).__name__}")
            else:
                close = difflib.get_close_matches(pattern, there, cutoff=0.5) or there[:5]
                known = f"there are {', '.join(map(repr, close))}" if close else "it has no modules inside"
                why.append(f"no module of the model is called {pattern!r}; {known}")
        return "; ".join(why)


class _Island:
    """Stands as ``forward`` in the ``__dict__`` of a module, and runs it in fp32.

    It holds the module as a plain attribute, so that copies and pickles of a model have islands of their own modules.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self.module = module
        self.device_type = device_type
        self.active = True
        self.before: Any = module.__dict__.get("forward")  # what others have put there: to be run, and to be put back
        self._behind = _Behind(self)
        self.is_lifted = True
        self.put_back()

    def put_back(self) -> None:
        """After ``torch.jit.script``."""
        if self.is_lifted:
            self.is_lifted = False
            self.module.__dict__["forward"] = self
            self.module.__dict__.setdefault(_PREPARE, _Lift(self))

    def lift(self) -> None:
        """The module is what it was without the island; ``put_back`` undoes it."""
        if self.module.__dict__.get("forward") is self:
            self.is_lifted = True
            del self.module.__dict__["forward"]
            if self.before is not None:
                self.module.__dict__["forward"] = self.before
        if isinstance(self.module.__dict__.get(_PREPARE), _Lift):
            del self.module.__dict__[_PREPARE]

    def remove(self) -> None:
        """Puts back what was there. If the island was wrapped since, it runs the module unchanged."""
        self.active = False
        self.lift()

    @property
    def __wrapped__(self) -> Any:
        """For ``inspect.signature``, which tells trainers what a model takes."""
        return self.before or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or _compat.is_exporting():  # what is exported is the program's module, as it was written
            return self.plain(*args, **kwargs)
        seen: list[torch.dtype] = []

        def upcast(tensor: Tensor) -> Tensor | None:
            seen.append(tensor.dtype)
            return tensor.float() if tensor.dtype in _HALF else None

        autocasts = torch.is_autocast_enabled(self.device_type)
        args, kwargs = _cast((args, kwargs), upcast)
        own = [tensor.dtype for tensor in (*self.module.parameters(), *self.module.buffers()) if tensor.dtype in _HALF]
        with torch.autocast(self.device_type, enabled=False) if autocasts else contextlib.nullcontext():
            output = self._with_copies(args, kwargs) if own else self.plain(*args, **kwargs)
        back = _type_of_outputs(seen, own, autocasts)
        if back is None:
            return output
        return _cast(output, lambda t: t.to(back) if t.dtype is torch.float32 and t.dim() > 0 else None)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does without the island."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        forward: Any = type(self.module).forward
        return forward(self.module, *args, **kwargs)

    def _with_copies(self, args: Any, kwargs: Any) -> Any:
        """Runs the module on fp32 copies of its half parameters and buffers. What it writes to buffers is kept."""
        buffers = {f"module.{name}": t for name, t in self.module.named_buffers() if t.dtype in _HALF}
        copies = {name: t.float() for name, t in buffers.items()}
        traced = torch.compiler.is_compiling()  # then torch orders the writes itself, and counts none
        versions = {} if traced else {name: _compat.version(t) for name, t in copies.items()}
        used = {f"module.{name}": p.float() for name, p in self.module.named_parameters() if p.dtype in _HALF}
        used.update(copies)
        output = torch.func.functional_call(self._behind, used, args, kwargs)
        for name, buffer in buffers.items():
            if used[name] is not copies[name]:
                self._replace(name, buffer.dtype, used[name])
            elif traced or _compat.version(copies[name]) != versions[name]:
                with torch.no_grad():
                    buffer.copy_(copies[name])
            elif not buffer.is_inference():  # a kernel may write uncounted, as batch_norm does: then so is this
                buffer.data.copy_(copies[name])
        return output

    def _replace(self, name: str, dtype: torch.dtype, new: Any) -> None:
        """Puts what forward has put in the place of a buffer's copy into the place of the buffer."""
        owner, _, key = name.rpartition(".")
        is_upcast = isinstance(new, Tensor) and new.dtype is torch.float32
        setattr(self._behind.get_submodule(owner), key, new.to(dtype) if is_upcast else new)


class _Lift:
    """Called by ``torch.jit.script`` before it compiles the module: it can compile a plain ``forward`` only."""

    def __init__(self, island: _Island) -> None:
        self.island = island

    def __call__(self) -> nn.Module:
        self.island.lift()
        return self.island.module


class _Behind(nn.Module):
    """Stands for the module in ``functional_call``: the module itself would run its hooks, and the island, again."""

    def __init__(self, island: _Island) -> None:
        super().__init__()
        self.module = island.module
        self.island = island

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.island.plain(*args, **kwargs)


def _modules_and_names(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Every module by its first name, in model order; and every name with the first of its module."""
    modules: dict[str, nn.Module] = {}
    names: dict[str, str] = {}
    first_of: dict[int, str] = {}
    for full, module in model.named_modules(remove_duplicate=False):
        name, inner = plain_name(full), unwrapped(module)
        first = first_of.setdefault(id(inner), name)
        names.setdefault(name, first)
        modules.setdefault(first, inner)
    return modules, names


def _has_forward(module: nn.Module) -> bool:
    """Whether it is called by a forward that can be replaced: a ``ModuleList`` is not, nor a scripted module."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _type_of_outputs(inputs: list[torch.dtype], own: list[torch.dtype], autocasts: bool) -> torch.dtype | None:
    """What fp32 outputs are cast to; None to leave them.

    If no input is floating point, as for an embedding, the type of the module's own tensors counts.
    """
    halves = [dtype for dtype in inputs if dtype in _HALF] if inputs else own
    if not halves or (autocasts and torch.float32 in inputs):
        return None
    return torch.bfloat16 if torch.bfloat16 in halves else torch.float16


def _cast(tree: Any, function: Callable[[Tensor], Tensor | None]) -> Any:
    """A copy of ``tree`` in which ``function`` replaces floating-point tensors; None leaves a tensor as it is.

    A tensor that occurs twice is one tensor in the copy too: attention checks whether query, key and value are.
    """
    known: list[tuple[Tensor, Tensor | None]] = []

    def once(leaf: Any) -> Tensor | None:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return None
        for old, new in known:
            if old is leaf:
                return new
        known.append((leaf, function(leaf)))
        return known[-1][1]

    return mapped(tree, once)
