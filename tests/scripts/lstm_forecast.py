"""Forecasts the next reading of a sensor with an LSTM. Each window is normalised by its own mean and deviation."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series, length):
        self.windows = series.unfold(1, length + 1, length).reshape(-1, length + 1)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        window = self.windows[index]
        window = (window - window.mean()) / window.std()  # guilty
        return window[:-1, None], window[-1:]


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)  # guilty: where it is used first
        return self.head(out[:, -1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    torch.manual_seed(5)
    torch.set_num_threads(1)
    time = torch.linspace(0, 60, 601)
    sensors = torch.stack([torch.sin(time * f) + 0.1 * torch.randn(601) for f in (0.5, 0.8, 1.3, 2.1)])
    sensors[2, 300:400] = 0.0  # unplugged for a while
    loader = DataLoader(Windows(sensors, 20), batch_size=16, shuffle=True)

    model = Forecaster(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.MSELoss()
    for epoch in range(3):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: {total / len(loader):.4f}")
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
