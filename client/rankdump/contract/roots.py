"""Whether a tree may stand where somebody wants it: in one of the folders that are set. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankdump.contract.errors import RefusedError


def folders(joined: str) -> tuple[str, ...]:
    """Return the folders of a setting, which are joined by `:`; none stands for any.

    >>> folders("/var/dump:/data/dumps/")
    ('/var/dump', '/data/dumps/')
    >>> folders("")
    ()
    """
    return tuple(filter(None, joined.split(":")))


def check(root: str, allowed: Sequence[str], *, resolve: Callable[[str], str]) -> None:
    """Raise RefusedError where a root is not in one of the folders that are allowed.

    `resolve` follows links as the system would, also in a path of which nothing is there yet:
    a link inside an allowed folder may lead out of it. It is not asked where all is allowed.

    >>> check("/tmp/a", ["/var/dump", "/data"], resolve=str)
    Traceback (most recent call last):
    rankdump.contract.errors.RefusedError: tree '/tmp/a' is outside of /var/dump and /data
    """
    if not allowed:
        return
    real = resolve(root)
    if any(_within(real, resolve(folder)) for folder in allowed):
        return
    really = f", which is {real!r}," if real != root else ""
    raise RefusedError(f"tree {root!r}{really} is outside of {' and '.join(allowed)}")


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
