"""MindSpore's synchronous tree, in the names of any profile. Pure.

    rank_{rank}/{net}/{graph}/{iteration}|constants/
        {op_type}.{op_name}.{task}.{stream}.{timestamp}.{side}.{slot}.{format}[.{element}].npy[.zst]

Source: mindspore-dump.md 2.1-2.5, 2.10 and 9.1. A name over 255 bytes is replaced by a number and
remembered in `mapping.csv`; MindSpore draws that number at random, here it is a digest of the
name, so that resending a record lands on the same file.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from functools import lru_cache

from rankdump.contract.key import Side, TensorKey, sanitised
from rankdump.contract.layout.place import NAME_MAX_BYTES, Place
from rankdump.contract.layout.profile import DEFAULT_PROFILE, Profile

METADATA_FOLDER = ".dump_metadata"
MANIFEST_FOLDER = ".dump_metadata/manifest"
ORDER_FOLDER = "execution_order"
GRAPH_FOLDER = "graphs"
CONSTANT_FOLDER = "constants"
STATISTIC_FILE = "statistic.csv"
PARAMETER = "Parameter"
"""Operator type of weights and constants."""
# Some 5 MB, of the 100 that an idle agent may take.
_REMEMBERED = 1 << 14

# Plain digits without leading zeros: exactly one text per number, and none too long for int().
_NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_FOLDER = re.compile(
    rf"rank_({_NUMBER})/([A-Za-z0-9_-]+)/({_NUMBER})/({_NUMBER}|{CONSTANT_FOLDER})/([^/]+)"
)
# Read from the right: a parameter's name has dots in the old names, and the element type is new.
_FIELDS = re.compile(
    rf"(?P<op_type>[^./]+)\.(?P<op_name>[^/]+)\.(?P<task>{_NUMBER})\.(?P<stream>{_NUMBER})"
    rf"\.(?P<stamp>{_NUMBER})\.(?P<side>input|output)\.(?P<slot>{_NUMBER})"
    r"\.(?P<format>[^./]+)(?:\.(?P<element>[^./]+))?\.npy(?:\.zst)?"
)


def rank_folder(rank: int) -> str:
    """Return the folder of a rank."""
    return f"rank_{rank}"


def tensor_folder(key: TensorKey) -> str:
    """Return the folder that holds a tensor: its iteration's, or its graph's constants."""
    where = key.graph, key.iteration
    return folder_of(key.rank, key.net_name, *where, constant=key.constant)


def folder_of(rank: int, net_name: str, graph: int, iteration: int, *, constant: bool) -> str:
    """Return the folder of a graph's tensors of one iteration, or of its constants."""
    last = CONSTANT_FOLDER if constant else iteration
    return f"{rank_folder(rank)}/{net_name}/{graph}/{last}"


def readable(key: TensorKey, profile: Profile = DEFAULT_PROFILE) -> TensorKey:
    """Return the key as a file name of that profile carries it: what reading it back gives."""
    return replace(
        key,
        op_type=sanitised(key.op_type) or "_",
        op_name=spelt(key.op_type, key.op_name, profile),
        iteration=0 if key.constant else key.iteration,
        element=sanitised(key.element) if profile.element_token else "",
    )


def spelt(op_type: str, op_name: str, profile: Profile) -> str:
    """Return an operator's name as file names and tables of that profile spell it."""
    if not profile.short_names:
        return sanitised(op_name) or "_"
    short = op_name.rpartition("/")[2]
    if op_type == PARAMETER:
        return ".".join(map(sanitised, short.split("."))) or "_"
    return sanitised(short) or "_"


def place_of(key: TensorKey, suffix: str, profile: Profile = DEFAULT_PROFILE) -> Place:
    """Return the place of a record whose codec appends `suffix` (empty or `.zst`) to `.npy`."""
    operator = _operator(key.op_type, key.op_name, profile)
    element = f".{sanitised(key.element)}" if key.element and profile.element_token else ""
    name = (
        f"{operator}.{key.task}.{key.stream}.{key.timestamp_us}"
        f".{key.side.value}.{key.slot}.{key.tensor_format}{element}.npy{suffix}"
    )
    folder = tensor_folder(key)
    if len(name.encode()) <= NAME_MAX_BYTES:
        return Place(folder, name)
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return Place(folder, f"{int.from_bytes(digest, 'big')}.npy{suffix}", mapped_from=name)


@lru_cache(maxsize=_REMEMBERED)
def _operator(op_type: str, op_name: str, profile: Profile) -> str:
    return f"{sanitised(op_type) or '_'}.{spelt(op_type, op_name, profile)}"


def key_of(path: str) -> TensorKey | None:
    """Return the key a relative path stands for; None when it is not a tensor of this tree.

    For a long name pass the one that `mapping.csv` remembers, in its folder.
    """
    where = _FOLDER.fullmatch(path)
    fields = _FIELDS.fullmatch(where[5]) if where else None
    if where is None or fields is None:
        return None
    constant = where[4] == CONSTANT_FOLDER
    return TensorKey(
        rank=int(where[1]),
        net_name=where[2],
        graph=int(where[3]),
        iteration=0 if constant else int(where[4]),
        timestamp_us=int(fields["stamp"]),
        op_type=fields["op_type"],
        op_name=fields["op_name"],
        side=Side(fields["side"]),
        slot=int(fields["slot"]),
        task=int(fields["task"]),
        stream=int(fields["stream"]),
        tensor_format=fields["format"],
        constant=constant,
        element=fields["element"] or "",
    )
