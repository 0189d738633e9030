"""Pulses of torch models: what is measured where, and what is reported as a fault."""

# pyright: reportArgumentType=false

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.black_box_side import BlackBoxSide
from torch import Tensor, nn

from rankdump._core.black_box import DETAIL_ROW, PULSE_ROW, FaultKind
from rankdump._core.plan import BlackBoxSettings, WatchRule
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.tensor_fingerprint import measure_with_fingerprint, place_fingerprint
from rankdump._frameworks.torch import pulse_hooks
from rankdump._frameworks.torch.pulse_hooks import (
    TorchPulseHook,
    fingerprint_tensor,
    measure_tensor,
)


class Recorder:
    armed = False
    card = None

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn_once(self, message: str) -> None:
        self.warnings.append(message)


class Divider(nn.Module):
    """Divides by the number it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.divide = Divider()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.divide(self.inner(x)))


class Training:
    """A model whose steps are measured."""

    def __init__(
        self, model: Any, *rules: WatchRule, fingerprints: bool = True, **settings: Any
    ) -> None:
        self.side = BlackBoxSide(BlackBoxSettings(64, watch=rules, **settings))
        if not fingerprints:
            self.side.recorder.can_afford = lambda spending: False
        self.model = model
        self.recorder = Recorder()
        self.hook = TorchPulseHook(model, self.recorder, self.side.recorder, graph=0, name="Net")
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        self.iteration = -1

    def begin(self) -> None:
        self.iteration += 1
        self.side.recorder.begin_step(self.iteration)
        self.hook.iteration_begins(self.iteration, armed=False)

    def end(self) -> dict[str, Any]:
        self.side.now_ns += 10**12
        self.side.recorder.end_step(ran=True)
        self.side.take()
        assert not self.recorder.warnings
        return self.side.list_rows(self.side.states[-1])

    def run_step(self, x: Tensor) -> dict[str, Any]:
        self.begin()
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()
        return self.end()


INNER = [
    "Default/network-Net/inner-Sequential/0-Linear/Linear-op0",
    "Default/network-Net/inner-Sequential/1-ReLU/ReLU-op0",
    "Default/network-Net/divide-Divider/Divider-op0",
    "Default/network-Net/head-Linear/Linear-op0",
]
GRADIENTS = [
    "Gradients/head.weight",
    "Gradients/head.bias",
    "Gradients/inner.0.weight",
    "Gradients/inner.0.bias",
]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])


def test_outputs_of_innermost_modules_and_gradients_are_measured(x):
    training = Training(Net())
    rows = training.run_step(x)
    assert list(rows)[:4] == INNER
    assert sorted(rows) == sorted(INNER + GRADIENTS)
    gradient = training.model.head.weight.grad.double()
    row = rows["Gradients/head.weight"]
    assert row["maximum"] == gradient.max()
    assert row["minimum"] == gradient.min()
    assert math.isclose(row["squares"], (gradient**2).sum(), rel_tol=1e-12)
    kind = training.side.kinds[0]
    assert (kind.op_type, kind.dtype, kind.shape, kind.byte_count) == (
        "Linear",
        "float32",
        (2, 4),
        32,
    )
    assert kind.model == "Net"


def test_second_call_of_a_module_has_its_own_name(x):
    model = nn.Sequential(nn.ReLU())
    training = Training(nn.Sequential(model[0], model[0], nn.Linear(3, 1)))
    rows = training.run_step(x)
    names = [name for name in rows if "ReLU" in name]
    assert [name[-4:] for name in names] == ["-op0", "-op1"]
    assert [name for name in training.run_step(x) if "ReLU" in name] == names


def test_cause_has_batch_random_state_and_learning_rate(x):
    training = Training(Net())
    training.run_step(x)
    training.run_step(x)
    training.run_step(x + 1)
    causes = [state.cause for state in training.side.states]
    assert [dict(cause.numbers) for cause in causes] == [{"learning_rate.0": 0.125}] * 3
    batches = [cause.digests["batch.0"] for cause in causes]
    assert batches[0] == batches[1] != batches[2]
    assert {len(cause.digests["random.cpu"]) for cause in causes} == {16}


def test_output_that_is_not_finite_is_reported_with_source_and_clean_inputs(x):
    training = Training(Net())
    training.run_step(x)
    training.model.divide.by = math.nan
    training.run_step(x)
    (fault,) = training.side.faults
    assert (fault.kind, fault.iteration) == (FaultKind.NON_FINITE, 1)
    assert fault.text == "the output of a module has 8 NaN; its inputs are finite"
    assert fault.tensor_kind is not None
    assert fault.tensor_kind.op_name == INNER[2]
    file, _, line = fault.source.rpartition(":")
    assert file == __file__
    lines = Path(__file__).read_text().splitlines()
    assert "self.divide(self.inner(x))" in lines[int(line) - 1]


def test_input_that_is_not_finite_is_said(x):
    training = Training(Net())
    training.run_step(x * math.inf)
    (fault,) = training.side.faults
    assert fault.text.endswith("its inputs are not finite either")
    assert fault.tensor_kind is not None
    assert fault.tensor_kind.op_name == INNER[0]


def test_infinite_output_is_a_fault_only_where_it_is_unusual(x):
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, -math.inf)

    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Mask()

        def forward(self, x: Tensor) -> Tensor:
            self.mask(x)
            return super().forward(x)

    training = Training(Masked())
    for _ in range(3):
        training.run_step(x)
    assert not training.side.faults
    training.model.divide.by = 0.0
    training.run_step(x.abs() + 1)
    assert len(training.side.faults) == 1


def test_gradient_that_is_not_finite_is_a_fault_when_an_optimizer_uses_it(x):
    training = Training(Net())
    training.run_step(x)
    training.begin()
    training.model(x).sum().mul(math.inf).backward()
    training.optimizer.zero_grad()  # as GradScaler skips a step
    training.end()
    assert not training.side.faults
    training.begin()
    training.model(x).sum().mul(math.nan).backward()
    training.optimizer.step()
    training.end()
    (fault,) = training.side.faults
    assert fault.text.startswith("a gradient that an optimizer uses has ")
    assert fault.tensor_kind is not None
    assert fault.tensor_kind.op_name == "Gradients/inner.0.weight"


def test_gradient_without_a_hook_is_measured_when_it_is_used(x):
    training = Training(Net())
    training.begin()
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    rows = training.end()
    assert sorted(rows) == sorted(GRADIENTS)


def has_hook(training: Training) -> list[bool]:
    return [bool(each._post_accumulate_grad_hooks) for each in training.model.parameters()]


def test_parameters_get_hooks_only_where_all_are_measured(x, monkeypatch):
    """Torch calls what has once been a hook of a parameter in every step."""
    monkeypatch.setattr(pulse_hooks, "_SETTLE_STEPS", 2)
    training = Training(Net(), fingerprints=False)
    training.side.recorder.stride = 4
    for _ in range(4):
        training.run_step(x)
        assert all(p._post_accumulate_grad_hooks is None for p in training.model.parameters())
    training.side.recorder.stride = 1
    assert sorted(training.run_step(x)) == sorted(INNER + GRADIENTS)
    assert all(has_hook(training))


def test_gradients_are_measured_as_they_arrive_where_no_optimizer_uses_them(x):
    """Two steps show that there is none; what is there at their end is measured."""
    training = Training(Net(), fingerprints=False)
    for expected in (False, False, True):
        training.begin()
        assert all(has_hook(training)) is expected
        training.model(x).sum().backward()
        if expected:
            training.model.zero_grad()
        training.hook.iteration_ends(0, armed=False)
        assert set(GRADIENTS) <= set(training.end())


def test_parameters_get_no_hooks_after_steps_in_which_nothing_ran_or_one_evaluation(x):
    """As where a script goes on from a checkpoint: torch would call them in every step."""
    training = Training(Net(), fingerprints=False)
    for _ in range(4):
        training.begin()
        training.hook.iteration_ends(0, armed=False)
        training.side.recorder.end_step(ran=False)
    for _ in range(2):
        training.run_step(x)
        training.begin()
        training.model(x)
        training.hook.iteration_ends(0, armed=False)
        training.end()
    assert all(each._post_accumulate_grad_hooks is None for each in training.model.parameters())


def test_part_of_the_modules_is_measured_in_turn(x):
    training = Training(Net(), fingerprints=False)
    training.run_step(x)
    training.side.recorder.stride = 4
    seen = [training.run_step(x) for _ in range(4)]
    assert sorted(name for rows in seen for name in rows) == sorted(INNER + GRADIENTS)
    assert [state.skipped for state in training.side.states] == [0, 6, 6, 6, 6]
    training.side.recorder.stride = 1
    assert len(training.run_step(x)) == 8


def list_details(training: Training) -> list[dict[str, Any]]:
    """Return for each step the details of tensors by the name of their operator."""
    side, found = training.side, []
    for state in side.states:
        rows = np.frombuffer(state.rows, PULSE_ROW)
        details = np.frombuffer(state.details, DETAIL_ROW)
        found.append({side.kinds[rows["kind"][each["row"]]].op_name: each for each in details})
    return found


def test_tensors_get_fingerprints_and_all_statistics_once_their_size_is_known(x):
    training = Training(Net())
    training.run_step(x)
    training.run_step(x)
    first, second = list_details(training)
    assert not first
    assert sorted(second) == sorted(INNER + GRADIENTS)
    gradient = training.model.head.weight.grad
    detail = second["Gradients/head.weight"]
    assert math.isclose(detail["total"], gradient.double().sum(), rel_tol=1e-12)
    assert detail["positives"] == (gradient > 0).sum()
    assert detail["negatives"] == (gradient < 0).sum()
    assert detail["zeros"] == (gradient == 0).sum()
    place = place_fingerprint("float32", (2, 4), None)
    data = gradient.numpy().tobytes()
    assert bytes(detail["fingerprint"]) == measure_with_fingerprint((), "float32", data, place)[1]


def test_fingerprint_is_that_of_the_elements_in_order():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    kind = TensorKind(0, "Linear", "a", TensorSide.OUTPUT, 0, "float32", (3, 2), 24)
    assert fingerprint_tensor(tensor, kind) == fingerprint_tensor(tensor.contiguous(), kind)
    assert fingerprint_tensor(tensor, kind) != fingerprint_tensor(tensor.t().contiguous(), kind)


def test_fingerprints_go_over_the_model_in_turn(x):
    training = Training(Net(), fingerprints=False)
    training.run_step(x)
    training.side.recorder.stride = 8
    training.side.recorder.can_afford = lambda spending: (
        spending.fingerprints <= 3 and not spending.copies
    )
    for _ in range(3):
        training.run_step(x)
    details = list_details(training)
    # Those whose turn it is are measured, although each is in one of eight parts.
    assert [len(step) for step in details] == [0, 3, 3, 3]
    assert {name for step in details for name in step} == set(INNER + GRADIENTS)


def test_tensor_that_is_too_large_has_no_turn(x):
    training = Training(Net())
    training.side.recorder.is_too_much = lambda spending: max(spending[0], spending[2]) > 32
    for _ in range(2):
        training.run_step(x)
    names = set(list_details(training)[1])
    assert names == {INNER[3], *GRADIENTS} - {"Gradients/inner.0.weight"} | set(INNER[:3])


def test_operator_that_a_rule_names_is_measured_in_every_step(x):
    rule = WatchRule("zero", ("divide", "Gradients/head.*"))
    training = Training(Net(), rule, fingerprints=False)
    training.side.recorder.stride = 4
    seen = [training.run_step(x) for _ in range(4)]
    named = {INNER[2], *GRADIENTS[:2]}
    for rows in seen:
        assert named <= set(rows)
    assert sorted({name for rows in seen for name in rows}) == sorted(INNER + GRADIENTS)
    assert sum(len(rows) for rows in seen) == 5 + 3 * 4
    assert [state.skipped for state in training.side.states] == [8 - len(rows) for rows in seen]


def test_rule_freezes_with_operator_and_source(x):
    training = Training(Net(), WatchRule("too_large", ("Divider",), value=100.0, do="freeze"))
    training.run_step(x)
    training.model.divide.by = 1e-4
    training.run_step(x)
    (fault,) = training.side.faults
    assert (fault.kind, fault.iteration) == (FaultKind.WATCH, 1)
    assert fault.tensor_kind is not None
    assert fault.tensor_kind.op_name == INNER[2]
    assert fault.text.endswith("the limit is 100")
    file, _, line = fault.source.rpartition(":")
    assert file == __file__
    assert "self.divide(" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_rule_notes_a_gradient_that_is_zero(x):
    training = Training(Net(), WatchRule("zero", ("Gradients/inner.0.*",), steps=2))
    training.model.divide.by = math.inf
    for _ in range(3):
        training.run_step(x)
    assert not training.side.faults
    notes = [state.notes for state in training.side.states]
    assert [len(each) for each in notes] == [0, 2, 0]
    assert all("zero in 2 steps in a row (output 0 of Gradients/" in note for note in notes[1])


def test_detached_model_has_no_hooks(x):
    training = Training(Net())
    training.run_step(x)
    twin = copy.deepcopy(training.model)
    training.hook.detach()
    states = len(training.side.states)
    training.model(x)
    assert not any(module._forward_hooks for module in training.model.modules())
    twin(x).sum().backward()
    assert len(training.side.states) == states


def test_training_is_bit_identical(x):
    plain, measured = Net(), Net()
    measured.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    training = Training(measured)
    for _ in range(3):
        optimizer.zero_grad()
        plain(x).sum().backward()
        optimizer.step()
        training.run_step(x)
    for a, b in zip(plain.parameters(), measured.parameters(), strict=True):
        assert torch.equal(a, b)


def test_new_module_is_measured_soon(x):
    training = Training(nn.Sequential(nn.Linear(3, 3)))
    before = len(training.run_step(x))
    training.model.append(nn.Linear(3, 1))
    for _ in range(15):
        training.run_step(x)
    assert (before, len(training.run_step(x))) == (3, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensor_in_another_order_is_measured(dtype):
    tensor = torch.arange(6, dtype=dtype).reshape(2, 3).t()[::2]
    found = measure_tensor(tensor)
    assert found is not None
    assert (found[0], found[1], found[2], found[4]) == (4, 5.0, 0.0, 0 + 9 + 4 + 25)


def test_tensor_that_has_no_floating_point_numbers_is_skipped():
    assert measure_tensor(torch.arange(3)) is None
    assert measure_tensor(torch.empty(0)) is None
    assert measure_tensor(torch.empty(3, device="meta")) is None


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take host memory for that of an accelerator."""
    monkeypatch.setattr(pulse_hooks, "measure_tensor", lambda tensor: None)
    monkeypatch.setattr(pulse_hooks, "is_measurable", lambda tensor: True)


