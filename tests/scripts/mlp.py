"""The quickstart: a multilayer perceptron, a training loop and a test loop."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(30)
torch.set_num_threads(1)


class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.stack = nn.Sequential(
            nn.Linear(8 * 8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x):
        return self.stack(self.flatten(x))


def train(dataloader, model, loss_fn, optimizer):
    size = len(dataloader.dataset)
    model.train()
    for batch, (X, y) in enumerate(dataloader):
        pred = model(X)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch % 5 == 0:
            print(f"loss: {loss.item():>7f}  [{(batch + 1) * len(X):>5d}/{size:>5d}]")


def test(dataloader, model, loss_fn):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for X, y in dataloader:
            pred = model(X)
            test_loss += loss_fn(pred, y).item()
            correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    print(f"Accuracy: {100 * correct / len(dataloader.dataset):>0.1f}%, Avg loss: {test_loss / len(dataloader):>8f}\n")


prototypes = torch.rand(10, 8, 8)
labels = torch.randint(0, 10, (640,))
images = prototypes[labels] + 0.3 * torch.randn(640, 8, 8)
train_dataloader = DataLoader(TensorDataset(images[:512], labels[:512]), batch_size=32, shuffle=True)
test_dataloader = DataLoader(TensorDataset(images[512:], labels[512:]), batch_size=32)
model = NeuralNetwork()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for t in range(3):
    print(f"Epoch {t + 1}\n-------------------------------")
    train(train_dataloader, model, nn.CrossEntropyLoss(), optimizer)
    test(test_dataloader, model, nn.CrossEntropyLoss())
torch.save(model.state_dict(), sys.argv[1])
print("Done!")
