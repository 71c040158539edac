import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="block_quant_moment", title="Own 8-bit Adam stores its moments divided by the block maximum; a block without any gradient has maximum 0 and 0 / 0",
    source="THUDM/slime#2256; pytorch/ao#927 (block-wise 8-bit state)", fidelity="adapted",
    precision="fp32", phase="optimizer", cause="zero_over_zero", cause_alt=["optimizer_state_corrupted"], op=["div", "div_"],
    module="branch.late", line="code = torch.round(blocks / top * 127)",
    fix="top.clamp(min=1e-12).",
    recoverable_by=["fix_code"], step=0, symptom="weight",
)


def pack(v, size=16):
    blocks = F.pad(v.flatten(), (0, -v.numel() % size)).view(-1, size)
    top = blocks.abs().amax(1, keepdim=True)
    code = torch.round(blocks / top * 127)
    return (code * top / 127).flatten()[: v.numel()].view_as(v)


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                m, v = st.get("m", torch.zeros_like(p)), st.get("v", torch.zeros_like(p))
                st["m"], st["v"] = pack(0.9 * m + 0.1 * p.grad), 0.99 * v + 0.01 * p.grad.square()
                p.sub_(group["lr"] * st["m"] / (st["v"].sqrt() + 1e-6))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x, gate):
        return torch.tanh(self.early(x)) + gate * self.late(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch, self.head = Branch(), nn.Linear(8, 3)

    def forward(self, x, gate):
        return self.head(self.branch(x, gate))


def loss_fn(model, batch):
    x, gate, y = batch
    return F.cross_entropy(model(x, gate), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 8, generator=g), float(i >= 2), torch.randint(0, 3, (8,), generator=g)) for i in range(5)]
    m = Net()
    return m, Adam8(m.parameters(), 1e-3), batches, loss_fn
