"""rankdump: dumps the inputs and outputs of every operator of every rank of a training job.

A training script needs two lines. RANKDUMP_CONFIG, or else MINDSPORE_DUMP_CONFIG, names the
configuration file; without either, both lines cost nothing.

    session = rankdump.attach(model)
    for i, batch in enumerate(batches):
        session.step(i)

`rankdump.open(path)` reads a dump, and `rankdump.compare(a, b)` compares two of them.
Exceptions are in `rankdump.errors`.
"""

import importlib
import os
from typing import TYPE_CHECKING

# gRPC reads this variable when it is loaded: its log lines, such as those at forks, are noise to
# users.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Without this variable gRPC starts its threads again in every forked child, such as a worker of a
# data loader, and some of these children crash. No child uses the session of its parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"
"""The version of the package, of its two commands and of the Debian package."""

__all__ = [
    "Session",
    "attach",
    "compare",
    "dump_start",
    "dump_stop",
    "layout",
    "limit",
    "microbatch",
    "note",
    "open",
    "set_dump",
    "step",
]

if TYPE_CHECKING:
    from rankdump import acl as acl
    from rankdump import control as control
    from rankdump import integrations as integrations
    from rankdump import migrator as migrator
    from rankdump import tf as tf
    from rankdump._analysis.compare.comparison import compare as compare
    from rankdump._session import Session as Session
    from rankdump._session import attach as attach
    from rankdump._session import dump_start as dump_start
    from rankdump._session import dump_stop as dump_stop
    from rankdump._session import layout as layout
    from rankdump._session import limit as limit
    from rankdump._session import microbatch as microbatch
    from rankdump._session import note as note
    from rankdump._session import set_dump as set_dump
    from rankdump._session import step as step

    # The name `open` is used as in h5py and similar libraries.
    from rankdump.reader import open as open  # noqa: A004
else:
    _MODULE_OF_NAME = {"compare": "_analysis.compare.comparison", "open": "reader"}
    """Modules of the public names that are not in `_session`."""
    _MODULES = ("acl", "control", "integrations", "migrator", "tf")

    def __getattr__(name: str) -> object:
        """Load a public name on first use: readers of trees need neither sessions nor gRPC."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(
            importlib.import_module(f"{__name__}.{_MODULE_OF_NAME.get(name, '_session')}"), name
        )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
