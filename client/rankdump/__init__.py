"""rankdump: what every operator of every rank read and wrote, collected outside training.

A training script needs two lines. The plan comes from the file that RANKDUMP_CONFIG, else
MINDSPORE_DUMP_CONFIG, names; without one, both lines cost nothing.

    session = rankdump.attach(model)
    for i, batch in enumerate(batches):
        session.step(i)

What was written is read back with `rankdump.open(path)`, and two dumps are compared with
`rankdump.compare(a, b)`.
"""

import importlib
import os
from typing import TYPE_CHECKING

from rankdump.session import Session, attach, dump_start, dump_stop, limit, set_dump, step

# Read when gRPC is loaded: its own lines, as on each fork, are no news for whoever runs the script.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__all__ = [
    "Session",
    "attach",
    "compare",
    "dump_start",
    "dump_stop",
    "limit",
    "open",
    "set_dump",
    "step",
]

if TYPE_CHECKING:
    from rankdump import acl as acl
    from rankdump import migrator as migrator
    from rankdump import tf as tf
    from rankdump.diff.run import compare as compare

    # The public name is the one that `h5py` and others of its kind have.
    from rankdump.reader import open as open  # noqa: A004
else:

    def __getattr__(name: str) -> object:
        """Load what reads trees, and what speaks with CANN's words, when somebody asks for it."""
        if name == "open":
            from rankdump import reader

            return reader.open
        if name == "compare":
            from rankdump.diff.run import compare

            return compare
        if name in ("acl", "migrator", "tf"):
            return importlib.import_module(f"rankdump.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
