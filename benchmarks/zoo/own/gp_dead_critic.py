import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="gp_dead_critic",
    title=(
        "WGAN gradient penalty: the critic is dead for one interpolate, its input gradient is 0 and sqrt(0) "
        "has slope inf"
    ),
    source="pytorch/pytorch#2534; keras-team/keras-io#910; tdeboissiere/DeepLearningImplementations#68",
    fidelity="direct",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", op=["sqrt"],
    module="", line="slope = gx.pow(2).flatten(1).sum(1).sqrt()",
    fix="Add 1e-12 under the root.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.h1 = nn.Linear(6, 16)
        self.h2 = nn.Linear(16, 1)

    def forward(self, x):
        return self.h2(F.relu(self.h1(x)))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = Critic()
        self.gen = nn.Linear(3, 6)


def gradient_penalty(critic, real, fake, mix):
    x = (mix * real + (1 - mix) * fake).requires_grad_()
    gx, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    slope = gx.pow(2).flatten(1).sum(1).sqrt()
    return (slope - 1).pow(2).mean()


def loss_fn(model, batch):
    real, z, mix = batch
    fake = torch.sigmoid(model.gen(z)).detach()
    gap = model.critic(fake).mean() - model.critic(real).mean()
    return gap + 10 * gradient_penalty(model.critic, real, fake, mix)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(5):
        batches.append((torch.rand(8, 6, generator=g), torch.randn(8, 3, generator=g), torch.rand(8, 1, generator=g)))
    batches[3][0][4] = -60.0  # an inverted image
    batches[3][2][4] = 1.0
    model = GAN()
    with torch.no_grad():
        model.critic.h1.weight.abs_()
        model.critic.h1.bias.abs_()
    return model, torch.optim.Adam(model.critic.parameters(), 1e-4, betas=(0.0, 0.9)), batches, loss_fn
