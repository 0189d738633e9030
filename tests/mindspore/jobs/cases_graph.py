"""Observations of the hook on cells in training that MindSpore compiles.

Each case trains twice: without a hook, and with one. Both must end in the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np
from recorded import Recorder, ms, nn, ops, run, tensor

from rankdump._frameworks.mindspore.cell_hook import MindSporeCellHook

Program = Callable[["Observed"], "list[bytes]"]
compilations: set[str] = import_module("mindspore.common.api").ms_compile_cache
"""A name for each function that MindSpore has compiled so far, with the shapes it was given."""
STEPS = 4
EVERY = range(STEPS)


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(4, 4)
        self.act = nn.ReLU()

    def construct(self, x: Any) -> Any:
        return self.act(self.fc(x))


class Observed:
    """One hook for each model, armed in some iterations; without models nothing is observed."""

    def __init__(self, armed: Iterable[int]) -> None:
        self.armed = set(armed)
        self.recorders: list[Recorder] = []
        self._hooks: list[MindSporeCellHook] = []
        self._iteration = -1

    def attach(self, *models: Any) -> None:
        if self.armed:
            self.recorders = [Recorder(armed=False) for _ in models]
            self._hooks = [
                MindSporeCellHook(model, recorder, graph)
                for graph, (model, recorder) in enumerate(zip(models, self.recorders, strict=True))
            ]

    def step(self, iteration: int) -> None:
        self._tell("iteration_ends", self._iteration)
        self._iteration = iteration
        for recorder in self.recorders:
            recorder.armed = iteration in self.armed
        self._tell("iteration_begins", iteration)

    def close(self) -> None:
        self._tell("iteration_ends", self._iteration)
        for hook in self._hooks:
            hook.detach()
        self._hooks = []

    def _tell(self, what: str, iteration: int) -> None:
        for hook in self._hooks:
            getattr(hook, what)(iteration, iteration in self.armed)


def compared(program: Program, armed: Iterable[int] = EVERY) -> dict[str, Any]:
    """Run a program without and with hooks; return what the first model's hook told."""
    results: list[list[bytes]] = []
    for observed in (Observed(()), Observed(armed)):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(1)
        np.random.seed(1)
        try:
            results.append(program(observed))
        finally:
            observed.close()
            ms.set_context(mode=ms.PYNATIVE_MODE)
    told = [recorder.told() for recorder in observed.recorders]
    assert all(not hooks_left(each) for each in Net().trainable_params())
    return {"same": results[0] == results[1], "others": told[1:], **told[0]}


def hooks_left(parameter: Any) -> list[Any]:
    return parameter.hooks()


def numbers(*values: Any) -> list[bytes]:
    return [value.asnumpy().tobytes() for value in values]


def state_of(net: Any) -> list[bytes]:
    assert not any(hooks_left(each) for each in net.get_parameters())
    return numbers(*net.get_parameters())


def one_step_of(net: Any) -> Any:
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.1)
    )
    step.set_train()
    return step


def graph_mode() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)


def one_step_cell(observed: Observed) -> list[bytes]:
    graph_mode()
    net = Net()
    step, losses = one_step_of(net), list[bytes]()
    observed.attach(net)
    for iteration in range(STEPS):
        observed.step(iteration)
        losses += numbers(step(tensor(2, 4, start=iteration), tensor(2, 4)))
    observed.close()
    assert len(step.compile_cache) == 1, "it was compiled once"
    return losses + state_of(net)


def case_one_step_cell() -> dict[str, Any]:
    return compared(one_step_cell)


def case_one_step_cell_armed_later() -> dict[str, Any]:
    return compared(one_step_cell, armed=(2,))


def case_model_train() -> dict[str, Any]:
    class Steps(ms.Callback):
        def __init__(self, observed: Observed) -> None:
            super().__init__()
            self.observed = observed
            self.losses: list[bytes] = []

        def on_train_step_begin(self, run_context: Any) -> None:
            self.observed.step(run_context.original_args().cur_step_num - 1)

        def on_train_step_end(self, run_context: Any) -> None:
            self.losses += numbers(run_context.original_args().net_outputs)

    def program(observed: Observed) -> list[bytes]:
        graph_mode()
        net = Net()
        samples = np.arange(STEPS * 8, dtype=np.float32).reshape(STEPS * 2, 4) / 8
        data = ms.dataset.NumpySlicesDataset((samples, samples * 0), shuffle=False).batch(2)
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        model = ms.Model(net, nn.MSELoss(), optimizer)
        observed.attach(net)
        steps = Steps(observed)
        model.train(1, data, callbacks=[steps], dataset_sink_mode=False)
        observed.close()
        return steps.losses + state_of(net)

    return compared(program, armed=(0, 2))


