"""`rankdump convert`: names, formats, reports and exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import sys
from pathlib import Path

import numpy as np
import pytest
from support.bin_conversion import NAME, bin_file, blocks, files_of, numbered, tensor
from support.bin_files import packed_file_of

from rankdump._binfile.overflow_record import convert_overflow_to_json
from rankdump._cli import output
from rankdump._cli.command_group import run_command_line

IMAGE = numbered((2, 20, 3, 5))
PARTS = (
    tensor("input", blocks(IMAGE), "NC1HWC0", IMAGE.shape),
    tensor("input", numbered((4,), "int32"), "ND", (4,)),
    tensor("output", numbered((2, 3, 2, 2), "float32"), "NCHW", (2, 3, 2, 2)),
)


@pytest.fixture
def source(tmp_path):
    """A folder with one operator, its L1 buffer and a workspace."""
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / NAME).write_bytes(bin_file(*PARTS, buffers=[b"l1"], spaces=[b"log"]))
    return folder


def run(capsys, source, out, *more):
    code = run_command_line(["convert", "-d", str(source), "-o", str(out), *map(str, more)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_convert_keeps_device_shapes_without_a_format(source, tmp_path, capsys):
    """Device shapes, and what the chip and the host kept beside the tensors."""
    out = tmp_path / "out"
    code, said, err = run(capsys, source / NAME, out)
    assert (code, err) == (0, "")
    assert files_of(out) == [
        f"{NAME}.input.0.npy",
        f"{NAME}.input.1.npy",
        f"{NAME}.l1buffer.0.bin",
        f"{NAME}.output.0.npy",
        f"{NAME}.space.0.bin",
    ]
    assert np.array_equal(np.load(out / f"{NAME}.input.0.npy"), blocks(IMAGE))
    assert (out / f"{NAME}.space.0.bin").read_bytes() == b"log"
    assert said == f"{out}: 5 tensors of 1 file, 2.36 KiB written\n"


def test_convert_to_a_format(source, tmp_path, capsys):
    """Converted and cropped; an ND tensor has nothing to become, and the rest is converted."""
    code, said, err = run(capsys, source, tmp_path / "out", "-f", "NCHW")
    assert code == 1
    assert files_of(tmp_path / "out") == [
        f"{NAME}.input.0.2x20x3x5.npy",
        f"{NAME}.output.0.2x3x2x2.npy",
        "convert_failed_file_list.txt",
    ]
    found = np.load(tmp_path / "out" / f"{NAME}.input.0.2x20x3x5.npy")
    assert np.array_equal(found, IMAGE)
    assert found.flags.c_contiguous
    path = source / NAME
    assert err == f"{path}: input 1: ND cannot be converted to NCHW, only to FRACTAL_NZ\n"
    assert "2 tensors of 1 file" in said
    assert said.endswith("1 not or only partly converted\n")
    listed = (tmp_path / "out" / "convert_failed_file_list.txt").read_text()
    assert listed == f"{path.absolute()}\n"


def test_convert_to_bare_elements(source, tmp_path, capsys):
    code, _, _ = run(capsys, source / NAME, tmp_path / "plain", "-t", "bin")
    assert code == 0
    assert files_of(tmp_path / "plain")[:2] == [
        f"{NAME}.input.0.960.float16.NC1HWC0.bin",
        f"{NAME}.input.1.4.int32.ND.bin",
    ]
    run(capsys, source / NAME, tmp_path / "nchw", "-t", "bin", "-f", "NCHW")
    name = f"{NAME}.input.0.2_20_3_5.float16.NCHW.bin"
    assert name in files_of(tmp_path / "nchw")
    assert (tmp_path / "nchw" / name).read_bytes() == IMAGE.tobytes()


def test_convert_does_not_crop_to_a_shape_of_another_order(source, tmp_path, capsys):
    """The header's shape is NCHW: as NHWC it is no part of the result, which stays whole."""
    code, _, err = run(capsys, source / NAME, tmp_path / "out", "-f", "NHWC", "-t", "bin", "-i", 0)
    assert code == 0
    assert files_of(tmp_path / "out") == [f"{NAME}.input.0.2_3_5_32.float16.NC1HWC0.bin"]
    assert (
        "input 0: (2, 3, 5, 32) in NHWC is not cropped: the original shape (2, 20, 3, 5) "
        "does not fit" in err
    )


def test_convert_crops_to_the_shape_option(source, tmp_path, capsys):
    code, _, err = run(capsys, source / NAME, tmp_path, "-f", "NHWC", "-i", "0", "-s", "2,3,5,20")
    assert (code, err) == (0, "")
    found = np.load(tmp_path / f"{NAME}.input.0.2x3x5x20.npy")
    assert np.array_equal(found, IMAGE.transpose(0, 2, 3, 1))


