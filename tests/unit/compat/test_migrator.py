"""Life cycle of an API dump, with doubles of a framework and an agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies

import rankdump
from rankdump import migrator
from rankdump._compat.api_dump import ApiDumpController
from rankdump._compat.dump_request import ApiDumpRequest, ApiDumpSetting
from rankdump._core.plan import plan_from_json
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, TensorObservation
from rankdump._frameworks.api_calls import ApiCallCounter, ApiOptions
from rankdump._frameworks.arrays import ArraySource
from rankdump._layout.api_tree import ApiCall
from rankdump._session import default_session
from rankdump._session.agent_finder import AgentFinder
from rankdump.errors import UnavailableError


class Hook:
    """Counts calls, and hands over a tensor for each of them in scope."""

    def __init__(self, recorder: Recorder, options: ApiOptions) -> None:
        self.numbers = ApiCallCounter()
        self.begun: list[tuple[int, bool]] = []
        self.detached = False
        self.record_with(recorder, options)

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        self.recorder, self.options = recorder, options

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        self.begun.append((iteration, armed))

    def iteration_ends(self, iteration: int, armed: bool) -> None: ...

    def detach(self) -> None:
        self.detached = True

    def call(self, name: str = "Conv2d") -> None:
        call = ApiCall("NN", name, self.numbers.next_number(f"NN_{name}"))
        if self.recorder.armed and self.options.scope(call):
            source = ArraySource(np.ones(2, np.float32))
            self.recorder.observe(
                TensorObservation(
                    0, call.op_type, call.name, TensorSide.OUTPUT, 0, "output", source
                )
            )


class Net:
    """A model of the double's framework."""


class Framework:
    """What `session.apis` asks of a framework, and what a model of it does."""

    NAME = "torch"

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.saved: list[Path] = []
        self.removed = 0
        self.finds_optimizer = True

    def api_hook(self, model: Any, recorder: Recorder, *, graph: int, options: ApiOptions) -> Hook:
        assert graph == 0
        self.hooks.append(Hook(recorder, options))
        return self.hooks[-1]

    def without_dropout(self, model: Any) -> int:
        return 2

    def save_state(self, model: Any, folder: Path) -> None:
        self.saved.append(folder)

    def watch_steps(self, model: Any, listener: Any) -> Framework:
        self.listener = listener
        return self

    def has_optimizer(self) -> bool:
        return self.finds_optimizer

    def remove(self) -> None:
        self.removed += 1

    def forward(self, *names: str, trains: bool = True) -> None:
        self.listener.called("gradients" if trains else "none", trains=trains)
        for name in names or ("Conv2d",):
            self.hooks[-1].call(name)

    def train(self, *names: str) -> None:
        self.forward(*names)
        self.listener.stepped()


@pytest.fixture
def framework() -> Framework:
    return Framework()


Begin = Callable[..., ApiDumpController]


@pytest.fixture
def begun(running: RunningFakeAgent, framework: Framework, tmp_path: Path) -> Iterator[Begin]:
    """Makes dumps that were set up, which go to a fake agent."""
    made: list[ApiDumpController] = []

    def begin(**setting: Any) -> ApiDumpController:
        environ = {"RANKDUMP_AGENT": running.address}
        dumping = ApiDumpController(environ, framework_of=lambda net: framework)
        dumping.init(Net(), ApiDumpSetting(str(tmp_path / "dump"), **setting))
        made.append(dumping)
        return dumping

    yield begin
    for each in made:
        each.stop()
    default_session.set_step_listener(lambda number: None)


def sent(running: RunningFakeAgent) -> list[tuple[int, str]]:
    return [(record.iteration, record.op_name) for record in bodies(running, "record")]


def test_stop_delivers_all_tensors_by_step(
    begun: Begin, framework: Framework, running: RunningFakeAgent, caplog
):
    """Everything since the start is with the agent when the stop returns, by steps."""
    dumping = begun()
    dumping.start(ApiDumpRequest())
    framework.train()
    framework.train("Conv2d", "ReLU")
    dumping.stop()
    expected = [(0, "NN_Conv2d_0"), (1, "NN_Conv2d_1"), (1, "NN_ReLU_0")]
    assert sent(running) == [(step, f"{name}_forward") for step, name in expected]
    ends = [end.iteration for end in bodies(running, "iteration_end")]
    assert ends == [0, 1]
    plan = plan_from_json(running.agent.opened[0].plan_json)
    assert (plan.output.layout, plan.content.saved) == ("api-torch", "full")
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(":")[1].split()[0] for text in said] == ["dropout", "API", "API"]
    assert "is written to" in said[1]
    assert "3 calls" in said[2]


