"""A small convolutional network with BatchNorm, and synthetic images of four classes."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIDE = 4, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, kernel_size=3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(6 * (SIDE // 2) ** 2, CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.bn(self.conv(x))))
        return self.fc(x.flatten(1))


def images(count, seed, classes=range(CLASSES)):
    """Noise with a bright quadrant; its place is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(list(classes)).repeat(count // len(list(classes)) + 1)[:count]
    x = 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    half = SIDE // 2
    for k, label in enumerate(labels.tolist()):
        row, column = divmod(label, 2)
        x[k, 0, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1.0
    return TensorDataset(x, labels)


def load_data(partition_id, batch_size):
    """The client's training and validation samples: it has only two of the classes."""
    mine = [partition_id % CLASSES, (partition_id + 1) % CLASSES]
    train_set, test_set = images(64, 10 + partition_id, mine), images(32, 50 + partition_id, mine)
    return DataLoader(train_set, batch_size=batch_size, shuffle=True), DataLoader(test_set, batch_size=batch_size)


def train(net, loader, epochs, lr):
    """Train in place; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader):
    """The mean loss and the accuracy."""
    net.eval()
    correct, total = 0, 0.0
    with torch.no_grad():
        for x, y in loader:
            out = net(x)
            total += F.cross_entropy(out, y).item()
            correct += (out.argmax(1) == y).sum().item()
    return total / len(loader), correct / len(loader.dataset)
