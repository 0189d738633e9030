"""Paths of files in MindSpore's and CANN's trees, with the names of any profile. Pure.

    rank_{rank}/{net}/{graph}/{iteration}|constants/
        {op_type}.{op_name}.{task}.{stream}.{timestamp}.{side}.{slot}.{format}[.{element}].npy[.zst]
    {op_type}.{op_name}.{task}.{stream}.{timestamp}                                   a bin file
    {op_type}.{op_name}.{task}.{stream}.{timestamp}.{side}.{slot}.{format}.npy[.zst]  CANN's npy

Source: MindSpore 2.3, Dump guide, and CANN's dump file names. A name over 255 bytes is replaced by
a number and listed in `mapping.csv`. MindSpore draws that number at random; here it is a digest of
the name, so that a record that is sent again has the same file. The number for a bin file is
libstdc++'s hash of its whole path, as in CANN.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rankdump._core.record import TensorKey, TensorSide, sanitize_name
from rankdump._layout.file_name import (
    ACLNN_PREFIX,
    NUMBER_PATTERN,
    PACKED_SUFFIX,
    FileKind,
    FileName,
)
from rankdump._layout.profile import DEFAULT_PROFILE, Profile

MAX_NAME_BYTES = 255
MAPPING_FILE = "mapping.csv"
_MAX_REMEMBERED_FOLDERS = 256


class FilePlace(NamedTuple):
    """Place of a file in a tree."""

    folder: str
    """Path of the folder relative to the root, with `/`."""
    name: str
    """Name of the file on disk."""
    mapped_from: str = ""
    """Full name, if it was too long to be the name on disk; else empty."""

    @property
    def path(self) -> str:
        """Path of the file relative to the root."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, slots=True)
class TreeContext:
    """Values that all paths of one session's tree share."""

    root: str = ""
    """Absolute path of the root, which is needed because CANN shortens a name by a hash of its
    whole path.
    """
    device: int = 0
    """Local device id."""
    started: str = ""
    """Start time of the session as `YYYYmmddHHMMSS`."""
    profile: Profile = DEFAULT_PROFILE


@lru_cache(maxsize=_MAX_REMEMBERED_FOLDERS)
def make_folder_name(name: str) -> str:
    """Return the name of a model as a folder name: letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", sanitize_name(name))[:MAX_NAME_BYTES] or "_"


METADATA_FOLDER = ".dump_metadata"
MANIFEST_FOLDER = ".dump_metadata/manifest"
FINGERPRINT_FOLDER = ".dump_metadata/fingerprint"
EXECUTION_ORDER_FOLDER = "execution_order"
GRAPH_FOLDER = "graphs"
CONSTANT_FOLDER = "constants"
STATISTIC_FILE = "statistic.csv"
PARAMETER_OP_TYPE = "Parameter"
"""Operator type of weights and constants."""
# These names take about 5 MB of the 100 MB that an idle agent may use.
_MAX_REMEMBERED_OPERATORS = 1 << 14

# The pattern is anchored at the end, because the old name of a parameter has dots and the element
# type is optional.
_NAME_FIELDS = re.compile(
    rf"(?P<op_type>[^./]+)\.(?P<op_name>[^/]+)\.(?P<task>{NUMBER_PATTERN})\.(?P<stream>{NUMBER_PATTERN})"
    rf"\.(?P<stamp>{NUMBER_PATTERN})\.(?P<side>input|output)\.(?P<slot>{NUMBER_PATTERN})"
    r"\.(?P<format>[^./]+)(?:\.(?P<element>[^./]+))?\.npy(?:\.zst)?"
)


def make_rank_folder(rank: int) -> str:
    """Return the folder of a rank."""
    return f"rank_{rank}"


def make_tensor_folder(key: TensorKey) -> str:
    """Return the folder of a tensor: that of its iteration, or of its graph's constants."""
    where = key.graph, key.iteration
    return make_iteration_folder(key.rank, key.net_name, *where, constant=key.constant)


@lru_cache(maxsize=_MAX_REMEMBERED_FOLDERS)
def make_iteration_folder(
    rank: int, net_name: str, graph: int, iteration: int, *, constant: bool
) -> str:
    """Return the folder of a graph's tensors of one iteration, or of its constants."""
    last = CONSTANT_FOLDER if constant else iteration
    return f"{make_rank_folder(rank)}/{make_folder_name(net_name)}/{graph}/{last}"


def make_mindspore_readable_key(key: TensorKey, profile: Profile = DEFAULT_PROFILE) -> TensorKey:
    """Return the key in the form in which it is read back from a file name of this profile."""
    return key._replace(
        net_name=make_folder_name(key.net_name),
        op_type=sanitize_name(key.op_type) or "_",
        op_name=spell_operator(key.op_type, key.op_name, profile),
        iteration=0 if key.constant else key.iteration,
        element=sanitize_name(key.element) if profile.element_token else "",
    )


def spell_operator(op_type: str, op_name: str, profile: Profile) -> str:
    """Return the name of an operator as file names and tables of this profile spell it."""
    if not profile.short_names:
        return sanitize_name(op_name) or "_"
    short = op_name.rpartition("/")[2]
    if op_type == PARAMETER_OP_TYPE:
        return ".".join(map(sanitize_name, short.split("."))) or "_"
    return sanitize_name(short) or "_"