@pytest.mark.usefixtures("accelerator")
def test_accelerator_is_read_back_a_step_later(x):
    training = Training(Net())
    training.begin()
    training.model(x).sum().backward()
    gradient = training.model.head.weight.grad.double()
    training.optimizer.step()
    training.hook.iteration_ends(0, armed=False)
    assert training.end() == {}
    training.begin()
    training.model(x).sum().backward()
    training.hook.iteration_ends(1, armed=False)
    training.side.take()
    late = training.side.states[-1]
    rows = training.side.list_rows(late)
    assert late.iteration == 0
    assert list(rows)[:4] == INNER
    assert sorted(rows) == sorted(INNER + GRADIENTS)
    row = rows["Gradients/head.weight"]
    assert (row["maximum"], row["minimum"]) == (gradient.max(), gradient.min())
    assert math.isclose(row["squares"], (gradient**2).sum(), rel_tol=1e-5)
    training.end()
    training.hook.detach()
    training.side.take()
    assert training.side.states[-1].iteration == 1
    assert len(training.side.list_rows(training.side.states[-1])) == 8


@pytest.mark.usefixtures("accelerator")
def test_first_output_on_an_accelerator_that_is_not_finite_is_reported(x):
    training = Training(Net())
    training.model.divide.by = math.nan
    training.begin()
    training.model(x).sum().backward()
    training.hook.iteration_ends(0, armed=False)
    training.end()
    training.begin()
    training.hook.iteration_ends(1, armed=False)
    training.side.take()
    (fault,) = training.side.faults
    assert (fault.kind, fault.iteration) == (FaultKind.NON_FINITE, 0)
    assert fault.text == "the output of a module is the first of its step that is not finite"
    assert fault.tensor_kind is not None
    assert fault.tensor_kind.op_name == INNER[2]
    assert fault.source.startswith(__file__)


