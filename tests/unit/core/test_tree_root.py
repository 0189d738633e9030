"""Which trees stand in a folder that is allowed."""

from __future__ import annotations

import pytest

from rankdump._core.tree_root import check_root, split_roots
from rankdump.errors import RejectedError

LINKS = {"/var/dump/link": "/etc", "/data": "/mnt/disk"}


def resolve(path: str) -> str:
    return LINKS.get(path, path)


@pytest.mark.parametrize("root", ["/var/dump", "/var/dump/a/b", "/mnt/disk", "/mnt/disk/job"])
def test_inside(root: str):
    check_root(root, split_roots("/var/dump:/data"), resolve=resolve)


@pytest.mark.parametrize("root", ["/var", "/var/dumpling", "/etc", "/", "/var/dump/link"])
def test_outside(root: str):
    """The line names the tree, where it really is, and the folders as they are set."""
    with pytest.raises(RejectedError) as refused:
        check_root(root, split_roots("/var/dump:/data"), resolve=resolve)
    assert repr(root) in str(refused.value)
    assert repr(resolve(root)) in str(refused.value)
    assert str(refused.value).endswith("is outside of /var/dump and /data")


def test_the_whole_system_may_be_allowed():
    check_root("/etc/anything", split_roots("/"), resolve=resolve)


def test_without_folders_nobody_is_asked():
    check_root("/etc", split_roots(""), resolve=lambda path: 1 / 0)  # type: ignore[return-value]