def test_calls_and_steps_are_counted_between_dumps(begun: Begin, framework, running):
    """From init on, before the first start and between a stop and the next start."""
    dumping = begun()
    framework.train()
    framework.train()
    dumping.start(ApiDumpRequest())
    framework.train()
    dumping.stop()
    framework.train()
    dumping.start(ApiDumpRequest())
    framework.train()
    dumping.stop()
    assert sent(running) == [(2, "NN_Conv2d_2_forward"), (4, "NN_Conv2d_4_forward")]
    first, second = running.agent.opened
    assert first.job_id != second.job_id
    assert first.rank == second.rank == 0


def test_changed_parameters_apply_at_the_next_start(begun: Begin, framework, running):
    dumping = begun(release="1.0.18")
    dumping.start(ApiDumpRequest(mode="list", scope=("NN_ReLU_0", "NN_ReLU_9")))
    framework.train("Conv2d", "ReLU")
    dumping.start(ApiDumpRequest(dump_type="statistics", statistic_category=("avg",)))
    framework.train()
    dumping.stop()
    assert sent(running) == [(0, "NN_ReLU_0_forward")]
    plans = [plan_from_json(opened.plan_json) for opened in running.agent.opened]
    assert [plan.content.saved for plan in plans] == ["full", "statistic"]
    assert plans[1].content.statistics == ("avg",)


def test_range_continues_in_the_next_window(begun: Begin, framework, running):
    """What was met once is not met again by another start with the same parameters."""
    dumping, request = begun(), ApiDumpRequest(mode="range", scope=("NN_Conv2d_0", "NN_Conv2d_1"))
    for _ in range(2):
        dumping.start(request)
        framework.train("Conv2d", "Conv2d")
        dumping.stop()
    assert sent(running) == [(0, "NN_Conv2d_0_forward"), (0, "NN_Conv2d_1_forward")]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            ApiDumpRequest(mode="list", scope=("NN_ReLU_7",)),
            ["no call was named NN_ReLU_7", "no call is in scope"],
        ),
        (ApiDumpRequest(mode="range", scope=("NN_Conv2d_0", "NN_x_1")), ["NN_x_1, was not made"]),
        (
            ApiDumpRequest(mode="api_list", scope=("gelu",)),
            ["contains 'gelu'", "no call is in scope"],
        ),
    ],
)
def test_stop_logs_calls_that_were_not_made(begun, framework, caplog, request_, words):
    dumping = begun()
    dumping.start(request_)
    framework.train()
    dumping.stop()
    assert all(any(part in text for text in caplog.messages) for part in words)


def test_overflow_check_dumps_every_call_and_says_so(begun, framework, running, caplog):
    """Release 1.0.18 has the parameter, and uses it with MindSpore alone."""
    dumping = begun()
    for _ in range(2):
        dumping.start(ApiDumpRequest(overflow_check=True))
        framework.train()
        dumping.stop()
    assert len(sent(running)) == 2
    said = [record for record in caplog.records if "overflow_check is not used" in record.message]
    assert [record.levelname for record in said] == ["WARNING", "INFO"][: len(said)]
    assert said


def test_start_has_the_parameters_of_the_last_release_in_their_order():
    parameters = list(signature(migrator.api_dump_start).parameters.values())
    assert [each.name for each in parameters] == [
        *("mode", "scope", "dump_type", "filter_data", "filter_stack"),
        *("overflow_check", "statistic_category"),
    ]
    assert {each.kind for each in parameters} == {Parameter.POSITIONAL_OR_KEYWORD}


def test_script_steps_replace_detected_steps(begun: Begin, framework, running):
    """`rankdump.step` takes the place of what is seen of calls and optimizers."""
    dumping = begun()
    dumping.start(ApiDumpRequest())
    for number in (10, 20):
        rankdump.step(number)
        framework.train()
        framework.train()
    dumping.stop()
    assert [step for step, _ in sent(running)] == [10, 10, 20, 20]


def test_first_start_removes_an_earlier_dump(begun: Begin, framework, tmp_path):
    """By the first start after init, not by those that follow."""
    old = tmp_path / "dump/rank0/torch_api_dump/old.npy"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    dumping = begun()
    assert old.exists()
    dumping.start(ApiDumpRequest())
    assert not old.exists()
    dumping.stop()
    old.parent.mkdir()
    old.write_text("of the window before")
    dumping.start(ApiDumpRequest())
    assert old.exists()


