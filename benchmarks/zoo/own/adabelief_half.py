import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="adabelief_half",
    title="AdaBelief on half parameters: eps 1e-16 is 0 in fp16, an embedding row without gradient has 0 / sqrt(0)",
    source="lucidrains/lightweight-gan#18; google-deepmind/optax#1754; juntang-zhuang/Adabelief-Optimizer#40",
    fidelity="direct",
    precision="fp16", phase="optimizer", cause="optimizer_eps_underflow", cause_alt=["eps_underflow", "zero_over_zero"],
    op=["div", "div_", "addcdiv", "addcdiv_"], module="tok", line='p.add_(m / denom, alpha=-group["lr"])',
    fix="Keep moments and eps in fp32 (master weights), or use an eps that half can represent.",
    recoverable_by=["fp32", "fix_code"], step=0, symptom="weight",
)


class AdaBelief(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-16):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["m"], st["s"] = torch.zeros_like(p), torch.zeros_like(p)
                m, s = st["m"], st["s"]
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                diff = p.grad - m
                s.mul_(b2).addcmul_(diff, diff, value=1 - b2)
                denom = torch.sqrt(s + group["eps"])
                p.add_(m / denom, alpha=-group["lr"])


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(40, 12), nn.Linear(12, 40)

    def forward(self, ids):
        return self.head(self.tok(ids).float())


def loss_fn(model, batch):
    out = model(batch[:, :-1])
    return F.cross_entropy(out.reshape(-1, 40).float(), batch[:, 1:].reshape(-1)) * 64.0


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, 32, (6, 9), generator=g) for _ in range(4)]
    m = LM()
    m.tok.half()
    return m, AdaBelief(m.parameters(), lr=1e-4), batches, loss_fn
