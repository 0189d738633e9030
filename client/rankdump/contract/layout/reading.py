"""A file of any tree to the tensors it may hold, by its path alone. Pure.

`key_of` is the inverse of what every layout writes; a file that holds several tensors has a key
for each side and slot.
"""

from __future__ import annotations

from collections.abc import Collection

from rankdump.contract.key import Side, TensorKey
from rankdump.contract.layout import api_tree, mindspore_sync
from rankdump.contract.layout.file_name import (
    ACLNN,
    FileKind,
    FileName,
    parsed,
    parsed_exception,
)
from rankdump.contract.layout.folders import Folder, Names, folder_at
from rankdump.contract.layout.long_names import LongNames

_SYNCHRONOUS_FORMAT = "DefaultFormat"


def key_of(path: str) -> TensorKey | None:
    """Return the key of a file that holds one tensor; None when it is no such file.

    For a name that was too long pass the one that `mapping.csv` remembers, in its folder.
    """
    parent, _, name = path.rpartition("/")
    folder = folder_at(parent)
    file = file_in(folder, name) if folder is not None else None
    if folder is None or file is None or file.kind not in (FileKind.TENSOR, FileKind.MEMBER):
        return None
    return key_in(folder, file, file.side, file.slot)


def file_in(folder: Folder, name: str) -> FileName | None:
    """Return what a name in a folder says; None when it is no dumped file's."""
    if folder.names is Names.RANK:
        return _in_rank(name)
    if folder.names in (Names.API, Names.API_TABLES):
        return api_tree.file_of(name) if folder.names is Names.API else None
    if folder.names is Names.EXCEPTION:
        return parsed_exception(name)
    file = parsed(name) if folder.names is not Names.NONE else None
    if folder.names is Names.CAPTURED and (file is None or file.number is None):
        return None
    return file


def absent_in(folder: Folder, names: LongNames, there: Collection[str]) -> list[str]:
    """Return the names on disk that the `mapping.csv` of a folder has and that are not there.

    Files of single tensors of an operator go when they are joined, and their rows stay.
    """
    files = ((name, file_in(folder, names.full(name))) for name in names.absent(there))
    return [name for name, file in files if file is None or file.kind is not FileKind.MEMBER]


def key_in(
    folder: Folder,
    file: FileName,
    side: Side,
    slot: int,
    *,
    rank: int | None = None,
    iteration: int | None = None,
) -> TensorKey:
    """Return the key of a tensor of a file.

    `rank` is better known than by the folder, `iteration` where neither folder nor name says it.
    """
    dated = file.number if folder.iteration is None else folder.iteration
    _, op_type, op_name, task, stream, timestamp_us, _, _, laid, element, *_, argument = file
    # By place: names would take longer than the key itself.
    return TensorKey(
        folder.rank if rank is None else rank,
        folder.net_name,
        folder.graph,
        (iteration if dated is None else dated) or 0,
        timestamp_us,
        op_type,
        op_name,
        side,
        slot,
        task,
        stream,
        laid,
        folder.constant,
        element,
        argument,
    )


def _in_rank(name: str) -> FileName | None:
    file = mindspore_sync.file_of(name)
    if file is None:
        # MindSpore never left the stream out of a tensor's name.
        other = parsed(name)
        return None if other is not None and other.kind is FileKind.TENSOR else other
    # Names of asynchronous dumps are CANN's; those of parameters have dots in synchronous ones.
    is_cann = file.tensor_format != _SYNCHRONOUS_FORMAT and "." not in file.op_name
    return parsed(name) if is_cann and file.op_type.startswith(ACLNN) else file
