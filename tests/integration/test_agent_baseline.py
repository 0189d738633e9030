"""Agent and baselines: tensors that are the same in an earlier tree have no file, and every reader
knows them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump import reader
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.reader.baseline_files import find_tensor_file
from rankdump._analysis.reader.fingerprints import read_fingerprints_of_tree
from rankdump._analysis.reader.manifest_columns import make_iteration_table, read_manifest_columns
from rankdump._analysis.reader.tensor_columns import make_columns_of_manifests, make_columns_of_tree
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import StoredRecord
from rankdumpd.rebuild import rebuild_ledger

IN, OUT = agent_pb2.SIDE_INPUT, agent_pb2.SIDE_OUTPUT
RNG = np.random.default_rng(5)
OPERATORS = ("Default/a/Block-op0", "Default/a/fc/Dense-op1", "Default/b/Dense-op2")
TENSORS = [
    (name, side, slot, RNG.random(2000 * (slot + 1)).astype(np.float32) + number)
    for number, name in enumerate(OPERATORS)
    for side, slot in ((IN, 0), (IN, 1), (OUT, 0))
]
CHANGED = 4
"""The second input of the second operator."""
FORMS = [
    ("mindspore-sync", "npy"),
    ("mindspore-async", "npy"),
    ("mindspore-async", "bin"),
    ("cann", "bin"),
    ("cann-op-step", "bin"),
    ("cann-op", "npy"),
    ("api-torch", "npy"),
]
_STAMP = 1_700_000_000_000_000


def step(frames, first: int, iteration: int = 0, *, changed: bool = False, layout="mindspore-sync"):
    """Return all tensors of an iteration, and its end."""
    ids = {"task": 65535, "stream": 65535} if LAYOUTS[layout].shares_timestamps else {}
    sent: list[agent_pb2.Frame] = []
    for number, (name, side, slot, array) in enumerate(TENSORS):
        about = {"argument": f"{'input' if side == IN else 'output'}.{slot}", **ids}
        if LAYOUTS[layout].shares_timestamps:
            about["timestamp_us"] = _STAMP + first + number // 3
        if LAYOUTS[layout].api_files is not None:
            name = f"Functional_linear_{number // 3}_forward"
        tensor = array + iteration + (changed and number == CHANGED)
        sequence = first + number
        sent.append(
            frames.record(
                sequence, tensor, iteration=iteration, op_name=name, side=side, slot=slot, **about
            )
        )
    return [*sent, frames.end(first + len(sent), iteration, len(sent))]


class JobPair:
    """A job and a later one, which has the tree of the first as baseline."""

    def __init__(self, make_agent, make_rank, frames, folder: Path, **settings) -> None:
        self.agent = make_agent(folder=folder / "agent")
        self.first, self.second = folder / "first", folder / "second"
        self._make_rank, self._frames, self._settings = make_rank, frames, settings
        self._jobs = 0

    def dump(self, root: Path, *, baseline: object = "", iterations=(0,), changed=False, **more):
        """Dump iterations as a job of its own; return the rank."""
        output = {**self._settings, "started": f"2026010100000{self._jobs}"}
        layout = output.get("layout", "mindspore-sync")
        content = more.pop("content", ContentSettings())
        if LAYOUTS[layout].api_files is not None:  # such a dump always has statistics
            content = replace(content, saved="full")
        content = replace(content, baseline=str(baseline))
        self._jobs += 1
        rank = self._make_rank(
            self.agent.address,
            root=root,
            job_id=f"job{self._jobs}",
            session_id=f"session{self._jobs:04}",
            output=output,
            content=content,
            **more,
        )
        rank.open()
        # Sequence numbers begin with 1, and time stamps of jobs differ.
        offset = self._jobs * 1000
        sent = [
            frame
            for number, iteration in enumerate(iterations)
            for frame in step(
                self._frames,
                offset + number * 100,
                iteration,
                changed=changed,
                layout=layout,
            )
        ]
        for sequence, frame in enumerate(sent, start=1):
            if frame.HasField("record") and not LAYOUTS[layout].shares_timestamps:
                frame.record.timestamp_us += 1_000_000 * self._jobs
            frame.sequence = sequence
        self.stream = rank.push()
        goodbye = self._frames.goodbye(len(sent) + 1, len(iterations))
        assert self.stream.send(*sent, goodbye).finish() is grpc.StatusCode.OK
        return rank

    def count(self, verdict: str) -> float:
        """Return how many records a baseline has judged so."""
        return sum(
            sample.value
            for sample in self.agent.counters.samples()
            if sample.name == "rankdump_agent_baseline_records_total"
            and sample.labels["verdict"] == verdict
        )


@pytest.fixture
def make_pair(make_agent, make_rank, frames, short_dir):
    """Makes pairs of jobs."""
    return lambda **settings: JobPair(make_agent, make_rank, frames, short_dir, **settings)


def read_manifest(root: Path, iteration: int = 0) -> Manifest:
    (path,) = root.glob(f"rank*/.dump_metadata/manifest/iteration_{iteration}.*.json")
    return Manifest.from_json(path.read_bytes())


def list_files(root: Path) -> list[Path]:
    """Return the files of tensors."""
    names = (".npy", ".npy.zst")
    return [
        path
        for path in root.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
        and (path.name.endswith(names) or path.name.removesuffix(".zst")[-6:].isdecimal())
    ]


@pytest.mark.parametrize(("layout", "file_format"), FORMS)
def test_only_what_differs_has_a_file(make_pair, layout, file_format):
    """In every layout, all but one tensor of the second job are in the baseline alone, and all of
    them are listed, loaded and checked as those of any dump.
    """
    pair = make_pair(layout=layout, file_format=file_format)
    pair.dump(pair.first)
    pair.dump(pair.second, baseline=pair.first, changed=True)
    manifest = read_manifest(pair.second)
    status = manifest.status
    assert (status.expected, status.stored, status.linked, status.same_as_baseline) == (9, 1, 8, 8)
    assert len(list_files(pair.second)) == 1
    assert [bool(each.same_as) for each in manifest.records].count(False) == 1
    tree = reader.walk(pair.second)
    assert (len(tree.entries), tree.problems) == (9, ())
    earlier = reader.walk(pair.first)
    for entry, other in zip(tree.entries, earlier.entries, strict=True):
        assert (entry.op_name, entry.key.side, entry.key.slot) == (
            (other.op_name, other.key.side, other.key.slot)
        )
        difference = reader.load(entry) - reader.load(other)
        assert np.allclose(difference, 0 if entry.is_same_as_baseline else 1, atol=1e-5)
    report = check_tree(pair.second, workers=1)
    assert not report.damages
    assert any("8 tensors are in the baseline" in text for text in report.unchecked)
    assert pair.count("same") == 8
    assert pair.count("different") == 1


def remove_tree(root: Path) -> None:
    shutil.rmtree(root)


def remove_manifests(root: Path) -> None:
    shutil.rmtree(root / "rank_0/.dump_metadata")


def rename_rank(root: Path) -> None:
    (root / "rank_0").rename(root / "rank_3")


def damage_manifest(root: Path) -> None:
    (path,) = root.glob("rank_0/.dump_metadata/manifest/*.json")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"Default/a", b"Default/z"))


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (remove_tree, "cannot be read: No such file or directory"),
        (remove_manifests, "has no manifests, which have the digests"),
        (rename_rank, "has no rank_0, but rank_3"),
        (damage_manifest, "cannot be read: its checksum is wrong"),
    ],
)
def test_baseline_that_says_nothing_is_one_line(make_pair, spoil, finding):
    """Without a usable baseline all tensors are stored, and counted; rank and status say why."""
    pair = make_pair()
    pair.dump(pair.first)
    spoil(pair.first)
    rank = pair.dump(pair.second, baseline=pair.first)
    pair.stream.wait_warned(1)
    (found,) = [text for text in rank.status().findings if "baseline" in text]
    assert f"the baseline {pair.first}" in found
    assert finding in found
    assert read_manifest(pair.second).status.stored == 9
    assert pair.count("unavailable") == 9
    assert len(list_files(pair.second)) == 9


def test_other_iterations_and_operators_are_stored(make_pair):
    """What the baseline does not have is stored; an iteration that it has not, with a finding."""
    pair = make_pair()
    pair.dump(pair.first, iterations=(0, 1))
    rank = pair.dump(pair.second, baseline=pair.first, iterations=(1, 2))
    assert read_manifest(pair.second, 1).status.same_as_baseline == 9
    assert read_manifest(pair.second, 2).status.stored == 9
    texts = list(rank.status().findings)
    assert any("other iterations of rank_0: it has 2, from 0 to 1" in text for text in texts)


def test_baseline_of_statistics_has_no_digests(make_pair, make_rank, frames):
    """A dump of statistics cannot be a baseline, and that is said."""
    pair = make_pair()
    rank = make_rank(
        pair.agent.address, root=pair.first, content=ContentSettings("statistic", ("max",))
    )
    rank.open()
    rows = frames.figures(1, [(array, "1") for _, _, _, array in TENSORS])
    rank.push().send(rows, frames.end(2, 0, len(TENSORS)), frames.goodbye(3)).finish()
    rank = pair.dump(pair.second, baseline=pair.first)
    assert read_manifest(pair.second).status.stored == 9
    texts = list(rank.status().findings)
    assert any("has no digests of tensors of rank_0" in text for text in texts)


def test_baseline_may_have_a_baseline(make_pair):
    """Of a chain of dumps, each tensor is read where its file is."""
    pair = make_pair()
    third = pair.second.with_name("third")
    pair.dump(pair.first)
    pair.dump(pair.second, baseline=pair.first, changed=True)
    pair.dump(third, baseline=pair.second, changed=True)
    manifest = read_manifest(third)
    assert manifest.status.same_as_baseline == 9
    assert {each.baseline for each in manifest.records} == {str(pair.first), str(pair.second)}
    for entry, other in zip(
        reader.walk(third).entries, reader.walk(pair.second).entries, strict=True
    ):
        assert np.array_equal(reader.load(entry), reader.load(other))


def test_manifests_alone_are_a_baseline(make_pair, short_dir):
    """A copy of the manifests has all digests, for a host without the tree; tensors are read from
    the tree once both are beside each other.
    """
    pair = make_pair()
    pair.dump(pair.first)
    copy = short_dir / "host" / "first"
    shutil.copytree(
        pair.first / "rank_0/.dump_metadata/manifest", copy / "rank_0/.dump_metadata/manifest"
    )
    pair.dump(pair.second, baseline=copy)
    shutil.rmtree(copy)
    tree = reader.walk(pair.second)
    assert all(each.is_same_as_baseline for each in tree.entries)
    assert not reader.damaged(tree)
    # Its name is the same, and it is a neighbour of the dump.
    assert reader.load(tree.entries[0]).shape == TENSORS[0][3].shape


def test_changed_file_of_a_baseline_is_not_read(make_pair):
    """Elements that are not those of the digest are no tensor of the dump."""
    pair = make_pair()
    pair.dump(pair.first)
    pair.dump(pair.second, baseline=pair.first)
    entry = reader.walk(pair.second).entries[0]
    path = find_tensor_file(entry)
    other = reader.walk(pair.first).entries[2].path
    path.unlink()
    shutil.copy(other, path)
    with pytest.raises(CorruptedError, match=r"its manifest has|has changed since"):
        reader.load(entry)


def test_tensors_have_rows_of_statistics(make_pair):
    """A tensor without a file has its row, as the plan asks."""
    pair = make_pair()
    pair.dump(pair.first)
    content = ContentSettings("full", ("max",), fingerprints=True)
    pair.dump(pair.second, baseline=pair.first, content=content)
    assert read_manifest(pair.second).status.same_as_baseline == 9
    lines = (pair.second / "rank_0/Net/0/0/statistic.csv").read_text().splitlines()
    assert len(lines) == 1 + len(TENSORS)
    found = read_fingerprints_of_tree(pair.second, lambda rank, iteration: True, [])
    assert len(found) == len(TENSORS)
    assert not check_tree(pair.second, workers=1).damages


def test_killed_agent_goes_on(make_pair, make_daemon, make_rank, frames):
    """An agent that is killed within an iteration knows afterwards which tensors had no file."""
    pair = make_pair()
    pair.dump(pair.first)
    daemon = make_daemon(RANKDUMPD_AGENT__KEEP_FREE_RATIO="0")
    rank = make_rank(
        daemon.address,
        root=pair.second,
        job_id="again",
        session_id="sessionagain",
        content=ContentSettings(baseline=str(pair.first)),
    )
    rank.open()
    sent = step(frames, 1, changed=True)
    stream = rank.push().send(*sent[:6])
    stream.wait_acknowledged(6)
    daemon.kill()
    stream.wait_over()
    daemon.start()
    rank.open()
    # The last two are sent again, as after a lost acknowledgement.
    rest = [*sent[4:], frames.goodbye(len(sent) + 1)]
    assert rank.push().send(*rest).finish() is grpc.StatusCode.OK
    status = read_manifest(pair.second).status
    assert (status.expected, status.stored, status.same_as_baseline) == (9, 1, 8)
    assert not check_tree(pair.second, workers=1).damages


def test_ledger_is_rebuilt_with_a_baseline(make_pair, tmp_path):
    """A ledger that is rebuilt from manifests counts tensors that have no file."""
    pair = make_pair()
    pair.dump(pair.first)
    pair.dump(pair.second, baseline=pair.first, changed=True)
    pair.agent.stop()
    rebuild_ledger(pair.second, tmp_path / "state")
    ledger = AgentLedger(tmp_path / "state")
    try:
        session_id = read_manifest(pair.second).status.session_id
        counts = {each.status.value: each.records for each in ledger.counts(session_id)}
        assert counts == {"stored": 1, "same_as_baseline": 8}
        kept = [each for each in ledger.kept(session_id, 0) if isinstance(each, StoredRecord)]
        assert {each.record.baseline for each in kept} == {"", str(pair.first)}
    finally:
        ledger.close()
        pair.agent.start()


def test_table_says_which_tensors_have_no_file(make_pair):
    """The table of statistics has the file in the baseline, from manifests as from a walk."""
    pair = make_pair()
    pair.dump(pair.first)
    pair.dump(pair.second, baseline=pair.first, changed=True)
    (path,) = pair.second.glob("rank_0/.dump_metadata/manifest/*.json")
    access, problems = LocalTree(pair.second), list[str]()
    read = read_manifest_columns(access, [path.relative_to(pair.second).as_posix()], problems)
    rows = make_columns_of_manifests(access, read, problems)
    walked = make_columns_of_tree(reader.walk(pair.second), problems)
    assert not problems
    places = rows.column("same_as").to_pylist()
    assert places == walked.column("same_as").to_pylist()
    assert [place is None for place in places] == [n == CHANGED for n in range(len(TENSORS))]
    assert all(Path(place).is_file() for place in places if place is not None)
    iterations = make_iteration_table(read.manifests)
    assert iterations.column("same_as_baseline").to_pylist() == [8]


def test_constants_and_parts_are_compared(make_pair, make_rank, frames):
    """A constant is the same as that of its graph, a micro-batch as the one with its number."""
    pair = make_pair()
    for root, baseline, stamp in ((pair.first, "", 0), (pair.second, pair.first, 500)):
        rank = make_rank(
            pair.agent.address,
            root=root,
            job_id=root.name,
            session_id=root.name,
            content=ContentSettings(baseline=str(baseline)),
        )
        rank.open()
        array, about = TENSORS[0][3], {"timestamp_us": _STAMP + stamp}
        sent = [
            frames.record(1, array, op_name="Default/weight", constant=True, **about),
            *(
                frames.record(n + 2, array + n, microbatch=n, timestamp_us=_STAMP + stamp + n + 1)
                for n in range(2)
            ),
            frames.end(4, 0, 3),
            frames.goodbye(5),
        ]
        assert rank.push().send(*sent).finish() is grpc.StatusCode.OK
    assert read_manifest(pair.second).status.same_as_baseline == 3
    tree = reader.walk(pair.second)
    assert [each.key.constant for each in tree.entries] == [True, False, False]
    differences = [reader.load(each)[0] - TENSORS[0][3][0] for each in tree.entries]
    assert np.allclose(differences, [0, 0, 1], atol=1e-5)
    assert not tree.problems
    assert not check_tree(pair.second, workers=1).damages
