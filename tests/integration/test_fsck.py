"""Check of trees that agents wrote, intact and damaged."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from integration.conftest import STAMP
from support.flipped_bytes import flipped

from rankdump._analysis.fsck.damage import CheckReport, DamageKind
from rankdump._analysis.fsck.repair import repair_tree
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._cli.command_group import run_command_line
from rankdump._core.plan import ContentSettings
from rankdump.wire.v1 import agent_pb2

STARTED = "20250102030405"
IN, OUT = agent_pb2.SIDE_INPUT, agent_pb2.SIDE_OUTPUT
RANDOM = np.random.default_rng(8)
FORMS = {
    "npy": ({"layout": "mindspore-sync"}, ContentSettings()),
    "full": ({"layout": "mindspore-sync"}, ContentSettings("full")),
    "cann-bin": ({"layout": "cann", "file_format": "bin", "started": STARTED}, ContentSettings()),
    "async-bin": ({"layout": "mindspore-async", "file_format": "bin"}, ContentSettings()),
    "op-npy": ({"layout": "cann-op-step", "started": STARTED}, ContentSettings()),
    "api": ({"layout": "api-torch"}, ContentSettings("full", ("max", "min", "avg"))),
}


def wide(name: str) -> tuple[np.ndarray, str]:
    """Return elements of a type that numpy lacks, as integers of their bits."""
    if name == "bfloat16":
        return RANDOM.integers(0, 1 << 16, 60, dtype=np.uint16), name
    return RANDOM.integers(0, 120, 90, dtype=np.uint8), name


TENSORS = [
    ("Default/a/Dense-op0", IN, 0, *wide("bfloat16")),
    ("Default/a/Dense-op0", IN, 2, RANDOM.standard_normal((30, 7)), ""),
    ("Default/a/Dense-op0", OUT, 0, np.zeros((2, 50), np.float16), ""),
    ("Default/b/ReLU-op0", IN, 0, np.array(7, np.int32), ""),
    ("Default/b/ReLU-op0", OUT, 0, *wide("float8_e4m3fn")),
    ("Default/b/ReLU-op0", OUT, 1, np.zeros((0, 3), np.float32), ""),
]
LARGE = ("Default/c/Large-op0", OUT, 0, RANDOM.random(20_000), "")


@pytest.fixture
def dumped(make_agent, make_rank, frames, short_dir):
    """Makes trees of two iterations; their agent has stopped."""
    agent = make_agent()
    agent.stop()

    def make(form: str, codec: str = "zstd", tensors=(*TENSORS, LARGE)) -> Path:
        agent.start()
        output, content = FORMS[form]
        root = short_dir / f"{form}-{codec}-{len(tensors)}"
        who = root.name
        rank = make_rank(
            agent.address,
            root=root,
            codec=codec,
            output=output,
            content=content,
            session_id=f"s{who}",
            job_id=who,
        )
        rank.open()
        stream, sequence = rank.push(), 0
        for iteration in range(2):
            for name, side, slot, array, dtype in tensors:
                sequence += 1
                about = {"argument": f"{'input' if side == IN else 'output'}.{slot}"}
                called = f"NN_{name[8]}_{iteration}_forward"
                api = {"op_name": called, **about} if form == "api" else {"op_name": name}
                stream.send(
                    frames.record(
                        sequence,
                        array,
                        iteration=iteration,
                        side=side,
                        slot=slot,
                        dtype=dtype,
                        timestamp_us=1_700_000_000_000_000 + 1000 * iteration + ord(name[8]),
                        **api,
                    )
                )
            sequence += 1
            stream.send(frames.end(sequence, iteration, len(tensors)))
        stream.send(frames.goodbye(sequence + 1, 2)).wait_acknowledged(sequence + 1)
        stream.finish()
        agent.stop()
        return root

    return make


def path_of(root: Path, damage: str = "Dense") -> Path:
    """Return the file of a tensor."""
    return next(path for path in named(root) if damage in path.name)


def named(root: Path) -> list[Path]:
    """Return the files that manifests name."""
    found = []
    for path in sorted(root.rglob(".dump_metadata/manifest/*.json")):
        found += [root / each["path"] for each in json.loads(path.read_bytes())["records"]]
    return sorted(set(found))


def words(report: CheckReport) -> set[tuple[str, str]]:
    return {(damage.kind.value, damage.path) for damage in report.damages}


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_fsck_finds_no_problem_in_an_agents_tree(dumped, form, codec):
    root = dumped(form, codec)
    report = check_tree(root, workers=2)
    assert report.damages == ()
    assert (report.digests, report.unchecked) == (2 * len(TENSORS) + 2, ())
    assert report.names == len(named(root))


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("form", ["npy", "cann-bin", "api"])
def test_fsck_finds_every_flipped_byte(dumped, form, codec):
    """Each byte of each file that a manifest names is flipped once; of large files only some."""
    root = dumped(form, codec, TENSORS)
    chance = random.Random(form + codec)
    for path in named(root):
        size = path.stat().st_size
        places = range(size) if size < 12 else chance.sample(range(size), 12)
        for at in places:
            with flipped(path, at, chance.randrange(1, 256)):
                report = check_tree(root, workers=1)
            assert ("torn", str(path.relative_to(root))) in words(report), (path, at)
    assert check_tree(root, workers=1).damages == ()


def test_fsck_names_each_kind_of_damage(dumped, short_dir):
    """Each damaged file is named with its kind of damage, and no other file is."""
    root = dumped("npy", "none", TENSORS)
    paths = [path for path in named(root) if path.stat().st_nlink == 1]
    gone, cut, twin, alone = paths[:4]
    folder = cut.parent
    folder.chmod(0o755)
    due = set()
    data = cut.read_bytes()
    cut.chmod(0o600)
    cut.write_bytes(data[:-1])
    due.add(("torn", cut))
    gone.unlink()
    due.add(("missing", gone))
    shutil.copy(twin, f"{twin}.zst")
    due.add(("duplicate", Path(f"{twin}.zst")))
    stray = alone.with_name(alone.name.replace("Default_", "Other_"))
    shutil.copy(alone, stray)
    due.add(("unmanifested", stray))
    (folder / "notes.txt").write_text("mine")
    due.add(("foreign", folder / "notes.txt"))
    outside = short_dir / "outside"
    shutil.copytree(folder, outside)
    (root / "rank_1").symlink_to(outside, target_is_directory=True)
    due.add(("foreign", root / "rank_1"))
    (folder / ".s-7.tmp").write_bytes(b"half")
    due.add(("leftover", folder / ".s-7.tmp"))
    later = root / "rank_0/Net/0/9"
    later.mkdir()
    shutil.copy(alone, later)
    due.add(("unmanifested", later))
    (manifest,) = root.rglob("iteration_1.*.json")
    broken = manifest.with_name("iteration_5.json")
    broken.write_bytes(manifest.read_bytes().replace(b'"expected": 6', b'"expected": 7'))
    due.add(("manifest", broken))
    second = manifest.with_name("iteration_1.copy.json")
    shutil.copy(manifest, second)
    due.add(("duplicate", second))
    report = check_tree(root, workers=2)
    assert words(report) == {(word, str(path.relative_to(root))) for word, path in due}
    left = repair_tree(root, report)
    assert [damage.path for damage in left.mended] == [str((folder / ".s-7.tmp").relative_to(root))]
    assert check_tree(root, workers=2).damages == left.damages


@pytest.mark.parametrize(
    ("layout", "tables"),
    [("mindspore-sync", "folder"), ("cann", "operator"), ("cann-op-step", "operator")],
)
def test_fsck_finds_rows_that_differ_from_the_manifest(
    make_agent, make_rank, frames, layout, tables
):
    """A table has each row of the manifest, with its operator, type and shape."""
    output = {"layout": layout, **({} if layout == "mindspore-sync" else {"started": STARTED})}
    content = ContentSettings("statistic", ("max", "min"), tables=tables)
    agent = make_agent()
    rank = make_rank(agent.address, output=output, content=content)
    rank.open()
    arrays: list[np.ndarray] = [np.ones((3, number), np.float32) for number in (1, 2)]
    arrays.append(np.ones(4, np.int32))
    stream, sequence = rank.push(), 0
    for iteration in range(2):
        for number, array in enumerate(arrays):
            sequence += 1
            about = {"op_name": f"Default/{number}, x/X-op0", "iteration": iteration}
            stream.send(frames.figures(sequence, [(array, "1,2")], **about))
        sequence += 1
        stream.send(frames.end(sequence, iteration, len(arrays)))
    stream.send(frames.goodbye(sequence + 1, 2)).wait_acknowledged(sequence + 1)
    stream.finish()
    agent.stop()
    assert check_tree(rank.root, workers=1).damages == ()
    table = min(rank.root.rglob("*.csv"), key=lambda path: ("order" in str(path), str(path)))
    table.chmod(0o600)
    whole = table.read_text()
    spoilt = {
        "shape": re.sub(r"3,1\)|3x1", lambda found: found[0].replace("3", "7"), whole),
        "type": whole.replace("float32", "float16").replace("DT_FLOAT", "DT_INT8"),
        "side": whole.replace("output", "inputs").replace("Output", "Inputs"),
    }
    if tables == "folder":
        spoilt["name"] = whole.replace("Default_0", "Default_9")
        spoilt["time"] = whole.replace(str(STAMP + 1), str(STAMP + 99))
    for text in spoilt.values():
        assert text != whole
        table.write_text(text)
        assert check_tree(rank.root, workers=1).damages != (), text
    table.write_text(whole)
    assert check_tree(rank.root, workers=1).damages == ()


def test_fsck_finds_an_unbalanced_iteration(dumped):
    root = dumped("npy")
    (path,) = root.rglob("iteration_0.*.json")
    path.chmod(0o600)
    body = json.loads(path.read_bytes())
    del body["crc32"]
    body["status"]["expected"] += 1
    del body["records"][0]
    path.write_text(json.dumps(body))
    kinds = [damage.kind for damage in check_tree(root, workers=1).damages]
    assert kinds.count(DamageKind.UNBALANCED) == 2


def test_repair_removes_tensor_files_left_by_a_crash(dumped):
    """Tensor files that are joined already are removed by --repair, and the joined file is kept."""
    root = dumped("async-bin", "none", TENSORS)
    whole = path_of(root)
    own = whole.with_name(f"{whole.name}.input.0")
    own.write_bytes(b"")
    before = check_tree(root, workers=1)
    assert [(damage.kind, damage.mendable) for damage in before.damages] == [
        (DamageKind.DUPLICATE, True)
    ]
    assert repair_tree(root, before).damages == ()
    assert whole.exists()
    assert not own.exists()
    assert check_tree(root, workers=1).damages == ()


def test_repair_keeps_files_being_written(dumped, capsys):
    root = dumped("npy")
    leftover = root / "rank_0/Net/0/0/.x.tmp"
    with leftover.open("w") as writer:
        assert run_command_line(["fsck", "--repair", str(root)]) == 1
        assert "leftover: rank_0/Net/0/0/.x.tmp" in capsys.readouterr().out
        assert not writer.closed
    assert run_command_line(["fsck", "--repair", "--json", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["mended"][0]["path"].endswith(".x.tmp")
    assert not leftover.exists()


def test_fsck_usage_errors(dumped, capsys):
    root = str(dumped("npy"))
    assert run_command_line(["fsck", "--rebuild", root]) == 2
    assert run_command_line(["fsck", "--repair", "--rebuild", "--state-dir", "x", root]) == 2
    assert run_command_line(["fsck", f"{root}/none"]) == 2
    assert run_command_line(["fsck", root]) == 0
    assert "no problem found" in capsys.readouterr().out
