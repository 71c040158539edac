"""A small convolutional network with batch norm; images are scaled to their brightest pixel."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = x / x.amax(dim=(1, 2, 3), keepdim=True)  # guilty
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.mean(dim=(2, 3)))


def train(model, loader, optimizer, epoch):
    model.train()
    correct = 0
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        correct += (output.argmax(1) == target).sum().item()
    print(f"Train epoch {epoch}: accuracy {correct / len(loader.dataset):.3f}")


def main():
    torch.manual_seed(6)
    torch.set_num_threads(1)
    labels = torch.randint(0, 4, (160,))
    images = torch.rand(160, 1, 12, 12)
    for image, label in zip(images, labels, strict=True):
        image[0, 3 * label : 3 * label + 3] += 1
    images[93] = 0  # the file was cut off
    loader = DataLoader(TensorDataset(images, labels), batch_size=16)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(1, 4):
        train(model, loader, optimizer, epoch)
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
