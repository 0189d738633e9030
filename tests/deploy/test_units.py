"""Units, users and folders of the package, checked by systemd itself."""

from __future__ import annotations

import pytest
from deploy.host_copy import ROOT, HostCopy

SERVICES = ["rankdump-agent.service", "rankdump-coordinator.service"]
UNITS = "/lib/systemd/system"


def test_units_pass_systemd_verification(host: HostCopy):
    """Run where the package is installed: commands have to be there. Not a word is a pass."""
    said = host.run("systemd-analyze", "verify", *[f"{UNITS}/{name}" for name in SERVICES])
    assert [line for line in said.splitlines() if "rankdump" in line] == []


@pytest.mark.parametrize("service", SERVICES)
def test_units_have_low_exposure(host: HostCopy, service: str):
    """2.0 of 10 at most; the command fails above its threshold."""
    said = host.run(
        "systemd-analyze", "security", "--offline=true", "--threshold=20", f"{UNITS}/{service}"
    )
    assert "OK" in said.splitlines()[-1]


def test_package_creates_users_and_folders(host: HostCopy):
    """The package made the user, its group, and the folders with their modes."""
    assert "rankdump" in host.run("id", "rankdump")
    # Made at boot, which this copy never had.
    host.run("systemd-tmpfiles", "--create", "rankdump.conf")
    modes = {"/run/rankdump": "750", "/var/lib/rankdump": "750", "/var/dump": "2750"}
    for folder, mode in modes.items():
        found = host.run("stat", "-c", "%a %U %G", folder).split()
        assert found == [mode, "rankdump", "rankdump"], folder


def test_package_settings_are_valid(host: HostCopy):
    """Every key is known, and what differs from the defaults is what the units need."""
    config = ("--config", "/etc/rankdump/rankdumpd.toml", "--check-config")
    agent = host.run("rankdumpd", "agent", *config)
    assert 'state_dir = "/var/lib/rankdump-coordinator"' in agent
    assert 'roots = "/var/dump"' in agent
    # A conffile: an upgrade keeps what the operator wrote.
    assert "/etc/rankdump/rankdumpd.toml" in host.run(
        "dpkg-query", "-W", "-f", "${Conffiles}", "rankdump"
    )
    assert (ROOT / "deploy" / "host.toml").read_text() == host.run("cat", config[1])
