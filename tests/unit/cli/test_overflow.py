"""`rankdump overflow`: operators that overflowed, and their status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.bin_files import operator, packed_file_of
from support.overflow_files import CORE, debug_file, new, old

from rankdump._binfile.overflow_record import convert_overflow_to_json
from rankdump._cli.command_group import run_command_line

STAMP = 1612439563338021
HIT = old(core=CORE, status=(0, 0, 0x120))
CLEAN = old()


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def put(folder: Path, name: str, data: bytes | str = b"") -> Path:
    """Write a file of a dump."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A device's folder with one overflow, of the convolution."""
    folder = tmp_path / "dump" / "20210204" / "0" / "net" / "1" / "3"
    put(folder, f"Opdebug.Node_OpDebug.99.5.{STAMP}", debug_file(HIT))
    put(folder, f"Conv2D.net_conv1.12.7.{STAMP - 5}", operator(b"abc"))
    put(folder, f"Add.net_add.12.8.{STAMP - 9}", operator(b"abc"))
    put(folder, f"Mul.net_mul.13.7.{STAMP - 3}", operator(b"abc"))
    return tmp_path / "dump"


def test_overflow_names_the_operator_and_the_status(dump, capsys):
    """The task inside the record says which operator, not the one in the file's name."""
    code, out, err = told(capsys, "overflow", dump)
    assert (code, err) == (1, "")
    folder, titles, row, _, meaning, total = out.splitlines()
    assert folder == str(dump / "20210204/0/net/1/3")
    assert titles == "time stamp        unit     task  stream  status  operator"
    assert row == f"{STAMP}  AI Core    12       7   0x120  Conv2D net_conv1"
    assert meaning == "0x120: float overflow, float32 or int32 to float16"
    assert total == f"{dump}: 1 overflow record, 1 with an overflow"


def test_overflow_lists_records_without_overflow(dump, capsys):
    """A record of zeros is listed, whatever its name, and the others are found all the same."""
    put(dump, f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(CLEAN))
    code, out, _ = told(capsys, "overflow", dump)
    assert code == 1
    assert f"{STAMP}  all" in out
    assert "no overflow" in out
    assert "2 overflow records, 1 with an overflow" in out


def test_overflow_without_overflows_succeeds(tmp_path, capsys):
    """An overflow dump without overflows is good news."""
    put(tmp_path / "clean", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(CLEAN))
    code, out, _ = told(capsys, "overflow", tmp_path)
    assert code == 0
    assert "1 overflow record, 0 with an overflow" in out
    (tmp_path / "empty").mkdir()
    code, out, err = told(capsys, "overflow", tmp_path / "empty")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{tmp_path / 'empty'}: the folder contains no file" in err
    (tmp_path / "empty" / "notes.txt").write_text("x")
    code, out, _ = told(capsys, "overflow", tmp_path / "empty")
    assert (code, out) == (0, f"{tmp_path / 'empty'}: no Opdebug file found\n")


def test_overflow_accepts_one_file(dump, capsys):
    """One file is enough; the operators beside it are found."""
    (path,) = dump.rglob("Opdebug*")
    code, out, _ = told(capsys, "overflow", path)
    assert code == 1
    assert "Conv2D net_conv1" in out


@pytest.mark.parametrize("form", ["zst", "json", "mindspore"])
def test_overflow_reads_packed_and_json_files(dump, capsys, form):
    """Packed, or JSON already."""
    (path,) = dump.rglob("Opdebug*")
    data = path.read_bytes()
    path.unlink()
    text = convert_overflow_to_json(HIT)
    if form == "zst":
        path.with_name(path.name + ".zst").write_bytes(packed_file_of(data))
    else:
        line = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
        put(path.parent, f"{path.name}.output.0.json", text if form == "json" else line)
    code, out, _ = told(capsys, "overflow", dump)
    assert code == 1
    assert "Conv2D net_conv1" in out
    assert f"{STAMP}  AI Core" in out


