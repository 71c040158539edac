"""What to do about a cause: in words, as one line of code where there is one, and which rungs can answer it."""

from __future__ import annotations

from dataclasses import dataclass

from nanguard.records.diagnosis import Cause


@dataclass(frozen=True, slots=True)
class Remedy:
    """``helps`` names what helps, the best first: fix_code, fix_data, fp32, skip, clip, lower_lr."""

    words: str
    helps: tuple[str, ...] = ("fix_code",)


REMEDIES: dict[Cause, Remedy] = {
    "unknown": Remedy("look at the operands above and at the line that made them", ("skip",)),
    "input_nonfinite": Remedy("clean the data, or mask such entries before they are used", ("skip", "fix_data")),
    "label_out_of_domain": Remedy(
        "clean the targets, or choose a loss whose domain they are in", ("fix_data", "skip", "fix_code")
    ),
    "overflow_fp16": Remedy(
        "scale down before this op, normalise, or run it in bf16 or fp32", ("fp32", "fix_code", "skip")
    ),
    "overflow_any_precision": Remedy(
        "bound the values: normalise between layers, clamp, or leave out extreme inputs",
        ("fix_code", "skip", "fix_data"),
    ),
    "gradient_explosion": Remedy(
        "lower the learning rate and clip the gradient norm", ("clip", "lower_lr", "fix_code")
    ),
    "exp_overflow": Remedy("clamp the argument, or compute in log-space (logsumexp, softplus)", ("fix_code", "skip")),
    "log_of_zero": Remedy(
        "clamp the argument away from 0, or use the log-space form (log_softmax, logsigmoid)", ("fix_code", "skip")
    ),
    "log_of_negative": Remedy(
        "keep the argument positive: clamp it, or take the log of its absolute value", ("fix_code", "skip")
    ),
    "div_by_zero": Remedy("add an eps to the denominator, or clamp it away from 0", ("fix_code", "skip")),
    "zero_over_zero": Remedy(
        "clamp the denominator: x / y.clamp(min=eps), or leave such entries out", ("fix_code", "skip")
    ),
    "division_by_near_zero_norm": Remedy(
        "torch.nn.functional.normalize(x, eps=1e-6), or leave out vectors of zeros", ("fix_code", "skip")
    ),
    "sqrt_of_negative": Remedy("clamp the argument at 0 before the root", ("fix_code", "skip")),
    "sqrt_grad_at_zero": Remedy("put an eps under the root: torch.sqrt(x + 1e-12)", ("fix_code", "skip")),
    "pow_negative_base": Remedy(
        "keep the base non-negative: clamp it or take its absolute value", ("fix_code", "skip")
    ),
    "acos_asin_domain": Remedy(
        "clamp the argument into the open domain: x.clamp(-1 + 1e-6, 1 - 1e-6)", ("fix_code", "skip")
    ),
    "std_of_single_element": Remedy(
        "use unbiased=False, or drop a last batch of one (drop_last=True)", ("fix_code", "skip", "fix_data")
    ),
    "masked_softmax_all_neg_inf": Remedy(
        "leave every row at least one entry, or mask with a large negative finite number",
        ("fix_code", "skip", "fix_data"),
    ),
    "inf_minus_inf": Remedy("mask with a large negative finite number instead of -inf", ("fix_code", "skip")),
    "zero_times_inf": Remedy(
        "make the unused branch safe before it is computed: exp(x.clamp(max=0)) inside torch.where",
        ("fix_code", "skip"),
    ),
    "eps_underflow": Remedy(
        "use an eps that this format can hold (1e-4 in fp16), or compute this in fp32", ("fp32", "fix_code", "skip")
    ),
    "ctc_inf": Remedy(
        "leave out targets longer than their inputs, or pass zero_infinity=True", ("skip", "fix_data", "fix_code")
    ),
    "uninitialized_memory": Remedy("initialise it: torch.empty leaves whatever was in memory", ("fix_code",)),
    "parameter_corrupted": Remedy(
        "find what wrote to this parameter (initialisation, checkpoint, weight surgery)", ("fix_code",)
    ),
    "buffer_corrupted": Remedy("do not update the buffer from such a batch, and reset it", ("fix_code", "fix_data")),
    "optimizer_state_corrupted": Remedy(
        "find what wrote to the optimizer's state; restore it from a good checkpoint", ("fix_code", "fix_data")
    ),
    "optimizer_eps_underflow": Remedy(
        "use an eps that the parameters' format can hold (1e-4 in fp16), or fp32 parameters", ("fp32", "fix_code")
    ),
    "loss_scale_overflow": Remedy("lower the loss scale, or let it adapt by itself", ("skip", "fix_code")),
    "attention_logit_growth": Remedy(
        "scale or normalise queries and keys (QK-norm), or lower their learning rate", ("lower_lr", "fp32", "fix_code")
    ),
    "nondeterministic_hardware_fault": Remedy(
        "nothing in the program: skip the step; if it happens again, take the device out", ("skip",)
    ),
    "custom_backward_bug": Remedy("correct the formula in the hand-written backward", ("fix_code", "skip")),
}
