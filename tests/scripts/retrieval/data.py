import torch


def images(count):
    labels = torch.arange(count) % 3
    return torch.randn(count, 3, 8, 8) + labels[:, None, None, None], labels
