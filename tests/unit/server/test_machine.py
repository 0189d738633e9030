"""Cores, memory, priority and host id of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankdumpd.server import machine


class FakeControlGroups:
    """Control groups as in the kernel's files; this process is in `unit/inner`."""

    def __init__(self, folder: Path) -> None:
        self.root, self.own = folder / "groups", folder / "own"
        (self.root / "unit/inner").mkdir(parents=True)
        self.own.write_text("0::/unit/inner\n")

    def say(self, group: str, name: str, text: str) -> None:
        (self.root / group / name).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path) -> FakeControlGroups:
    return FakeControlGroups(tmp_path)


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, 2),
        ({"unit/inner": "max 100000"}, 2),
        ({"unit/inner": "100000 100000"}, 1),
        ({"unit": "100000 100000"}, 1),
        ({"unit/inner": "150000 100000"}, 2),
        ({"unit/inner": "20000 100000"}, 1),
        ({"unit/inner": "1600000 100000"}, 2),
        ({"unit/inner": ""}, 2),
    ],
)
def test_count_cores_respects_affinity_and_quotas(
    groups: FakeControlGroups, monkeypatch: pytest.MonkeyPatch, limits, cores: int
):
    """The lowest of the affinity and of every quota around the process, at least 1."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    for group, text in limits.items():
        groups.say(group, "cpu.max", text)
    assert machine.count_cores(groups.root, groups.own) == cores


def test_read_memory_respects_control_groups(groups: FakeControlGroups):
    total = machine.read_memory_bytes(groups.root, groups.own)
    assert total > 64 << 20
    groups.say("unit/inner", "memory.max", "max")
    assert machine.read_memory_bytes(groups.root, groups.own) == total
    groups.say("unit", "memory.max", str(64 << 20))
    assert machine.read_memory_bytes(groups.root, groups.own) == 64 << 20


def test_resources_without_control_groups_are_those_of_machine(tmp_path: Path):
    nowhere = tmp_path / "nowhere"
    assert machine.count_cores(nowhere, nowhere) == len(os.sched_getaffinity(0))
    assert machine.read_memory_bytes(nowhere, nowhere) > 64 << 20


def test_lower_priority_never_raises_it_again():
    """In a separate process, because a lowered priority cannot be raised."""
    code = """
import os
from rankdumpd.server.machine import lower_priority
found = []
for niceness in (0, 10, 5, 19):
    lower_priority(niceness)
    found.append(os.getpriority(os.PRIO_PROCESS, 0))
print(found)
"""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str([max(n, before) for n in (0, 10, 10, 19)])


def test_host_id_depends_on_boot_machine_and_network(tmp_path: Path):
    """Each part changes the id; it is empty if nothing can be read."""

    def host(boot: str, machine_id: str, network: str) -> str:
        own = tmp_path / f"{boot}{machine_id}{network}"
        (own / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (own / "self/ns").mkdir(parents=True, exist_ok=True)
        (own / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (own / "machine-id").write_text(f"{machine_id}\n")
        if not (own / "self/ns/net").is_symlink():
            (own / "self/ns/net").symlink_to(network)
        return machine.read_host_id(own, own / "machine-id")

    hosts = [("a", "m", "net:[1]"), ("b", "m", "net:[1]"), ("a", "n", "net:[1]")]
    hosts += [("a", "m", "net:[2]")]
    assert len({host(*each) for each in hosts}) == len(hosts)
    assert host(*hosts[0]) == host(*hosts[0])
    assert machine.read_host_id(tmp_path / "none", tmp_path / "none") == ""
    assert len(machine.read_host_id()) == 8
