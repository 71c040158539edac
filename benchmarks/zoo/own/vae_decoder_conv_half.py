import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="vae_decoder_conv_half",
    title="Latent-diffusion decoder in fp16: an un-normalised residual path overflows inside a convolution",
    source="huggingface/diffusers#7188; cumulo-autumn/StreamDiffusion#114 (SDXL VAE is NaN in fp16)",
    fidelity="adapted",
    precision="fp16",
    phase="forward",
    cause="overflow_fp16",
    op=["conv2d", "convolution", "mkldnn_convolution", "_convolution"],
    module="decoder.up.1.conv2",
    module_alt=["decoder.up.1"],
    line="h = self.conv2(F.silu(h))",
    fix="Run the decoder in fp32 or bf16, or rescale the weights of the residual path.",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=4,
    symptom="loss",
    seeds=[0],
)


class ResUp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        h = self.conv1(F.silu(x))
        h = self.conv2(F.silu(h))
        return F.interpolate(x + h, scale_factor=2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ModuleList([ResUp(8), ResUp(8)])
        self.norm = nn.GroupNorm(2, 8)
        self.conv_out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, z):
        h = self.conv_in(z)
        for block in self.up:
            h = block(h)
        return self.conv_out(F.silu(self.norm(h)))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(3, 4, 4, stride=4)
        self.decoder = Decoder()


def loss_fn(model, batch):
    image, scale = batch
    z = model.encoder(image) * scale.view(-1, 1, 1, 1)
    return F.mse_loss(model.decoder(z).float(), image)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 3, 16, 16, generator=g), torch.ones(2)) for _ in range(6)]
    batches[4][1][1] = 20000.0  # latents that were divided by the scaling factor instead of multiplied
    m = AutoEncoder()
    with torch.no_grad():
        m.decoder.up[1].conv2.weight.mul_(25.0)
    return m, torch.optim.AdamW(m.parameters(), 1e-4), batches, loss_fn
