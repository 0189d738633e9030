"""Runs troubleshooter's `api_dump_*`: dumps of small nets from a seed, and comparisons.

    run_troubleshooter.py MODULE dump JSON       one dump, as `Dump` in test_troubleshooter.py says
    run_troubleshooter.py MODULE words JSON      one dump of calls with words: the net Wordy
    run_troubleshooter.py MODULE compare JSON    a list of [origin, target, output, parameters]

The module is `troubleshooter`, or `rankdump`, which has the same calls. Runs under the Python of a
virtual environment that has it, with torch.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import importlib
import json
import random
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ts = importlib.import_module(sys.argv[1]) if __name__ == "__main__" else None
WIDTH = 8
STEPS = {
    "linear": lambda net, x, n: net.linears[n % len(net.linears)](x),
    "norm": lambda net, x, n: net.norm(x),
    "gelu": lambda net, x, n: net.gelu(x),
    "relu": lambda net, x, n: functional.relu(x),
    "sigmoid": lambda net, x, n: torch.sigmoid(x),
    "tanh": lambda net, x, n: x.tanh(),
    "double": lambda net, x, n: x + x,
    "scale": lambda net, x, n: x * 0.5,
    "matmul": lambda net, x, n: torch.matmul(x, net.linears[0].weight),
    "turn": lambda net, x, n: x.t().t(),
    "halves": lambda net, x, n: torch.cat(torch.chunk(x, 2, dim=1), dim=1),
    "softmax": lambda net, x, n: functional.softmax(x, dim=-1),
    "fold": lambda net, x, n: x.reshape(2, -1).reshape(x.shape),
}


class Net(nn.Module):
    """Calls the steps it is notified, one after the other."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.gelu = nn.GELU()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for number, step in enumerate(self.steps):
            x = STEPS[step](self, x, number)
        return self.last(x)


class Wordy(nn.Module):
    """Gives arguments by keyword, returns a mapping, and runs a part of itself again."""

    class Named(nn.Linear):
        def forward(self, x):
            y = functional.linear(x, weight=self.weight, bias=self.bias)
            return {"y": y, "parts": (y * 2, [y * 3, y * 4])}

    def __init__(self):
        super().__init__()
        self.first, self.named = nn.Linear(WIDTH, WIDTH), self.Named(WIDTH, WIDTH)

    def forward(self, x):
        x = checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False)
        found = self.named(x)
        x = torch.add(input=found["y"], other=found["parts"][1][0], alpha=2)
        return torch.cat(tensors=[x, found["parts"][0]], dim=1)


def steps_of(seed, changed):
    """The steps of a net, with some inserted and left out for each change."""
    chosen = random.Random(seed)
    steps = [chosen.choice(list(STEPS)) for _ in range(12)]
    for _ in range(changed):
        place = chosen.randrange(len(steps))
        if chosen.random() < 0.6:
            steps[place:place] = [chosen.choice(list(STEPS)) for _ in range(chosen.randint(1, 3))]
        else:
            del steps[place]
    return steps


def dump(out, seed, changed, noise, iterations, start, backward):
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    net = Net(steps_of(seed, changed))
    with torch.no_grad():
        net.linears[1].weight.add_(noise)
    trained(net, out, iterations, start, backward)


def words(out, start):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trained(Wordy(), out, 2, start, True)


def trained(net, out, iterations, start, backward):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ts.migrator.api_dump_init(net, output_path=out, retain_backward=backward)
    ts.migrator.api_dump_start(**start)
    for iteration in range(iterations):
        data = torch.Generator().manual_seed(iteration)
        x = torch.randn(6, WIDTH, generator=data)
        target = torch.randint(0, 4, (6,), generator=data)
        optimizer.zero_grad()
        functional.nll_loss(functional.log_softmax(net(x), dim=-1), target).backward()
        optimizer.step()
    ts.migrator.api_dump_stop()


def compare(pairs):
    for origin, target, output, parameters in pairs:
        ts.migrator.api_dump_compare(origin, target, output, **parameters)


if __name__ == "__main__":
    told = json.loads(sys.argv[3])
    verb = {"dump": dump, "words": words}.get(sys.argv[2])
    compare(told) if verb is None else verb(**told)
