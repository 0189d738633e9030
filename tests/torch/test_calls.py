"""Module calls as records: names, slots, values, numbers, order."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.model_hook import attach_model

ROOT = "Default/network-Net/Net-op0"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_module_calls_have_names_and_order(recorder, observed) -> None:
    """Every module call, containers too, is an event under its scope name, in program order."""
    with observed(Net(), recorder), torch.no_grad():
        torch.relu(Net()(torch.ones(2, 4)))  # another model is not seen
        model = Net()
    assert not recorder.events
    with observed(model, recorder), torch.no_grad():
        model(torch.ones(2, 4))
    block = "Default/network-Net/layers-ModuleList/{0}-Sequential"
    layer = [
        name.format(index)
        for index in (0, 1)
        for name in (
            block + "/0-Linear/Linear-op0",
            block + "/1-ReLU/ReLU-op0",
            block + "/Sequential-op0",
        )
    ]
    assert [event.name for event in recorder.events] == [*layer, ROOT]
    assert recorder.names[0] == ROOT  # it started first and finished last
    assert sorted(event.position for event in recorder.events) == list(range(1, 8))


def test_module_calls_have_inputs_and_outputs(recorder, observed) -> None:
    """A module's input and output are the values it had and gave."""
    model, x = Net(), torch.randn(2, 4)
    with observed(model, recorder), torch.no_grad():
        y = model(x)
    assert np.array_equal(recorder.one(ROOT, "input").array, x.numpy())
    assert np.array_equal(recorder.one(ROOT, "output").array, y.numpy())
    linear = "Default/network-Net/layers-ModuleList/0-Sequential/0-Linear/Linear-op0"
    assert recorder.one(linear, "input").op_type == "Linear"


@pytest.mark.parametrize("again", [0, 3, 7])
def test_module_calls_are_numbered_from_0_after_iterations_without_a_dump(recorder, again) -> None:
    """Iteration 0 is dumped, and a later one, which may have its number, after its first call."""
    model, x = Net(), torch.ones(2, 4)
    hook = attach_model(model, recorder, graph=0)

    def run(iteration: int, *, armed: bool) -> list[str]:
        recorder.armed = armed
        hook.iteration_begins(iteration, armed)
        before = len(recorder.events)
        with torch.no_grad():
            model(x)
        return [event.name for event in recorder.events[before:]]

    first = run(0, armed=True)
    hook.iteration_ends(0, armed=True)
    for iteration in (1, 2, 3):
        assert run(iteration, armed=False) == []
        hook.iteration_ends(iteration, armed=False)
    assert run(again, armed=False) == []
    assert run(again, armed=True) == first
    assert len(first) == 7
    hook.detach()


class Pair(NamedTuple):
    hidden: Tensor
    cell: Tensor


@dataclass
class Output:
    logits: Tensor
    pair: Pair
    loss: Tensor | None = None


class Rich(nn.Module):
    def forward(self, x: Tensor, scale: float, *, mask: Tensor, extra: dict[str, Tensor]) -> Output:
        return Output(x * scale, Pair(mask, extra["bias"]))


def test_structured_arguments_have_slots_and_places(recorder, observed) -> None:
    """Keyword arguments, dicts, named tuples and dataclasses give a slot to every leaf."""
    model = Rich()
    with observed(model, recorder):
        model(torch.ones(1), 2.0, mask=torch.ones(2), extra={"bias": torch.ones(3), "n": 1})
    seen = [(t.side.value, t.slot, t.argument, t.shape) for t in recorder.taken]
    assert seen == [
        ("input", 0, "args.0", (1,)),
        ("input", 2, "kwargs.mask", (2,)),
        ("input", 3, "kwargs.extra.bias", (3,)),
        ("output", 0, "out.logits", (1,)),
        ("output", 1, "out.pair.hidden", (2,)),
        ("output", 2, "out.pair.cell", (3,)),
    ]


def test_in_place_operator_has_its_input_from_before_the_call(recorder, observed) -> None:
    """An in-place module's input is the value before it wrote."""
    model = nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 2.0])
    with observed(model, recorder):
        model(x)
    name = "Default/network-ReLU/ReLU-op0"
    assert recorder.one(name, "input").array.tolist() == [-1.0, 2.0]
    assert recorder.one(name, "output").array.tolist() == [0.0, 2.0]


