"""Ingest beside a writing job, killed at any moment, and in an agent."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.native_tree import hidden, native_files, stored, write_tree

import rankdump
from rankdump import reader
from rankdump.errors import CorruptedError
from rankdump.reader import Dump, Entry

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "mindspore"
JOBS = Path(__file__).parent / "jobs"
TREES = (
    "2.7.0-two-ranks",
    "2.7.0-three-graphs",
    "2.7.0-dtypes",
    "2.7.0-longname",
    "2.0.0-two-ranks",
    "2.0.0-dtypes",
)
WAIT_S = 300


def start(*arguments: object, cli: bool = True, **fields) -> subprocess.Popen[str]:
    module = "rankdump" if cli else "rankdumpd"
    command = [sys.executable, "-m", module, "ingest", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **fields
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def wait_for(holds: Callable[[], bool], what: str = "it") -> None:
    done = threading.Event()
    for _ in range(100 * WAIT_S):
        if holds():
            return
        done.wait(0.01)
    raise AssertionError(f"{what} does not come")


def gone(path: Path) -> Callable[[], bool]:
    return lambda: not path.exists()


def assert_same_arrays(ours: Path, theirs: Path) -> None:
    """Check that both trees have equal tensors under equal keys; unreadable ones are so in both."""
    mine, native = rankdump.open(ours), rankdump.open(theirs)
    by_key = {entry.key: entry for entry in mine.tensors()}
    entries = native.tensors()
    assert entries
    assert set(by_key) == {entry.key for entry in entries}
    for entry in entries:
        np.testing.assert_array_equal(loaded(mine, by_key[entry.key]), loaded(native, entry))


def loaded(dump: Dump, entry: Entry) -> np.ndarray | str:
    try:
        return dump.load(entry)
    except CorruptedError:
        return "damaged"


@pytest.fixture(scope="module")
def ingest_killed_at() -> Iterator[Callable[..., int]]:
    """Returns the exit code of an ingest that kills itself at a call, if it comes to that one."""
    with subprocess.Popen(
        [sys.executable, str(JOBS / "killed_ingest.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked
        assert answers

        def ingest(call: int, *arguments: str) -> int:
            asked.write(json.dumps([call, *arguments]) + "\n")
            return int(answers.readline())

        yield ingest


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("delete", [False, True])
def test_ingest_follows_a_tree_while_it_is_written(tree: str, delete: bool, tmp_path: Path):
    """A real tree that another process writes meanwhile gives the same arrays."""
    origin = GOLDEN / tree
    if not origin.is_dir():
        pytest.skip("the golden trees are not beside this clone")
    source, target = tmp_path / "source", tmp_path / "tree"
    source.mkdir()
    more = ["--delete-source"] * delete
    process = start(source, "--into", target, "--follow", "--json", *more)
    wait_for((target / ".rankdump" / "ingest.sqlite").exists, "the ingest")
    seed = TREES.index(tree) * 2 + delete
    writer = [sys.executable, str(JOBS / "native_writer.py"), str(origin), str(source), str(seed)]
    made = int(subprocess.run(writer, check=True, capture_output=True, text=True).stdout)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    files = {p.relative_to(origin).as_posix(): p for p in origin.rglob("*") if p.is_file()}
    assert stored(target) == {name: path.read_bytes() for name, path in files.items()}
    assert_same_arrays(target, origin)
    assert json.loads(out)["removed"] == delete * made
    assert list(source.iterdir()) == [] if delete else stored(source).keys() == files.keys()
    view = reader.status(target)
    assert all(iteration.complete and iteration.is_balanced for iteration in view.iterations)


def test_ingest_takes_all_descriptors_that_it_may_have(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "tree"
    source.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        process = start(source, "--into", target, "--follow", cli=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for((target / ".rankdump" / "ingest.sqlite").exists, "the ingest")
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_ingest_killed_at_any_call_imports_each_file_once(
    seed: int, delete: bool, tmp_path: Path, ingest_killed_at: Callable[..., int]
):
    """After every kill each file is in the source or committed; at the end each is in the tree
    once.
    """
    source, tree = tmp_path / "source", tmp_path / "tree"
    files = write_tree(source, dict(native_files(ranks=1)))
    chance, kills = random.Random(seed), 0
    more = ["--delete-source"] * delete
    for _ in range(12):
        call = chance.choice([chance.randint(1, 60), chance.randint(60, 400)])
        code = ingest_killed_at(call, str(source), "--into", str(tree), *more)
        if code == 0:
            break
        kills += 1
        assert code == -signal.SIGKILL
        kept = stored(tree) if tree.exists() else {}
        kept = {name: data for name, data in kept.items() if "/.ingest-" not in name}
        assert files.items() >= kept.items()
        for name, data in files.items():
            assert (source / name).exists() or kept[name] == data
    assert kills > 2
    code, _, err = finish(start(source, "--into", tree, *more))
    assert (code, err) == (0, "")
    assert stored(tree) == files
    assert not hidden(tree)
    assert not delete or list(source.iterdir()) == []
    view = reader.status(tree)
    assert [(i.complete, i.is_balanced, i.expected) for i in view.iterations] == [
        (True, True, 9)
    ] * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_ingest_killed_while_following_imports_each_file_once(seed: int, tmp_path: Path):
    """The command is killed from outside, repeatedly, while a job writes."""
    chance = random.Random(seed)
    source, tree = tmp_path / "source", tmp_path / "tree"
    source.mkdir()
    files = dict(native_files(ranks=3, iterations=3))
    names, done = sorted(files), set[str]()
    while len(done) < len(names):
        process = start(source, "--into", tree, "--follow", "--delete-source", cli=False)
        few = {name: files[name] for name in names[len(done) : len(done) + chance.randint(5, 60)]}
        write_tree(source, few)
        done.update(few)
        goals = [source / name for name in sorted(few) if name.endswith(".npy")]
        if goals:
            wait_for(gone(chance.choice(goals)), "the last tensor")
        process.kill()
        finish(process)
    code, _, err = finish(start(source, "--into", tree, "--delete-source"))
    assert (code, err) == (0, "")
    assert stored(tree) == files
    assert not hidden(tree)
    assert list(source.iterdir()) == []


def test_second_ingest_of_one_tree_is_rejected(tmp_path: Path):
    """The second one ends with one line; the first one continues."""
    source, tree = tmp_path / "source", tmp_path / "tree"
    files = write_tree(source)
    first = start(source, "--into", tree, "--follow")
    wait_for((tree / ".rankdump" / "ingest.sqlite").exists, "the first")
    code, out, err = finish(start(source, "--into", tree))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "is used by another ingest" in err
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 0
    assert stored(tree) == files


def test_engine_exits_when_its_command_is_killed(tmp_path: Path):
    """The next command can lock the tree, because no process of the killed one writes to it."""
    source, tree = tmp_path / "source", tmp_path / "tree"
    files = write_tree(source)
    first = start(source, "--into", tree, "--follow", "--delete-source")
    wait_for((tree / ".rankdump" / "ingest.sqlite").exists, "the first")
    first.kill()
    first.wait()
    last = ""

    def free() -> bool:
        nonlocal last
        code, _, last = finish(start(source, "--into", tree, "--delete-source"))
        return code == 0

    wait_for(free, "an end")
    assert stored(tree) == files
    first.communicate()


@pytest.mark.parametrize("workers", [1, 2])
def test_agent_ingests_its_configured_folder(workers: int, short_dir: Path):
    """Files are ingested as they come, and tensors are removed; files that may grow are kept."""
    source, tree = short_dir / "source", short_dir / "tree"
    config = short_dir / "agent.toml"
    config.write_text(
        f'[agent]\nlisten = "unix:{short_dir}/a.sock"\nstate_dir = "{short_dir}/state"\n'
        f'workers = {workers}\ningest_dir = "{source}"\ningest_into = "{tree}"\n'
        "ingest_delete = true\n"
    )
    source.mkdir()
    agent = subprocess.Popen(
        [sys.executable, "-m", "rankdumpd", "agent", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for((tree / ".rankdump" / "ingest.sqlite").exists, "the ingest")
    files = write_tree(source)
    tensors = {name for name in files if name.endswith(".npy") or "Add." in name}
    wait_for(lambda: not any((source / name).exists() for name in tensors), "the last tensor")
    wait_for((short_dir / "a.sock").exists, "the agent")
    agent.send_signal(signal.SIGTERM)
    _, log = agent.communicate(timeout=WAIT_S)
    assert agent.returncode == 0, log
    assert stored(tree) == files
    assert f"ingested {len(files)} files" in log
    assert log.count("following ") == 1
    left = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert left == set(files) - tensors


def test_agent_rejects_nested_ingest_folders(short_dir: Path):
    environ = os.environ | {
        "RANKDUMPD_AGENT__LISTEN": f"unix:{short_dir}/a.sock",
        "RANKDUMPD_AGENT__STATE_DIR": str(short_dir / "state"),
        "RANKDUMPD_AGENT__INGEST_DIR": str(short_dir),
        "RANKDUMPD_AGENT__INGEST_INTO": str(short_dir / "tree"),
        "RANKDUMPD_AGENT__INGEST_DELETE": "true",
    }
    command = [sys.executable, "-m", "rankdumpd", "agent"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "does not contain it" in done.stderr


def test_agent_ingests_only_into_its_roots(short_dir: Path):
    environ = os.environ | {
        "RANKDUMPD_AGENT__LISTEN": f"unix:{short_dir}/a.sock",
        "RANKDUMPD_AGENT__STATE_DIR": str(short_dir / "state"),
        "RANKDUMPD_AGENT__INGEST_DIR": str(short_dir / "source"),
        "RANKDUMPD_AGENT__INGEST_INTO": str(short_dir / "tree"),
        "RANKDUMPD_AGENT__ROOTS": "/var/dump",
    }
    command = [sys.executable, "-m", "rankdumpd", "agent"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "agent.ingest_into" in line
    assert line.endswith(f"tree '{short_dir}/tree' is outside of /var/dump")
    assert not (short_dir / "tree").exists()
