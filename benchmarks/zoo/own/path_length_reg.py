import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="path_length_reg", title="Path-length regularisation takes the root of the squared Jacobian norm; for a latent whose generator units are all off the Jacobian is 0 (double backward)",
    source="NVlabs/stylegan2-ada-pytorch#133; rosinality/stylegan2-pytorch#210", fidelity="adapted",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", op=["sqrt"],
    module="g.ppl", line="length = torch.sqrt(jac.pow(2).sum(-1))",
    fix="Add eps under the root.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class PathLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, img, w, noise):
        jac, = torch.autograd.grad((img * noise).sum(), w, create_graph=True)
        length = torch.sqrt(jac.pow(2).sum(-1))
        self.mean.lerp_(length.detach().mean(), 0.1)
        return (length - self.mean.detach().clone()).pow(2).mean()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.style, self.synth, self.ppl = nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)), PathLength()

    def forward(self, z):
        w = self.style(z)
        return self.synth(w), w


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = Generator(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_fn(model, batch):
    z, noise = batch
    img, w = model.g(z)
    return F.softplus(-model.d(img)).mean() + 0.1 * model.g.ppl(img, w, noise)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(6, 5, generator=g), torch.randn(6, 6, generator=g)) for _ in range(5)]
    m = GAN()
    with torch.no_grad():
        m.g.style.weight.abs_(); m.g.synth[0].weight.abs_()
        m.g.synth[0].bias.abs_().add_(0.1)
    batches[3][0][2] = -40.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
