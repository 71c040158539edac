"""Rules about losses and small numbers. Each function yields a node and what is wrong there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nanguard.checkup.script import Complaints, Script, owner_of
from nanguard.state.optimizer_traits import names_of_optimizers

SOFTMAX = ("torch.softmax", "F.softmax")
SIGMOID = ("torch.sigmoid", "F.sigmoid")
LOGS = ("torch.log", "torch.log2", "torch.log10")
PASSED_THROUGH = ("to", "cuda", "cpu", "float", "half", "bfloat16", "double", "train", "eval")

WITH_EPS = {
    **dict.fromkeys(names_of_optimizers("eps")),
    **{f"torch.nn.{name}": 1 for name in ("LayerNorm", "RMSNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d")},
    "torch.nn.GroupNorm": 2,
    "F.layer_norm": 4,
    "F.normalize": 3,
}
"""Classes and functions that divide by a root plus eps, and the position of the argument eps."""


def log_of_softmax(script: Script) -> Complaints:
    for call in script.all(ast.Call):
        if script.called(call) in LOGS and call.args:
            inside: ast.expr | None = call.args[0]
        elif script.method(call) in ("log", "log2", "log10") and isinstance(call.func, ast.Attribute):
            inside = call.func.value
        else:
            continue
        if _is_call_of(script, inside, SOFTMAX, "softmax"):
            yield call, "the logarithm of a softmax"
        elif _is_call_of(script, inside, SIGMOID, "sigmoid"):
            yield call, "the logarithm of a sigmoid"


def cross_entropy_of_probabilities(script: Script) -> Complaints:
    for call, given in _losses(script, "F.cross_entropy", "torch.nn.CrossEntropyLoss"):
        if _is_probabilities(script, given):
            yield call, "cross entropy gets probabilities"


def nll_of_no_logarithms(script: Script) -> Complaints:
    for call, given in _losses(script, "F.nll_loss", "torch.nn.NLLLoss"):
        if _is_probabilities(script, given):
            yield call, "the negative log likelihood gets probabilities"
        elif _last_layer(script, given) == "torch.nn.Linear":
            yield call, "the negative log likelihood gets raw scores"


def eps_of_zero(script: Script) -> Complaints:
    for call in script.calls(*WITH_EPS):
        name = script.called(call)
        value = script.constant(script.argument(call, "eps", WITH_EPS[name]))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0:
            yield call, f"{name.rpartition('.')[2]} with eps=0"


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _losses(script: Script, function: str, module: str) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Calls of a loss, by its function or an instance of its module, with the first argument."""
    for call in script.all(ast.Call):
        if script.called(call) == function or script.called(script.behind(call.func)) == module:
            given = script.argument(call, "input", 0)
            if given is not None:
                yield call, given


def _is_call_of(script: Script, node: ast.expr | None, functions: tuple[str, ...], method: str) -> bool:
    call = script.behind(node)
    return script.called(call) in functions or script.method(call) == method


def _is_probabilities(script: Script, node: ast.expr) -> bool:
    if _is_call_of(script, node, SOFTMAX, "softmax"):
        return True
    made = script.behind(node)
    by = script.called(script.behind(made.func)) if isinstance(made, ast.Call) else ""
    return "torch.nn.Softmax" in (by, _last_layer(script, node))


def _last_layer(script: Script, node: ast.expr) -> str:
    """The class of the last layer if ``node`` is the output of an ``nn.Sequential`` in the program."""
    made = script.behind(node)
    model = script.behind(made.func) if isinstance(made, ast.Call) else None
    while isinstance(model, ast.Call) and script.method(model) in PASSED_THROUGH:
        model = script.behind(owner_of(model))
    if not isinstance(model, ast.Call) or script.called(model) != "torch.nn.Sequential" or script.is_open(model):
        return ""
    return script.called(script.behind(model.args[-1])) if model.args else ""
