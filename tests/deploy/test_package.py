"""The installed package at work: an agent as its own user, as under its unit."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from deploy.host_copy import ROOT, HostCopy

WAIT_S = 60
CONFIG = "/etc/rankdump/rankdumpd.toml"
FIRST_DUMP = "/usr/share/doc/rankdump/first_dump.py"
PYTHON = "/usr/lib/rankdump/bin/python3"


def calls_of(group: str) -> set[str]:
    """Return the system calls of a group of systemd's."""
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True
    )
    names = [line.strip() for line in listed.stdout.splitlines()[1:]]
    found: set[str] = set()
    for name in names:
        if name.startswith("@"):
            found |= calls_of(name)
        elif name and not name.startswith("#"):
            found.add(name)
    return found


def calls_allowed(unit: Path) -> set[str]:
    """Return what the filter of a unit lets through."""
    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", unit.read_text(), re.MULTILINE):
        forbids, words = line.startswith("~"), line.lstrip("~").split()
        calls = set().union(*map(calls_of, words))
        allowed = allowed - calls if forbids else allowed | calls
    return allowed


class PackagedAgent:
    """An agent of the package under its unit's filter, and a service manager for it."""

    def __init__(self, host: HostCopy, **environ: str) -> None:
        self.heard: list[str] = []
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = host.path / "run" / "notify"
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))
        path.chmod(0o666)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        variables = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1000000", **environ}
        words = ["env", *(f"{key}={value}" for key, value in variables.items())]
        words += ["/usr/bin/python3", "/tmp/filtered.py", "/tmp/calls", "rankdumpd", "agent"]
        self.process = subprocess.Popen(
            host.command(*words, "--config", CONFIG, user="rankdump"),
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_heard(self, word: str, times: int = 1) -> None:
        def count() -> int:
            return sum(word in said for said in self.heard)

        with self._changed:
            assert self._changed.wait_for(lambda: count() >= times, WAIT_S), self.end()

    def end(self) -> tuple[int, str]:
        """Ask it to stop; return its status and its log."""
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while said := self._socket.recv(4096):
            with self._changed:
                self.heard.append(said.decode())
                self._changed.notify_all()


@pytest.fixture
def booted(host: HostCopy) -> HostCopy:
    """The copy with the folders of a boot, and a user whose jobs dump."""
    host.run("systemd-tmpfiles", "--create", "rankdump.conf")
    host.run("sh", "-c", "id alice || useradd --create-home --groups rankdump alice")
    calls = calls_allowed(ROOT / "deploy" / "rankdump-agent.service")
    (host.path / "tmp" / "calls").write_text("\n".join(sorted(calls)))
    filtered = Path(__file__).with_name("filtered.py").read_text()
    (host.path / "tmp" / "filtered.py").write_text(filtered)
    return host


@contextlib.contextmanager
def running(host: HostCopy, **environ: str) -> Generator[PackagedAgent]:
    with contextlib.closing(PackagedAgent(host, **environ)) as agent:
        yield agent


def first_dump(host: HostCopy) -> str:
    """Run the commands of the README's first dump as a user; return what they say."""
    text = (ROOT / "deploy" / "README.md").read_text()
    section = text.split("## First dump")[1]
    script = section.split("```sh\n")[1].split("```")[0]
    assert "first_dump.py" in script
    return host.run("sh", "-ec", f"cd /home/alice; {script}", user="alice")


def test_package_runs_from_first_start_to_stop(booted: HostCopy):
    """Its own user, one dump by the README, signs of life, a reload, an orderly end."""
    with running(booted) as agent:
        agent.wait_heard("READY=1")
        owner = Path(f"/proc/{agent.process.pid}/status").read_text()
        uid = booted.run("id", "-u", "rankdump").strip()
        assert re.search(rf"^Uid:\t{uid}\t{uid}\t{uid}", owner, re.MULTILINE)
        assert re.search(r"^Seccomp:\t2$", owner, re.MULTILINE)
        said = first_dump(booted)
        assert "Dense" in said
        agent.wait_heard("WATCHDOG=1", times=3)
        settings = booted.path / CONFIG.lstrip("/")
        before = settings.read_text()
        settings.write_text(before.replace("[coordinator]", "keep_free_bytes = 1\n[coordinator]"))
        agent.process.send_signal(signal.SIGHUP)
        agent.wait_heard("READY=1", times=2)
        settings.write_text(before)
        status, log = agent.end()
    assert status == 0, log
    assert "changed: agent.keep_free_bytes" in log
    assert "Traceback" not in log
    assert any("STATUS=drained, 0 items are left" in said for said in agent.heard)
    # Nobody but the group may look.
    folder = booted.run("stat", "-c", "%a %U %G", "/var/dump/first").split()
    assert folder[1:] == ["rankdump", "rankdump"]
    assert folder[0].endswith("0")


def test_package_of_pages_has_what_pages_need(booted: HostCopy):
    """And nothing that the other package has: they are installed into one folder."""
    find = "from rankdumpd.composition import find_missing_module as find; print(find() or 'none')"
    ask = [PYTHON, "-P", "-c", find]
    assert booted.run(*ask).strip() != "none"
    booted.run("dpkg", "--install", "/tmp/rankdump-web.deb")
    assert booted.run(*ask).strip() == "none"
    first_dump_rows = "SELECT count(*) AS tensors FROM tensors"
    assert "tensors" in booted.run("rankdump", "query", "/var/dump/first", first_dump_rows)
    booted.run("dpkg", "--remove", "rankdump-web")
    assert booted.run(*ask).strip() != "none"


def test_package_removal_leaves_only_settings_and_dumps(booted: HostCopy):
    """Removed, it takes its files with it; settings and dumps stay."""
    booted.run("dpkg", "--remove", "rankdump")
    assert not (booted.path / "usr/lib/rankdump").exists()
    assert (booted.path / CONFIG.lstrip("/")).exists()
    booted.run("dpkg", "--install", "/tmp/rankdump.deb")
