"""Names of dumped files as CANN, MindSpore and their tools write them, and the folders of each."""

from __future__ import annotations

import pytest

from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout import dump_folders
from rankdump._layout.dump_folders import NameScheme, find_folder
from rankdump._layout.file_name import FileKind, FileName, parse_exception_name, parse_file_name

NOW = 1795221576504376
BIN, NPY, TABLE = FileKind.OPERATOR, FileKind.TENSOR, FileKind.TABLE


def name_of(name: str) -> FileName:
    found = parse_file_name(name)
    assert found is not None
    return found


def key_of(path: str) -> TensorKey:
    key = dump_folders.parse_tensor_path(path)
    assert key is not None
    return key


@pytest.mark.parametrize(
    ("name", "kind", "names", "ids"),
    [
        (f"Add.net_Add.2.7.{NOW}", BIN, ("Add", "net_Add"), (2, 7, NOW)),
        (f"Add.net_Add.2.7.{NOW}.zst", BIN, ("Add", "net_Add"), (2, 7, NOW)),
        ("Add.net_Add.2.7.179522157650437", BIN, ("Add", "net_Add"), (2, 7, 179522157650437)),
        (f"Add.net_Add.2.{NOW}", BIN, ("Add", "net_Add"), (2, 65535, NOW)),
        (f"Add.net_Add.2.7.{NOW}.4.1.2.0", BIN, ("Add", "net_Add"), (2, 7, NOW)),
        (f"Add.net_Add.2.7.{NOW}.4.1.2", BIN, ("Add", "net_Add"), (2, 7, NOW)),
        (f"Add.net_Add.2.{NOW}.0.65535.65535.0", BIN, ("Add", "net_Add"), (2, 65535, NOW)),
        ("Add.net_Add.2.7.33", BIN, ("Add", "net_Add"), (2, 7, 33)),
        ("Add.net_Add.2.33", BIN, ("Add", "net_Add"), (2, 65535, 33)),
        (f"aclnnAdd.Add_1.2.7.{NOW}", BIN, ("Add_1", "aclnnAdd"), (2, 7, NOW)),
        (f"Relu.Conv_To_Relu.2.7.{NOW}", BIN, ("Relu", "Conv_To_Relu"), (2, 7, NOW)),
        (f"Add.1.2.7.{NOW}", BIN, ("Add", "1"), (2, 7, NOW)),
        (f"Add.net_Add.2.7.{NOW}.csv", TABLE, ("Add", "net_Add"), (2, 7, NOW)),
        (f"Add.net_Add.2.7.{NOW}.csv.zst", TABLE, ("Add", "net_Add"), (2, 7, NOW)),
    ],
)
def test_parse_file_name_of_operators(name, kind, names, ids):
    """Old and new releases, parts of tasks, aclnn's other order, and pairs of a watcher."""
    found = name_of(name)
    assert (found.kind, found.op_type, found.op_name) == (kind, *names)
    assert (found.task, found.stream, found.timestamp_us) == ids


def test_parse_file_name_of_parts_and_captured_streams():
    """Some names also have a part, a thread or a captured stream."""
    of_part = name_of(f"Add.a.2.7.{NOW}.4.1.2.3")
    assert (of_part.part, of_part.context, of_part.thread) == ((4, 1, 2, 3), 1, 2)
    short = name_of(f"Add.a.2.{NOW}.4.1.2.output.0.zst")
    assert (short.part, short.context, short.thread) == ((4, 1, 2), 1, 2)
    whole = name_of(f"Add.a.2.7.{NOW}")
    assert (whole.part, whole.context, whole.thread) == ((), 65535, 65535)
    captured = name_of(f"Add.a.11.2.7.{NOW}")
    assert (captured.number, captured.task, captured.stream) == (11, 2, 7)
    both = name_of(f"Add.a.11.2.7.{NOW}.4.1.2.0")
    assert (both.number, both.timestamp_us, both.part) == (11, NOW, (4, 1, 2, 0))