def case_compiled_gradient_function() -> dict[str, Any]:
    """The gradients reach the script, which gives them to an optimizer."""

    def program(observed: Observed) -> list[bytes]:
        net, losses = Net(), list[bytes]()
        loss_fn = nn.MSELoss()

        def forward(x: Any, y: Any) -> Any:
            return loss_fn(net(x), y)

        optimizer = nn.SGD(net.trainable_params(), 0.1)
        grad = ms.jit(ms.value_and_grad(forward, None, optimizer.parameters))
        observed.attach(net)
        for iteration in range(STEPS):
            observed.step(iteration)
            loss, gradients = grad(tensor(2, 4, start=iteration), tensor(2, 4))
            losses += numbers(loss, *gradients)
            if iteration == 2:
                optimizer(gradients=gradients)
            else:
                optimizer(gradients)
        observed.close()
        return losses + state_of(net)

    return {"expected": gradients_of_first_step(), **compared(program, armed=(0, 2))}


def gradients_of_first_step() -> dict[str, list[float]]:
    """What PyNative mode computes, by name."""
    ms.set_seed(1)
    np.random.seed(1)
    net, loss_fn = Net(), nn.MSELoss()
    weights = net.trainable_params()
    grad = ms.grad(lambda x, y: loss_fn(net(x), y), None, weights)
    found = grad(tensor(2, 4), tensor(2, 4))
    pairs = zip(weights, found, strict=True)
    return {weight.name: each.asnumpy().ravel().tolist() for weight, each in pairs}


def case_gradient_function_of_graph_mode() -> dict[str, Any]:
    """No optimizer is there: the gradients are known from what the function returns."""

    def program(observed: Observed) -> list[bytes]:
        graph_mode()
        net, found = Net(), list[bytes]()
        loss = nn.WithLossCell(net, nn.MSELoss())
        both = ms.value_and_grad(loss, 0, net.trainable_params())
        listed = ops.GradOperation(get_by_list=True)(loss, net.trainable_params())
        observed.attach(net)
        for iteration, grad in enumerate((both, listed)):
            observed.step(iteration)
            result = grad(tensor(2, 4), tensor(2, 4))
            found += numbers(*(result[1][1] if grad is both else result))
        observed.close()
        return found + state_of(net)

    return {"expected": gradients_of_first_step(), **compared(program)}


def case_compiled_step_function() -> dict[str, Any]:
    """All of a step is compiled: nothing but the loss comes out."""

    def program(observed: Observed) -> list[bytes]:
        net, losses = Net(), list[bytes]()
        optimizer = nn.Adam(net.trainable_params(), 0.1)
        grad = ms.value_and_grad(nn.WithLossCell(net, nn.MSELoss()), None, optimizer.parameters)

        @ms.jit
        def train_step(x: Any, y: Any) -> Any:
            loss, gradients = grad(x, y)
            return ops.depend(loss, optimizer(gradients))

        @ms.jit
        def shift(x: Any) -> Any:
            return x + 1

        observed.attach(net)
        for iteration in range(STEPS):
            observed.step(iteration)
            losses += numbers(train_step(shift(tensor(2, 4, start=iteration)), tensor(2, 4)))
        observed.close()
        return losses + state_of(net)

    return compared(program, armed=(1, 2))