@pytest.mark.usefixtures("accelerator")
def test_rule_judges_an_accelerator_a_step_later(x):
    training = Training(Net(), WatchRule("too_large", ("divide",), value=100.0, do="freeze"))
    training.model.divide.by = 1e-4
    training.begin()
    training.model(x)
    training.hook.iteration_ends(0, armed=False)
    training.end()
    training.begin()
    training.hook.iteration_ends(1, armed=False)
    training.side.take()
    (fault,) = training.side.faults
    assert (fault.kind, fault.iteration) == (FaultKind.WATCH, 0)
    assert fault.source.startswith(__file__)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("is_used", [False, True])
def test_gradient_on_an_accelerator_is_a_fault_only_if_it_was_used(x, is_used):
    training = Training(Net())
    training.begin()
    training.model(x).sum().mul(math.inf).backward()
    if is_used:
        training.optimizer.step()
    training.hook.iteration_ends(0, armed=False)
    training.end()
    training.hook.detach()
    training.side.take()
    assert len(training.side.faults) == is_used


def list_kept(training: Training, iteration: int) -> dict[str, Any]:
    """Return the tensors in full of a step by operator, and with `input` where they are one."""
    return {
        f"{each.kind.op_name}{' input' * (each.kind.side is TensorSide.INPUT)}": each
        for each in training.side.tensors
        if each.iteration == iteration
    }


