"""Digests of a baseline: a tensor is compared with its counterpart, and little of it is held."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.tensor_layouts import shard_rows

from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.record import TensorSide
from rankdump._core.status import IterationStatus
from rankdumpd.agent.records import BaselineVerdict, TreeFile
from rankdumpd.agent.storage import baseline as module
from rankdumpd.agent.storage.baseline import BaselineIndex, make_identity

DIGEST = "0123456789abcdef0123456789abcdef"
STAMP = 1_700_000_000_000_000


def make_record(number: int = 0, side: str = "output", slot: int = 0, **fields) -> ManifestRecord:
    """Return the record of a tensor of an operator with a number."""
    name = f"MatMul.Default_m{number}-op{number}.0.0.{STAMP + number}.{side}.{slot}"
    default = ManifestRecord(
        path=f"rank_0/Net/0/0/{name}.DefaultFormat.npy",
        timestamp_us=STAMP + number,
        op_type="MatMul",
        op_name=f"Default/m{number}-op{number}",
        argument="",
        dtype="float32",
        shape=(4,),
        bytes_in=16,
        bytes_stored=144,
        digest=DIGEST,
    )
    return default._replace(**fields)


def write_manifest(root: Path, *records: ManifestRecord, iteration: int = 0, rank: int = 0) -> Path:
    """Write the manifest of an iteration; return its path."""
    status = IterationStatus("job", "session", rank, iteration, complete=True)
    folder = root / f"rank_{rank}/.dump_metadata/manifest"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / make_manifest_name(iteration, "session")
    path.write_bytes(Manifest(status, 1, 0, "here", tuple(records)).to_json())
    return path


class Counterparts:
    """Asks an index for tensors of one baseline."""

    def __init__(self, root: Path, **limits) -> None:
        self.root, self.index = root, BaselineIndex(**limits)

    def find(self, number: int = 0, *, iteration: int = 0, rank: int = 0, **fields):
        """Return what the baseline says of the tensor of `make_record`, with other fields."""
        about: dict[str, Any] = {
            "place": ("Net", 0, False),
            "digest": DIGEST,
            "dtype": "float32",
            "shape": (4,),
            "side": TensorSide.OUTPUT,
            "slot": 0,
            "argument": "",
            "microbatch": None,
            "phase": "",
            "is_npy": True,
        } | fields
        identity = make_identity(
            about["place"],
            ("MatMul", f"Default/m{number}-op{number}", about["argument"]),
            f"{about['side'].value}.{about['slot']}",
            (about["microbatch"], about["phase"]),
            is_npy=about["is_npy"],
        )
        content = about["digest"], about["dtype"], about["shape"]
        return self.index.find_match(str(self.root), f"rank_{rank}", iteration, identity, content)


SAME, DIFFERENT, ABSENT = (
    BaselineVerdict.SAME,
    BaselineVerdict.DIFFERENT,
    BaselineVerdict.ABSENT,
)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, SAME),
        ({"digest": DIGEST[::-1]}, DIFFERENT),
        ({"shape": (2, 2)}, DIFFERENT),
        ({"dtype": "int32"}, DIFFERENT),
        ({"number": 1}, ABSENT),
        ({"side": TensorSide.INPUT}, ABSENT),
        ({"slot": 1}, ABSENT),
        ({"microbatch": 0}, ABSENT),
        ({"phase": "eval"}, ABSENT),
        ({"argument": "args.0"}, ABSENT),
        ({"place": ("Net", 1, False)}, ABSENT),
        ({"place": ("Net", 0, True)}, ABSENT),
        ({"is_npy": False}, ABSENT),
    ],
)
def test_tensor_is_compared_with_its_counterpart(tmp_path: Path, fields, verdict):
    """An equal content of another tensor, side, slot or micro-batch does not count."""
    record = make_record()
    write_manifest(tmp_path, record)
    found = Counterparts(tmp_path).find(**fields)
    assert found.verdict is verdict
    assert found.file == (TreeFile(str(tmp_path), record.path) if verdict is SAME else None)


def test_tensors_of_one_operator_are_told_apart(tmp_path: Path):
    """Each of many tensors with equal contents finds its own file."""
    records = [
        make_record(n, side, slot, layout=shard_rows(0, 2, (8, 4)) if slot else None)
        for n in range(20)
        for side in ("input", "output")
        for slot in range(3)
    ]
    write_manifest(tmp_path, *records)
    asked = Counterparts(tmp_path)
    for record in records:
        side, slot = record.path.split(".")[-4:-2]
        number = record.timestamp_us - STAMP
        found = asked.find(number, side=TensorSide(side), slot=int(slot))
        assert found.file == TreeFile(str(tmp_path), record.path)


def test_rerun_in_the_baseline_offers_both_contents(tmp_path: Path):
    """Of an iteration that two sessions ran, a tensor may equal that of either."""
    first = write_manifest(tmp_path, make_record())
    first.rename(first.with_name("iteration_0.another.json"))
    write_manifest(tmp_path, make_record(digest=DIGEST[::-1]))
    asked = Counterparts(tmp_path)
    assert asked.find().verdict is SAME
    assert asked.find(digest=DIGEST[::-1]).verdict is SAME


def test_long_name_is_found_by_its_full_name(tmp_path: Path):
    """Side and slot of a shortened name are in the `mapping.csv` of its folder."""
    record = make_record()
    folder, _, name = record.path.rpartition("/")
    write_manifest(tmp_path, record._replace(path=f"{folder}/123456.npy"))
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "mapping.csv").write_text(f"123456.npy,{name}\n")
    assert Counterparts(tmp_path).find().file == TreeFile(str(tmp_path), f"{folder}/123456.npy")


def test_replaced_manifest_is_read_as_it_was(tmp_path: Path):
    """A baseline whose files are packed later gets other manifests, of the same tensors."""
    path = write_manifest(tmp_path, make_record(0), make_record(1))
    asked = Counterparts(tmp_path)
    assert asked.find(1).verdict is SAME
    path.unlink()
    write_manifest(tmp_path, make_record(1, bytes_stored=9))
    assert asked.find(1).file == TreeFile(str(tmp_path), make_record(1).path)


def test_only_some_iterations_are_held(tmp_path: Path):
    """The oldest ones leave memory, by their number and by that of their tensors."""
    for iteration in range(5):
        write_manifest(tmp_path, *map(make_record, range(10)), iteration=iteration)
    few, small = Counterparts(tmp_path, max_iterations=2), Counterparts(tmp_path, max_records=25)
    for asked in (few, small):
        for iteration in (0, 1, 2, 3, 4, 0):
            assert asked.find(3, iteration=iteration).verdict is SAME
            assert asked.index.held_records <= 20
        assert asked.index.held_records == 20


def test_iteration_above_the_limit_is_held_alone(tmp_path: Path):
    """A limit never keeps a tensor from being compared."""
    write_manifest(tmp_path, *map(make_record, range(10)))
    asked = Counterparts(tmp_path, max_records=3)
    assert {asked.find(n).verdict for n in range(10)} == {SAME}


def test_manifest_is_read_once_by_several_threads(tmp_path: Path, monkeypatch):
    """Workers that need the same iteration wait for one of them."""
    write_manifest(tmp_path, *map(make_record, range(50)))
    asked, opened = Counterparts(tmp_path), list[str]()
    is_intact = module.is_intact
    monkeypatch.setattr(module, "is_intact", lambda data: opened.append("") or is_intact(data))
    gate = threading.Barrier(4)

    def ask() -> None:
        gate.wait()
        found.append(asked.find(7).verdict)

    found: list[BaselineVerdict] = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (found, opened) == ([SAME] * 4, [""])


def test_iteration_that_arrives_later_is_found(tmp_path: Path):
    """The list of manifests is read again for an iteration that it does not have."""
    write_manifest(tmp_path, make_record())
    asked = Counterparts(tmp_path)
    assert asked.find().verdict is SAME
    write_manifest(tmp_path, make_record(), iteration=1)
    assert asked.find(iteration=1).verdict is SAME


def test_links_in_a_baseline_are_not_followed(tmp_path: Path):
    """A link in the place of a manifest or its folder leads nowhere."""
    path = write_manifest(tmp_path / "real", make_record())
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/rank_0").symlink_to(path.parents[2])
    found = Counterparts(tmp_path / "linked").find()
    assert found.verdict is BaselineVerdict.UNAVAILABLE
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))
    assert Counterparts(tmp_path / "real").find().verdict is BaselineVerdict.UNAVAILABLE


def test_manifest_of_an_early_version_is_named(tmp_path: Path):
    """Records that are not lines are not compared, and the finding names the file."""
    path = write_manifest(tmp_path, make_record())
    path.write_bytes(path.read_bytes().replace(b'"records": [\n', b'"records": [ \n'))
    path.write_bytes(path.read_bytes().rpartition(b', "crc32"')[0] + b"}")
    found = Counterparts(tmp_path).find()
    assert found.problem is not None
    assert found.problem.kind == "damaged"
    assert path.name in found.problem.text
    assert "not lines" in found.problem.text


def test_baseline_outside_of_the_roots_is_not_read(tmp_path: Path):
    """An agent that may write to some folders only reads baselines there only, links resolved."""
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    write_manifest(other, make_record())
    write_manifest(allowed / "tree", make_record())
    (allowed / "link").symlink_to(other)
    for root, verdict in (
        (allowed / "tree", SAME),
        (other, BaselineVerdict.UNAVAILABLE),
        (allowed / "link", BaselineVerdict.UNAVAILABLE),
    ):
        asked = Counterparts(root, roots=(str(allowed),))
        assert asked.find().verdict is verdict


def test_folders_of_a_baseline_keep_their_modes(tmp_path: Path):
    """A baseline is never written to, also where a folder looks like one that is not finished."""
    write_manifest(tmp_path, make_record())
    folder = tmp_path / "rank_0"
    folder.chmod(0o1700)
    assert Counterparts(tmp_path).find().verdict is SAME
    assert folder.stat().st_mode & 0o7777 == 0o1700