def make_mindspore_place(
    key: TensorKey, suffix: str, profile: Profile = DEFAULT_PROFILE
) -> FilePlace:
    """Return the place of a record; its codec appends `suffix` (empty or `.zst`) to `.npy`."""
    element = key.element if profile.element_token else ""
    operator, tensor = _spell_operator_and_tensor(
        key.op_type, key.op_name, key.side, key.slot, key.tensor_format, element, profile
    )
    stem = f"{operator}.{key.task}.{key.stream}.{key.timestamp_us}.{tensor}"
    return shorten_mindspore_name(make_tensor_folder(key), stem, f".npy{suffix}")


def shorten_mindspore_name(folder: str, stem: str, suffix: str) -> FilePlace:
    """Return the place of a file, whose name is replaced by a number if it is too long."""
    name = stem + suffix
    if len(name) <= MAX_NAME_BYTES and (name.isascii() or len(name.encode()) <= MAX_NAME_BYTES):
        return FilePlace(folder, name)
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return FilePlace(folder, f"{int.from_bytes(digest, 'big')}{suffix}", mapped_from=name)


@lru_cache(maxsize=_MAX_REMEMBERED_OPERATORS)
def _spell_operator_and_tensor(
    op_type: str,
    op_name: str,
    side: TensorSide,
    slot: int,
    tensor_format: str,
    element: str,
    profile: Profile,
) -> tuple[str, str]:
    """Return the parts of a file name before and after its numbers."""
    operator = spell_operator(op_type, op_name, profile)
    last = f".{sanitize_name(element)}" if element else ""
    return (
        f"{sanitize_name(op_type) or '_'}.{operator}",
        f"{side.value}.{slot}.{tensor_format}{last}",
    )


def parse_mindspore_name(name: str) -> FileName | None:
    """Return the parts of the name of a tensor's file; None for a name of another form."""
    fields = _NAME_FIELDS.fullmatch(name)
    if fields is None:
        return None
    op_type, op_name, task, stream, stamp, side, slot, laid, element = fields.groups("")
    meant = TensorSide.INPUT if side == "input" else TensorSide.OUTPUT
    # Arguments are positional, because keyword arguments take a fifth of the time of parsing a
    # name.
    numbers = int(task), int(stream), int(stamp)
    return FileName(FileKind.TENSOR, op_type, op_name, *numbers, meant, int(slot), laid, element)


_NAME_NUMBER_LIMIT = 10**32
_HASH_MASK = (1 << 64) - 1
_HASH_SEED, _HASH_MULTIPLIER, _HASH_SHIFT = 0xC70F6907, 0xC6A4A7935BD1E995, 47


def get_host_format(shape: tuple[int, ...]) -> str:
    """Return the format of a tensor in host memory (MindSpore 2.3 Dump guide, file names)."""
    return "NCHW" if len(shape) == 4 else "ND"


def make_operator_file_name(key: TensorKey) -> str:
    """Return the name of the file that holds a whole operator.

    Names of aclnn kernels begin with the name of the API.
    """
    names = sanitize_name(key.op_type) or "_", sanitize_name(key.op_name) or "_"
    first, second = reversed(names) if names[1].startswith(ACLNN_PREFIX) else names
    return f"{first}.{second}.{key.task}.{key.stream}.{key.timestamp_us}"


def make_cann_readable_key(key: TensorKey) -> TensorKey:
    """Return the key in the form in which it is read back from a file name of CANN."""
    op_type, op_name = sanitize_name(key.op_type) or "_", sanitize_name(key.op_name) or "_"
    if op_type.startswith(ACLNN_PREFIX) and not op_name.startswith(ACLNN_PREFIX):
        op_type, op_name = op_name, op_type
    return key._replace(op_type=op_type, op_name=op_name, element="")


def make_member_file_name(key: TensorKey) -> str:
    """Return the name of a bin file that holds one tensor of an operator."""
    return f"{make_operator_file_name(key)}.{key.side.value}.{key.slot}"


def make_tensor_file_name(key: TensorKey) -> str:
    """Return the name of a tensor's npy file, without the codec's suffix."""
    return f"{make_member_file_name(key)}.{key.tensor_format}.npy"


def shorten_cann_name(folder: str, name: str, root: str) -> FilePlace:
    """Return the place of a file, whose name is replaced by a number if it is too long."""
    if len(name.encode()) <= MAX_NAME_BYTES:
        return FilePlace(folder, name)
    if ".npy" in name:
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        ending = name[name.rindex(".npy") :]
        short = f"{int.from_bytes(digest, 'big') % _NAME_NUMBER_LIMIT:032}{ending}"
    else:
        # The hash is that of the unpacked name, which is the name of CANN's file.
        plain = name.removesuffix(PACKED_SUFFIX)
        ending = name[len(plain) :]
        short = f"{compute_libstdcxx_hash(f'{root}/{folder}/{plain}'.encode())}{ending}"
    return FilePlace(folder, short, mapped_from=name)


def compute_libstdcxx_hash(data: bytes) -> int:
    """Return `std::hash<std::string>` of libstdc++ on 64 bits: a form of MurmurHash64A."""
    value = _HASH_SEED ^ (len(data) * _HASH_MULTIPLIER & _HASH_MASK)
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        word = int.from_bytes(data[at : at + 8], "little") * _HASH_MULTIPLIER & _HASH_MASK
        value = (
            value ^ (_fold_hash(word) * _HASH_MULTIPLIER & _HASH_MASK)
        ) * _HASH_MULTIPLIER & _HASH_MASK
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _HASH_MULTIPLIER & _HASH_MASK
    return _fold_hash(_fold_hash(value) * _HASH_MULTIPLIER & _HASH_MASK)


def _fold_hash(value: int) -> int:
    return value ^ (value >> _HASH_SHIFT)
