"""Observations of the hook on cells, and of the step watch, in small models."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from recorded import Recorder, ms, nn, ops, run, tensor

from rankdump._frameworks import mindspore
from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.mindspore import api_framework
from rankdump._frameworks.mindspore.api_framework import MindSporeApiHook
from rankdump._frameworks.mindspore.cell_hook import MindSporeCellHook, MindSporeOutermostWatch
from rankdump._recorder.declared_layouts import DeclaredLayouts
from rankdump._recorder.run_card_recorder import RunCardRecorder


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(4, 4)
        self.act = nn.ReLU()

    def construct(self, x: Any) -> Any:
        return self.act(self.fc(x))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3, pad_mode="pad", padding=1)
        self.blocks = nn.SequentialCell(Block(), Block())
        self.fc = nn.Dense(32, 4)

    def construct(self, x: Any) -> Any:
        return self.blocks(self.fc(ops.relu(self.conv1(x)).reshape(x.shape[0], -1)))


IMAGE = tensor(2, 1, 4, 4)


@contextmanager
def attached(model: Any, recorder: Recorder) -> Generator[MindSporeCellHook]:
    hook = MindSporeCellHook(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    try:
        yield hook
        hook.iteration_ends(0, armed=True)
    finally:
        hook.detach()


def case_names() -> dict[str, Any]:
    net, recorder = Net(), Recorder(is_describing=True)
    with attached(net, recorder) as hook:
        net(IMAGE)
        net(IMAGE)
        hook.iteration_ends(0, armed=True)
        hook.iteration_begins(1, armed=True)
        net.fc(tensor(2, 32))
    return recorder.told()


def case_gradients() -> dict[str, Any]:
    net, recorder = Block(), Recorder()
    with attached(net, recorder):
        grad = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
        _, gradients = grad(tensor(2, 4))
    return {"expected": [each.asnumpy().ravel().tolist() for each in gradients], **recorder.told()}


def case_recomputation() -> dict[str, Any]:
    net, recorder = nn.SequentialCell(Block(), nn.Dense(4, 1)), Recorder()
    net[0].recompute()
    with attached(net, recorder):
        ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(tensor(2, 4))
    return recorder.told()


def case_graph_mode() -> dict[str, Any]:
    net, recorder = Block(), Recorder()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with attached(net, recorder):
            net(tensor(2, 4))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    return recorder.told()


def case_not_armed() -> dict[str, Any]:
    net, recorder = Block(), Recorder(armed=False)
    before = nn.Cell.__call__
    hook = MindSporeCellHook(net, recorder, 0)
    hook.iteration_begins(0, armed=False)
    untouched = nn.Cell.__call__ is before
    net(tensor(2, 4))
    hook.detach()
    return {"untouched": untouched, **recorder.told()}


def case_outermost_calls() -> dict[str, Any]:
    inner = Block()
    outer = nn.SequentialCell(inner)
    told: list[int] = []
    watch = MindSporeOutermostWatch(told.append)
    watch.watch(outer)
    watch.watch(inner)
    outer(tensor(2, 4))
    inner(tensor(2, 4))
    watch.remove()
    outer(tensor(2, 4))
    return {"told": told}


def marked_after(*calls: tuple[Any, str, bool]) -> list[str]:
    """Return what a recorder is told is marked after these calls, each of a path in a new model."""
    net, recorder = Net(), Recorder()
    cells = dict(net.cells_and_names())
    for set_dump, path, enabled in calls:
        set_dump(cells[path], enabled)
    with attached(net, recorder):
        pass
    return sorted(recorder.marks[-1])


def case_marks() -> dict[str, Any]:
    ours, theirs = mindspore.set_dump, ms.set_dump
    return {
        "none": marked_after(),
        "ours": marked_after((ours, "blocks.1", True)),
        "theirs": marked_after((theirs, "blocks.1", True)),
        "all": marked_after((ours, "", True)),
        "taken away by ours": marked_after((theirs, "blocks", True), (ours, "blocks.0", False)),
        "taken away by theirs": marked_after((ours, "blocks", True), (theirs, "blocks.0", False)),
        "marked again": marked_after(
            (theirs, "fc", False), (ours, "fc", False), (ours, "fc", True)
        ),
    }


def case_marks_after_attach() -> dict[str, Any]:
    """A mark counts from the next call of the cell on, and from the next iteration for others."""
    net, recorder = Net(), Recorder()
    told: list[list[str]] = []
    with attached(net, recorder) as hook:
        for change in (
            lambda: mindspore.set_dump(net.fc),
            lambda: ms.set_dump(net.conv1),
            lambda: ms.set_dump(net.conv1, False),
            lambda: mindspore.set_dump(net.fc, False),
        ):
            change()
            net(IMAGE)
            told.append(sorted(recorder.marks[-1]))
        times = len(recorder.marks)
        net(IMAGE)
        quiet = len(recorder.marks) == times
        ms.set_dump(net.blocks)
        hook.iteration_begins(1, armed=True)
        told.append(sorted(recorder.marks[-1]))
    return {"told": told, "quiet": quiet}


def case_marked_primitive() -> dict[str, Any]:
    net, recorder = Net(), Recorder()
    ms.set_dump(net.conv1.conv2d)
    with attached(net, recorder):
        net(IMAGE)
    return {"marked": sorted(recorder.marks[-1])}


def case_wrong_marks() -> dict[str, Any]:
    told: list[str] = []
    wrong = [(None, True), (Net, True), (nn.Dense(2, 2).matmul, True), (Net(), 1), (Net(), None)]
    for target, enabled in wrong:
        try:
            mindspore.set_dump(target, enabled)
        except ValueError as error:
            told.append(str(error))
    return {"told": told}


def case_marks_are_not_compiled() -> dict[str, Any]:
    net = Net()
    mindspore.set_dump(net)
    cells = [cell for _, cell in net.cells_and_names()]
    return {"flags": [cell.get_flags() for cell in cells], "count": len(cells)}


class Odd(nn.Cell):
    """Has attributes of every kind, few of them plain."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = ms.bfloat16
        self.nested = ((1, 2), (3, None))
        self.listed = [1, 2]
        self.deeper = (((1,),),)
        self.long_text = "x" * 5000
        self.number = 1e-05
        self.off = False
        self.tensor = tensor(2)
        self.function = ops.relu
        self.part = nn.ReLU()
        self.add = ops.Add()
        self.matmul = ops.MatMul(transpose_b=True)
        self.add_flags(sink=True)
        self._hidden = 3

    def construct(self, x: Any) -> Any:
        return self.part(x)