def test_overflow_lists_a_record_once(dump, capsys):
    """JSON that was made of a file that is still there is not another record."""
    (path,) = dump.rglob("Opdebug*")
    put(path.parent, f"{path.name}.output.0.json", convert_overflow_to_json(HIT))
    _, out, _ = told(capsys, "overflow", dump)
    assert "1 overflow record, 1 with" in out


def test_overflow_finds_all_files_of_the_operator(dump, capsys):
    """Whatever says the task belongs to the operator, but nothing of the debug task does."""
    folder = next(dump.rglob("Opdebug*")).parent
    put(folder, f"Relu.net_relu.12.7.{STAMP}.csv")
    put(folder, f"aclnnMul.Mul_1.12.7.{STAMP}.output.0.zst")
    for name in (f"Opdebug.Node_OpDebug.12.7.{STAMP}.output.0.npy", "Relu.net_relu.12.7.json"):
        put(folder, name)
    _, out, _ = told(capsys, "overflow", dump, "--json")
    (hit,) = json.loads(out)["records"][0]["overflows"]
    found = [(o["op_type"], o["op_name"]) for o in hit["operators"]]
    assert found == [("Conv2D", "net_conv1"), ("Relu", "net_relu"), ("Mul_1", "aclnnMul")]


def test_overflow_has_a_row_for_each_section(dump, capsys):
    """A row for each section; operators of one task are all named."""
    folder = next(dump.rglob("Opdebug*")).parent
    put(folder, f"Cast.net_cast.12.7.{STAMP}.output.0.ND.npy")
    put(folder, f"Cast.net_cast.12.7.{STAMP}.output.1.ND.npy")
    both = old(dha=(1, 7, 13, 0, 0, 0), core=CORE, status=(1, 0, 8))
    put(folder, f"Opdebug.Node_OpDebug.99.5.{STAMP}", debug_file(both))
    _, out, _ = told(capsys, "overflow", dump, "--json")
    (record,) = json.loads(out)["records"]
    dha, core = record["overflows"]
    assert (dha["unit"], dha["status"], dha["meaning"]) == ("DHA Atomic Add", [1], ["overflow"])
    assert [operator["op_name"] for operator in dha["operators"]] == ["net_mul"]
    assert core["operators"] == [
        {
            "op_type": "Cast",
            "op_name": "net_cast",
            "files": [f"Cast.net_cast.12.7.{STAMP}.output.{slot}.ND.npy" for slot in (0, 1)],
        },
        {
            "op_type": "Conv2D",
            "op_name": "net_conv1",
            "files": [f"Conv2D.net_conv1.12.7.{STAMP - 5}"],
        },
    ]


def test_overflow_selects_operators_by_context_and_thread(tmp_path, capsys):
    """Context and thread of a record select the operators, where the record has them.

    The names of the operators fit in the 100 cells of a line that does not go to a terminal.
    """
    words = (1, 7, 12, 0, 3, 4, 0, 0, 0, 0, 0x20)
    put(tmp_path, f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(new(0, *words)))
    for thread in (4, 5):
        put(tmp_path, f"Conv2D.slice{thread}.12.7.{STAMP}.4.3.{thread}.0")
    put(tmp_path, f"Conv2D.plain.12.{STAMP}")
    put(tmp_path, f"Conv2D.unknown.12.65535.{STAMP}.4.65535.65535.0")
    _, out, _ = told(capsys, "overflow", tmp_path)
    assert "slice4" in out
    assert "plain" in out  # an older name, which says neither stream nor thread
    assert "unknown" in out
    assert "slice5" not in out
    words = (1, 7, 12, 0, 65535, 65535, 0, 0, 0, 0, 0x20)
    put(tmp_path, f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(new(0, *words)))
    _, out, _ = told(capsys, "overflow", tmp_path, "--json")
    (hit,) = json.loads(out)["records"][0]["overflows"]
    assert [o["op_name"] for o in hit["operators"]] == [
        *("plain", "slice4", "slice5", "unknown"),
    ]


