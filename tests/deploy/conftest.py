"""The package, installed on a copy of this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.host_copy import ROOT, HostCopy, copied


@pytest.fixture(scope="session")
def package() -> Path:
    (package,) = (ROOT / "build" / "deb").glob("rankdump_*.deb")
    return package


@pytest.fixture(scope="session")
def pages() -> Path:
    (package,) = (ROOT / "build" / "deb").glob("rankdump-web_*.deb")
    return package


@pytest.fixture(scope="session")
def host(
    package: Path, pages: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostCopy]:
    at = tmp_path_factory.mktemp("host")
    with copied(at, package, pages) as holder:
        try:
            host = HostCopy(holder, at)
            # A service that is installed is not to be started: nothing here is process 1.
            host.run("sh", "-c", "printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d")
            host.run("chmod", "+x", "/usr/sbin/policy-rc.d")
            host.run("dpkg", "--install", "/tmp/rankdump.deb")
            yield host
        finally:
            holder.kill()
