"""Rules about half precision. Each function yields a node of the program and what is wrong there."""

from __future__ import annotations

import ast

from nanguard.checkup.script import Complaints, Script, arguments_of, is_given, owner_of
from nanguard.state.optimizer_traits import names_of_optimizers

AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler")
OLD = ("torch.cuda.amp.autocast", "torch.cuda.amp.GradScaler", "torch.cpu.amp.autocast", "torch.cpu.amp.GradScaler")
CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
UNTRACKED = ("torch.no_grad", "torch.inference_mode")
FRAMEWORKS = (
    "accelerate",
    "apex",
    "composer",
    "deepspeed",
    "fairscale",
    "ignite",
    "lightning",
    "nanguard",
    "pytorch_lightning",
    "speechbrain",
    "transformers",
)
"""Frameworks that may scale the loss."""

FORMATS = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}
SMALLEST_FP16_EPS = 2**-25
"""Values up to 2**-25 round to zero in fp16."""

HALVED = names_of_optimizers("loses_eps_in_fp16")


def format_of(script: Script, call: ast.Call) -> str:
    """The format of an enabled autocast, ``fp16`` or ``bf16``. Empty if that is not certain."""
    enabled = script.argument(call, "enabled", 0 if script.called(call) in OLD else None)
    if script.is_open(call) or not script.is_on(enabled):
        return ""
    dtype = script.argument(call, "dtype", 1)
    if dtype is not None:
        return FORMATS.get(script.name(script.behind(dtype)), "")
    return {"cuda": "fp16", "cpu": "bf16"}.get(device_of(script, call), "")


def device_of(script: Script, call: ast.Call) -> str:
    """The device of an autocast, ``cuda`` or ``cpu``. Empty if that is not certain."""
    name = script.called(call)
    if name in OLD:
        return name.split(".")[1]
    device = script.constant(script.argument(call, "device_type", 0))
    return device.partition(":")[0] if isinstance(device, str) else ""


def scaler_with_bf16(script: Script) -> Complaints:
    formats = {format_of(script, call) for call in script.calls(*AUTOCASTS)}
    for call in script.calls(*SCALERS):
        is_on = not script.is_open(call) and script.is_on(script.argument(call, "enabled"))
        if is_on and formats == {"bf16"}:
            yield call, "a GradScaler is used with autocast to bf16"


def fp16_without_scaler(script: Script) -> Complaints:
    if _speaks_of(script, "scale") or script.imports_from(*FRAMEWORKS) or not script.methods("step"):
        return
    plain = [call for call in script.methods("backward") if not isinstance(owner_of(call), ast.BinOp)]
    for call in script.calls(*AUTOCASTS):
        trains = any(script.function(backward) is script.function(call) for backward in plain)
        watched = not any(script.called(context) in UNTRACKED for context in script.contexts(call))
        if format_of(script, call) == "fp16" and trains and watched and _is_context(script, call):
            yield call, "autocast to fp16 without a GradScaler"


def clip_before_unscale(script: Script) -> Complaints:
    for backward, scaler in _scaled_backwards(script):
        here = script.function(backward)
        steps = [call for call in script.methods("step") if script.owner(call) == scaler]
        clips = [call for call in script.calls(*CLIPS) if script.function(call) is here and _after(call, backward)]
        if not any(script.function(step) is here for step in steps) or not clips:
            continue
        unscales = [call for call in script.methods("unscale_") if script.owner(call) == scaler]
        beside = [call for call in unscales if script.function(call) is here and _after(call, backward)]
        if not unscales:
            yield clips[0], f"gradients are clipped while they are still multiplied by the loss scale of {scaler}"
        elif beside and _after(beside[0], clips[0]) and script.loops(beside[0]) == script.loops(clips[0]):
            yield clips[0], f"gradients are clipped before {scaler}.unscale_ in line {beside[0].lineno}"


def scaler_without_update(script: Script) -> Complaints:
    updated = {script.owner(call) for call in script.methods("update")}
    for scaler in {scaler for _, scaler in _scaled_backwards(script)} - updated:
        for step in [call for call in script.methods("step") if script.owner(call) == scaler][:1]:
            if not _is_handed_on(script, scaler):
                yield step, f"{scaler}.step is called, but {scaler}.update is not"


