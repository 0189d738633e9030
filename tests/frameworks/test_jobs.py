"""Whole jobs with the real frameworks: the same losses bit for bit, nothing dropped, and iterations
that are steps of the optimizer.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from .conftest import (
    FrameworkJobs,
    FrameworkRun,
    find_microbatches,
    list_calls,
    read_parameter_digests,
)

NOTICE = "dumps nothing, because there is no configuration"
NUMBERED = ("losses", "gradients", "parameters", "steps")


def check_run(plain: FrameworkRun, dumped: FrameworkRun, *, prefix: str = "") -> None:
    """Check that both runs computed the same, and that the dump holds what they computed."""
    assert [pick(each) for each in dumped.journals] == [pick(each) for each in plain.journals]
    assert "internal error" not in dumped.printed + plain.printed
    (row,) = re.findall(r"^ *(?:all|0) +(\d+)/(\d+) .* (\d+)$", dumped.printed, re.MULTILINE)[-1:]
    steps = sum(each["steps"] for each in dumped.journals)
    assert tuple(map(int, row)) == (steps, steps, 0), dumped.printed
    for rank, journal in enumerate(dumped.journals):
        found = read_parameter_digests(dumped, rank, prefix=prefix)
        assert found["gradients"] == journal["gradients"]
        assert found["parameters"] == journal["parameters"]


def pick(journal: dict[str, Any]) -> dict[str, Any]:
    return {name: journal[name] for name in NUMBERED}


def test_hf_trainer_dumps_steps_of_the_optimizer(jobs: FrameworkJobs) -> None:
    """Two batches a step; evaluations after steps 1 and 3, and one before the first step."""
    plain, dumped = jobs.run_plain("hf_trainer.py"), jobs.run_dumped("hf_trainer.py")
    check_run(plain, dumped)
    assert plain.printed.count(NOTICE) == 1
    assert NOTICE not in dumped.printed
    trained, evaluated = ["GPT2Model-op0", "GPT2Model-op1"], ["GPT2Model-op2", "GPT2Model-op3"]
    both = trained + evaluated
    calls = list_calls(dumped, "transformer-GPT2Model/GPT2Model")
    assert calls == {0: trained, 1: both, 2: trained, 3: both}
    assert find_microbatches(dumped) == {step: {0, 1} for step in range(4)}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_trainer_dumps_steps_of_the_optimizer(jobs: FrameworkJobs, package: str) -> None:
    """Five batches an epoch, two a step, and a validation of two batches after the third."""
    plain = jobs.run_plain("lightning_trainer.py", package, 1)
    dumped = jobs.run_dumped("lightning_trainer.py", package, 1)
    check_run(plain, dumped)
    counts = {s: len(c) for s, c in list_calls(dumped, "net-TinyNet/TinyNet").items()}
    assert counts == {0: 2, 1: 4, 2: 1, 3: 2, 4: 4, 5: 1}
    batches = {0: {0, 1}, 1: {0, 1}, 2: {0}, 3: {0, 1}, 4: {0, 1}, 5: {0}}
    assert find_microbatches(dumped) == batches


@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_lightning_trainer_dumps_the_same_steps_on_two_ranks(
    jobs: FrameworkJobs, launcher: str
) -> None:
    """Lightning calls `training_step` through DistributedDataParallel, which is a call of it.

    The ranks that it starts itself have no variable with their rank.
    """
    words = ("lightning_trainer.py", "lightning.pytorch", 2)
    starts_ranks = launcher == "lightning"
    plain = jobs.run_plain(*words, ranks=2, starts_ranks=starts_ranks)
    dumped = jobs.run_dumped(*words, ranks=2, starts_ranks=starts_ranks)
    check_run(plain, dumped)
    assert dumped.journals[0]["gradients"] == dumped.journals[1]["gradients"]
    assert dumped.journals[0]["losses"] != dumped.journals[1]["losses"]
    for rank in (0, 1):
        batches = find_microbatches(dumped, rank=rank)
        assert batches == {0: {0, 1}, 1: {0, 1}, 2: {0}, 3: {0, 1}, 4: {0, 1}, 5: {0}}


def test_fabric_dumps_steps_of_the_optimizer(jobs: FrameworkJobs) -> None:
    """Two batches a step, and an evaluation after each step, which belongs to it."""
    plain, dumped = jobs.run_plain("fabric_loop.py"), jobs.run_dumped("fabric_loop.py")
    check_run(plain, dumped)
    calls = ["TinyNet-op0", "TinyNet-op1", "TinyNet-op2"]
    assert list_calls(dumped, "network-TinyNet/TinyNet") == dict.fromkeys(range(3), calls)
    assert find_microbatches(dumped) == {step: {0, 1} for step in range(3)}


def test_accelerate_dumps_accumulated_steps(jobs: FrameworkJobs) -> None:
    """Five batches in `accumulate`, two a step; an evaluation after the second."""
    plain = jobs.run_plain("accelerate_loop.py", "accumulate")
    dumped = jobs.run_dumped("accelerate_loop.py", "accumulate")
    check_run(plain, dumped)
    counts = {s: len(c) for s, c in list_calls(dumped, "network-TinyNet/TinyNet").items()}
    assert counts == {0: 3, 1: 2, 2: 1}
    assert find_microbatches(dumped) == {0: {0, 1}, 1: {0, 1}, 2: {0}}


def test_accelerate_dumps_steps_without_accumulate(jobs: FrameworkJobs) -> None:
    """Five batches, each with a step of its own; an evaluation after the second."""
    plain = jobs.run_plain("accelerate_loop.py", "plain")
    dumped = jobs.run_dumped("accelerate_loop.py", "plain")
    check_run(plain, dumped)
    counts = {s: len(c) for s, c in list_calls(dumped, "network-TinyNet/TinyNet").items()}
    assert counts == {0: 1, 1: 2, 2: 1, 3: 1, 4: 1}


def test_accelerate_dumps_the_same_steps_on_two_ranks(jobs: FrameworkJobs) -> None:
    """The buckets of gradients are in the order of both ranks, once a step."""
    plain = jobs.run_plain("accelerate_loop.py", "accumulate", ranks=2)
    dumped = jobs.run_dumped("accelerate_loop.py", "accumulate", ranks=2)
    check_run(plain, dumped)
    assert dumped.journals[0]["parameters"] == dumped.journals[1]["parameters"]
    for rank in (0, 1):
        assert find_microbatches(dumped, rank=rank) == {0: {0, 1}, 1: {0, 1}, 2: {0}}


def test_hf_trainer_dumps_the_same_steps_on_two_ranks(jobs: FrameworkJobs) -> None:
    plain = jobs.run_plain("hf_trainer.py", ranks=2)
    dumped = jobs.run_dumped("hf_trainer.py", ranks=2)
    check_run(plain, dumped)
    assert plain.printed.count(NOTICE) == 1
    assert dumped.journals[0]["gradients"] == dumped.journals[1]["gradients"]


def test_deepspeed_dumps_steps_of_the_engine(jobs: FrameworkJobs) -> None:
    """Two batches a step, and an evaluation after the first step."""
    plain = jobs.run_plain("deepspeed_engine.py", ranks=1)
    dumped = jobs.run_dumped("deepspeed_engine.py", ranks=1)
    check_run(plain, dumped)
    counts = {s: len(c) for s, c in list_calls(dumped, "network-TinyNet/TinyNet").items()}
    assert counts == {0: 3, 1: 2, 2: 2}
    assert find_microbatches(dumped) == {step: {0, 1} for step in range(3)}


def test_torchtitan_dumps_steps_of_the_trainer(jobs: FrameworkJobs) -> None:
    """Two batches a step; torchtitan's first step has the number 1, and is iteration 0."""
    plain = jobs.run_plain("titan_trainer.py", ranks=1)
    dumped = jobs.run_dumped("titan_trainer.py", ranks=1)
    check_run(plain, dumped)
    calls = ["TokenNet-op0", "TokenNet-op1"]
    assert list_calls(dumped, "network-TokenNet/TokenNet") == dict.fromkeys(range(3), calls)
    assert find_microbatches(dumped) == {step: {0, 1} for step in range(3)}