def test_calls_are_numbered_per_iteration(recorder) -> None:
    """N counts the calls of one module from 0, and starts again with each iteration."""
    model = nn.Linear(2, 2)
    hook = attach_model(model, recorder, 0)
    for iteration in range(2):
        hook.iteration_begins(iteration, armed=True)
        for _ in range(2):
            model(torch.ones(1, 2))
        hook.iteration_ends(iteration, armed=True)
    hook.detach()
    names = [f"Default/network-Linear/Linear-op{number}" for number in (0, 1, 0, 1)]
    assert recorder.names == names


def test_call_numbers_continue_if_an_iteration_is_armed_twice(recorder) -> None:
    """Switched off and on again within an iteration, calls are numbered on and no gradient is
    handed over again."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    hook = attach_model(model, recorder, 0)
    for armed in (True, False, True):
        hook.iteration_begins(5, armed)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    hook.iteration_ends(5, armed=True)
    hook.iteration_begins(6, armed=True)
    model(torch.ones(1, 2))
    hook.detach()
    forward = [name[-3:] for name in recorder.names if name.startswith("Default/")]
    assert forward == ["op0", "op1", "op0"]
    assert recorder.keys.count(("Gradients/weight", "output", 0)) == 1
    assert recorder.keys.count(("weight", "output", 0)) == 1


class Recursive(nn.Module):
    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self(x + 1, depth - 1) * 2 if depth else x


def test_recursive_calls_have_their_own_results(recorder, observed) -> None:
    """A module that calls itself has each result under the number of its own call."""
    model = Recursive()
    with observed(model, recorder):
        model(torch.zeros(1), 2)
    for number, (given, result) in enumerate([(0, 8), (1, 4), (2, 2)]):
        name = f"Default/network-Recursive/Recursive-op{number}"
        assert recorder.one(name, "input").array.tolist() == [given]
        assert recorder.one(name, "output").array.tolist() == [result]


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            raise ValueError("no positive sums")
        return x - 1


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Fragile())

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ValueError:
            return self.inner(-x)


def test_forward_that_raised_does_not_shift_later_calls(recorder, observed) -> None:
    """The error passes; calls after it keep their own results; its event ends, too."""
    model = Catching()
    with observed(model, recorder):
        assert model(torch.ones(1)).item() == -2
        with pytest.raises(ValueError, match="no positive sums"):
            model.inner[0](torch.ones(1))
        assert model(-torch.ones(1)).item() == -2
    inner = "Default/network-Catching/inner-Sequential/0-Fragile/Fragile-op"
    outputs = {
        t.op_name for t in recorder.taken if t.side is TensorSide.OUTPUT and inner in t.op_name
    }
    assert outputs == {inner + "1", inner + "3"}
    assert recorder.one(inner + "1", "output").array.tolist() == [-2]
    assert len(recorder.events) == recorder.position
    assert not recorder.warnings


def test_interrupt_passes_and_the_next_iteration_is_complete(recorder) -> None:
    """A KeyboardInterrupt inside a forward is not swallowed and leaves no open call behind."""

    class Interrupted(nn.Module):
        stop = True

        def forward(self, x: Tensor) -> Tensor:
            if self.stop:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(Interrupted())
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    hook.iteration_begins(1, armed=True)
    Interrupted.stop = False
    assert len(recorder.events) == 2
    recorder.events.clear()
    model(torch.ones(1))
    hook.detach()
    assert len(recorder.events) == 2
    assert not recorder.open


def test_open_calls_end_when_dumping_is_switched_off(recorder) -> None:
    """Law: every started event is finished."""

    class Stopping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            recorder.armed = False
            hook.iteration_begins(0, armed=False)
            return x

    model = nn.Sequential(Stopping())
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    model(torch.ones(1))
    assert len(recorder.events) == recorder.position == 2
    assert not recorder.open
    hook.detach()


def test_calls_of_threads_do_not_mix(recorder, observed) -> None:
    """Four threads in one model: no name twice, and each output belongs to its input."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))

    def work(worker: int) -> None:
        for step in range(50):
            model(torch.full((3,), worker * 1000.0 + step))

    with observed(model, recorder):
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recorder.events) == len(set(recorder.names)) == 4 * 50 * 4
    assert len(recorder.keys) == len(set(recorder.keys))
    values = {(t.op_name, t.side): t.data for t in recorder.taken}
    for (name, side), data in values.items():
        assert side is TensorSide.OUTPUT or values[name, TensorSide.OUTPUT] == data
    assert not recorder.warnings


