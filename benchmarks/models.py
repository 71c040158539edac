"""What the benchmarks train, and the ways they train it.

Workloads: a GPT of GPT-2 small's shape, and one so small that only launches cost time. They stand at the ends
of what a guarded step can cost. `large` keeps the GPU busy: extra kernels and passes over the gradients show,
host work hides. `tiny` waits for the host all the time: every microsecond of Python shows.

Variants: the plain training step, the guarded ones, and the checks people write today.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Token ids and, as targets, the same ids moved on by one; both of shape (batch, context)."""

MAX_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT; the defaults are GPT-2 small with its vocabulary rounded up to a multiple of 64."""

    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    context: int = 1024


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(y.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """The position-wise feed-forward layer, four times as wide as the model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(F.gelu(self.expand(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer with a tied head; its forward returns the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialize(config)

    def _initialize(self, config: GPTConfig) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):  # these write to the residual stream, twice a layer
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_layers))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch, in the shape `guard.step` calls it."""
    tokens, targets = batch
    loss: Tensor = model(tokens, targets)
    return loss


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batches it trains on."""

    name: str
    config: GPTConfig
    batch_size: int

    def build(self, device: torch.device, *, seed: int = 0) -> GPT:
        """A fresh model on `device`; the same seed gives the same weights."""
        torch.manual_seed(seed)
        with device:
            return GPT(self.config)

    def batches(self, device: torch.device, *, num: int, seed: int = 1) -> list[Batch]:
        """`num` different batches of random tokens, already on `device`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num, self.batch_size, self.config.context + 1)
        tokens = torch.randint(self.config.vocabulary, shape, generator=generator).to(device)
        return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]

    def __str__(self) -> str:
        c = self.config
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in GPT(c).parameters())
        size = f"{num_parameters / 1e6:.0f}M" if num_parameters >= 1e6 else f"{num_parameters / 1e3:.0f}k"
        shape = f"{c.num_layers} layers of width {c.width}, batch {self.batch_size}x{c.context}"
        return f"GPT, {size} parameters, {shape}"


_TINY = GPTConfig(num_layers=4, num_heads=4, width=64, vocabulary=512, context=32)
_SMOKE = GPTConfig(num_layers=1, num_heads=2, width=16, vocabulary=64, context=8)

WORKLOADS = {
    "large": Workload(name="large", config=GPTConfig(), batch_size=8),
    "tiny": Workload(name="tiny", config=_TINY, batch_size=4),
}
SMOKE_WORKLOADS = {
    "large": Workload(name="large", config=_TINY, batch_size=4),
    "tiny": Workload(name="tiny", config=_SMOKE, batch_size=2),
}


# ── Ways to train: one way each to run a step, all on the same seed, data and optimizer ──────────────────


@dataclass(frozen=True, kw_only=True)
class Rig:
    """What all variants that are compared with each other share."""

    workload: Workload
    mode: str
    device: torch.device
    batches: list[Batch]


class Plain:
    """the baseline: autocast forward, backward, `clip_grad_norm_`, fused step, `zero_grad`"""

    slow: ClassVar[bool] = False  # slow ones are timed in eager mode only, and less often

    def __init__(self, rig: Rig) -> None:
        module = rig.workload.build(rig.device)
        self.device_type = rig.device.type
        self.parameters = list(module.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)
        self.model: nn.Module = module
        if rig.mode == "compile":
            self.model = cast(nn.Module, torch.compile(module, dynamic=False))
        self.batches = itertools.cycle(rig.batches)

    @classmethod
    def missing(cls) -> str | None:
        """Why this variant cannot run here, or None if it can."""
        return None

    def step(self, batch: Batch) -> Tensor:
        """One training step; returns the loss on the device."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            return loss_fn(self.model, batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.clip()
        self.optimizer.step()

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def finish(self) -> None:
        """Completes host work that the last steps left undone; part of the measured time."""

    def run(self, num_steps: int) -> Tensor:
        """`num_steps` steps on the next batches, then whatever they left undone; returns the last loss."""
        for _ in range(num_steps):
            loss = self.step(next(self.batches))
        self.finish()
        return loss


