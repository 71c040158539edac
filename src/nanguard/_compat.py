"""The private names of torch that nanguard depends on, in one place: a new torch release is this file's work.

Checked on torch 2.11 (CUDA) and 2.13 (CPU); written for 2.6 and newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.fx._symbolic_trace as _symbolic_trace
import torch.optim.optimizer as _torch_optimizer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether ``step()`` reads ``optimizer.found_inf`` on the device and then leaves everything bit-exact."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


_STOPPED = (
    "device-side assert",
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "hardware stack error",
)
"""Errors after which CUDA refuses everything until the process ends."""


def stops_device(error: BaseException | None) -> bool:
    """Whether the GPU has stopped: from this error on, nothing on it can be read or computed in this process."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return ("CUDA error" in text or "HIP error" in text) and any(words in text for words in _STOPPED)


def never_free(things: Iterable[object]) -> None:
    """They live until the process has ended, also while Python clears its modules.

    On a GPU that has stopped, freeing a tensor that another stream has read ends the process by an abort.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether the program has put hooks before this optimizer's step, or all of them: they may change gradients."""
    return bool(_PRE_HOOKS_OF_ALL or getattr(optimizer, "_optimizer_step_pre_hooks", None))


_PRE_HOOKS_OF_ALL: Any = getattr(_torch_optimizer, "_global_optimizer_pre_hooks", {})


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether a GradScaler has divided the gradients of this optimizer by the scale, since its last ``update()``."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is not None and state["stage"].name != "READY"


def scale_of(scaler: Any) -> Tensor | None:
    """The scale of a GradScaler, on its device; None before its first use. ``get_scale()`` would sync."""
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """``version`` of each, in less time."""
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:
        return list(map(version, tensors))


_version_of = attrgetter("_version")


def version(tensor: Tensor) -> int | None:
    """How often the tensor was written to in place; None if torch does not count (inference tensors)."""
    try:  # as quick as possible
        return tensor._version
    except RuntimeError:
        return None


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters live in pieces on several ranks (FSDP, tensor parallelism)."""
    if any(hasattr(p, "_local_tensor") or hasattr(p, "_flat_param") for p in module.parameters()):
        return True
    return any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules())


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    """Compiled functions run as written: hooks in them are called."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def ddp_casts_itself(wrapper: DistributedDataParallel) -> bool:
    """Whether DDP holds copies of the parameters in another dtype."""
    return getattr(wrapper, "mixed_precision", None) is not None


def reduce_anew(wrapper: DistributedDataParallel) -> None:
    """Makes DDP reduce gradients of the parameters' present dtype, with the communication hooks it has.

    Its reducer listens to gradient accumulators, and a parameter of a new dtype gets a new one: without this,
    ranks go their own ways, and nothing says so.
    """
    ddp: Any = wrapper
    torch_dist: Any = dist
    parameters, sparse = ddp._build_params_for_reducer()
    hook_name = ddp._get_ddp_logging_data().get("comm_hook")
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        torch_dist._register_comm_hook(ddp.reducer, state, hook)
    kinds = torch_dist.BuiltinCommHookType
    for kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS):
        if hook_name == str(kind):  # torch keeps no list of these
            ddp._register_builtin_comm_hook(kind)


def default_store() -> Any:
    """The store that the ranks of the default process group met through. Raises if there is none."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# ---- when torch records a program ------------------------------------------------------------------------------------


def recorders() -> list[tuple[Any, str]]:
    """Functions of torch that run a program and record it, with their owners. The ONNX exporter calls some of them."""
    export = sys.modules.get("torch.export")
    places = [(torch.jit, "trace"), (torch.jit, "trace_module"), (torch.jit, "_get_trace_graph"), (export, "export")]
    return [(owner, name) for owner, name in places if hasattr(owner, name)]


_KINDS: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_RECORDING_MODES = () if _KINDS is None else (_KINDS.FAKE, _KINDS.PROXY, _KINDS.FUNCTIONAL)
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch
_is_tracing, _num_dispatch_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack
_is_key_included: Any = torch._C._dispatch_tls_is_dispatch_key_included
_compiler: Any = torch.compiler

is_traced_by_compile: Any = torch.compiler.is_dynamo_compiling
"""Whether ``torch.compile`` traces the program now. What comes after an ``or`` behind this is not traced then."""


def is_recording() -> bool:
    """Whether torch is recording what the program does: what we do now would become part of the record.

    True inside ``torch.compile``, ``torch.jit.trace`` (also for ``SummaryWriter.add_graph`` and ONNX),
    ``torch.export``, ``make_fx``, ``torch.fx.symbolic_trace``, and with fake tensors. Does not sync.
    """
    if is_traced_by_compile():  # first: under torch.compile the rest is not even traced
        return True
    if _compiler._is_compiling_flag or _is_tracing() or _symbolic_trace._is_fx_tracing_flag:
        return True
    mode_of: Any = torch._C._get_dispatch_mode
    if _num_dispatch_modes() and any(mode_of(kind) is not None for kind in _RECORDING_MODES):
        return True
    mode_of = torch._ops._get_dispatch_mode_pre_dispatch  # torch sets a key while there is any
    return _is_key_included(_BEFORE_DISPATCH) and mode_of(_KINDS.PROXY) is not None


def is_exporting() -> bool:
    """As ``is_recording``, but not for ``torch.compile``: the record leaves this program."""
    if torch.compiler.is_compiling():
        # Not by torch.compiler.is_exporting(): up to torch 2.11 it is True in whatever torch.compile traces.
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    return is_recording()


# ---- what tracing needs ----------------------------------------------------------------------------------------------

MODULE_CALL: CodeType = nn.Module._call_impl.__code__
"""What runs while a module is being called."""


def module_call() -> Any:
    """What torch runs when any module is called: its hooks, and ``forward``."""
    return nn.Module._call_impl


def set_module_call(function: Any) -> None:
    nn.Module._call_impl = function  # type: ignore[method-assign]


def values_of(tensor: Tensor) -> Tensor:
    """The stored values of a sparse tensor; a dense tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor.detach()._values()
    return tensor if tensor.layout is torch.strided else tensor.detach().values()