def case_arguments() -> dict[str, Any]:
    net, recorder = Net(), Recorder(wants_arguments=True)
    odd, of_odd = Odd(), Recorder(wants_arguments=True)
    odd.set_train()
    with attached(net, recorder):
        net(IMAGE)
        net.fc(tensor(2, 32))
    with attached(odd, of_odd):
        odd(tensor(2))
    return {"net": recorder.configured, "odd": of_odd.configured}


class Doubled(nn.Cell):
    """Says itself how its gradient is made."""

    def construct(self, x: Any) -> Any:
        return x * 2

    def bprop(self, x: Any, out: Any, gradient: Any) -> Any:
        return (gradient * 2,)


class Many(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.SequentialCell(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), Doubled())
        self.mixing = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.memory = nn.LSTM(8, 4)

    def construct(self, x: Any) -> Any:
        rows = self.mixing(self.front(x).reshape(2, 4, 8))
        every, (last, _) = self.memory(rows)
        return every.sum() + last.mean()


def case_training_is_the_same() -> dict[str, Any]:
    def trained(hook_of: Callable[[Any], Any]) -> list[bytes]:
        ms.set_seed(1)
        np.random.seed(1)
        net = Many()
        net.set_train()
        optimizer = nn.Adam(net.trainable_params(), 0.01)
        grad = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
        hook, losses = hook_of(net), []
        for step in range(2):
            hook.iteration_begins(step, armed=True)
            loss, gradients = grad(IMAGE + step)
            optimizer(gradients)
            losses.append(loss.asnumpy().tobytes())
            hook.iteration_ends(step, armed=True)
        hook.detach()
        return [*losses, *(each.asnumpy().tobytes() for each in net.get_parameters())]

    silent, of_cells, of_calls = Recorder(armed=False), Recorder(), Recorder()
    options = ApiOptions(retain_backward=True, filter_data=False)
    runs = [
        trained(lambda net: MindSporeCellHook(net, silent, 0)),
        trained(lambda net: MindSporeCellHook(net, of_cells, 0)),
        trained(lambda net: MindSporeApiHook(net, of_calls, 0, options)),
    ]
    troubles = [*of_cells.warnings, *of_cells.lost, *of_calls.warnings, *of_calls.lost]
    tensors = [len(each.taken) for each in (silent, of_cells, of_calls)]
    return {"same": runs[0] == runs[1] == runs[2], "troubles": troubles, "tensors": tensors}


