"""Names of files that CANN writes, and MindSpore and MSTT from them. Pure.

    {op_type}.{op_name}.{task}.{stream}.{timestamp}                                   a bin file
    {op_type}.{op_name}.{task}.{stream}.{timestamp}.{side}.{slot}.{format}.npy[.zst]

Source: ascend-formats.md 2.1-2.3. A name over 255 bytes is replaced by a number and remembered in
`mapping.csv`: a bin file's by libstdc++'s hash of its whole path, as CANN does; an npy file's by
32 digits, which MindSpore draws at random and which are a digest here.
"""

from __future__ import annotations

import hashlib

from rankdump.contract.key import TensorKey, sanitised
from rankdump.contract.layout.file_name import ACLNN, PACKED
from rankdump.contract.layout.place import NAME_MAX_BYTES, Place

_DIGITS = 10**32
_MASK = (1 << 64) - 1
_SEED, _MULTIPLIER, _SHIFT = 0xC70F6907, 0xC6A4A7935BD1E995, 47


def host_format(shape: tuple[int, ...]) -> str:
    """Return the format of a tensor in the host's memory (mindspore-dump.md 2.4)."""
    return "NCHW" if len(shape) == 4 else "ND"


def operator_name(key: TensorKey) -> str:
    """Return the name of a file that holds a whole operator.

    aclnn kernels have their two names the other way round: that of the API comes first.
    """
    names = sanitised(key.op_type) or "_", sanitised(key.op_name) or "_"
    first, second = reversed(names) if names[1].startswith(ACLNN) else names
    return f"{first}.{second}.{key.task}.{key.stream}.{key.timestamp_us}"


def readable(key: TensorKey) -> TensorKey:
    """Return the key as a file name carries it: what reading it back gives."""
    op_type, op_name = sanitised(key.op_type) or "_", sanitised(key.op_name) or "_"
    if op_type.startswith(ACLNN) and not op_name.startswith(ACLNN):
        op_type, op_name = op_name, op_type
    return key._replace(op_type=op_type, op_name=op_name, element="")


def member_name(key: TensorKey) -> str:
    """Return the name of a bin file with one tensor of an operator."""
    return f"{operator_name(key)}.{key.side.value}.{key.slot}"


def tensor_name(key: TensorKey, suffix: str) -> str:
    """Return the name of a tensor's npy file."""
    return f"{member_name(key)}.{key.tensor_format}.npy{suffix}"


def shortened(folder: str, name: str, root: str) -> Place:
    """Return the place of a file, under a number where its name is too long."""
    if len(name.encode()) <= NAME_MAX_BYTES:
        return Place(folder, name)
    if ".npy" in name:
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        ending = name[name.rindex(".npy") :]
        short = f"{int.from_bytes(digest, 'big') % _DIGITS:032}{ending}"
    else:
        # Unpacked, it is the file that CANN writes.
        plain = name.removesuffix(PACKED)
        ending = name[len(plain) :]
        short = f"{libstdcxx_hash(f'{root}/{folder}/{plain}'.encode())}{ending}"
    return Place(folder, short, mapped_from=name)


def libstdcxx_hash(data: bytes) -> int:
    """Return `std::hash<std::string>` of libstdc++ on 64 bits: a form of MurmurHash64A."""
    value = _SEED ^ (len(data) * _MULTIPLIER & _MASK)
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        word = int.from_bytes(data[at : at + 8], "little") * _MULTIPLIER & _MASK
        value = (value ^ (_folded(word) * _MULTIPLIER & _MASK)) * _MULTIPLIER & _MASK
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    return _folded(_folded(value) * _MULTIPLIER & _MASK)


def _folded(value: int) -> int:
    return value ^ (value >> _SHIFT)