def test_hooks_that_a_script_removed_are_back_in_the_next_iteration(recorder) -> None:
    """Common ways to remove one's own hooks remove all; what is not seen then is not silent."""
    model = Net()
    hook = attach_model(model, recorder, 0)
    seen: list[int] = []
    for iteration in range(3):
        hook.iteration_begins(iteration, True)
        if iteration == 1:
            for module in model.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks = OrderedDict()
        model(torch.ones(2, 4))
        hook.iteration_ends(iteration, True)
        seen.append(sum(event.name == ROOT for event in recorder.events))
    hook.detach()
    assert seen == [1, 1, 2]
    assert [each for each in recorder.warnings if "removed hooks of rankdump" in each]


def test_no_hooks_are_installed_while_not_armed(recorder) -> None:
    """Hooks come with an armed iteration and go with one that is not; detach leaves none."""

    def hooks(model: nn.Module) -> int:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
        kinds += ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
        return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)

    from torch.optim.optimizer import _global_optimizer_pre_hooks as on_optimizers

    # Another test may have left some.
    before = len(on_optimizers)
    model = Net()
    hook = attach_model(model, recorder, 0)
    assert hooks(model) == 0
    for armed in (False, True, True, False, True):
        recorder.armed = armed
        hook.iteration_begins(0, armed)
        assert (hooks(model) > 0) == armed
        assert len(on_optimizers) == before + armed
        hook.iteration_ends(0, armed)
    hook.detach()
    hook.detach()
    assert hooks(model) == 0
    assert len(on_optimizers) == before


def test_modules_added_between_iterations_are_recorded(recorder) -> None:
    """The tree is looked at again at every armed iteration."""
    model = nn.Sequential(nn.ReLU())
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    model.append(nn.Tanh())
    hook.iteration_begins(1, armed=True)
    model(torch.ones(1))
    hook.detach()
    assert "Default/network-Sequential/1-Tanh/Tanh-op0" in recorder.names


def test_unwanted_operators_are_not_read(recorder, observed) -> None:
    """Selection is asked per operator and side, and only what is wanted is copied."""
    recorder.wanted = lambda name, side: "ReLU" in name and side is TensorSide.OUTPUT
    with observed(Net(), recorder) as _, torch.no_grad():
        pass
    model = Net()
    with observed(model, recorder):
        model(torch.ones(1, 4))
    forward = [t for t in recorder.taken if t.op_name.startswith("Default/")]
    assert {(t.op_type, t.side) for t in forward} == {("ReLU", TensorSide.OUTPUT)}
    assert any("Linear" in name for name in recorder.names)


def test_forked_or_disarmed_process_records_nothing(recorder, observed) -> None:
    """Where the recorder is not armed, installed hooks do nothing."""
    model = Net()
    with observed(model, recorder):
        recorder.armed = False
        model(torch.ones(1, 4)).sum().backward()
    assert not recorder.events
    assert not recorder.taken


def test_data_loader_workers_record_nothing(recorder, observed) -> None:
    """Workers forked while hooks are installed run the model undisturbed."""
    model = nn.Linear(2, 2)

    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            with torch.no_grad():
                return torch.full((2,), float(index))

    with observed(model, recorder):
        loader = torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=2)
        results = [model(batch) for batch in loader]
    assert len(results) == 2
    assert len(recorder.events) == 2


