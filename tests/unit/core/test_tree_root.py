"""Roots of trees and the folders that are allowed for them."""

from __future__ import annotations

import pytest

from rankdump._core.tree_root import check_root, split_roots
from rankdump.errors import RejectedError

LINKS = {"/var/dump/link": "/etc", "/data": "/mnt/disk"}


def resolve(path: str) -> str:
    return LINKS.get(path, path)


@pytest.mark.parametrize("root", ["/var/dump", "/var/dump/a/b", "/mnt/disk", "/mnt/disk/job"])
def test_check_root_accepts_roots_inside(root: str):
    check_root(root, split_roots("/var/dump:/data"), resolve=resolve)


@pytest.mark.parametrize("root", ["/var", "/var/dumpling", "/etc", "/", "/var/dump/link"])
def test_check_root_rejects_roots_outside(root: str):
    """The line names the tree, where it really is, and the folders as they are set."""
    with pytest.raises(RejectedError) as refused:
        check_root(root, split_roots("/var/dump:/data"), resolve=resolve)
    assert repr(root) in str(refused.value)
    assert repr(resolve(root)) in str(refused.value)
    assert str(refused.value).endswith("is outside of /var/dump and /data")


def test_check_root_may_allow_the_whole_system():
    check_root("/etc/anything", split_roots("/"), resolve=resolve)


def test_check_root_without_folders_resolves_nothing():
    check_root("/etc", split_roots(""), resolve=lambda path: 1 / 0)  # type: ignore[return-value]