def test_overflow_shortens_long_names(dump, capsys):
    """A row fits in 100 cells; the name gives way in its middle."""
    folder = next(dump.rglob("Opdebug*")).parent
    for at in range(3):
        put(folder, f"Conv2DBackpropInputD.Default_network_{'scope_' * 12}op{at}.12.7.{STAMP}")
    words = (1, 7, 12, 0, 65535, 65535, 0, 0, 0, 0, 0x20, 0, 0, 1)
    put(folder, f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(new(1, *words, version=1)))
    _, out, _ = told(capsys, "overflow", dump)
    assert max(len(line) for line in out.splitlines()[1:-1]) <= 100
    assert "0x20,0x0,0x0,0x1: float overflow, word 3: 0x1" in out


def test_overflow_resolves_mapped_names(dump, capsys):
    """A name that was too long for the disk stands in mapping.csv."""
    folder = next(dump.rglob("Opdebug*")).parent
    long = f"Conv2D.{'long' * 90}.12.7.{STAMP}"
    put(folder, "1234567", b"")
    put(folder, "mapping.csv", f"1234567,{long}\n")
    _, out, _ = told(capsys, "overflow", dump, "--json")
    (hit,) = json.loads(out)["records"][0]["overflows"]
    assert hit["operators"][0]["files"] == ["1234567"]
    put(folder, "mapping.csv", b"\xff\n1234567.zst,\n1234567," + long.encode() + b"\r\n")
    (folder / "1234567").rename(folder / "1234567.zst")
    _, out, _ = told(capsys, "overflow", dump, "--json")
    (hit,) = json.loads(out)["records"][0]["overflows"]
    assert hit["operators"][0]["files"] == ["1234567.zst"]


def test_overflow_reports_an_unreadable_mapping(dump, capsys):
    """It is named, and so is the overflow."""
    folder = next(dump.rglob("Opdebug*")).parent
    with (folder / "mapping.csv").open("wb") as file:
        file.truncate((64 << 20) + 1)
    code, out, err = told(capsys, "overflow", dump)
    assert code == 1
    assert "Conv2D net_conv1" in out
    size = (64 << 20) + 1
    cause = f"{size} bytes, at most {size - 1} expected"
    assert err == f"{folder / 'mapping.csv'}: cannot be read: {cause}\n"


def test_overflow_reports_damage_in_one_line_each(dump, capsys):
    """What cannot be read is named, and the rest is listed."""
    cut = put(dump / "a", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(HIT)[:-1])
    empty = put(dump / "b", f"Opdebug.Node_OpDebug.1.1.{STAMP}", b"")
    none = put(dump / "c", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file())
    small = put(dump / "d", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(bytes(99)))
    text = put(dump / "e", f"Opdebug.Node_OpDebug.1.1.{STAMP}.output.0.json", "{}")
    later = put(dump / "f", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(new(0, version=9)))
    large = put(dump / "g", f"Opdebug.Node_OpDebug.1.1.{STAMP}.output.0.json", " " * 1_100_000)
    size = len(debug_file(HIT))
    code, out, err = told(capsys, "overflow", dump)
    assert code == 1
    assert "1 overflow record, 1 with an overflow" in out
    assert err.splitlines() == [
        f"{cut}: damaged: according to its header, output 0 of 2048 bytes ends at byte {size}, "
        f"the file has {size - 1}",
        f"{empty}: empty: 0 bytes, the length of the header alone takes 8",
        f"{none}: the file has no output and therefore no overflow record",
        f"{small}: overflow record of 99 bytes, 2048 expected",
        f"{text}: the JSON has none of DHA Atomic Add, L2 Atomic Add, AI Core, acc_list",
        f"{later}: overflow record of version 9 and unit 0; known: 0 and 1, 0 to 3",
        f"{large}: more than 1048576 bytes, too large for an overflow record",
    ]
    for path in (empty, text):
        code, out, err = told(capsys, "overflow", path)
        assert (code, out, len(err.splitlines())) == (1, "", 1)


