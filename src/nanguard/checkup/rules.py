"""The table of rules. A new rule is a function that yields nodes, and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanguard.checkup import amp, loop, losses
from nanguard.checkup.record import CheckupFinding, Severity
from nanguard.checkup.script import Complaints, Script, too_deep


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Something to look for, why it matters, and what to write instead."""

    name: str
    severity: Severity
    look: Callable[[Script], Complaints]
    why: str
    change: str


RULES = (
    Rule(
        name="fp16-without-scaler",
        severity="error",
        look=amp.fp16_without_scaler,
        why="gradients below 6e-8 become zero in fp16, so much of the model does not learn",
        change="scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); "
        "scaler.update(). Or use dtype=torch.bfloat16, which needs no scaler",
    ),
    Rule(
        name="clip-before-unscale",
        severity="error",
        look=amp.clip_before_unscale,
        why="the norm is still thousands of times too large, so every step is clipped to almost nothing",
        change="call scaler.unscale_(optimizer) right before clipping",
    ),
    Rule(
        name="scaler-without-update",
        severity="error",
        look=amp.scaler_without_update,
        why="the scale never changes, and torch refuses the next step",
        change="call scaler.update() after scaler.step(optimizer)",
    ),
    Rule(
        name="scaler-that-does-not-scale",
        severity="error",
        look=amp.scaler_that_does_not_scale,
        why="step divides the gradients by a scale, but they were never multiplied by it",
        change="call scaler.scale(loss).backward() instead of loss.backward()",
    ),
    Rule(
        name="half-with-adam",
        severity="error",
        look=amp.half_with_adam,
        why="squared gradients and eps are both zero in fp16, so the update is divided by zero",
        change="keep weights in fp32 and use torch.autocast, or set eps=1e-4",
    ),
    Rule(
        name="bce-in-autocast",
        severity="error",
        look=amp.bce_in_autocast,
        why="torch refuses it: probabilities in fp16 round to 0 and 1, and their logarithm is infinite",
        change="use binary_cross_entropy_with_logits (BCEWithLogitsLoss) without the sigmoid",
    ),
    Rule(
        name="no-zero-grad",
        severity="error",
        look=loop.no_zero_grad,
        why="every step uses the sum of all gradients since the first",
        change="call optimizer.zero_grad() after each step",
    ),
    Rule(
        name="clip-after-step",
        severity="error",
        look=loop.clip_after_step,
        why="the clipping has no effect on this step",
        change="clip between backward() and step()",
    ),
    Rule(
        name="cross-entropy-of-probabilities",
        severity="error",
        look=losses.cross_entropy_of_probabilities,
        why="it applies softmax again, so the loss cannot get near zero and gradients are small",
        change="pass the scores from before the softmax",
    ),
    Rule(
        name="nll-of-no-logarithms",
        severity="error",
        look=losses.nll_of_no_logarithms,
        why="it expects log-probabilities; with other values the loss has no lower bound or is wrong",
        change="use F.cross_entropy on the raw scores, or log_softmax before it",
    ),
    Rule(
        name="eps-of-zero",
        severity="error",
        look=losses.eps_of_zero,
        why="if the variance, norm or squared gradient is zero, the result is 0/0",
        change="leave eps at its default",
    ),
    Rule(
        name="log-of-softmax",
        severity="warning",
        look=losses.log_of_softmax,
        why="small probabilities underflow to zero, and their logarithm is -Inf",
        change="use log_softmax (or logsigmoid), which does both in one op",
    ),
    Rule(
        name="schedule-before-step",
        severity="warning",
        look=loop.schedule_before_step,
        why="the first learning rate of the schedule is never used",
        change="call scheduler.step() after optimizer.step()",
    ),
    Rule(
        name="anomaly-left-on",
        severity="warning",
        look=loop.anomaly_left_on,
        why="every step is several times slower, and it does not detect Inf",
        change="turn it on only to search for a fault; nanguard replays the bad step instead",
    ),
    Rule(
        name="scaler-with-bf16",
        severity="advice",
        look=amp.scaler_with_bf16,
        why="bf16 has the range of fp32, so a scaler is not needed and only adds work",
        change="remove the GradScaler",
    ),
    Rule(
        name="backward-in-autocast",
        severity="advice",
        look=amp.backward_in_autocast,
        why="backward ops use the format of their forward ops; torch advises against autocast around them",
        change="end the with block before backward()",
    ),
    Rule(
        name="fp16-on-cpu",
        severity="advice",
        look=amp.fp16_on_cpu,
        why="most CPUs cannot multiply fp16 matrices in hardware, so torch is slower than in fp32",
        change="use dtype=torch.bfloat16",
    ),
    Rule(
        name="not-fused",
        severity="advice",
        look=loop.not_fused,
        why="a fused optimizer needs fewer kernels, and under the guard it needs no sync",
        change="set fused=True",
    ),
    Rule(
        name="loss-read-every-step",
        severity="advice",
        look=loop.loss_read_every_step,
        why="the host waits for the GPU before it can queue the next step",
        change="sum loss.detach() on the device and read it every few dozen steps",
    ),
    Rule(
        name="old-amp",
        severity="advice",
        look=amp.old_amp,
        why="torch has warned about it since 2.4",
        change="use torch.autocast('cuda') and torch.amp.GradScaler('cuda')",
    ),
)


def examine(script: Script) -> list[CheckupFinding]:
    """All findings, at most one of a rule per line, sorted by severity and line.

    Raises ``ScriptError`` if the program is nested too deeply.
    """
    found: dict[tuple[str, int], CheckupFinding] = {}
    for rule in RULES:
        try:
            for node, what in rule.look(script):
                place = script.place(node)
                finding = CheckupFinding(
                    rule=rule.name, severity=rule.severity, what=what, why=rule.why, change=rule.change, place=place
                )
                found.setdefault((rule.name, place.line), finding)
        except RecursionError:
            raise too_deep(script.path) from None
    order = {"error": 0, "warning": 1, "advice": 2}
    return [found[key] for key in sorted(found, key=lambda key: (order[found[key].severity], key[1]))]
