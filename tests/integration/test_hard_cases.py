"""Cases that break other dump tools: training and dump stay intact.

The numbers of the job equal those of a run without rankdump, bit for bit, and its dump is complete.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rankdump.reader import load, status, walk

JOB = Path(__file__).parent / "jobs" / "hard_cases.py"
CONFIG = """{
  "common_dump_settings": {
    "dump_mode": 0, "path": "/tmp/unused", "net_name": "Hard", "iteration": "all",
    "saved_data": "tensor", "input_output": 0, "kernels": [], "support_device": [0]
  },
  "e2e_dump_settings": {"enable": true, "trans_flag": true}
}"""
pytestmark = [pytest.mark.slow]


def command(folder: Path, *cases: str) -> list[str]:
    """Return the job under `rankdump run`, with its tree in folder/tree."""
    config = folder / "data_dump.json"
    config.write_text(CONFIG)
    run = [sys.executable, "-m", "rankdump", "run", "--config", str(config)]
    return [*run, "--output", str(folder / "tree"), "--", sys.executable, str(JOB), *cases]


def job(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **environ})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, subprocess.CompletedProcess[str], Path]:
    """All cases without and with rankdump, and the tree of the second run."""
    folder = tmp_path_factory.mktemp("hard")
    plain = job(sys.executable, str(JOB))
    assert plain.returncode == 0, plain.stderr
    return plain.stdout, job(*command(folder)), folder / "tree"


@pytest.fixture(scope="module")
def tensors(whole):
    """The tensors of each case by its name, as (entry, array) in the order of observation."""
    plain, _, tree = whole
    names = [line.split()[0] for line in plain.splitlines()]
    found = {name: [] for name in names}
    for entry in walk(tree).entries:
        found[names[entry.key.iteration]].append((entry, load(entry)))
    return found


def test_losses_are_bit_identical_with_dump(whole):
    plain, dumped, _ = whole
    assert dumped.returncode == 0, dumped.stderr
    assert dumped.stdout == plain


def test_every_iteration_is_balanced(whole):
    plain, _, tree = whole
    iterations = status(tree).iterations
    assert len(iterations) == len(plain.splitlines())
    assert all(i.complete and i.is_balanced for i in iterations)
    assert not any(
        reason for i in iterations for reason in i.dropped if reason != "unsupported_sparse"
    ), [(i.iteration, i.dropped) for i in iterations if i.dropped]


def pick(found, op_type: str, side: str, scope: str = "Default/"):
    return [
        (entry, array)
        for entry, array in found
        if entry.key.op_type == op_type
        and entry.key.side.value == side
        and entry.op_name.startswith(scope)
    ]


def test_bfloat16_and_float8_are_stored_as_float32(tensors):
    for name, wanted in (("bfloat16", "bfloat16"), ("float8", "float8_e4m3fn")):
        typed = [a for e, a in tensors[name] if e.record is not None and e.record.dtype == wanted]
        assert typed, name
        assert all(array.dtype == np.float32 for array in typed)


def test_keyword_arguments_and_dict_outputs_are_recorded(tensors):
    arguments = {e.record.argument for e, _ in tensors["keywords_and_dicts"] if e.record}
    assert {"kwargs.mask", "kwargs.options.bias", "out.hidden"} <= arguments


def test_in_place_operator_has_its_original_input(tensors):
    inputs = pick(tensors["in_place"], "ReLU", "input")
    outputs = pick(tensors["in_place"], "ReLU", "output")
    assert len(inputs) == len(outputs) == 2
    for (_, before), (_, after) in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(np.maximum(before, 0), after)
        assert (before < 0).any()


@pytest.mark.parametrize("name", ["checkpoint_reentrant", "checkpoint_not_reentrant"])
def test_recomputed_calls_are_marked_and_keep_their_numbers(tensors, name):
    again = {e.op_name for e, _ in tensors[name] if e.op_name.startswith("Recompute/")}
    first = {e.op_name for e, _ in tensors[name] if e.op_name.startswith("Default/")}
    assert again
    assert {op.replace("Recompute/", "", 1) for op in again} <= first
    assert not any(op.endswith("-op1") for op in first | again)


def test_calls_of_threads_are_not_mixed(tensors):
    """Input and output of one call have the same number, whichever other threads call the
    module.
    """
    inputs = {e.op_name: a for e, a in pick(tensors["four_threads"], "ReLU", "input")}
    outputs = {e.op_name: a for e, a in pick(tensors["four_threads"], "ReLU", "output")}
    assert len(inputs) == 20
    assert inputs.keys() == outputs.keys()
    for name, before in inputs.items():
        np.testing.assert_array_equal(np.maximum(before, 0), outputs[name])


def test_repeated_forwards_are_numbered_without_data_workers(tensors):
    for name, calls in (("accumulated_gradients", 3), ("inference", 3), ("loader_workers", 2)):
        numbers = Counter(e.op_name for e, _ in pick(tensors[name], "ReLU", "output"))
        assert sorted(op[-3:] for op in numbers) == [f"op{n}" for n in range(calls)], name
        assert set(numbers.values()) == {1}


def test_tensors_of_function_transforms_are_recorded(tensors):
    assert pick(tensors["functional_transforms"], "Linear", "output")
    assert pick(tensors["without_source"], "Linear", "output")


def test_unhandled_exception_leaves_a_readable_dump(tmp_path):
    done = job(*command(tmp_path, "unhandled"))
    assert done.returncode == 1
    assert "the user's own bug" in done.stderr
    found = walk(tmp_path / "tree").entries
    assert len(found) > 10
    for entry in found:
        load(entry)


def test_killed_rank_loses_no_staged_tensor(tmp_path):
    done = job(*command(tmp_path, "killed"), HARD_CASES_KILL="1")
    plain = job(sys.executable, str(JOB), "killed")
    assert done.returncode == 128 + 9, done.stderr
    assert done.stdout.splitlines() == plain.stdout.splitlines()[:3]
    iterations = [i for i in status(tmp_path / "tree").iterations if i.complete]
    assert [i.iteration for i in iterations] == [0, 1, 2]
    assert all(i.is_balanced and not i.dropped for i in iterations)
    assert "before the session was closed" in done.stderr


def test_full_disk_drops_tensors_and_training_continues(tmp_path):
    """On a real file system of 1 MiB, tensors that do not fit are counted by their reason."""
    tree = tmp_path / "tree"
    tree.mkdir()
    arguments = command(tmp_path, "large")
    mount = f'mount -t tmpfs -o size=1m tmpfs {tree} && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, "sh", *arguments]
    done = job(*inside)
    plain = job(sys.executable, str(JOB), "large")
    if "unshare" in done.stderr and os.environ.get("CI") != "true":
        pytest.skip("no user namespaces here to mount a small file system in")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "disk_full" in done.stderr or "disk_low" in done.stderr, done.stderr