def case_cards() -> dict[str, Any]:
    """Two equal jobs, and one with another batch; the last step is not dumped."""

    def run_job(change: float) -> list[dict[str, Any]]:
        ms.set_seed(5)
        net = Block()
        for number, parameter in enumerate(net.get_parameters()):
            parameter.set_data(ms.Tensor(np.full(parameter.shape, number + 1.0, np.float32)))
        recorder = Recorder()
        card = RunCardRecorder(
            DeclaredLayouts(recorder.warn_once), None, warn=recorder.warn_once, environ={}
        )
        recorder.card = card
        hook = MindSporeCellHook(net, recorder, 0)
        optimizer = nn.SGD(net.trainable_params(), 0.125)
        grad = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
        cards: list[dict[str, Any]] = []
        for iteration in range(3):
            recorder.armed = iteration < 2
            card.begin_step()
            hook.iteration_begins(iteration, recorder.armed)
            optimizer(grad(tensor(2, 4) + change * iteration)[1])
            hook.iteration_ends(iteration, recorder.armed)
            cards.append(json.loads(card.make_card()))
        hook.detach()
        assert not recorder.warnings, recorder.warnings
        return cards

    return {"same": [run_job(0.0), run_job(0.0)], "other": run_job(1.0)}


class Heard:
    def __init__(self) -> None:
        self.told: list[str] = []

    def called(self, manner: str, *, trains: bool) -> None:
        self.told.append(f"{manner}, trains {trains}")

    def stepped(self) -> None:
        self.told.append("stepped")


def case_steps() -> dict[str, Any]:
    net, other, heard = Block(), Block(), Heard()
    net.set_train()
    grad = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
    watch = api_framework.watch_steps(net, heard)
    before = watch.has_optimizer()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    after = watch.has_optimizer()
    optimizer(grad(tensor(2, 4))[1])
    net.set_train(False)
    net(tensor(2, 4))
    nothing = tuple(ops.zeros_like(each) for each in other.trainable_params())
    nn.SGD(other.trainable_params(), 0.1)(nothing)
    watch.remove()
    net(tensor(2, 4))
    return {"told": heard.told, "before": before, "after": after}


def case_whole_steps() -> dict[str, Any]:
    net, heard = Block(), Heard()
    watch = api_framework.watch_steps(net, heard)
    loss = nn.WithLossCell(net, nn.MSELoss())
    step = nn.TrainOneStepCell(loss, nn.Adam(net.trainable_params(), 0.1))
    step(tensor(2, 4), tensor(2, 4))
    watch.remove()
    return {"told": heard.told}


def case_dropout() -> dict[str, Any]:
    kinds = (nn.Dropout(p=0.5), nn.Dropout1d(0.5), nn.Dropout2d(0.5), nn.Dropout3d(0.5))
    net = nn.SequentialCell(*kinds, nn.ReLU())
    net.set_train()
    inputs = (tensor(2, 4), tensor(2, 4, 4), tensor(2, 4, 4, 4), tensor(2, 4, 4, 4, 4))
    count = api_framework.without_dropout(net)
    kept = [bool((kind(x) == x).all().asnumpy()) for kind, x in zip(kinds, inputs, strict=True)]
    return {"count": count, "kept": kept}


if __name__ == "__main__":
    run(dict(globals()))
