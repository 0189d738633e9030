"""`Session.replay`: a step that runs two times is in the dump once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agent_double import RunningFakeAgent, bodies, event_names, plan
from torch import Tensor, nn

import rankdump
from rankdump._core.plan import BlackBoxSettings, IterationSelection
from rankdump._core.rank_identity import RankIdentity
from rankdump._core.run_card import parse_card
from rankdump._recorder.step_overhead import StepOverhead


class Noise(nn.Module):
    def __init__(self, make: Callable[[], float]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return x + self.make()


def train(
    session: rankdump.Session, *, replayed: bool, noise: Callable[[], float] = lambda: 0.0
) -> list[float]:
    """Three steps of two micro-batches each; the step in the middle is replayed."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), Noise(noise), nn.Dropout(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    session.attach(model)

    def step(scale: float) -> float:
        optimizer.zero_grad()
        total = 0.0
        for index in range(2):
            session.microbatch(index)
            loss = model(torch.full((2, 3), scale + index)).square().sum()
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        session.note(loss=total, calls=1)
        return total

    losses: list[float] = []
    for number in range(3):
        session.step(number)
        is_twice = replayed and number == 1
        losses.append(session.replay(step, scale=1.0 + number) if is_twice else step(1.0 + number))
    return losses


def run(
    running: RunningFakeAgent, folder: Path, *, black_box: bool = False, **about: Any
) -> tuple[list[float], list[tuple[object, ...]], rankdump.Session]:
    """Train with a session; return the losses, and what reached the agent."""
    running.agent.frames.clear()
    settings = BlackBoxSettings(8 if black_box else 0)
    made = replace(plan(folder), black_box=settings)
    session = rankdump.Session(made, agent=running.address, identity=RankIdentity())
    losses = train(session, **about)
    session.close()
    records = [
        (r.iteration, r.op_name, r.side, r.slot, r.microbatch, r.data)
        for r in bodies(running, "record")
    ]
    return losses, records, session


@pytest.mark.parametrize("black_box", [False, True])
def test_replayed_step_is_in_the_dump_once(
    running: RunningFakeAgent, tmp_path: Path, black_box: bool
) -> None:
    """Law: same records, events, losses and notes as without a replay."""
    plain, records, session = run(running, tmp_path, replayed=False, black_box=black_box)
    assert session.last_replay is None
    events = event_names(running)
    replayed, again, session = run(running, tmp_path, replayed=True, black_box=black_box)
    assert replayed == plain
    assert len(records) > 100
    assert again == records
    assert event_names(running) == events
    report = session.last_replay
    assert report is not None
    assert (report.is_deterministic, report.iteration, report.rank) == (True, 1, 0)
    cards = [parse_card(end.card) for end in bodies(running, "iteration_end")]
    noted = [{k: v for k, v in each.numbers.items() if "rate" not in k} for each in cards]
    assert noted[1] == {
        "loss": repr(plain[1]),
        "calls": "1.0",
        "replay.differing": "0.0",
    }
    assert noted[2] == {"loss": repr(plain[2]), "calls": "1.0"}
    (end,) = bodies(running, "session_end")
    assert "1 step was replayed with the same digests" in [*end.notes]


def test_step_that_differs_is_logged_and_noted(
    running: RunningFakeAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter = itertools.count()
    with caplog.at_level(logging.WARNING, "rankdump"):
        _, _, session = run(running, tmp_path, replayed=True, noise=lambda: 1e-3 * next(counter))
    text = str(session.last_replay)
    assert "Default/network-Sequential/1-Noise/Noise-op0: its inputs agree, and output.0" in text
    assert f"{__file__}:" in text
    assert any(text in message for message in caplog.messages)
    (end,) = bodies(running, "session_end")
    assert text.replace(" on rank 0:", ":") in [*end.notes]


def test_iteration_that_is_not_dumped_is_replayed_too(
    running: RunningFakeAgent, tmp_path: Path
) -> None:
    made = plan(tmp_path)
    selection = replace(made.selection, iterations=IterationSelection("2", ((2, 2),)))
    made = replace(made, selection=selection)
    with rankdump.Session(made, agent=running.address, identity=RankIdentity()) as session:
        train(session, replayed=True)
        report = session.last_replay
    assert report is not None
    assert report.is_deterministic
    assert {r.iteration for r in bodies(running, "record")} == {2}


def test_error_of_the_step_propagates(running: RunningFakeAgent, tmp_path: Path) -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        raise ZeroDivisionError

    with rankdump.Session(plan(tmp_path), agent=running.address) as session:
        session.attach(nn.Linear(1, 1))
        with pytest.raises(ZeroDivisionError):
            session.replay(step)
        assert session.last_replay is None
        # The next replay is one again.
        session.replay(lambda: calls.append(2))
    assert calls == [1, 2, 2]


def test_step_without_a_plan_or_a_model_runs_once(
    running: RunningFakeAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    off = rankdump.Session()
    off.attach(nn.Linear(1, 1))
    assert off.replay(lambda: calls.append(1) or "done") == "done"
    with rankdump.Session(plan(tmp_path), agent=running.address) as session:
        assert session.replay(lambda: calls.append(2) or 5) == 5
        session.attach(nn.Linear(1, 1))

        def nested() -> None:
            session.replay(lambda: calls.append(3))

        session.replay(nested)
    assert calls == [1, 2, 3, 3]
    assert any("no torch model is attached" in message for message in caplog.messages)


def test_session_that_the_step_closes_stays_closed(
    running: RunningFakeAgent, tmp_path: Path
) -> None:
    session = rankdump.Session(plan(tmp_path), agent=running.address)
    session.attach(nn.Linear(1, 1))
    session.replay(session.close)
    assert (session.closed, session.active) == (True, False)


def test_time_of_a_replay_is_not_that_of_dumping(
    running: RunningFakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a rank that limits its overhead does not keep less because a step was replayed."""
    taken: list[tuple[int, bool]] = []

    def end_iteration(self: StepOverhead, iteration: int, *, dumped: bool) -> None:
        taken.append((iteration, dumped))

    monkeypatch.setattr(StepOverhead, "end_iteration", end_iteration)
    made = plan(tmp_path, max_step_overhead=0.5)
    with rankdump.Session(made, agent=running.address, identity=RankIdentity()) as session:
        train(session, replayed=True)
    assert taken == [(0, True), (1, False), (2, True)]


def test_one_object_beside_the_model_needs_no_list(
    running: RunningFakeAgent, tmp_path: Path
) -> None:
    own = torch.Generator()
    with rankdump.Session(plan(tmp_path), agent=running.address) as session:
        session.attach(nn.Linear(1, 1))
        session.replay(lambda: torch.rand(1, generator=own), also=own)
        assert session.last_replay is not None
        assert session.last_replay.is_deterministic
