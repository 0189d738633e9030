"""Which trees stand in a folder that is allowed."""

from __future__ import annotations

import pytest

from rankdump.contract.errors import RefusedError
from rankdump.contract.roots import check, folders

LINKS = {"/var/dump/link": "/etc", "/data": "/mnt/disk"}


def resolve(path: str) -> str:
    return LINKS.get(path, path)


@pytest.mark.parametrize("root", ["/var/dump", "/var/dump/a/b", "/mnt/disk", "/mnt/disk/job"])
def test_inside(root: str):
    check(root, folders("/var/dump:/data"), resolve=resolve)


@pytest.mark.parametrize("root", ["/var", "/var/dumpling", "/etc", "/", "/var/dump/link"])
def test_outside(root: str):
    """The line names the tree, where it really is, and the folders as they are set."""
    with pytest.raises(RefusedError) as refused:
        check(root, folders("/var/dump:/data"), resolve=resolve)
    assert repr(root) in str(refused.value)
    assert repr(resolve(root)) in str(refused.value)
    assert str(refused.value).endswith("is outside of /var/dump and /data")


def test_the_whole_system_may_be_allowed():
    check("/etc/anything", folders("/"), resolve=resolve)


def test_without_folders_nobody_is_asked():
    check("/etc", folders(""), resolve=lambda path: 1 / 0)  # type: ignore[return-value]