class PlainAgain(Plain):
    """the baseline once more, with a copy of its own: the noise floor"""


class Guarded(Plain):
    """`guard.step(loss_fn, batch)`, clipped per parameter group"""

    options: ClassVar[dict[str, Any]] = {"clip": "group"}

    def __init__(self, rig: Rig) -> None:
        import nanguard

        super().__init__(rig)
        self.guard: Any = nanguard.Guard(
            self.model, self.optimizer, precision="bf16", max_norm=MAX_NORM, **self.options
        )

    @classmethod
    def missing(cls) -> str | None:
        try:
            from nanguard import Guard  # noqa: F401
        except ImportError as error:
            return f"{error}; set PYTHONPATH=src"
        return None

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.guard.step(loss_fn, batch)
        return loss

    def finish(self) -> None:
        self.guard.settle()


class GuardedGlobal(Guarded):
    """`guard.step`, clipped by one norm over all parameters"""

    options: ClassVar[dict[str, Any]] = {"clip": "global"}


class GuardedOwnLoop(Guarded):
    """`guard.autocast`, `guard.backward`, `guard.update` in a loop of the user's own"""

    def step(self, batch: Batch) -> Tensor:
        with self.guard.autocast():
            loss = loss_fn(self.model, batch)
        self.guard.backward(loss)
        self.guard.update()
        return loss


class GuardedEager(Guarded):
    """`guard.step` with `sync="eager"`: the host looks at every step before the next"""

    options: ClassVar[dict[str, Any]] = {"clip": "group", "sync": "eager"}


class IsfiniteLoss(Plain):
    """plain, with `if torch.isfinite(loss)` around backward and step"""

    def step(self, batch: Batch) -> Tensor:
        loss = self.forward(batch)
        if torch.isfinite(loss):
            self.backward(loss)
            self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class IsfiniteNorm(Plain):
    """plain, with `if torch.isfinite(norm)` around the step"""

    def update(self) -> None:
        if torch.isfinite(self.clip()):
            self.optimizer.step()


class Scaler(Plain):
    """plain, with `torch.amp.GradScaler` and `unscale_` before clipping"""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.scaler = torch.amp.GradScaler(self.device_type)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class PerParameterIsfinite(Plain):
    """plain, with each non-finite gradient replaced by zeros; no sync"""

    slow = True

    def update(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                finite = torch.isfinite(parameter.grad).all()
                parameter.grad = torch.where(finite, parameter.grad, 0.0)
        super().update()


class ForwardHooks(Plain):
    """plain, with a forward hook on every module that gathers `isfinite(output)` in one flag; no sync"""

    slow = True

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.finite = torch.ones((), dtype=torch.bool, device=rig.device)
        for module in self.model.modules():
            module.register_forward_hook(self.check)

    def check(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.finite.logical_and_(torch.isfinite(output.detach()).all())


class DetectAnomaly(Plain):
    """plain, under `torch.autograd.detect_anomaly`"""

    slow = True

    def step(self, batch: Batch) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):  # detect_anomaly itself, without its warning a step
            return super().step(batch)


class HFDebug(Plain):
    """plain, with transformers' `DebugUnderflowOverflow`"""

    slow = True

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        debug_utils = importlib.import_module("transformers.debug_utils")
        self.debug = debug_utils.DebugUnderflowOverflow(self.model)

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("transformers") else "transformers is not installed"


VARIANTS: dict[str, type[Plain]] = {
    "plain": Plain,
    "plain_again": PlainAgain,
    "guard": Guarded,
    "guard_global": GuardedGlobal,
    "guard_own_loop": GuardedOwnLoop,
    "guard_eager": GuardedEager,
    "isfinite_loss": IsfiniteLoss,
    "isfinite_norm": IsfiniteNorm,
    "grad_scaler": Scaler,
    "per_param_isfinite": PerParameterIsfinite,
    "forward_hooks": ForwardHooks,
    "detect_anomaly": DetectAnomaly,
    "hf_debug": HFDebug,
}
