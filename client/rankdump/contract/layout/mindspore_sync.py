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
from functools import lru_cache

from rankdump.contract.key import Side, TensorKey, sanitised
from rankdump.contract.layout.file_name import NUMBER, FileKind, FileName
from rankdump.contract.layout.place import NAME_MAX_BYTES, Place, folder_name
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

# Read from the right: a parameter's name has dots in the old names, and the element type is new.
_FIELDS = re.compile(
    rf"(?P<op_type>[^./]+)\.(?P<op_name>[^/]+)\.(?P<task>{NUMBER})\.(?P<stream>{NUMBER})"
    rf"\.(?P<stamp>{NUMBER})\.(?P<side>input|output)\.(?P<slot>{NUMBER})"
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
    return f"{rank_folder(rank)}/{folder_name(net_name)}/{graph}/{last}"


def readable(key: TensorKey, profile: Profile = DEFAULT_PROFILE) -> TensorKey:
    """Return the key as a file name of that profile carries it: what reading it back gives."""
    return key._replace(
        net_name=folder_name(key.net_name),
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
        f".{key.side.value}.{key.slot}.{key.tensor_format}{element}"
    )
    return shortened(tensor_folder(key), name, f".npy{suffix}")


def shortened(folder: str, stem: str, suffix: str) -> Place:
    """Return the place of a file, under a number where its name would be too long."""
    name = stem + suffix
    if len(name.encode()) <= NAME_MAX_BYTES:
        return Place(folder, name)
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return Place(folder, f"{int.from_bytes(digest, 'big')}{suffix}", mapped_from=name)


@lru_cache(maxsize=_REMEMBERED)
def _operator(op_type: str, op_name: str, profile: Profile) -> str:
    return f"{sanitised(op_type) or '_'}.{spelt(op_type, op_name, profile)}"


def file_of(name: str) -> FileName | None:
    """Return what the name of a tensor's file says; None when it is none of this tree's."""
    fields = _FIELDS.fullmatch(name)
    if fields is None:
        return None
    op_type, op_name, task, stream, stamp, side, slot, laid, element = fields.groups("")
    meant = Side.INPUT if side == "input" else Side.OUTPUT
    # By place: names take a fifth of the time that a name takes to be read.
    numbers = int(task), int(stream), int(stamp)
    return FileName(FileKind.TENSOR, op_type, op_name, *numbers, meant, int(slot), laid, element)
