"""MindSpore's synchronous tree, names as version 2.3 writes them. Pure.

    rank_{rank}/{net}/{graph}/{iteration}/
        {op_type}.{op_name}.{task}.{stream}.{timestamp}.{input|output}.{slot}.{format}.npy[.zst]

Source: mindspore-dump.md 2.1-2.3 and 2.10. A name over 255 bytes is replaced by a number and
remembered in `mapping.csv`; MindSpore draws that number at random, here it is a digest of the
name, so that resending a record lands on the same file.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from rankdump.contract.key import Side, TensorKey

NAME_MAX_BYTES = 255
MAPPING_FILE = "mapping.csv"
METADATA_FOLDER = ".dump_metadata"
MANIFEST_FOLDER = ".dump_metadata/manifest"
ORDER_FOLDER = "execution_order"
GLOBAL_ORDER_FOLDER = "global_execution_order"

# Plain digits without leading zeros: exactly one text per number, and none too long for int().
_NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_FOLDER = re.compile(rf"rank_({_NUMBER})/([A-Za-z0-9_-]+)/({_NUMBER})/({_NUMBER})/([^/]+)")
_FIELDS = re.compile(
    rf"(?P<op_type>[^./]+)\.(?P<op_name>[^./]+)\.(?P<task>{_NUMBER})\.(?P<stream>{_NUMBER})"
    rf"\.(?P<stamp>{_NUMBER})\.(?P<side>input|output)\.(?P<slot>{_NUMBER})"
    r"\.(?P<format>[^./]+)\.npy(?:\.zst)?"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record's file stands."""

    folder: str
    """Relative to the root, with `/`."""
    name: str
    """Name on disk."""
    mapped_from: str = ""
    """The full name, when it was too long to be the name on disk."""

    @property
    def path(self) -> str:
        """Relative to the root."""
        return f"{self.folder}/{self.name}"


def rank_folder(rank: int) -> str:
    """Return the folder of a rank."""
    return f"rank_{rank}"


def iteration_folder(rank: int, net_name: str, graph: int, iteration: int) -> str:
    """Return the folder that holds an iteration's tensors."""
    return f"{rank_folder(rank)}/{net_name}/{graph}/{iteration}"


def place_of(key: TensorKey, suffix: str) -> Place:
    """Return the place of a record whose codec appends `suffix` (empty or `.zst`) to `.npy`."""
    clean = key.sanitised()
    name = (
        f"{clean.op_type}.{clean.op_name}.{clean.task}.{clean.stream}.{clean.timestamp_us}"
        f".{clean.side.value}.{clean.slot}.{clean.tensor_format}.npy{suffix}"
    )
    folder = iteration_folder(clean.rank, clean.net_name, clean.graph, clean.iteration)
    if len(name.encode()) <= NAME_MAX_BYTES:
        return Place(folder, name)
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return Place(folder, f"{int.from_bytes(digest, 'big')}.npy{suffix}", mapped_from=name)


def key_of(path: str) -> TensorKey | None:
    """Return the key a relative path stands for; None when it is not a tensor of this tree.

    For a long name pass the one that `mapping.csv` remembers, in its folder.
    """
    where = _FOLDER.fullmatch(path)
    fields = _FIELDS.fullmatch(where[5]) if where else None
    if where is None or fields is None:
        return None
    return TensorKey(
        rank=int(where[1]),
        net_name=where[2],
        graph=int(where[3]),
        iteration=int(where[4]),
        timestamp_us=int(fields["stamp"]),
        op_type=fields["op_type"],
        op_name=fields["op_name"],
        side=Side(fields["side"]),
        slot=int(fields["slot"]),
        task=int(fields["task"]),
        stream=int(fields["stream"]),
        tensor_format=fields["format"],
    )