@pytest.mark.parametrize(
    ("tail", "tensor_format", "element"),
    [
        ("input.1.ND.npy", "ND", ""),
        ("input.1.NCHW.npy.zst", "NCHW", ""),
        ("input.1.FRACTAL_NZ.float16.npy", "FRACTAL_NZ", "float16"),
        ("input.1.npy", "", ""),
    ],
)
def test_parse_file_name_of_npy_files(tail, tensor_format, element):
    """MindSpore's, MSTT's with the element type, and msaccucmp's without a format."""
    found = name_of(f"Add.a.2.7.{NOW}.{tail}")
    assert (found.kind, found.side, found.slot) == (NPY, TensorSide.INPUT, 1)
    assert (found.tensor_format, found.element) == (tensor_format, element)


def test_parse_file_name_of_members_and_overflows():
    """A file of one tensor is a bin file; the state of the cores is not a tensor."""
    member = name_of(f"Add.a.2.7.{NOW}.output.3.zst")
    assert (member.kind, member.side, member.slot) == (FileKind.MEMBER, TensorSide.OUTPUT, 3)
    for tail in ("", ".zst", ".4.65535.65535.0"):
        found = name_of(f"Opdebug.Node_OpDebug.1.5.{NOW}{tail}")
        assert (found.kind, found.is_overflow) == (FileKind.OVERFLOW, True)
    assert not member.is_overflow


def test_parse_file_name_of_overflows_as_json():
    """Each output has such a file, which holds no tensor."""
    for start in (f"Opdebug.Node_OpDebug.1.5.{NOW}", f"Opdebug.Node_OpDebug.1.{NOW}.4.3.2.0"):
        found = name_of(f"{start}.output.1.json")
        assert (found.kind, found.side, found.slot) == (
            FileKind.OVERFLOW_JSON,
            TensorSide.OUTPUT,
            1,
        )
        assert (found.task, found.timestamp_us, found.is_overflow) == (1, NOW, True)
        assert not found.kind.holds_tensors
        assert dump_folders.parse_tensor_path(f"20261121175901/5/{start}.output.1.json") is None


@pytest.mark.parametrize(
    ("name", "op_type", "ids"),
    [
        ("Add.net_Add.9.20261121175901123", "Add", (9, 65535, 20261121175901123)),
        ("exception_info.3.9.20261121175901123", "exception_info", (9, 3, 20261121175901123)),
        ("exception_info.3.9.1795221576504376", "exception_info", (9, 3, NOW)),
        ("te_add_1.3.9.AIC.5.20261121175901123", "te_add_1", (9, 3, 20261121175901123)),
        (
            "exception_info.3.9.0.5.20261121175901123.zst",
            "exception_info",
            (9, 3, 20261121175901123),
        ),
        ("Add.net_Add.9.20261121175901123.custom.17", "Add", (9, 65535, 20261121175901123)),
    ],
)
def test_parse_exception_name(name, op_type, ids):
    """Some releases have task and stream in the other order."""
    found = parse_exception_name(name)
    assert found is not None
    assert (found.op_type, found.task, found.stream, found.timestamp_us) == (op_type, *ids)
    assert found.kind is BIN


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mapping.csv",
        "statistic.csv",
        "statistic.01234567.csv",
        "Add",
        "Add.a",
        f"Add.a.{NOW}",
        f"Add.a.2.7.{NOW}.core",
        f"Add.a.2.7.{NOW}.input.0.ND",
        f"Add.a.2.7.{NOW}.input.0.csv",
        f"Add.a.2.7.{NOW}.sideways.0.ND.npy",
        f"Add.a.2.7.{NOW}.npy",
        f"Add.a.02.7.{NOW}",
        f"Add.a.1.2.9.4.{NOW}",
        f"Add.a.b.2.7.{NOW}",
        "12345678901234567",
        f"Add.a.2.7.{'9' * 300}",
        f"Add.a.1.2.3.4.{NOW}",
        f".a.2.7.{NOW}",
        f"Opdebug.Node_OpDebug.1.5.{NOW}.json",
        f"Opdebug.Node_OpDebug.1.5.{NOW}.output.0.json.zst",
        f"Opdebug.Node_OpDebug.1.5.{NOW}.output.0.ND.json",
        f"Add.a.1.5.{NOW}.output.0.json",
        "exception_info.core",
    ],
)
def test_parse_file_name_rejects_other_files(name):
    """Any other file name returns None."""
    assert parse_file_name(name) is None
    assert parse_exception_name(name) is None


