"""A restricted Boltzmann machine, trained by contrastive divergence."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


class RBM(nn.Module):
    def __init__(self, n_vis=64, n_hid=32, k=1):
        super().__init__()
        self.W = nn.Parameter(torch.randn(n_hid, n_vis) * 1e-2)
        self.v_bias = nn.Parameter(torch.zeros(n_vis))
        self.h_bias = nn.Parameter(torch.zeros(n_hid))
        self.k = k

    def sample(self, p):
        return F.relu(torch.sign(p - torch.rand(p.size())))

    def v_to_h(self, v):
        return self.sample(torch.sigmoid(F.linear(v, self.W, self.h_bias)))

    def h_to_v(self, h):
        return self.sample(torch.sigmoid(F.linear(h, self.W.t(), self.v_bias)))

    def gibbs(self, v):
        for _ in range(self.k):
            v = self.h_to_v(self.v_to_h(v))
        return v

    def free_energy(self, v):
        wx_b = F.linear(v, self.W, self.h_bias)
        hidden = torch.log(1 + torch.exp(wx_b)).sum(1)  # guilty
        return (-hidden - v.mv(self.v_bias)).mean()


torch.manual_seed(4)
torch.set_num_threads(1)
data = 255.0 * (torch.rand(320, 64) < torch.rand(64))  # as the image files have it
rbm = RBM()
train_op = optim.SGD(rbm.parameters(), lr=0.01, momentum=0.9)

for epoch in range(6):
    losses = []
    for batch in data.split(32):
        v1 = rbm.gibbs(batch).detach()
        loss = rbm.free_energy(batch) - rbm.free_energy(v1)
        losses.append(loss.item())
        train_op.zero_grad()
        loss.backward()
        train_op.step()
    print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")

torch.save(rbm.state_dict(), sys.argv[1])
