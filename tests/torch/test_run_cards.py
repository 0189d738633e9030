"""What the run card has of a torch model: batch, generators, weights before the step, rates."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankdump._core.record import TensorSide
from rankdump._core.run_card import ParameterDigest, RunCard, parse_card, parse_parameter
from rankdump._core.tensor_layout import TensorLayout
from rankdump._frameworks import card_digests
from rankdump._frameworks.card_digests import HEAD_ELEMENTS, TURN_ITERATIONS
from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.tensors import make_torch_source
from rankdump._recorder.declared_layouts import DeclaredLayouts, LayoutDeclaration, declare_layout
from rankdump._recorder.run_card_recorder import RunCardRecorder


class Net(nn.Module):
    """Takes a keyword, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.drop = nn.Dropout()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.head(self.drop(self.body(x)))
        return y if scale is None else y * scale


def digest_head(tensor: Tensor, layout: TensorLayout | None) -> ParameterDigest | None:
    source = make_torch_source(tensor)
    if source is None or isinstance(source, str):
        return None
    return card_digests.digest_head(source, layout)


@dataclass
class CardJob:
    """A model with a run card, whose steps are those of a job."""

    model: nn.Module
    recorder: Any
    """The double of a recorder."""
    layouts: DeclaredLayouts = field(default_factory=lambda: DeclaredLayouts(lambda text: None))
    rate: float = 0.125
    iteration: int = -1

    def __post_init__(self) -> None:
        self.card = RunCardRecorder(
            self.layouts, None, warn=self.recorder.warnings.append, environ={}
        )
        self.card.name_model(0, "Net")
        self.recorder.card = self.card
        self.hook = attach_model(self.model, self.recorder, graph=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)

    def run_step(self, *batches: Tensor, **keywords: Any) -> RunCard:
        self.iteration += 1
        self.card.begin_step()
        self.hook.iteration_begins(self.iteration, self.recorder.armed)
        self.optimizer.zero_grad()
        for batch in batches:
            self.model(batch, **keywords).sum().backward()
        self.optimizer.step()
        self.hook.iteration_ends(self.iteration, self.recorder.armed)
        assert self.recorder.warnings == []
        return parse_card(self.card.make_card())


@pytest.fixture
def x() -> Tensor:
    return torch.ones(5, 3)


JobMaker = Callable[..., CardJob]