def scaler_that_does_not_scale(script: Script) -> Complaints:
    scaling = {script.owner(call) for call in script.methods("scale")}
    for call in script.calls(*SCALERS):
        scaler = script.variable(call)
        for step in [each for each in script.methods("step") if scaler and script.owner(each) == scaler][:1]:
            if scaler not in scaling and not _is_handed_on(script, scaler) and script.methods("backward"):
                yield step, f"{scaler}.step is called, but {scaler}.scale is not"


def backward_in_autocast(script: Script) -> Complaints:
    for backward in script.methods("backward"):
        if any(script.called(c) in AUTOCASTS and format_of(script, c) for c in script.contexts(backward)):
            yield backward, "the backward pass runs under autocast"


def bce_in_autocast(script: Script) -> Complaints:
    for call in script.all(ast.Call):
        made = script.called(script.behind(call.func))
        if script.called(call) != "F.binary_cross_entropy" and made != "torch.nn.BCELoss":
            continue
        inside = [c for c in script.contexts(call) if script.called(c) in AUTOCASTS]
        if inside and format_of(script, inside[0]) and device_of(script, inside[0]) == "cuda":
            yield call, "binary cross entropy of probabilities under CUDA autocast"


def fp16_on_cpu(script: Script) -> Complaints:
    for call in script.calls(*AUTOCASTS):
        if device_of(script, call) == "cpu" and format_of(script, call) == "fp16":
            yield call, "fp16 on a CPU"


def half_with_adam(script: Script) -> Complaints:
    halved = {script.owner(call) for call in script.methods("half", "to") if _makes_half(script, call)}
    widened = {script.owner(call) for call in script.methods("float", "double")}
    for call in script.calls(*HALVED):
        parameters = script.argument(call, "params", 0)
        eps = script.argument(call, "eps")
        value = 1e-8 if eps is None else script.constant(eps)
        if script.is_open(call) or not isinstance(parameters, ast.Call) or script.method(parameters) != "parameters":
            continue
        is_half = _is_made_half(script, owner_of(parameters)) or script.owner(parameters) in halved - widened
        if is_half and isinstance(value, float) and value <= SMALLEST_FP16_EPS:
            yield call, f"{script.called(call).rpartition('.')[2]} with eps={value:g} on weights in fp16"


def old_amp(script: Script) -> Complaints:
    for call in script.calls(*OLD)[:1]:
        yield call, f"{script.called(call)} is deprecated"


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _after(call: ast.Call, other: ast.Call) -> bool:
    return (call.lineno, call.col_offset) > (other.lineno, other.col_offset)


def _scaled_backwards(script: Script) -> list[tuple[ast.Call, str]]:
    """Each ``scaler.scale(loss).backward()``, with the name of the scaler."""
    calls = [(call, owner_of(call)) for call in script.methods("backward")]
    return [(call, script.owner(by)) for call, by in calls if isinstance(by, ast.Call) and script.method(by) == "scale"]


def _speaks_of(script: Script, word: str) -> bool:
    """Whether any name in the program contains this word."""
    names = [node.id for node in script.all(ast.Name)] + [node.attr for node in script.all(ast.Attribute)]
    names += [node.arg for node in script.all(ast.arg)] + [node.arg or "" for node in script.all(ast.keyword)]
    names += [alias.name for node in script.all(ast.ImportFrom) for alias in node.names]
    return any(word in name.lower() for name in names)


def _is_handed_on(script: Script, variable: str) -> bool:
    """Whether the variable is passed to another function, which may do anything with it."""
    return any(is_given(call, variable) for call in script.all(ast.Call))


def _is_context(script: Script, call: ast.Call) -> bool:
    return isinstance(script.parents.get(call), ast.withitem)


def _makes_half(script: Script, call: ast.Call) -> bool:
    """Whether it is an unconditional ``x.half()`` or ``x.to(torch.float16)``."""
    if script.is_conditional(call):
        return False
    if script.method(call) == "half":
        return not call.args
    return any(FORMATS.get(script.name(each)) == "fp16" for each in arguments_of(call))


def _is_made_half(script: Script, model: ast.expr | None) -> bool:
    made = script.behind(model)
    return isinstance(made, ast.Call) and script.method(made) in ("half", "to") and _makes_half(script, made)
