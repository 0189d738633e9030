"""The trees of troubleshooter's `api_dump`. Pure.

    rank{rank}/{framework}_api_dump/{tensor name}.npy[.zst]
    rank{rank}/{framework}_api_dump_info.pkl        or `.csv`, as 1.0.18 calls it
    rank{rank}/{framework}_api_dump_stack.json

Source: api-dump.md 0 and A.1. A tensor's name is that of its call with its place behind it
(`api_name`); it is the same in the info file, and no other tensor of a dump has it. A name over 255
bytes is replaced by a number, as in MindSpore's tree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankdump.contract.key import Side, TensorKey, sanitised
from rankdump.contract.layout.api_name import ApiPlace, call_of, place_of, tensor_name
from rankdump.contract.layout.file_name import PACKED, FileKind, FileName
from rankdump.contract.layout.mindspore_sync import shortened
from rankdump.contract.layout.place import Place, Stand

FRAMEWORKS = ("torch", "mindspore", "mindtorch")
_NPY = ".npy"
_FORMAT = "DefaultFormat"
_SIDES = tuple(side.value for side in Side)
_INFO = re.compile(rf"({'|'.join(FRAMEWORKS)})_api_dump_info\.(pkl|csv)")
_FOLDER = re.compile(rf"({'|'.join(FRAMEWORKS)})_api_dump")
_MOST_SLOT = 1 << 31
_MOST_DIGITS = 11


@dataclass(frozen=True, slots=True)
class ApiFiles:
    """What the files of one framework's dump are called."""

    framework: str
    """One of FRAMEWORKS."""
    extended: bool = False
    """As 1.0.18 writes them: the info file ends in `.csv`, and its lines in two more fields."""

    @property
    def folder(self) -> str:
        """The folder of the tensors, in that of the rank."""
        return f"{self.framework}_api_dump"

    @property
    def info(self) -> str:
        """The info file: text, whatever its name ends in."""
        return f"{self.folder}_info.{'csv' if self.extended else 'pkl'}"

    @property
    def stacks(self) -> str:
        """The file that says where calls came from."""
        return f"{self.folder}_stack.json"


@dataclass(frozen=True, slots=True)
class ApiLayout:
    """The tree of one framework, in the form of one release."""

    name: str
    files: ApiFiles

    @property
    def api(self) -> ApiFiles | None:
        """What the files of an api dump are called."""
        return self.files

    @property
    def shares_stamps(self) -> bool:
        """Whether all tensors of one call of an operator have the time stamp of the first."""
        return False

    @property
    def timed(self) -> bool:
        """Whether a folder is named by when the session began."""
        return False

    @property
    def unknown_id(self) -> int:
        """Task and stream of an operator of which nobody knows them."""
        return 0

    def tensor_format(self, shape: tuple[int, ...]) -> str:
        """Return the word for the format of a tensor in the host's memory."""
        return _FORMAT

    def rank_folder(self, rank: int) -> str:
        """Return the folder of a rank."""
        return rank_folder(rank)

    def folder_of(
        self, stand: Stand, *, rank: int, net_name: str, graph: int, iteration: int, constant: bool
    ) -> str:
        """Return the folder of a rank's tensors, whatever their graph and iteration."""
        return f"{rank_folder(rank)}/{self.files.folder}"

    def place_of(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a tensor's npy file, with what the codec appends."""
        return shortened(self._folder(key), name_of(key), f"{_NPY}{suffix}")

    def readable(self, key: TensorKey, stand: Stand) -> TensorKey:
        """Return the key as a path carries it: what reading it back gives."""
        op_name = sanitised(key.op_name) or "_"
        call, place = call_of(op_name), _place(key)
        return TensorKey(
            rank=key.rank,
            net_name="",
            graph=0,
            iteration=0,
            timestamp_us=0,
            op_type=op_name if call is None else call.op_type,
            op_name=op_name,
            side=place.side,
            slot=slot_of(place),
            tensor_format=_FORMAT,
            argument=place.name,
        )

    def operator_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a file that holds the operator of a tensor."""
        return shortened(self._folder(key), sanitised(key.op_name) or "_", suffix)

    def member_place(self, key: TensorKey, stand: Stand, suffix: str) -> Place:
        """Return the place of a `bin` file with one tensor of an operator, until it is joined."""
        return shortened(self._folder(key), name_of(key), suffix)

    def _folder(self, key: TensorKey) -> str:
        return f"{rank_folder(key.rank)}/{self.files.folder}"


def rank_folder(rank: int) -> str:
    """Return the folder of a rank."""
    return f"rank{rank}"


def is_tensor_folder(name: str) -> bool:
    """Return whether tensors stand in a folder of that name, within a rank's."""
    return _FOLDER.fullmatch(name) is not None


def info_files_of(name: str) -> ApiFiles | None:
    """Return to which files an info file belongs, by its name; None when it is none."""
    found = _INFO.fullmatch(name)
    return ApiFiles(found[1], found[2] == "csv") if found is not None else None


def name_of(key: TensorKey) -> str:
    """Return a tensor's name as info file and file name spell it."""
    return tensor_name(sanitised(key.op_name) or "_", _place(key))


def spelt(op_name: str, place: ApiPlace) -> str:
    """Return the same of a tensor at a place of a call."""
    return tensor_name(sanitised(op_name) or "_", _spelt(place))


def _place(key: TensorKey) -> ApiPlace:
    return _spelt(place_of(key.argument) or ApiPlace(key.side, str(key.slot)))


def _spelt(place: ApiPlace) -> ApiPlace:
    path = ".".join(sanitised(part) or "_" for part in place.path.split(".")) if place.path else ""
    return ApiPlace(place.side, path)


def file_of(name: str) -> FileName | None:
    """Return what the name of a tensor's file says; None when it is none of these.

    A call that is none of the grammar's has its whole name for a type.
    """
    plain = name.removesuffix(PACKED)
    if not plain.endswith(_NPY):
        return None
    stem, dot, path = plain.removesuffix(_NPY).partition(".")
    op_name, _, side = stem.rpartition("_")
    if not op_name or side not in _SIDES or (dot and not all(path.split("."))):
        return None
    call, place = call_of(op_name), ApiPlace(Side(side), path)
    return FileName(
        kind=FileKind.TENSOR,
        op_type=op_name if call is None else call.op_type,
        op_name=op_name,
        task=0,
        stream=0,
        timestamp_us=0,
        side=place.side,
        slot=slot_of(place),
        tensor_format=_FORMAT,
        argument=place.name,
    )


def slot_of(place: ApiPlace) -> int:
    """Return the number of an argument or a result; 0 where its place has none.

    The parts of one share it: their places tell them apart.
    """
    first = place.path.partition(".")[0]
    plain = first.isascii() and first.isdecimal()
    number = int(first[:_MOST_DIGITS]) if plain else 0
    return number if number < _MOST_SLOT else 0