class Compiled(nn.Cell):
    """A cell of which MindSpore compiles the body, also in PyNative mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    @ms.jit
    def construct(self, x: Any) -> Any:
        return self.inner(x)


class Mixed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Dense(4, 4)
        self.middle = Compiled()
        self.head = nn.Dense(4, 1)

    def construct(self, x: Any) -> Any:
        return self.head(self.middle(self.front(x)))


def case_compiled_cell_within_pynative() -> dict[str, Any]:
    """The backward runs from Python: gradients are seen on both sides of what is compiled."""

    def program(observed: Observed) -> list[bytes]:
        net, losses, compiled_before = Mixed(), list[bytes](), len(compilations)
        grad = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
        observed.attach(net)
        for iteration in range(STEPS):
            observed.step(iteration)
            loss, gradients = grad(tensor(2, 4, start=iteration))
            losses += numbers(loss, *gradients)
        observed.close()
        assert len(compilations) == compiled_before + 1, "it was compiled once"
        return losses + state_of(net)

    return compared(program, armed=(0, 3))


def case_bytecode_capture() -> dict[str, Any]:
    """The other compiler: a tensor with a hook goes in, and its gradient comes."""

    def program(observed: Observed) -> list[bytes]:
        net, found = Mixed(), list[bytes]()

        @ms.jit(capture_mode="bytecode")
        def doubled(x: Any) -> Any:
            return x * 2

        def forward(x: Any) -> Any:
            return (net.head(doubled(net.front(x)))).sum()

        grad = ms.value_and_grad(forward, None, net.front.trainable_params())
        observed.attach(net)
        for iteration in range(2):
            observed.step(iteration)
            loss, gradients = grad(tensor(2, 4, start=iteration))
            found += numbers(loss, *gradients)
        observed.close()
        return found

    return compared(program)


def case_bytecode_capture_of_the_model() -> dict[str, Any]:
    def program(observed: Observed) -> list[bytes]:
        net = Net()

        @ms.jit(capture_mode="bytecode")
        def forward(x: Any) -> Any:
            return net(x)

        observed.attach(net)
        observed.step(0)
        found = numbers(forward(tensor(2, 4)), forward(tensor(2, 4, start=1)))
        observed.close()
        return found

    return compared(program)


def case_mode_is_switched() -> dict[str, Any]:
    """Attached before the context is set; both modes take turns while an iteration is armed."""

    def program(observed: Observed) -> list[bytes]:
        net = Net()
        observed.attach(net)
        observed.step(0)
        graph_mode()
        step = one_step_of(net)
        found = numbers(step(tensor(2, 4), tensor(2, 4)))
        ms.set_context(mode=ms.PYNATIVE_MODE)
        observed.step(1)
        found += numbers(step(tensor(2, 4), tensor(2, 4)))
        graph_mode()
        found += numbers(step(tensor(2, 4), tensor(2, 4)))
        observed.close()
        return found + state_of(net)

    return compared(program)


def case_no_arguments() -> dict[str, Any]:
    graph_mode()
    net, recorder = Net(), Recorder(wants_arguments=True)
    step, hook = one_step_of(net), MindSporeCellHook(net, recorder, 0)
    for iteration in range(2):
        hook.iteration_begins(iteration, armed=True)
        step(tensor(2, 4), tensor(2, 4))
        hook.iteration_ends(iteration, armed=True)
    hook.detach()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return recorder.told()


def case_nothing_is_compiled() -> dict[str, Any]:
    """MS_JIT=0 makes graph mode run in Python: cells are seen as in PyNative mode."""

    def program(observed: Observed) -> list[bytes]:
        graph_mode()
        net = Net()
        observed.attach(net)
        observed.step(0)
        os.environ["MS_JIT"] = "0"
        try:
            return numbers(net(tensor(2, 4)))
        finally:
            del os.environ["MS_JIT"]

    return compared(program)


def case_compiled_again() -> dict[str, Any]:
    """New shapes in the middle are compiled anew, with hooks that are armed."""

    def program(observed: Observed) -> list[bytes]:
        graph_mode()
        net = Net()
        step, losses = one_step_of(net), list[bytes]()
        observed.attach(net)
        for iteration in range(STEPS):
            observed.step(iteration)
            rows = 2 + iteration // 2
            losses += numbers(step(tensor(rows, 4), tensor(rows, 4)))
        observed.close()
        assert len(step.compile_cache) == 2
        return losses + state_of(net)

    return compared(program)


def case_several_models() -> dict[str, Any]:
    """One compiled step runs two of three attached models."""

    class Both(nn.Cell):
        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.first, self.second = first, second

        def construct(self, x: Any) -> Any:
            return self.second(self.first(x))

    def program(observed: Observed) -> list[bytes]:
        graph_mode()
        first, second, other = Net(), Net(), Net()
        both = Both(first, second)
        both.update_parameters_name("both.")
        step = one_step_of(both)
        observed.attach(first, second, other)
        observed.step(0)
        found = numbers(step(tensor(2, 4), tensor(2, 4)))
        observed.close()
        return found + state_of(first) + state_of(second)

    return compared(program)


def case_hooks_of_the_job_stay() -> dict[str, Any]:
    """A hook that the script put on a parameter is compiled as ever, and left where it is."""

    def program(observed: Observed) -> list[bytes]:
        net = Net()

        def halve(gradient: Any) -> Any:
            return gradient / 2

        handle = net.fc.weight.register_hook(halve)
        grad = ms.jit(ms.value_and_grad(net, None, net.trainable_params()))
        observed.attach(net)
        observed.step(0)
        _, gradients = grad(tensor(2, 4))
        found = numbers(*gradients)
        assert halve in net.fc.weight.hooks()
        observed.close()
        assert net.fc.weight.hooks() == [halve]
        handle.remove()
        return found

    return compared(program)


if __name__ == "__main__":
    run(dict(globals()))
