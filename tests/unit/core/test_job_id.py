"""Id of a job: the same for all its ranks, and different for every other job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rankdump._core.rank_identity import JobLauncher, derive_job_id, find_launcher, is_multi_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
ON_TWO_HOSTS = {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}
LAUNCHER = JobLauncher(4711, 1234, "boot")


def named(environ: dict[str, str], **about: object) -> str:
    given = {"world_size": 4, "tree": "/data/a", "launcher": LAUNCHER, "host": "node7.cluster"}
    return derive_job_id(environ, **(given | about))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANKDUMP_JOB_ID": "a", "SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "b"}, "a"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", **TORCHRUN}, "77.2"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "TORCHELASTIC_RUN_ID": "b"}, "77.2"),
        # Two runs in one batch script, whose step has a number of Slurm's own or none.
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291"}, "77"),
        ({"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "b"}, "77-b"),
        ({"PMIX_NAMESPACE": "prterun-node7-12@1"}, "prterun-node7-12@1"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "b"}, "b"),
    ],
)
def test_job_id_prefers_names_in_a_fixed_order(environ, expected):
    assert named(environ) == expected


def test_job_id_of_torchrun_on_one_host_is_its_launcher():
    """`none` is no id: two jobs at once, and one after another, are two."""
    one = named(TORCHRUN)
    assert one.startswith("node7-4711-")
    assert one == named({**TORCHRUN, "RANK": "0"})
    others = [
        named(TORCHRUN, tree="/data/b"),
        named(TORCHRUN, launcher=JobLauncher(4712, 1234, "boot")),
        named(TORCHRUN, launcher=JobLauncher(4711, 9999, "boot")),
        named(TORCHRUN, launcher=JobLauncher(4711, 1234, "after a reboot")),
    ]
    assert len({one, *others}) == 5


def test_job_id_of_torchrun_on_several_hosts_is_its_master():
    """Each host has a launcher of its own, so only what all ranks know is in the id."""
    one = named(ON_TWO_HOSTS)
    assert one.startswith("node7-29500-")
    assert one == named(ON_TWO_HOSTS, launcher=JobLauncher(1, 2), host="node8")
    assert one != named({**ON_TWO_HOSTS, "MASTER_PORT": "29501"})
    assert one != named(ON_TWO_HOSTS, tree="/data/b")


@pytest.mark.parametrize(
    ("environ", "size", "expected"),
    [
        ({}, 1, False),
        ({}, 4, False),
        (TORCHRUN, 4, False),
        (ON_TWO_HOSTS, 4, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, True),
        ({"SLURM_NNODES": "2"}, 8, True),
        # torchrun on one host of an allocation of two.
        ({**TORCHRUN, "SLURM_NNODES": "2"}, 4, False),
        # No launcher says how many are here: only the address of the master does.
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, 2, False),
        ({"MASTER_ADDR": "localhost"}, 2, False),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "1"}, 2, True),
        ({"MS_SCHED_HOST": "10.0.0.7", "MS_SCHED_PORT": "8118"}, 2, True),
        ({"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118"}, 2, False),
    ],
)
def test_is_multi_host_reads_the_launchers_variables(environ, size, expected):
    assert is_multi_host(environ, world_size=size) is expected


SHOW = """
import os
from rankdump._core.rank_identity import find_launcher
print(find_launcher(os.environ, world_size=2).pid)
"""


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]])
def test_find_launcher_skips_wrappers_of_ranks(wrapper):
    """A shell or numactl around each rank has the rank's variables."""
    ranks = [
        subprocess.run(
            [*wrapper, sys.executable, "-c", SHOW],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        for rank in range(2)
    ]
    assert ranks == [str(os.getpid())] * 2


def test_find_launcher_of_ranks_that_the_first_one_starts_is_that_one():
    """As Lightning starts them: all have LOCAL_RANK and NODE_RANK in the end, and none has RANK."""
    about = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    starter = (
        f"import os, subprocess, sys; os.environ.update({about}); code = {SHOW!r}\n"
        "print(os.getpid()); sys.stdout.flush(); exec(code); sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', code], check=True)"
    )
    environ = {name: text for name, text in os.environ.items() if name not in {"RANK", *about}}
    done = subprocess.run(
        [sys.executable, "-c", starter], env=environ, capture_output=True, text=True, check=True
    )
    own, *found = done.stdout.split()
    assert found == [own, own]


def test_find_launcher_of_a_single_process_is_itself():
    assert find_launcher({"RANK": "0"}, world_size=1).pid == os.getpid()
    assert find_launcher({}, world_size=4).pid == os.getppid()
    # A torchrun of one rank may start that again.
    assert find_launcher(TORCHRUN, world_size=1).pid == os.getppid()