def test_convert_one_tensor(source, tmp_path, capsys):
    code, _, _ = run(capsys, source / NAME, tmp_path / "out", "--output-tensor", 0)
    assert (code, files_of(tmp_path / "out")) == (0, [f"{NAME}.output.0.npy"])
    code, _, err = run(capsys, source / NAME, tmp_path / "out", "-i", 2)
    assert (code, err) == (1, f"{source / NAME}: the file has no input 2\n")


def test_convert_drops_the_packing_suffix(source, tmp_path, capsys):
    """Ours end in `.zst`, which is no part of an output's name."""
    plain = (source / NAME).read_bytes()
    run(capsys, source, tmp_path / "plain")
    (source / NAME).unlink()
    (source / f"{NAME}.zst").write_bytes(packed_file_of(plain))
    code, _, _ = run(capsys, source, tmp_path / "packed")
    assert code == 0
    assert files_of(tmp_path / "packed") == files_of(tmp_path / "plain")
    for name in files_of(tmp_path / "plain"):
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_convert_continues_after_damaged_files(source, tmp_path, capsys):
    """Damaged, unknown and empty files in a folder with whole ones; npy files are left alone."""
    whole = (source / NAME).read_bytes()
    (source / "Cut.a.1.2.3").write_bytes(whole[:-1])
    (source / "Empty.a.1.2.3").write_bytes(b"12345678")
    (source / "Noise.a.1.2.3").write_bytes(bytes(range(256)))
    text = tensor("output", numbered((3,), "uint8"), data_type=13)
    (source / "Text.a.1.2.3").write_bytes(bin_file(text, PARTS[1]))
    (source / "x.npy").write_bytes(b"anything")
    (source / "mapping.csv").write_text("1,2\n")
    (source / "below").mkdir()
    (source / "below" / NAME).write_bytes(whole)
    code, said, err = run(capsys, source, tmp_path / "out")
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == f"{source / 'Empty.a.1.2.3'}: empty"
    assert [line.partition(": ")[0] for line in lines[1:]] == [
        str(source / name) for name in ("Cut.a.1.2.3", "Noise.a.1.2.3", "Text.a.1.2.3")
    ]
    assert "output 0: elements of type STRING cannot be read" in lines[3]
    assert said.endswith("1 empty, 3 not or only partly converted\n")
    assert f"{NAME}.input.0.npy" in files_of(tmp_path / "out")
    assert "Text.a.1.2.3.input.0.npy" in files_of(tmp_path / "out")
    # Nothing failed any more: an old list would lie.
    for name in ("Cut.a.1.2.3", "Noise.a.1.2.3", "Text.a.1.2.3"):
        (source / name).unlink()
    assert run(capsys, source, tmp_path / "out")[0] == 0
    assert "convert_failed_file_list.txt" not in files_of(tmp_path / "out")


def test_convert_succeeds_with_an_empty_file(tmp_path, capsys):
    (tmp_path / NAME).write_bytes(b"")
    code, said, err = run(capsys, tmp_path / NAME, tmp_path / "out")
    assert (code, err) == (0, f"{tmp_path / NAME}: empty\n")
    assert said.endswith("0 tensors of 1 file, 0 B written, 1 empty\n")


def test_convert_of_a_folder_without_bin_files_is_an_error(tmp_path, capsys):
    (tmp_path / "a.npy").write_bytes(b"")
    code, _, err = run(capsys, tmp_path, tmp_path / "out")
    assert (code, err) == (1, f"rankdump: {tmp_path}: no bin file found\n")


def test_convert_recursive_keeps_folders(source, tmp_path, capsys):
    """What stands in OUT, which is part of the tree here, is not converted again."""
    below = source / "0" / "step 7"
    below.mkdir(parents=True)
    (below / NAME).write_bytes(bin_file(PARTS[2]))
    (source / ".hidden").mkdir()
    (source / ".hidden" / NAME).write_bytes(b"broken, but nobody looks")
    for _ in range(2):
        code, said, _ = run(capsys, source, source / "out", "--recursive", "-t", "bin")
        assert code == 0
        assert "6 tensors of 2 files" in said
    assert f"0/step 7/{NAME}.output.0.24.float32.NCHW.bin" in files_of(source / "out")