def test_overflow_fails_with_damage_only(tmp_path, capsys):
    """Damage is found as overflows are."""
    put(tmp_path, f"Opdebug.Node_OpDebug.1.1.{STAMP}", b"x")
    code, _, err = told(capsys, "overflow", tmp_path)
    assert code == 1
    assert "empty: 1 bytes" in err


def test_overflow_follows_no_links_and_limits_depth(dump, tmp_path, capsys):
    """Links lead nowhere, and what lies too deep is said."""
    outside = put(tmp_path / "outside", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(HIT))
    (dump / "link").symlink_to(tmp_path / "outside")
    (dump / "Opdebug.Node_OpDebug.5.5.5").symlink_to(outside)
    (dump / "round").symlink_to(dump)
    os.mkfifo(dump / "Opdebug.Node_OpDebug.6.6.6")
    code, out, _ = told(capsys, "overflow", dump)
    assert "1 overflow record, 1 with" in out
    deepest = dump.joinpath(*"d" * 30)
    put(deepest, f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(CLEAN))
    put(deepest / "below", f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(CLEAN))
    code, out, err = told(capsys, "overflow", dump)
    assert code == 1
    assert "2 overflow records, 1 with" in out
    assert err.endswith(f"{deepest}: more than 30 folders deep, not searched further\n")


@pytest.mark.parametrize("name", ["Opdebug.Node_OpDebug.6.6.6", "a.json"])
def test_overflow_does_not_wait_for_a_pipe(tmp_path, capsys, name):
    """Nobody waits for one that nobody writes to."""
    os.mkfifo(tmp_path / name)
    code, _, err = told(capsys, "overflow", tmp_path / name)
    assert (code, err) == (1, f"{tmp_path / name}: not a regular file\n")


def test_overflow_writes_json(dump, tmp_path, capsys):
    """JSON under msaccucmp's names, in the folders where the records were."""
    folder = next(dump.rglob("Opdebug*")).parent
    both = put(folder, f"Opdebug.Node_OpDebug.1.1.{STAMP}", debug_file(HIT, CLEAN))
    packed = packed_file_of(debug_file(CLEAN))
    put(dump, f"Opdebug.Node_OpDebug.2.1.{STAMP}.zst", packed)
    target = tmp_path / "out"
    code, out, _ = told(capsys, "overflow", dump, "--write", target)
    assert code == 1
    assert out.endswith(f"4 JSON files written to {target}\n")
    files = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*.json")}
    below = folder.relative_to(dump)
    assert files == {
        f"{below}/Opdebug.Node_OpDebug.99.5.{STAMP}.output.0.json": convert_overflow_to_json(HIT),
        f"{below}/Opdebug.Node_OpDebug.1.1.{STAMP}.output.0.json": convert_overflow_to_json(HIT),
        f"{below}/Opdebug.Node_OpDebug.1.1.{STAMP}.output.1.json": convert_overflow_to_json(CLEAN),
        f"Opdebug.Node_OpDebug.2.1.{STAMP}.output.0.json": convert_overflow_to_json(CLEAN),
    }
    _, out, _ = told(capsys, "overflow", both, "--write", tmp_path / "flat")
    assert sorted(p.name for p in (tmp_path / "flat").iterdir()) == [
        f"Opdebug.Node_OpDebug.1.1.{STAMP}.output.{slot}.json" for slot in (0, 1)
    ]
    code, out, _ = told(capsys, "overflow", target)
    assert "4 overflow records, 2 with an overflow" in out


def test_overflow_rejects_wrong_usage(dump, tmp_path, capsys):
    """One line, and the code for it."""
    code, out, err = told(capsys, "overflow", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "does not exist" in err
    put(tmp_path, "file")
    code, out, err = told(capsys, "overflow", dump, "--write", tmp_path / "file" / "x")
    assert (code, out) == (2, "")
    assert "cannot be written: Not a directory" in err
