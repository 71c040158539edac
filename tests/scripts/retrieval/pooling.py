import torch
from torch import nn


class GeM(nn.Module):
    """Generalised mean with a learned exponent."""

    def __init__(self, p=3.0):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, x):
        return x.pow(self.p).mean(dim=(2, 3)).pow(1 / self.p)  # guilty
