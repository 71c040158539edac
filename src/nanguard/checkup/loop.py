"""Rules about optimizers and training loops. Each function yields a node and what is wrong there."""

from __future__ import annotations

import ast

from nanguard.checkup.amp import CLIPS
from nanguard.checkup.script import Complaints, Loop, Script, is_given, owner_of
from nanguard.state.optimizer_traits import names_of_optimizers

FUSABLE = names_of_optimizers("can_be_fused")
EXCLUDES_FUSED = ("fused", "foreach", "differentiable")
ANOMALY = ("torch.autograd.set_detect_anomaly", "torch.autograd.detect_anomaly")


def not_fused(script: Script) -> Complaints:
    if not _is_for_cuda(script) or _has_sparse_gradients(script):
        return
    for call in script.calls(*FUSABLE):
        if not script.is_open(call) and not any(keyword.arg in EXCLUDES_FUSED for keyword in call.keywords):
            yield call, f"{script.called(call).rpartition('.')[2]} without fused=True"


def anomaly_left_on(script: Script) -> Complaints:
    for call in script.calls(*ANOMALY):
        mode = script.argument(call, "mode", 0) if script.called(call).endswith("set_detect_anomaly") else None
        is_used = isinstance(script.parents.get(call), (ast.Expr, ast.withitem))
        if (
            script.argument(call, "check_nan") is None
            and script.is_on(mode)
            and is_used
            and not script.is_conditional(call)
        ):
            yield call, "anomaly detection is always on"


def no_zero_grad(script: Script) -> Complaints:
    if _clears_gradients(script):
        return
    for made in script.calls(*_optimizers(script)):
        optimizer = script.variable(made)
        if not optimizer or _is_shared(script, optimizer):
            continue
        for step in [call for call in script.methods("step") if _steps(script, call, optimizer)][:1]:
            loops = _training_loops(script, step)
            if loops and loops[0] not in script.loops(made):
                yield step, f"{optimizer} steps in a loop, but nothing clears the gradients"


def loss_read_every_step(script: Script) -> Complaints:
    if not _is_for_cuda(script):
        return
    for backward in script.methods("backward"):
        loops, loss = script.loops(backward), script.owner(backward)
        reads = [c for c in script.methods("item") if script.owner(c) in (loss, f"{loss}.detach()")]
        for read in reads if loss.isidentifier() else ():
            same = bool(loops) and script.loops(read)[:1] == loops[:1]
            if same and not script.is_conditional(read, loops[0]):
                yield read, f"{loss}.item() is called at every step"
                return


def schedule_before_step(script: Script) -> Complaints:
    for made in script.all(ast.Call):
        name = script.called(made)
        if not name.startswith("torch.optim.lr_scheduler.") or name.endswith("ReduceLROnPlateau"):
            continue
        schedule, optimizer = script.variable(made), script.argument(made, "optimizer", 0)
        if not schedule or optimizer is None:
            continue
        ticks = [c for c in script.methods("step") if script.owner(c) == schedule and script.loops(c)]
        steps = [c for c in script.methods("step") if _steps(script, c, ast.unparse(optimizer))]
        if len(ticks) != 1 or not steps:
            continue
        tick, step = ticks[0], steps[0]
        together = script.function(tick) is script.function(step) and script.loops(step)[-1:] == script.loops(tick)[-1:]
        if together and tick.lineno < step.lineno and not script.is_conditional(tick):
            yield tick, f"{schedule}.step() comes before the first step of {ast.unparse(optimizer)}"


def clip_after_step(script: Script) -> Complaints:
    for clip in script.calls(*CLIPS):
        block = _block(script, clip)
        place = next(i for i, statement in enumerate(block) if clip in set(ast.walk(statement)))
        before = [_direct_call(statement) for statement in block[:place]]
        steps = [c for c in before if c is not None and script.method(c) == "step" and _is_optimizer(script, c)]
        backwards = [c for c in before if c is not None and script.method(c) == "backward"]
        others = [c for c in script.calls(*CLIPS) if c is not clip and script.function(c) is script.function(clip)]
        if steps and backwards and backwards[-1].lineno < steps[-1].lineno and not others:
            yield clip, f"gradients are clipped after {script.owner(steps[-1])}.step() has used them"


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _optimizers(script: Script) -> set[str]:
    """Full names of the torch optimizer classes that the program uses."""
    names = {script.called(call) for call in script.all(ast.Call)}
    own = {name for name in names if name.startswith("torch.optim.") and name.count(".") == 2}
    return {name for name in own if name.rpartition(".")[2][:1].isupper()}


def _is_optimizer(script: Script, step: ast.Call) -> bool:
    return script.called(script.behind(owner_of(step))) in _optimizers(script)


def _steps(script: Script, call: ast.Call, optimizer: str) -> bool:
    """``optimizer.step()``, or ``scaler.step(optimizer)``."""
    return script.owner(call) == optimizer or [ast.unparse(argument) for argument in call.args] == [optimizer]


def _training_loops(script: Script, step: ast.Call) -> list[Loop]:
    """The loops around a step if its backward pass is in the same innermost loop."""
    loops = script.loops(step)
    beside = [backward for backward in script.methods("backward") if script.loops(backward)[:1] == loops[:1]]
    return loops if beside else []


def _clears_gradients(script: Script) -> bool:
    """Whether the program may clear gradients, or computes them without storing them."""
    words = {node.attr for node in script.all(ast.Attribute)}
    words |= {node.name for node in script.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return any("zero_" in word or word == "grad" for word in words)


def _is_shared(script: Script, optimizer: str) -> bool:
    """Whether the optimizer is passed to anything but torch's schedulers and scalers, which may clear gradients."""
    for call in script.all(ast.Call):
        is_torchs = script.called(call).startswith("torch.optim.") or script.method(call) in ("step", "unscale_")
        if is_given(call, optimizer) and not is_torchs:
            return True
    return False


def _is_for_cuda(script: Script) -> bool:
    words = {node.value for node in script.all(ast.Constant) if isinstance(node.value, str)}
    return any(word == "cuda" or word.startswith("cuda:") for word in words) or bool(script.methods("cuda"))


def _has_sparse_gradients(script: Script) -> bool:
    return any(keyword.arg == "sparse" for keyword in script.all(ast.keyword))


def _block(script: Script, node: ast.AST) -> list[ast.stmt]:
    """The block of statements that contains the node."""
    while not isinstance(node, ast.stmt):
        node = script.parents[node]
    parent = script.parents[node]
    blocks = [getattr(parent, name, []) for name in ("body", "orelse", "finalbody")]
    return next((block for block in blocks if isinstance(block, list) and node in block), [node])


def _direct_call(statement: ast.stmt) -> ast.Call | None:
    return statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
