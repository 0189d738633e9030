"""Observations of the hook on API calls in small programs."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from recorded import Recorder, mint, ms, nn, ops, run, tensor

from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.mindspore.api_framework import MindSporeApiHook


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(4, 4)
        self.act = nn.ReLU()

    def construct(self, x: Any) -> Any:
        return self.act(self.fc(x)) * 2


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, pad_mode="pad", padding=1, has_bias=True)
        self.fc = nn.Dense(32, 4)
        self.block = Block()
        self.product = ops.MatMul()

    def construct(self, x: Any) -> Any:
        x = ops.relu(self.conv(x))
        x = x.reshape(x.shape[0], -1)
        x = self.block(self.fc(x))
        x = self.product(x, x.transpose()) + mint.exp(x[:, :2])
        first, second = ops.split(x, 1, axis=1)
        return ops.cat((first, second), axis=1)


IMAGE = tensor(2, 1, 4, 4)


@contextmanager
def hooked(model: Any, recorder: Recorder, **options: Any) -> Generator[MindSporeApiHook]:
    hook = MindSporeApiHook(model, recorder, 0, ApiOptions(**options))
    hook.iteration_begins(0, armed=recorder.armed)
    try:
        yield hook
        hook.iteration_ends(0, armed=recorder.armed)
    finally:
        hook.detach()


def case_names() -> dict[str, Any]:
    net, recorder = Net(), Recorder()
    with hooked(net, recorder):
        net(IMAGE)
        net(IMAGE)
    return recorder.told()


def case_gradients() -> dict[str, Any]:
    net, recorder = Net(), Recorder()
    with hooked(net, recorder, retain_backward=True):
        ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(IMAGE)
    return recorder.told()


def case_recomputation() -> dict[str, Any]:
    net, recorder = Net(), Recorder()
    net.block.recompute()
    with hooked(net, recorder, retain_backward=True):
        ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(IMAGE)
    return recorder.told()


def case_numbers_of_python() -> dict[str, Any]:
    recorder = Recorder()
    with hooked(Net(), recorder, filter_data=False):
        ops.clamp(IMAGE.sum(), min=1, max=2.5)
    return recorder.told()


def case_before_the_call() -> dict[str, Any]:
    recorder, weight = Recorder(), ms.Parameter(tensor(3), name="weight")
    with hooked(Net(), recorder):
        ops.assign_add(weight, tensor(3, start=1))
    return recorder.told()


def case_bfloat16() -> dict[str, Any]:
    recorder, values = Recorder(), tensor(4, start=1).astype(ms.bfloat16)
    with hooked(Net(), recorder):
        values.astype(ms.float32)
    return recorder.told()


def case_float8() -> dict[str, Any]:
    recorder = Recorder()
    values = ms.Tensor(tensor(4, start=1).asnumpy(), ms.float8_e4m3fn)
    with hooked(Net(), recorder):
        values.reshape(2, 2)
    return recorder.told()


def case_training_is_the_same() -> dict[str, Any]:
    def trained(recorder: Recorder | None) -> list[bytes]:
        ms.set_seed(1)
        np.random.seed(1)
        net = Net()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        grad = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
        seen: list[bytes] = []
        hook = (
            MindSporeApiHook(net, recorder, 0, ApiOptions(retain_backward=True))
            if recorder
            else None
        )
        for step in range(3):
            loss, gradients = grad(IMAGE + step)
            optimizer(gradients)
            seen += [loss.asnumpy().tobytes(), *(each.asnumpy().tobytes() for each in gradients)]
        if hook is not None:
            hook.detach()
        return [*seen, *(each.asnumpy().tobytes() for each in net.get_parameters())]

    recorder = Recorder()
    return {"same": trained(None) == trained(recorder), **recorder.told()}


def case_left_as_it_was() -> dict[str, Any]:
    def places() -> list[Any]:
        classes = (ms.Tensor, nn.Cell, ops.Primitive, ops.MatMul)
        found = [dict(vars(module)) for module in (ops, ops.functional, mint, *classes)]
        return [{name: id(value) for name, value in each.items()} for each in found]

    before = places()
    with hooked(Net(), Recorder()), hooked(Net(), Recorder()):
        during = places()
    return {"changed": during != before, "restored": places() == before}


def case_compiled() -> dict[str, Any]:
    @ms.jit
    def compiled(x: Any) -> Any:
        return ops.relu(x) + x.reshape(2, 16).sum()

    @ms.jit(capture_mode="bytecode")
    def captured(x: Any) -> Any:
        return ops.relu(x) + ops.exp(x)

    expected = [compiled(IMAGE), captured(IMAGE), ops.relu(IMAGE)]
    recorder = Recorder()
    with hooked(Net(), recorder):
        found = [compiled(IMAGE), compiled(IMAGE[:1].tile((2, 1, 1, 1))), captured(IMAGE)]
        found[1] = ops.relu(IMAGE)
    same = [
        np.array_equal(a.asnumpy(), b.asnumpy())
        for a, b in zip(expected, (found[0], found[2], found[1]), strict=True)
    ]
    return {"same": same, **recorder.told()}


def case_graph_mode() -> dict[str, Any]:
    net, recorder = Block(), Recorder()
    x = tensor(2, 4)
    expected = net(x)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with hooked(net, recorder):
            found = net(x)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    return {"same": np.allclose(expected.asnumpy(), found.asnumpy()), **recorder.told()}


def case_errors() -> dict[str, Any]:
    recorder = Recorder()
    with hooked(Net(), recorder):
        product = ops.matmul(tensor(2, 3), tensor(2, 3))
        try:
            product.asnumpy()
            asked = "nothing"
        except RuntimeError:
            asked = "RuntimeError"
        try:
            ops.relu("no tensor")
            called = "nothing"
        except TypeError:
            called = "TypeError"
        ops.exp(IMAGE)
    return {"asked": asked, "called": called, **recorder.told()}


def case_threads() -> dict[str, Any]:
    recorder = Recorder()
    with hooked(Net(), recorder):
        thread = threading.Thread(target=lambda: ops.relu(IMAGE))
        thread.start()
        thread.join()
        ops.relu(IMAGE)
    return recorder.told()


def case_numbers_go_on() -> dict[str, Any]:
    net, silent, recorder = Net(), Recorder(armed=False), Recorder()
    with hooked(net, silent) as hook:
        ops.relu(IMAGE)
        hook.record_with(recorder, ApiOptions(scope=lambda call: call.api == "relu"))
        hook.iteration_begins(1, armed=True)
        ops.relu(ops.exp(IMAGE))
    return {"silent": silent.tensors, **recorder.told()}


def case_layers_once() -> dict[str, Any]:
    net, recorder = Block(), Recorder()
    with hooked(net, recorder, layers_once=True):
        net(tensor(2, 4))
        net(tensor(2, 4))
    return recorder.told()


def case_optimizers() -> dict[str, Any]:
    net, recorder = Block(), Recorder()
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.1)
    )
    with hooked(net, recorder):
        step(tensor(2, 4), tensor(2, 4, start=1))
    return recorder.told()


if __name__ == "__main__":
    run(dict(globals()))
