"""Trains the network with MindSpore in PyNative mode, and dumps its calls."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from one_network import RATE, STEPS, asked, begin, end, images

ms: Any = import_module("mindspore")
nn, ops = ms.nn, ms.ops
ms.set_context(mode=ms.PYNATIVE_MODE)


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, pad_mode="pad", padding=1, has_bias=True)
        self.fc1 = nn.Dense(48, 8)
        self.fc2 = nn.Dense(8, 4)

    def construct(self, x: Any) -> Any:
        x = ops.relu(self.conv(x))
        x = x.reshape(x.shape[0], -1)
        x = ops.relu(self.fc1(x))
        return ops.log_softmax(self.fc2(x), -1)


run = asked()
net = Net()
ms.load_param_into_net(
    net, {name: ms.Parameter(ms.Tensor(value)) for name, value in run.weights.items()}
)
optimizer = nn.SGD(net.trainable_params(), RATE)
grad = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
begins = begin(run, net)
for step in range(STEPS):
    begins(step)
    _, gradients = grad(ms.Tensor(images(step)))
    optimizer(gradients)
end(run)