def test_convert_writes_overflow_files_as_json(tmp_path, capsys):
    payload = np.zeros(2048, np.uint8)
    payload[1040] = 0x20
    name = "Opdebug.Node_OpDebug.3.5.1719000000123456"
    (tmp_path / name).write_bytes(bin_file(tensor("output", payload, "ND", (2048,))))
    for number, more in enumerate(([], ["-f", "NCHW"])):
        out = tmp_path / str(number)
        assert run(capsys, tmp_path / name, out, *more)[0] == 0
        assert files_of(out) == [f"{name}.output.0.json"]
        assert (out / f"{name}.output.0.json").read_text() == convert_overflow_to_json(
            payload.tobytes()
        )


def test_convert_shortens_long_names(tmp_path, capsys):
    """A digest stands for a name of 255 characters, once in mapping.csv however often it ran."""
    name = "A." + "n" * 230 + ".1.2.345678"
    (tmp_path / name).write_bytes(bin_file(tensor("output", numbered((2, 3)))))
    for _ in range(2):
        code, _, _ = run(capsys, tmp_path / name, tmp_path / "out", "-t", "bin")
        assert code == 0
    mapping = (tmp_path / "out" / "mapping.csv").read_text()
    short, _, long = mapping.strip().partition(",")
    assert long == f"{name}.output.0.6.float16.ND.bin"
    assert files_of(tmp_path / "out") == sorted([short, "mapping.csv"])
    assert len(short) == 36
    assert short.endswith(".bin")


def test_convert_prints_json(source, tmp_path, capsys):
    (source / "Empty.a.1.2.3").write_bytes(b"")
    code, said, err = run(capsys, source, tmp_path / "out", "-f", "NHWC", "--json")
    told = json.loads(said)
    assert (code, err) == (1, "")
    path = str(source / NAME)
    assert told["failures"] == [
        {"path": path, "reason": "input 1: ND cannot be converted to NHWC, only to FRACTAL_NZ"}
    ]
    assert [warning["path"] for warning in told["warnings"]] == [path]
    assert told["empty"] == [str(source / "Empty.a.1.2.3")]
    assert (told["file_count"], told["tensor_count"], told["failed_count"]) == (2, 2, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("-f", "FRACTAL"), "'FRACTAL' is not one of"),
        (("-f", "nchw"), "'NDC1HWC0'"),
        (("-f", "NCHW", "-s", "1,0,2"), "numbers above 0"),
        (("-f", "NCHW", "-s", "1;2"), "numbers above 0"),
        (("-s", "1,2"), "--shape needs --format"),
        (("-i", "0", "--output-tensor", "0"), "cannot be combined"),
        (("-t", "pt"), "'pt' is not one of"),
        (("--jobs", "0"), "0 is not in the range"),
    ],
)
def test_convert_rejects_wrong_usage(source, tmp_path, capsys, more, said):
    code, _, err = run(capsys, source / NAME, tmp_path / "out", *more)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_convert_rejects_options_of_one_file_for_a_folder(source, tmp_path, capsys):
    code, _, err = run(capsys, source, tmp_path / "out", "-f", "NCHW", "-s", "1,2")
    assert (code, "are for one file" in err) == (2, True)
    assert run(capsys, source / "absent", tmp_path / "out")[0] == 2
    assert run(capsys, source / NAME, source / NAME)[0] == 2