@pytest.mark.parametrize(
    ("path", "names", "says"),
    [
        ("rank_3/Net/0/7", NameScheme.RANK, (3, False, "Net", 0, 7)),
        ("rank_3/Net/0/constants", NameScheme.RANK, (3, False, "Net", 0, None)),
        ("rank_3/Net/0", NameScheme.NONE, (3, False, "Net", 0, None)),
        ("20261121175901", NameScheme.NONE, (0, False, "", 0, None)),
        ("20261121175901/5", NameScheme.CANN, (5, True, "", 0, None)),
        ("20261121175901/5/9", NameScheme.CANN, (5, True, "", 0, 9)),
        ("20261121175901/5/2/9", NameScheme.CANN, (5, True, "", 2, 9)),
        ("20261121175901/5/model", NameScheme.NONE, (5, True, "", 0, None)),
        ("20261121175901/5/model/2", NameScheme.CANN, (5, True, "model", 2, None)),
        ("20261121175901/5/model/2/9", NameScheme.CANN, (5, True, "model", 2, 9)),
        ("20261121175901/5/44/2/9", NameScheme.CANN, (5, True, "44", 2, 9)),
        ("8/20261121175901/5", NameScheme.CANN, (5, True, "", 0, 8)),
        ("8/20261121175901/5/9", NameScheme.CANN, (5, True, "", 0, 8)),
        ("8/20261121175901/5/model/2/9", NameScheme.CANN, (5, True, "model", 2, 8)),
        ("5", NameScheme.CAPTURED, (5, True, "", 0, None)),
        ("extra-info/data-dump/5", NameScheme.EXCEPTION, (5, True, "", 0, None)),
    ],
)
def test_find_folder_knows_every_tree(path, names, says):
    """The folders determine the kind of tree; a folder of a step above gives the iteration."""
    found = find_folder(path)
    assert found is not None
    assert found.names is names
    said = (found.rank, found.device, found.net_name, found.graph, found.iteration)
    assert said == says


@pytest.mark.parametrize(
    "path",
    [
        "",
        "rank_3/graphs",
        "rank_3/execution_order",
        "rank_3/Net/x",
        "rank_3/Net/0/7/1",
        "rank_03",
        "20261121175901/x",
        "20261121175901/5/model/x",
        "20261121175901/5/model/2/9/1",
        "20261121175901/5/../2/9",
        "8/9",
        "8/20261121175901/5/model/2/9/1",
        "extra-info/5",
        "extra-info/data-dump/x",
        ".dump_metadata",
        "global_execution_order",
    ],
)
def test_find_folder_rejects_other_folders(path):
    """Any other path returns None."""
    assert find_folder(path) is None


def test_captured_stream_needs_its_number():
    """A folder that is only a number counts if its files name the captured stream."""
    assert dump_folders.parse_tensor_path(f"5/Add.a.2.7.{NOW}.output.0") is None
    assert key_of(f"5/Add.a.11.2.7.{NOW}.output.0").iteration == 11
    key = key_of(f"5/Add.a.11.2.7.{NOW}.output.0.ND.npy")
    assert (key.rank, key.iteration) == (5, 11)
    assert key_of(f"20261121175901/5/Add.a.11.2.7.{NOW}.output.0").iteration == 11


def test_rank_folders_may_hold_asynchronous_names():
    """Older releases wrote CANN's names there, beside parameters with dots."""
    folder = "rank_0/Net/0/3"
    assert key_of(f"{folder}/aclnnAdd.Add.2.7.{NOW}.input.0.ND.npy").op_name == "aclnnAdd"
    assert key_of(f"{folder}/aclnnAdd.x.0.0.{NOW}.input.0.DefaultFormat.npy").op_type == "aclnnAdd"
    assert key_of(f"{folder}/Parameter.a.0.w.0.0.{NOW}.output.0.NCHW.npy").op_name == "a.0.w"
    assert key_of(f"{folder}/Add.a.2.7.{NOW}.input.0").slot == 0
