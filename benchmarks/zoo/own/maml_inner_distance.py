import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="maml_inner_distance",
    title=(
        "The inner step of a meta-learner differentiates a root distance to the prototype; a one-shot class "
        "sits on it"
    ),
    source="dragen1860/MAML-Pytorch#17 (second-order inner loop); pytorch/pytorch#2421", fidelity="adapted",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="sqrt_grad_at_zero", op=["sqrt"],
    module="", line="spread = (emb - proto[y]).square().sum(-1).sqrt()",
    fix="Use the squared distance (or an eps under the root) in the inner loss.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 5))

    def functional(self, x, fast):
        h = torch.tanh(F.linear(x, fast["embed.0.weight"], fast["embed.0.bias"]))
        return F.linear(h, fast["embed.2.weight"], fast["embed.2.bias"])


def prototypes(emb, y, ways):
    hot = F.one_hot(y, ways).float()
    return hot.t() @ emb / hot.sum(0)[:, None]


def inner_loss(emb, y):
    proto = prototypes(emb, y, 3)
    spread = (emb - proto[y]).square().sum(-1).sqrt()
    return spread.mean()


def loss_fn(model, batch):
    fast = dict(model.named_parameters())
    loss = inner_loss(model.functional(batch["support"], fast), batch["support_y"])
    grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
    fast = {k: w - 0.1 * d for (k, w), d in zip(fast.items(), grads, strict=True)}
    query = model.functional(batch["query"], fast)
    proto = prototypes(model.functional(batch["support"], fast), batch["support_y"], 3)
    return F.cross_entropy(-torch.cdist(query, proto).square(), batch["query_y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        y = torch.tensor([0, 0, 1, 1, 2, 2]) if i != 3 else torch.tensor([0, 0, 1, 1, 1, 2])
        batches.append({
            "support": torch.randn(6, 4, generator=g), "support_y": y,
            "query": torch.randn(9, 4, generator=g), "query_y": torch.randint(0, 3, (9,), generator=g),
        })
    model = Learner()
    return model, torch.optim.SGD(model.parameters(), 0.01), batches, loss_fn