def test_first_tensor_that_is_not_finite_is_kept_in_full_with_its_inputs(x):
    training = Training(Net(), fingerprints=False)
    training.run_step(x)
    training.model.divide.by = math.nan
    inputs: list[Tensor] = []
    training.model.divide.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0].detach().clone())
    )
    training.begin()
    with torch.no_grad():
        training.model(x).zero_()
    training.side.take()
    # At once: a rank that does not come further loses nothing.
    assert training.side.bodies[-3:] == ["fault", "step_states", "step_tensors"]
    kept = list_kept(training, 1)
    assert list(kept) == [INNER[2], f"{INNER[2]} input"]
    output, argument = kept.values()
    assert output.about_fault
    assert argument.about_fault
    assert np.isnan(np.frombuffer(output.data, np.float32)).all()
    assert argument.data == inputs[0].numpy().tobytes()
    assert (argument.row, argument.kind.argument, argument.kind.shape) == (None, "args.0", (2, 4))
    state = training.side.states[-1]
    assert state.unfinished
    [number] = np.frombuffer(state.rows, PULSE_ROW)["kind"][[output.row]]
    assert training.side.kinds[number] == output.kind
    training.end()
    for _ in range(3):
        training.run_step(x)
    # A fault that goes on is not kept again.
    assert len(training.side.tensors) == 2


