"""Jobs without `rankdump run` and without an agent: python, torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.data_dumps import write_data_dump

from rankdump.reader import read_order, status

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ARRAYS = """
import numpy as np, rankdump
{begin}
for step in range(2):
    session.step(step)
    session.dump("Op", "Default/Op-op0", "output", 0, np.full(3, step, np.float32))
session.close()
"""
ACL = """
import torch, rankdump
print("codes", rankdump.acl.init_dump(), rankdump.acl.set_dump({file!r}))
model = torch.nn.Linear(2, 2)
rankdump.attach(model)
model(torch.ones(1, 2))
print("codes", rankdump.acl.finalize_dump())
"""
RANKS = """
import torch, torch.distributed as dist, rankdump
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
session = rankdump.attach(model)
for step in range(2):
    session.step(step)
    model(torch.ones(2, 4) * (dist.get_rank() + step)).sum().backward()
    dist.all_reduce(model.weight.grad)
session.close()
dist.destroy_process_group()
"""
WITHOUT_THE_EXTRA = "import sys\nsys.modules['click'] = None\n"


def configuration(folder: Path, tree: Path, **rankdump: object) -> Path:
    return write_data_dump(folder, tree, own=rankdump)


class PlainJob:
    """A script, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, temp: Path) -> None:
        self.folder, self.temp = folder, temp

    def start(self, script: str, *launcher: str, **environ: str) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(script)
        command = [*(launcher or (sys.executable,)), str(path)]
        own = {"TMPDIR": str(self.temp), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            env={**os.environ, **own, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *launcher: str, **environ: str) -> tuple[str, str]:
        """Return the output of a script; it must leave no file behind."""
        process = self.start(script, *launcher, **environ)
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        assert not [*self.temp.glob("rankdump*")]
        return out, err


@pytest.fixture
def job(tmp_path: Path, socket_folder: Path) -> PlainJob:
    return PlainJob(tmp_path, socket_folder)


def kept(tree: Path) -> list[tuple[int, int, int]]:
    """Return rank, iteration and tensors of every complete iteration."""
    found = status(tree).iterations
    return sorted((i.rank, i.iteration, i.stored + i.linked) for i in found if i.complete)


BEGINNINGS = {
    "environment": "session = rankdump.Session.from_environment()",
    "object": "session = rankdump.Session(rankdump.tf.DumpConfig(True, {tree!r}))",
}


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_plain_script_starts_an_embedded_agent(job, begin):
    """Everything is dumped; one line names the agent, which ends with the script."""
    tree = job.folder / "dump"
    tree.mkdir()
    script = ARRAYS.format(begin=BEGINNINGS[begin].format(tree=str(tree)))
    config = configuration(job.folder, tree)
    environ = {"RANKDUMP_CONFIG": str(config)} if begin == "environment" else {}
    _, err = job.run(script, **environ)
    assert kept(tree) == [(0, 0, 1), (0, 1, 1)]
    (line,) = err.splitlines()
    assert re.fullmatch(
        r"rankdump: no agent runs on this host: started an agent for this job at "
        rf"unix:{job.temp}/rankdump-of-\S+/agent.sock; it ends with the job",
        line,
    )


@pytest.mark.parametrize("variable", ["RANKDUMP_CONFIG", "MINDSPORE_DUMP_CONFIG"])
def test_script_with_a_wrong_configuration_runs_without_dump(job, variable):
    """One line names the fault, and no later line names another cause."""
    tree = job.folder / "dump"
    config = configuration(job.folder, tree)
    config.write_text(config.read_text().replace('"Net"', '"' + "n" * 256 + '"'))
    script = ARRAYS.format(begin=BEGINNINGS["environment"]) + "print('ran')"
    out, err = job.run(script, **{variable: str(config)})
    assert out == "ran\n"
    (line,) = err.splitlines()
    assert line.startswith(f"rankdump: nothing will be dumped: {config}: common_dump_settings.net_")
    assert line.endswith("is not allowed; allowed: 1 to 255 letters, digits, _ and -")
    assert not tree.exists()


@pytest.mark.torch
def test_acl_calls_start_an_embedded_agent(job):
    file = job.folder / "acl.json"
    file.write_text(json.dumps({"dump": {"dump_path": str(job.folder), "dump_op_switch": "on"}}))
    out, err = job.run(ACL.format(file=str(file)))
    assert out == "codes 0 0\ncodes 0\n", err
    assert [*job.folder.glob("*/0/Linear/*/0/*Linear*")]


@pytest.mark.torch
def test_acl_calls_return_an_error_without_an_agent(job):
    """The extra `daemon` is missing, or the configured agent does not answer."""
    file = job.folder / "acl.json"
    file.write_text(json.dumps({"dump": {"dump_path": str(job.folder), "dump_op_switch": "on"}}))
    script = ACL.format(file=str(file))
    out, err = job.run(WITHOUT_THE_EXTRA + script)
    assert out == "codes 0 500000\ncodes 0\n"
    assert err.count("pip install 'rankdump[daemon]'") == 1
    out, err = job.run(script, RANKDUMP_AGENT=f"unix:{job.temp}/nobody.sock")
    assert out == "codes 0 0\ncodes 500000\n"
    assert "3 tensors were not dumped" in err


def test_job_without_the_extra_logs_its_losses_in_one_line(job):
    script = ARRAYS.format(begin=BEGINNINGS["environment"])
    config = configuration(job.folder, job.folder / "dump")
    _, err = job.run(WITHOUT_THE_EXTRA + script, RANKDUMP_CONFIG=str(config))
    *_, line = err.splitlines()
    assert line == (
        "rankdump: 2 tensors were not dumped: 2 not_taken_by_agent; no agent runs on this host, "
        "and no daemon can be started, because click is not installed; "
        "pip install 'rankdump[daemon]' installs it"
    )


def test_configuration_can_forbid_the_embedded_agent(job):
    script = ARRAYS.format(begin=BEGINNINGS["environment"])
    config = configuration(job.folder, job.folder / "dump", embedded=False)
    _, err = job.run(script, RANKDUMP_CONFIG=str(config))
    assert (
        "2 tensors were not dumped: 2 not_taken_by_agent; no agent runs on this host, and " in err
    )
    assert "rankdump.embedded is false" in err
    assert not (job.folder / "dump").exists()


@pytest.mark.torch
def test_ranks_of_plain_torchrun_share_an_agent(job):
    """Although the run id is `none`, they are one job; each message is logged once."""
    tree = job.folder / "dump"
    config = configuration(job.folder, tree)
    port = ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    _, err = job.run(RANKS, *TORCHRUN, *port, RANKDUMP_CONFIG=str(config))
    assert err.count("started an agent for this job") == 1
    counts = kept(tree)
    assert [row[:2] for row in counts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row[2] for row in counts)
    order = read_order(tree)
    assert not order.findings
    assert {entry.ranks for entry in order.entries() if "AllReduce" in entry.name} == {(0, 1)}
    (job_id,) = {session.job_id for session in status(tree).sessions}
    assert job_id != "none"


@pytest.mark.torch
def test_two_jobs_of_plain_torchrun_have_their_own_trees(job):
    """Each job has its own tree and its own order."""
    trees = [job.folder / name for name in "ab"]
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    processes = []
    for tree in trees:
        tree.mkdir()
        environ = {"RANKDUMP_CONFIG": str(configuration(tree, tree / "dump"))}
        processes.append(job.start(RANKS, *TORCHRUN, *port, **environ))
    for process in processes:
        _, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        assert "were not dumped" not in err
    for tree in trees:
        assert [row[:2] for row in kept(tree / "dump")] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        order = read_order(tree / "dump")
        assert not order.findings
        assert {entry.iteration for entry in order.entries()} == {0, 1}