def test_second_init_detaches_the_earlier_model(begun: Begin, framework, running, tmp_path):
    dumping = begun()
    dumping.start(ApiDumpRequest())
    framework.train()
    dumping.init(Net(), ApiDumpSetting(str(tmp_path / "other"), compare_statedict=True))
    assert framework.hooks[0].detached
    assert framework.removed == 1
    assert framework.saved == [tmp_path / "other/rank0"]
    assert sent(running) == [(0, "NN_Conv2d_0_forward")]
    dumping.start(ApiDumpRequest())
    framework.train()
    dumping.stop()
    assert sent(running)[1:] == [(0, "NN_Conv2d_0_forward")]
    roots = [plan_from_json(opened.plan_json).output.root for opened in running.agent.opened]
    assert roots == [str(tmp_path / "dump"), str(tmp_path / "other")]


class StartingLease:
    """A share in a daemon that begins to serve when it is told to."""

    started_it = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.serving = threading.Event()

    def is_starting(self) -> bool:
        return not self.serving.is_set()

    def close(self) -> str:
        return ""


def test_steps_do_not_wait_for_the_agent_that_was_started(running, framework, tmp_path):
    """It is started by init, and what was dumped until it serves is kept for it."""
    leases: list[StartingLease] = []

    def start(job_id: str, merges: bool) -> Any:
        leases.append(StartingLease(running.address))
        return leases[-1]

    agents = AgentFinder(start, lambda address: "no agent runs on this host")
    dumping = ApiDumpController({}, agents, framework_of=lambda net: framework)
    dumping.init(Net(), ApiDumpSetting(str(tmp_path)))
    assert len(leases) == 1
    dumping.start(ApiDumpRequest())
    framework.train()
    framework.train()
    assert running.agent.opened == []
    leases[0].serving.set()
    dumping.stop()
    assert sent(running) == [(0, "NN_Conv2d_0_forward"), (1, "NN_Conv2d_1_forward")]
    assert len(leases) == 1


def test_missing_agent_is_logged_with_the_lost_calls(framework, tmp_path, caplog):
    """Training goes on, the stop counts, and an earlier dump is not removed for it."""
    old = tmp_path / "rank0/torch_api_dump/old.npy"
    old.parent.mkdir(parents=True)
    old.write_text("old")

    def refuse(job_id: str, merges: bool) -> Any:
        raise UnavailableError("click is not installed")

    agents = AgentFinder(refuse, lambda address: "no agent runs on this host")
    dumping = ApiDumpController({}, agents, framework_of=lambda net: framework)
    dumping.init(Net(), ApiDumpSetting(str(tmp_path)))
    dumping.start(ApiDumpRequest())
    framework.train()
    framework.train()
    dumping.stop()
    why = "no agent runs on this host, and click is not installed"
    assert [
        text.startswith(f"rankdump: {why}: training continues") for text in caplog.messages
    ] == [
        False,
        True,
        False,
        False,
    ]
    assert caplog.messages[2] == f"rankdump: 2 tensors were not dumped: 2 not_taken_by_agent; {why}"
    assert old.exists()


def test_internal_failure_does_not_reach_the_script(framework, tmp_path, caplog):
    def fail(model: Any) -> int:
        raise ZeroDivisionError

    framework.without_dropout = fail
    dumping = ApiDumpController({}, framework_of=lambda net: framework)
    dumping.init(Net(), ApiDumpSetting(str(tmp_path)))
    assert "internal error" in caplog.text


@pytest.mark.parametrize("call", [migrator.api_dump_start, migrator.api_dump_stop])
def test_start_and_stop_before_init_raise_runtime_error(call, monkeypatch):
    monkeypatch.setattr(migrator, "_process", ApiDumpController({}))
    with pytest.raises(RuntimeError, match="api_dump_init was not called"):
        call()


def test_init_rejects_wrong_arguments(monkeypatch):
    monkeypatch.setattr(migrator, "_process", ApiDumpController({}))
    with pytest.raises(TypeError, match=r"net .* is not allowed; allowed: torch.nn.Module"):
        migrator.api_dump_init(object())
    with pytest.raises(TypeError, match="output_path: 7 is not allowed; allowed: a path"):
        migrator.api_dump_init(object(), 7)  # pyright: ignore[reportArgumentType]


def test_migrator_is_an_attribute_of_rankdump():
    """`import rankdump as ts` is all that a script changes."""
    assert rankdump.migrator is migrator
    for name in ("api_dump_init", "api_dump_start", "api_dump_stop", "api_dump_compare"):
        assert callable(getattr(rankdump.migrator, name))