def test_tensor_of_a_fault_is_kept_once(x):
    training = Training(Net())
    for _ in range(2):
        training.run_step(x)
    training.model.divide.by = math.nan
    training.run_step(x)
    kept = [each.kind.op_name for each in training.side.tensors if each.iteration == 2]
    # With the input of the operator.
    assert sorted(kept) == sorted([*INNER, *GRADIENTS, INNER[2]])


def test_gradient_that_is_not_finite_is_kept_in_full(x):
    training = Training(Net(), fingerprints=False)
    training.run_step(x)
    training.begin()
    (training.model(x).sum() * math.inf).backward()
    training.hook.iteration_ends(1, armed=False)
    training.end()
    kept = list_kept(training, 1)
    assert len(kept) == 1
    assert set(kept) <= set(GRADIENTS)


def test_tensors_are_kept_in_full_while_there_is_time(x):
    training = Training(Net())
    for _ in range(3):
        training.run_step(x)
    assert not list_kept(training, 0)  # their sizes are not known yet
    kept = list_kept(training, 2)
    assert set(kept) == set(INNER + GRADIENTS)
    gradient = training.model.head.weight.grad
    assert kept["Gradients/head.weight"].data == gradient.numpy().tobytes()
    rows = np.frombuffer(training.side.states[2].rows, PULSE_ROW)
    for tensor in kept.values():
        assert not tensor.about_fault
        assert training.side.kinds[rows[tensor.row]["kind"]] == tensor.kind
        assert np.frombuffer(tensor.data, np.float32).max() == rows[tensor.row]["maximum"]
    assert not any(state.left_out for state in training.side.states)


