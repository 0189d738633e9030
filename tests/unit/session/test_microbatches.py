"""Micro-batches that a script declares with `Session.microbatch`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.agent_double import RunningFakeAgent, bodies, event_names, plan

import rankdump
from rankdump._core.rank_identity import RankIdentity
from rankdump._session.default_session import replace_default_session
from rankdump._session.rank_session import MAX_MICROBATCH, parse_microbatch

ONE = np.ones(1, "f4")


def started(running: RunningFakeAgent, folder: Path) -> rankdump.Session:
    return rankdump.Session(plan(folder), agent=running.address, identity=RankIdentity())


def numbers(running: RunningFakeAgent) -> list[tuple[str, int | None]]:
    return [(record.op_name, record.microbatch) for record in bodies(running, "record")]


def test_arrays_have_the_number_that_was_declared_last(running, tmp_path):
    """Law: none before the first, and `step` ends the last one."""
    with started(running, tmp_path) as session:
        session.dump("Add", "a", "input", 0, ONE)
        for index in (0, 3):
            session.microbatch(index)
            session.dump("Add", "b", "input", 0, ONE)
        session.step()
        session.dump("Add", "c", "input", 0, ONE)
    assert numbers(running) == [("a", None), ("b", 0), ("b", 3), ("c", None)]
    assert [record.phase for record in bodies(running, "record")] == [""] * 4


def test_microbatch_ends_the_open_operator(running, tmp_path):
    """Law: an operator that is dumped in two micro-batches in a row ran twice."""
    with started(running, tmp_path) as session:
        for index in range(2):
            session.microbatch(index)
            session.dump("Add", "a", "input", 0, ONE)
            session.dump("Add", "a", "output", 0, ONE)
    assert event_names(running) == ["a", "a"]


def test_constants_and_parameters_belong_to_no_microbatch(running, tmp_path):
    with started(running, tmp_path) as session:
        session.microbatch(1)
        session.constant("table", ONE)
        session.dump("Parameter", "weight", "output", 0, ONE)
        session.dump("MatMul", "mm", "output", 0, ONE)
    assert numbers(running) == [("table", None), ("weight", None), ("mm", 1)]


@pytest.mark.parametrize(
    ("index", "number"),
    [(0, 0), (MAX_MICROBATCH, MAX_MICROBATCH), (np.int64(7), 7), (torch.tensor(5), 5)],
)
def test_whole_numbers_of_any_type_are_taken(index, number):
    assert parse_microbatch(index) == number


class Unprintable:
    def __repr__(self) -> str:
        return "x" * 1000


@pytest.mark.parametrize(
    ("index", "given"),
    [
        (-1, "-1"),
        (MAX_MICROBATCH + 1, "4294967296"),
        (True, "True"),
        (1.0, "1.0"),
        ("2", "'2'"),
        (None, "None"),
        (torch.tensor(1.5), "tensor(1.5000)"),
        (np.bool_(True), repr(np.bool_(True))),
        (Unprintable(), "x" * 60),
    ],
)
def test_wrong_number_is_one_line_and_changes_nothing(running, tmp_path, caplog, index: Any, given):
    caplog.set_level(logging.WARNING, "rankdump")
    with started(running, tmp_path) as session:
        session.microbatch(2)
        session.microbatch(index)
        session.microbatch(index)
        session.dump("Add", "a", "input", 0, ONE)
    assert numbers(running) == [("a", 2)]
    allowed = f"microbatch({given}) is not allowed; allowed: a whole number from 0 to 4294967295"
    assert [message for message in caplog.messages if "microbatch" in message] == [
        f"rankdump: {allowed}"
    ]


def test_microbatch_without_a_plan_does_nothing():
    rankdump.Session().microbatch("anything")  # pyright: ignore[reportArgumentType]


def test_function_declares_a_microbatch_of_the_default_session(running, tmp_path):
    session = started(running, tmp_path)
    replace_default_session(lambda: session)
    try:
        rankdump.microbatch(4)
    finally:
        replace_default_session(None)
    session.dump("Add", "a", "input", 0, ONE)
    session.close()
    assert numbers(running) == [("a", 4)]
