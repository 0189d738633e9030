"""Job with every case that breaks other dump tools; it prints its losses exactly.

Every case is one iteration of one session. Run it with and without a plan: the lines must agree.
Usage: hard_cases.py [CASE ...]
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import rankdump

session = rankdump.Session.from_environment()
CASES: dict[str, Callable[[], float]] = {}


def case(function: Callable[[], float]) -> Callable[[], float]:
    CASES[function.__name__] = function
    return function


def train(model: nn.Module, loss_of: Callable[[], Tensor]) -> float:
    """Train one AdamW step with clipping; return the loss and every parameter, which show any
    deviation.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = loss_of()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss) + sum(float(p.detach().double().sum()) for p in model.parameters())


def attached(model: nn.Module) -> nn.Module:
    rankdump.attach(model, session)
    return model


def mlp(**options) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, **options), nn.ReLU(), nn.Linear(16, 4, **options))


@case
def bfloat16() -> float:
    model = attached(mlp(dtype=torch.bfloat16))
    return train(model, lambda: model(torch.randn(2, 8, dtype=torch.bfloat16)).float().sum())


@case
def autocast() -> float:
    model = attached(mlp())

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(2, 8)).float().sum()

    return train(model, loss)


class Float8(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().to(torch.float8_e4m3fn)


@case
def float8() -> float:
    return float(attached(Float8())(torch.randn(4, 4)).float().sum())


class Odd(nn.Module):
    """Outputs of every unusual kind at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.lstm(x)
        mixed, weights = self.attention(x, x, x)
        return {
            "loss": hidden.sum() + mixed.sum() + weights.sum(),
            "complex": torch.complex(x, x).conj(),
            "half": x.half(),
            "sparse": x[0].to_sparse(),
            "empty": x[:0],
            "scalar": x.sum(),
            "expanded": x[:1].expand(5, -1, -1),
            "bool": x > 0,
        }


@case
def odd_tensors() -> float:
    model = attached(Odd())
    return train(model, lambda: model(torch.randn(3, 2, 8))["loss"])


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor, *, mask: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": self.inner(x) * mask + options["bias"]}


@case
def keywords_and_dicts() -> float:
    model = attached(Keyword())
    x, mask, bias = torch.randn(2, 8), torch.ones(2, 4), torch.randn(4)
    return train(model, lambda: model(x, mask=mask, options={"bias": bias})["hidden"].sum())


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.linear(x))
        return (h + x).add_(1.0)


@case
def in_place() -> float:
    model = attached(nn.Sequential(InPlace(), InPlace()))
    return train(model, lambda: model(torch.randn(2, 8)).sum())


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block = mlp()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@case
def checkpoint_reentrant() -> float:
    model = attached(Recomputed(reentrant=True))
    return train(model, lambda: model(torch.randn(2, 8, requires_grad=True)).sum())


@case
def checkpoint_not_reentrant() -> float:
    model = attached(Recomputed(reentrant=False))
    return train(model, lambda: model(torch.randn(2, 8)).sum())


@case
def loader_workers() -> float:
    model = attached(mlp())
    data = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4, num_workers=2)
    return sum(train(model, lambda x=x: model(x).sum()) for (x,) in data)


@case
def four_threads() -> float:
    model = attached(mlp())
    results = [0.0] * 4

    def run(index: int, x: Tensor) -> None:
        with torch.no_grad():
            for _ in range(5):
                results[index] = float(model(x).sum())

    threads = [
        threading.Thread(target=run, args=(i, torch.full((2, 8), float(i)))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(results)


@case
def compiled() -> float:
    compiled_model = torch.compile(mlp(), backend="eager")
    assert isinstance(compiled_model, nn.Module)
    model = attached(compiled_model)
    return train(model, lambda: model(torch.randn(2, 8)).sum())


@case
def compiled_after() -> float:
    inner = attached(mlp())
    model = torch.compile(inner, backend="eager")
    return train(inner, lambda: model(torch.randn(2, 8)).sum())


@case
def functional_transforms() -> float:
    model = attached(mlp())
    parameters = dict(model.named_parameters())

    def loss(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(p), (x,)).sum()

    x = torch.randn(3, 8)
    gradient = torch.func.grad(loss)(parameters, x)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return float(gradient["0.weight"].sum() + each["0.weight"].sum())


@case
def without_source() -> float:
    text = "def loss_of(model, x):\n    return model(x).sum()\n"
    scope: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {}
    exec(text, scope)
    model = attached(mlp())
    return train(model, lambda: scope["loss_of"](model, torch.randn(2, 8)))


@case
def accumulated_gradients() -> float:
    model = attached(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return sum(float(p.detach().double().sum()) for p in model.parameters())


@case
def inference() -> float:
    model = attached(mlp().eval())
    with torch.inference_mode():
        return sum(float(model(torch.randn(2, 8)).sum()) for _ in range(3))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


@case
def forward_that_raised() -> float:
    first, last = mlp(), nn.Linear(4, 1)
    model = attached(nn.Sequential(first, Raises(), last))
    with contextlib.suppress(ValueError):
        model(torch.randn(2, 8))
    return train(nn.Sequential(first, last), lambda: last(first(torch.randn(2, 8))).sum())


@case
def unhandled() -> float:
    model = attached(mlp())
    train(model, lambda: model(torch.randn(2, 8)).sum())
    raise RuntimeError("the user's own bug")


@case
def killed() -> float:
    """Train three whole iterations, then end by a signal that no handler receives."""
    model = attached(mlp())
    for i in range(3):
        session.step(i)
        print(train(model, lambda: model(torch.randn(2, 8)).sum()).hex(), flush=True)
    session.step(3)
    if os.environ.get("HARD_CASES_KILL"):
        pipeline: Any = session._pipeline  # pyright: ignore[reportPrivateUsage]
        while pipeline._send_buffer.items.outstanding:
            time.sleep(0.01)  # what is in flight leaves this process; nothing says goodbye
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


@case
def large() -> float:
    """Dump enough bytes to fill a small disk."""
    model = attached(nn.Linear(512, 512))
    return train(model, lambda: model(torch.randn(512, 512)).sum())


SEPARATE = {"unhandled", "killed", "large"}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or [name for name in CASES if name not in SEPARATE]
    for number, name in enumerate(chosen):
        session.step(number)
        torch.manual_seed(number)
        print(name, CASES[name]().hex(), flush=True)
    session.close()