def test_tensors_that_a_rule_names_are_kept_first(x):
    rule = WatchRule("zero", ("divide", "Gradients/head.*"))
    training = Training(Net(), rule)
    training.side.recorder.can_afford = lambda spending: (
        not spending.fingerprints and spending.copies <= 4
    )
    training.run_step(x)
    for _ in range(3):
        training.run_step(x)
    named = {INNER[2], *GRADIENTS[:2]}
    for iteration in range(1, 4):
        kept = set(list_kept(training, iteration))
        # They have half, and take turns when they need more.
        assert len(kept & named) == 2
        assert len(kept - named) == 2
    assert [state.left_out for state in training.side.states] == [3, 1, 1, 1]
    seen = {name for iteration in (1, 2) for name in list_kept(training, iteration)}
    assert named <= seen


def test_no_tensor_is_kept_without_bytes_for_it(x):
    training = Training(Net(), WatchRule("zero", ("divide",)), tensor_bytes=0)
    training.run_step(x)
    training.model.divide.by = math.nan
    training.run_step(x)
    assert not training.side.tensors
    assert not any(state.left_out for state in training.side.states)


def test_tensor_of_a_fault_that_exceeds_its_bytes_is_counted(x):
    training = Training(Net(), fingerprints=False, tensor_bytes=5000)
    training.run_step(x)
    training.model.divide.by = math.nan
    training.run_step(x)
    # Each of 32 bytes, and 4 KiB beside them.
    assert list(list_kept(training, 1)) == [INNER[2]]
    assert training.side.states[-1].left_out == 1


def test_hidden_hook_measures_nothing_and_goes_on_where_it_was() -> None:
    """A step that is repeated has one pulse of each tensor, and one batch."""
    plain, hidden = Training(Net()), Training(Net())
    torch.manual_seed(2)
    expected = plain.run_step(torch.ones(2, 3))
    torch.manual_seed(2)
    hidden.begin()
    hidden.optimizer.zero_grad()
    hidden.model(torch.ones(2, 3)).sum().backward()
    hidden.hook.hide(True)
    hidden.model(torch.zeros(2, 3))
    hidden.hook.hide(False)
    hidden.optimizer.step()
    assert hidden.end().keys() == expected.keys()
    assert hidden.side.states[-1].cause == plain.side.states[-1].cause
