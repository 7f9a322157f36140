import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def load_data(partition_id, num_partitions):
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.argsort(y, stable=True)  # few digits per node
    mine = order[torch.arange(len(y)) * num_partitions // len(y) == partition_id]
    train, test = mine[::2], mine[1::2]
    trainloader = DataLoader(TensorDataset(x[train], y[train]), batch_size=32, shuffle=True)
    return trainloader, DataLoader(TensorDataset(x[test], y[test]), batch_size=32)


def train(net, trainloader, epochs, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader):
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in testloader)
    return hits / len(testloader.dataset)
