"""Trains the network with torch, and dumps its calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from one_network import RATE, STEPS, asked, begin, end, images
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.fc1 = nn.Linear(48, 8)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x))
        x = x.reshape(x.shape[0], -1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=-1)


run = asked()
torch.set_num_threads(1)
net = Net()
net.load_state_dict({name: torch.from_numpy(value) for name, value in run.weights.items()})
optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
begins = begin(run, net)
for step in range(STEPS):
    begins(step)
    optimizer.zero_grad()
    (net(torch.from_numpy(images(step))) ** 2).mean().backward()
    optimizer.step()
end(run)