def storage_of(tensor: Tensor) -> Any:
    """The memory of a tensor, of a sparse one that of its values; the tensor itself if it has none."""
    try:
        return values_of(tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def storage_key(tensor: Tensor) -> int:
    """The same for all views of a storage, as long as it lives."""
    storage = storage_of(tensor)
    return id(tensor) if storage is tensor else int(storage._cdata)


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """Does not keep the memory; as long as it is held, no other storage has the same ``storage_key``: its ``cdata``."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """``tensor.register_hook(hook)`` for one that is no leaf. It takes less time, unless there are hooks already."""
    node: Any = tensor.grad_fn
    if tensor._backward_hooks is not None or node is None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    tensor._backward_hooks = OrderedDict({-1: hook})  # torch counts its own from 0
    node._register_hook_dict(tensor)


def storage_size(tensor: Tensor) -> int:
    """In bytes."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


def is_part(tensor: Tensor) -> bool:
    """Whether it is a view, so that it keeps the memory of a larger tensor."""
    return tensor._is_view()


def current_node() -> Any:
    """The node of the autograd graph that is being evaluated, None outside a backward pass."""
    return torch._C._current_autograd_node()


def next_sequence_nr() -> int | None:
    """The number that the next node of the autograd graph will get in this thread; None where torch does not say."""
    function = getattr(torch.autograd, "_get_sequence_nr", None)
    return None if function is None else int(function())


def sequence_nr(node: Any) -> int | None:
    """The number of a node, by which it knows when it was made."""
    function = getattr(node, "_sequence_nr", None)
    return None if function is None else int(function())


def is_view(op: Any) -> bool:
    """Whether an op gives a view of what it takes."""
    return bool(getattr(op, "is_view", False)) or op.namespace == "prim"


def schema_arguments(op: Any) -> Any:
    """The declared arguments of an op, each with ``name``, ``type`` and ``alias_info``."""
    return op._schema.arguments


def makes_zeros_without_memory(op: Any) -> bool:
    """Whether the result of an op has a shape and no memory. Autograd uses such zeros."""
    return bool(op is torch.ops.aten._efficientzerotensor.default)


def is_collective(op: Any) -> bool:
    """Whether an op talks to other ranks."""
    return op.namespace in ("c10d", "_c10d_functional", "c10d_functional")


def runs_backward(code: CodeType) -> bool:
    """Whether this is the function of torch that calls the autograd engine."""
    return code.co_name == "_engine_run_backward"


def saved_by(node: Any, name: str) -> Any:
    """What a node of the autograd graph has saved; None if there is no such thing or it has been freed."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


# ---- modules and schedulers ------------------------------------------------------------------------------------------

COMPILED = "_orig_mod"
"""The name that ``torch.compile`` gives to the module that it wraps."""

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Attributes of a module that hold its forward hooks."""

LAST_RATES = "_last_lr"
"""The attribute of a scheduler that holds the learning rates it has set last."""


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper of ``torch.compile``; None if this is no such wrapper."""
    children = children_of(module)
    if COMPILED not in children:  # those of a scripted module have no get()
        return None
    return children[COMPILED]


def is_compiled(module: nn.Module) -> bool:
    """Whether this is a wrapper of ``torch.compile``, or a module on which ``compile()`` was called."""
    return compiled_module(module) is not None or getattr(module, "_compiled_call_impl", None) is not None


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that the module itself registers, not a copy. Empty before ``Module.__init__``."""
    registered: dict[str, nn.Parameter | None] = vars(module).get("_parameters", {})
    return registered


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """As ``parameters_of``."""
    registered: dict[str, Tensor | None] = vars(module).get("_buffers", {})
    return registered


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """As ``parameters_of``."""
    registered: dict[str, nn.Module | None] = vars(module).get("_modules", {})
    return registered


def is_divided(loss: Tensor) -> bool:
    """Whether the last op that made it is a quotient or a product."""
    return type(loss.grad_fn).__name__ in ("DivBackward0", "MulBackward0")


def divisor_of(loss: Tensor) -> float:
    """The number that a loss that ``is_divided`` was divided by; 1 if it was no plain number. Does not sync.

    Not inside a dispatch mode, which is given a plain number for the tensor of a number.
    """
    node = loss.grad_fn
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.device.type != "cpu" or other.numel() != 1 or not float(other):
        return 1.0
    return float(other) if type(node).__name__ == "DivBackward0" else round(1 / float(other), 6)


@contextlib.contextmanager
def without_post_accumulate_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hooks of ``register_post_accumulate_grad_hook`` do not run inside. Their handles stay valid."""
    found = [hooks for tensor in tensors if (hooks := tensor._post_accumulate_grad_hooks)]
    saved = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(found, saved, strict=True):
            since = dict(hooks)
            hooks.clear()
            hooks.update({**before, **since})


def schedulers_inside(scheduler: Any) -> Sequence[Any]:
    """Those that a ``SequentialLR`` or a ``ChainedScheduler`` calls."""
    inside: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return inside


def hooked_modules(model: nn.Module, *, backward: bool) -> list[str]:
    """Names of the modules, but for the model itself, that have a hook."""
    kinds = ("_backward_hooks", "_backward_pre_hooks") if backward else FORWARD_HOOKS
    return [n for n, module in model.named_modules() if n and any(getattr(module, kind, None) for kind in kinds)]