def test_copied_and_pickled_models_have_no_hooks(recorder, observed) -> None:
    """A copy made in an armed iteration works and records nothing."""
    model = nn.Sequential(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with observed(model, recorder):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        before = len(recorder.events)
        for twin in twins:
            assert torch.equal(twin(x), twin[0](x))
        assert len(recorder.events) == before


def test_calls_of_code_without_source_are_recorded(recorder, observed) -> None:
    """A module defined by exec, which has no source file, is observed like any other."""
    scope: dict[str, type[nn.Module]] = {"nn": nn}
    text = "class Made(nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    exec(text, scope)
    model = scope["Made"]()
    with observed(model, recorder):
        model(torch.zeros(1))
    assert recorder.one("Default/network-Made/Made-op0", "output").array.tolist() == [1]


def test_lstm_and_attention_are_recorded(recorder, observed) -> None:
    """Recurrent and attention modules show their tuples; a packed sequence shows its parts."""
    lstm = nn.LSTM(3, 4)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    with observed(lstm, recorder):
        lstm(torch.ones(5, 1, 3))
        lstm(packed)
    outputs = [
        (t.op_name[-1], t.argument)
        for t in recorder.taken
        if t.side is TensorSide.OUTPUT and "LSTM" in t.op_name and t.op_name.startswith("Default/")
    ]
    assert outputs[:3] == [("0", "out.0"), ("0", "out.1.0"), ("0", "out.1.1")]
    assert ("1", "out.0.data") in outputs
    assert ("1", "out.0.batch_sizes") in outputs
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    with observed(attention, recorder):
        y, _ = attention(x, x, x)
    name = "Default/network-MultiheadAttention/MultiheadAttention-op0"
    assert np.array_equal(recorder.one(name, "output").array, y.detach().numpy())


def test_functions_of_torch_are_not_patched(recorder, observed) -> None:
    """Functional calls are not operators, and functions are not patched."""
    relu = functional.relu
    with observed(Net(), recorder):
        assert relu is functional.relu


def test_failing_hook_never_reaches_training(recorder, observed, monkeypatch) -> None:
    """A tensor that cannot be read is lost by count, an error elsewhere is one warning."""
    from rankdump._frameworks.torch.tensors import TorchTensor

    def broken(self: TorchTensor, target: memoryview) -> None:
        raise ValueError("broken source")

    model, x = Net(), torch.ones(1, 4)
    expected = model(x)
    monkeypatch.setattr(TorchTensor, "copy_into", broken)
    with observed(model, recorder):
        result = model(x)
        result.sum().backward()
    assert torch.equal(result, expected)
    assert {reason for _, _, reason in recorder.lost} == {"internal_error"}
    assert not recorder.taken
    assert len(recorder.warnings) == 1


def test_error_while_naming_modules_is_a_warning(recorder, observed) -> None:
    """Arguments that raise when looked at do not disturb the call that takes them."""

    class Hostile(dict):
        def items(self):
            raise RuntimeError("do not look")

    class Taking(nn.Module):
        def forward(self, hostile: Hostile) -> int:
            return 7

    model = Taking()
    with observed(model, recorder):
        assert model(Hostile()) == 7
    (warning,) = recorder.warnings
    assert warning == "a hook of rankdump failed, data may be missing: RuntimeError: do not look"


def test_script_modules_are_not_hooked(recorder, observed) -> None:
    """A scripted child is skipped with one warning; what is around it is seen."""
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    model = nn.Sequential(scripted, nn.Tanh(), scripted)
    with observed(model, recorder):
        model(torch.ones(1))
    assert len(recorder.warnings) == 1
    assert "torch.jit" in recorder.warnings[0]
    names = {name.rpartition("/")[2] for name in recorder.names}
    assert names == {"Tanh-op0", "Sequential-op0"}


def test_fused_encoder_layer_keeps_its_fused_path(recorder, observed) -> None:
    """An encoder layer in eval mode is not hooked, because that would change its results."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True)).eval()
    x = torch.randn(2, 3, 8)
    with torch.inference_mode():
        expected = model(x)
        with observed(model, recorder):
            assert torch.equal(model(x), expected)
    assert any("TransformerEncoderLayer" in warning for warning in recorder.warnings)
    assert recorder.names == ["Default/network-Sequential/Sequential-op0"]


def test_hooks_do_not_change_numbers(recorder) -> None:
    """Losses and parameters of three AdamW steps with clipping are bit-identical without us."""

    def train(attached: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(1)
        model = nn.Sequential(Net(), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        hook = attach_model(model, recorder, 0) if attached else None
        losses = []
        for step in range(3):
            if hook is not None:
                hook.iteration_begins(step, armed=True)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(loss.item())
            if hook is not None:
                hook.iteration_ends(step, armed=True)
        if hook is not None:
            hook.detach()
        return losses, list(model.parameters())

    plain, seen = train(attached=False), train(attached=True)
    assert recorder.taken
    assert plain[0] == seen[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], seen[1], strict=True))