@pytest.fixture
def make_job(recorder) -> Iterator[JobMaker]:
    """Makes jobs with weights of a seed; detaches their hooks, some of which are torch's own."""
    jobs: list[CardJob] = []

    def make(seed: int = 3, model: nn.Module | None = None, **settings: Any) -> CardJob:
        torch.manual_seed(seed)
        jobs.append(CardJob(model or Net(), copy.copy(recorder), **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.hook.detach()


def test_equal_runs_have_equal_cards(x, make_job):
    first, second = make_job(), make_job()
    torch.manual_seed(7)
    own = [first.run_step(x) for _ in range(3)]
    torch.manual_seed(7)
    assert [second.run_step(x) for _ in range(3)] == own
    card = own[0]
    (model,) = card.models
    assert (model.name, model.parameters, model.elements) == ("Net", 4, 26)
    assert model.dtypes == {"float32": 4}
    assert list(card.parameters) == ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert card.numbers == {"learning_rate.0": "0.125"}
    assert {"batch.0", "random.cpu", "random.python", "random.numpy"} == card.digests.keys()
    assert card.settings["torch.initial_seed"] == "7"
    assert card.settings["torch.deterministic_algorithms"] == "false"


def test_optimizers_of_a_step_have_their_own_rates(x, make_job):
    """Also where each steps a part of the model alone."""
    job = make_job()
    head = torch.optim.SGD(job.model.get_submodule("head").parameters(), lr=0.5)
    job.optimizer.register_step_post_hook(lambda *_: head.step())
    for _ in range(2):
        assert job.run_step(x).numbers == {"learning_rate.0": "0.125", "learning_rate.1.0": "0.5"}


def test_changed_cause_changes_its_part_alone(x, make_job):
    base = make_job().run_step(x)
    other = make_job()
    torch.manual_seed(3)
    with torch.no_grad():
        other.model.get_parameter("head.weight")[0, 0] += 1
    changed = other.run_step(x).parameters
    assert [name for name in changed if changed[name] != base.parameters[name]] == ["head.weight"]
    batch = make_job().run_step(x + 1)
    assert batch.digests["batch.0"] != base.digests["batch.0"]
    assert batch.parameters == base.parameters
    assert make_job(rate=0.25).run_step(x).numbers == {"learning_rate.0": "0.25"}


def test_state_is_that_of_the_first_call(x, make_job):
    """A script seeds and loads weights after it attached the model."""
    late, early = make_job(4), make_job(3)
    late.model.load_state_dict(early.model.state_dict())
    torch.manual_seed(9)
    own = late.run_step(x)
    torch.manual_seed(9)
    its = early.run_step(x)
    assert own.parameters == its.parameters
    assert own.digests == its.digests


def test_batch_has_keywords_and_all_calls(x, make_job):
    job = make_job()
    one = job.run_step(x, scale=torch.ones(2)).digests
    assert {"batch.0", "batch.scale"} <= one.keys()
    two = job.run_step(x, x, scale=torch.ones(2)).digests
    assert two["batch.0"] != one["batch.0"]
    swapped = [job.run_step(*each).digests["batch.0"] for each in ((x, x + 1), (x + 1, x))]
    assert len({*swapped, one["batch.0"], two["batch.0"]}) == 4


def test_parameters_have_turns_after_the_first_iteration(x, make_job):
    job = make_job()
    first = job.run_step(x)
    later = [job.run_step(x).parameters for _ in range(TURN_ITERATIONS)]
    assert sorted(name for each in later for name in each) == sorted(first.parameters)
    again = make_job()
    assert [list(again.run_step(x).parameters) for _ in range(3)][1:] == list(map(list, later[:2]))


def test_iterations_that_are_not_dumped_take_nothing(x, make_job):
    job = make_job()
    job.recorder.armed = False
    card = job.run_step(x)
    assert (card.digests, card.parameters, card.numbers, card.models) == ({}, {}, {}, ())
    job.recorder.armed = True
    assert len(job.run_step(x).parameters) == 4


def test_declared_shards_add_up_to_the_whole():
    weight = nn.Linear(6, 8).weight
    whole = digest_head(weight, None)
    assert whole is not None
    parts = []
    for rank in (0, 1):
        declared = declare_layout(rank, (8, 6), {"tp": 2}, {"tp": "Shard(1)"})
        assert isinstance(declared, LayoutDeclaration)
        layout = declared.make_layout((8, 3))
        assert isinstance(layout, TensorLayout)
        part = digest_head(weight.detach().chunk(2, dim=1)[rank], layout)
        assert part is not None
        parts.append(part)
    assert sum(each.digest for each in parts) % 2**64 == whole.digest
    assert [each.part for each in parts] == ["0:8/8,0:3/6", "0:8/8,3:6/6"]


def test_declared_layout_is_in_the_summary(x, make_job):
    """Its logical name and shape are those of the whole model."""
    layouts = DeclaredLayouts(lambda text: None)
    declared = declare_layout(
        0, (8, 3), {"tp": 2}, {"tp": "Shard(0)"}, logical_name="layers.4.weight"
    )
    assert isinstance(declared, LayoutDeclaration)
    layouts.add("body.weight", TensorSide.OUTPUT, 0, declared)
    card = make_job(layouts=layouts).run_step(x)
    assert card.models[0].elements == 26 + 12
    assert parse_parameter(card.parameters["layers.4.weight"]).part == "0:4/8,0:3/3"


def test_large_parameter_is_digested_at_its_head():
    weight = torch.zeros(HEAD_ELEMENTS // 2, 3)
    head = digest_head(weight, None)
    weight[-1, -1] = 1
    assert digest_head(weight, None) == head
    weight[0, 1] = 1
    assert digest_head(weight, None) != head


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.empty(0),
        torch.empty(3, dtype=torch.float8_e5m2),
    ],
)
def test_parameter_that_cannot_be_read_has_no_digest(tensor):
    assert digest_head(tensor, None) is None


def test_transposed_parameter_has_the_digest_of_its_elements():
    dense = torch.arange(12.0).reshape(3, 4)
    assert digest_head(dense.t().contiguous().t(), None) == digest_head(dense, None)


def test_lazy_parameters_are_left_out_until_they_are_made(make_job):
    job = make_job(model=nn.Sequential(nn.LazyLinear(2)))
    job.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert job.run_step(torch.ones(1, 3)).models[0].parameters == 0
    assert job.run_step(torch.ones(1, 3)).models[0].parameters == 2


def test_copies_of_the_model_take_nothing(x, make_job):
    job = make_job()
    job.run_step(x)
    job.card.begin_step()
    copy.deepcopy(job.model)(x)
    pickle.loads(pickle.dumps(job.model))(x)
    assert parse_card(job.card.make_card()).digests == {}
