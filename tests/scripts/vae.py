"""A variational autoencoder on spectra that nobody scaled."""

import sys

import torch
from torch import nn, optim
from torch.nn import functional as F

torch.manual_seed(8)
torch.set_num_threads(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(40, 32)
        self.fc21 = nn.Linear(32, 4)
        self.fc22 = nn.Linear(32, 4)
        self.fc3 = nn.Linear(4, 32)
        self.fc4 = nn.Linear(32, 40)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)  # guilty
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return self.fc4(F.relu(self.fc3(z)))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    mse = F.mse_loss(recon_x, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return mse + kld


peaks = torch.randint(0, 40, (256, 1))
channels = torch.arange(40)
spectra = 20 * torch.exp(-((channels - peaks) ** 2) / 8.0) + torch.rand(256, 40)
spectra[200:] *= 150  # measured with another gain

model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    train_loss = 0
    for data in spectra.split(32):
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(spectra):.4f}")
torch.save(model.state_dict(), sys.argv[1])