def test_convert_reports_an_output_that_cannot_be_written(source, tmp_path, capsys):
    """A folder stands under the name of one output; the others are written."""
    (tmp_path / "out" / f"{NAME}.input.0.npy").mkdir(parents=True)
    code, _, err = run(capsys, source / NAME, tmp_path / "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "input 0: cannot be written" in err
    assert len(files_of(tmp_path / "out")) == 4


def test_convert_writes_nothing_outside_the_output_folder(source, tmp_path, capsys):
    """Links in the output folder lead nowhere; what stands under a file's name is replaced."""
    outside = tmp_path / "outside"
    outside.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{NAME}.input.0.npy").symlink_to(outside / "victim")
    (outside / "victim").write_text("as it was")
    (source / "sub").mkdir()
    (source / "sub" / NAME).write_bytes(bin_file(PARTS[2]))
    (out / "sub").symlink_to(outside)
    code, _, err = run(capsys, source, out, "--recursive")
    assert (code, "leads out of" in err) == (1, True)
    assert files_of(outside) == ["victim"]
    assert (outside / "victim").read_text() == "as it was"
    assert not (out / f"{NAME}.input.0.npy").is_symlink()
    assert Path(out / f"{NAME}.input.0.npy").is_file()


def test_convert_reports_two_files_of_one_name(source, tmp_path, capsys):
    """The plain one is converted, the packed one is named."""
    (source / f"{NAME}.zst").write_bytes(packed_file_of((source / NAME).read_bytes()))
    code, _, err = run(capsys, source, tmp_path / "out")
    assert code == 1
    assert err == f"{source / NAME}.zst: {NAME} is converted to files of the same names\n"
    assert len(files_of(tmp_path / "out")) == 6


def test_convert_rejects_an_impossible_output_folder(source, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, source, tmp_path / "file" / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'file'}" in err


def test_convert_reports_an_unreadable_folder(source, tmp_path, capsys, monkeypatch):
    """What nobody could look into is named, and the rest converted."""
    (source / "closed").mkdir()
    scandir = os.scandir

    def closing(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closing)
    code, _, err = run(capsys, source, tmp_path / "out", "--recursive")
    assert (code, err) == (1, f"{source / 'closed'}: cannot be listed: Permission denied\n")
    assert f"{NAME}.output.0.npy" in files_of(tmp_path / "out")


@pytest.mark.parametrize(("patience_s", "shown"), [(-1.0, True), (3600.0, False)])
def test_convert_shows_a_progress_bar_on_a_terminal(
    source, tmp_path, monkeypatch, patience_s, shown
):
    """On a terminal, and only when there is time to see it."""
    master, terminal = pty.openpty()
    monkeypatch.setattr(output, "_PROGRESS_DELAY_S", patience_s)
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert run_command_line(["convert", "-d", str(source), "-o", str(tmp_path / "out")]) == 0
    seen = b""
    # The kernel hands on what was written in its own time; the end is an error.
    with contextlib.suppress(OSError):
        while data := os.read(master, 1 << 16):
            seen += data
    os.close(master)
    assert (b"converting" in seen) == shown
    assert bool(seen) == shown


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line(["convert", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("out", ["-out", "--output", "--out", "-o"])
def test_convert_accepts_the_options_of_msaccucmp(out, source, tmp_path, capsys):
    """A command line of the tutorial works as it stands there."""
    file = source / NAME
    line = ("-d", file, out, tmp_path / "out", "-f", "NCHW", "-t", "npy", "-v", "2", "-i", "0")
    code, said, _ = told(capsys, *line)
    assert (code, len(list((tmp_path / "out").iterdir()))) == (0, 1), said


def test_convert_takes_short_o_as_a_number_beside_out(source, tmp_path, capsys):
    """`-o` of msaccucmp is one output; without `-out` it is the folder, as it was here."""
    file = source / NAME
    options = ("--dump_file", file, "-out", tmp_path / "out", "-f", "NCHW")
    code, _, _ = told(capsys, *options, "-o", 0)
    assert (code, [".output.0." in p.name for p in (tmp_path / "out").iterdir()]) == (0, [True])
    code, said, err = told(capsys, *options, "-o", tmp_path / "other")
    assert (code, said, err.count("\n")) == (2, "", 1)
    assert "the number of one output" in err
    assert "a folder for the converted files is missing" in told(capsys, "-d", file)[2]


def test_convert_escapes_line_breaks_in_names(tmp_path, capsys):
    """A name that holds a newline breaks neither what is said nor the list of failures."""
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "Conv.a\nb.1.2.3").write_bytes(bin_file(*PARTS)[:-1])
    code, _, err = told(capsys, "-d", folder, "-o", tmp_path / "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "Conv.a\\nb.1.2.3: damaged: according to its header, output 0 of " in err
    (listed,) = (tmp_path / "out/convert_failed_file_list.txt").read_text().splitlines()
    assert listed == f"{folder}/Conv.a\\nb.1.2.3"


def test_convert_reports_pipes_and_hidden_files(source, tmp_path, capsys):
    """Nobody waits for a pipe; what is hidden is no failure. Both are named."""
    os.mkfifo(source / "Conv.pipe.1.2.3")
    (source / ".Conv.hidden.1.2.4").write_bytes(bin_file(*PARTS))
    code, _, err = told(capsys, "-d", source, "-o", tmp_path / "out")
    assert code == 1
    assert f"{source}/Conv.pipe.1.2.3: not a regular file" in err
    assert f"{source}/.Conv.hidden.1.2.4: a hidden file, not converted" in err
    (source / "Conv.pipe.1.2.3").unlink()
    body = json.loads(told(capsys, "-d", source, "-o", tmp_path / "out", "--json")[1])
    assert (body["failed_count"], len(body["hidden"])) == (0, 1)
    (source / NAME).unlink()
    code, _, err = told(capsys, "-d", source, "-o", tmp_path / "out")
    assert (code, "no bin file found; 1 hidden file left out" in err) == (1, True)
