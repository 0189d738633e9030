"""Commands of the documents, run as written, with the documented output.

Where a command starts a training script it is run under `rankdump run` and plain, and both dump the
same. `docs/mindspore.md` needs MindSpore: tests/mindspore/test_docs.py runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import distributed
import pytest
from support import documented_material as material
from support.documented import PAGES, ROOT, DocumentPage, blocks, commands, unlabelled
from support.foreign_dumps import write_dump
from support.native_tree import write_tree

import rankdump

pytestmark = pytest.mark.slow

RUN = "rankdump run --config data_dump.json --"
PACKAGE = "tests/deploy/test_package.py::test_package_runs_from_first_start_to_stop"
WEB = "tests/unit/web/test_server.py::test_command_serves_until_it_is_interrupted"
WEB_ROLES = "tests/unit/web/test_server.py::test_command_serves_certificates_with_a_role"
NEEDS_SYSTEMD = (
    "sudo apt-get install -y debhelper gcc python3-dev python3-pip python3-venv",
    "sudo apt-get install -y ./build/deb/rankdump_*.deb",
    'sudo usermod -aG rankdump "$USER"',
    "sudo systemctl enable --now rankdump-agent",
    "sudo systemctl edit rankdump-agent",
    "systemctl enable --now rankdump-coordinator",
    "systemctl reload rankdump-agent",
    "systemctl status rankdump-agent",
    "systemctl restart",
)
"""What changes a host that systemd runs; `make test-deploy` does the same in a copy of one."""

STEPPING_JOB = """
import pathlib, time, torch, rankdump
model = torch.nn.Linear(4, 2)
session = rankdump.attach(model)
while not pathlib.Path("stop").exists():
    model(torch.ones(2, 4)).sum().backward()
    session.step()
    time.sleep(0.02)
"""

ARRAY_JOB = """
import sys, numpy, rankdump
with rankdump.Session.from_environment() as session:
    for step in range(2):
        session.step(step)
        for layer in range(20):
            changed = layer == 7 and "--changed" in sys.argv
            array = numpy.arange(1024) + 100 * layer + step + changed
            session.dump("MatMul", f"Default/layer{layer}/MatMul-op0", "output", 0, array)
"""


@dataclass
class TrainedTrees:
    """Trees of the README's script under `rankdump run`, and with other weights."""

    tree: Path
    other: Path


def operators(tree: Path) -> Counter[tuple[object, ...]]:
    """Return how many tensors of each operator a tree has."""
    entries = rankdump.open(tree).tensors()
    return Counter((e.key.rank, e.key.iteration, e.op_name, e.key.side) for e in entries)


@pytest.fixture(scope="module")
def temp() -> Iterator[Path]:
    """A folder for sockets, in which no other test finds an agent of its job."""
    folder = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def environ(temp: Path) -> dict[str, str]:
    return {"TMPDIR": str(temp), "OMP_NUM_THREADS": "1", "RANKDUMPD_AGENT__KEEP_FREE_RATIO": "0"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> TrainedTrees:
    """Run the command of the README as it is written, then without `rankdump run`."""
    folder = tmp_path_factory.mktemp("trained")
    page = DocumentPage(ROOT / "README.md", folder, environ)
    page.forks_ranks = False
    write_job(page)
    command = f"{RUN} torchrun --nproc-per-node 2 train.py"
    page.run(command, says=r"all +18/18")
    (folder / "data").rename(folder / "under_run")
    page.environ |= {"RANKDUMP_CONFIG": "data_dump.json"}
    plain(page, command)
    assert operators(folder / "data/dump") == operators(folder / "under_run/dump")
    page.environ |= {"SEED": "1"}
    page.forks_ranks = True
    (folder / "data").rename(folder / "plain")
    plain(page, command)
    return TrainedTrees(folder / "under_run/dump", folder / "data/dump")


def write_job(page: DocumentPage, config: str = "data_dump.json") -> None:
    """Write the README's script, and a configuration that dumps into /data/dump."""
    snippet = blocks(ROOT / "README.md", "python")[0]
    material.script(page.folder / "train.py", snippet)
    (page.folder / config).write_text(page.here(material.data_dump("/data/dump")))


def plain(page: DocumentPage, command: str) -> None:
    """Run a command of the page without `rankdump run` before it."""
    done = page.shell(command.partition(" -- ")[2])
    assert done.returncode == 0, done.stdout


def copied(tree: Path, to: Path) -> None:
    """Copy a tree to the place that a page names; the files themselves are shared."""
    shutil.copytree(tree, to, copy_function=os.link)


def readme(page: DocumentPage, trained: TrainedTrees) -> None:
    page.elsewhere(
        f"{RUN} torchrun --nproc-per-node 2 train.py",
        "tests/integration/test_documented_commands.py::trained",
    )
    _show_trees(page, trained)
    page.run("rankdump order /data/dump --iteration 1", says="AllReduce")
    page.run("rankdump diff after before", status=1, says="the difference starts at")
    demo = "tests/integration/test_demo.py::test_example_trains_identically_without_dump"
    page.elsewhere("make demo", demo)


def _show_trees(page: DocumentPage, trained: TrainedTrees) -> None:
    """Run the commands that both the README and the list of all commands have."""
    write_job(page)
    for name in ("data/dump", "before"):
        copied(trained.tree, page.folder / name)
    copied(trained.other, page.folder / "after")
    page.run("rankdump order [TREE]", TREE="/data/dump", says="AllReduce")
    page.run("rankdump diff A B", A="before", B="before", says="0 different|450 same")
    page.run("rankdump ls TREE", TREE="/data/dump", says="Linear")
    file = next((page.folder / "data/dump/rank_0").rglob("Linear.Default*Head*output*"))
    page.run("rankdump show FILE", FILE=file, says=r"shape: +\(2,2\)")
    page.run("rankdump stats TREE --nonfinite", TREE="/data/dump", says="all of them are finite")
    page.run("rankdump status [TREE]", TREE="/data/dump", says=r"all +18/18")
    page.elsewhere("rankdump web TREE", WEB)


def all_commands(page: DocumentPage, trained: TrainedTrees) -> None:
    _show_trees(page, trained)
    page.run("rankdump card TREE", TREE="before", says="model Sequential: 4 parameters")
    _replay_call(page)
    count = "'SELECT count(*) AS tensors FROM tensors'"
    page.run("rankdump query TREE SQL", TREE="/data/dump", SQL=count, says="tensors")
    page.elsewhere("rankdump index TREE", "tests/integration/test_documented_commands.py::querying")
    material.with_statistics(page.folder / "charts")
    page.run(
        "rankdump plot TREE -o FILE", TREE="charts", FILE="x.svg", says="x.svg written: l2norm"
    )
    page.run("rankdump find-source TREE train.py:24", TREE="/data/dump", says="Linear-op0")
    page.run("rankdump config check FILE", FILE="data_dump.json", says="mindspore")
    page.run("rankdump fsck TREE", TREE="/data/dump", says="digests correct")
    page.run("rankdump hints [TREE]", TREE="/data/dump", says="gloo")
    page.run("rankdump forecast TREE", TREE="/data/dump", says="the largest iteration|iteration")
    material.overflows(page.folder / "overflows")
    page.run("rankdump overflow PATH", PATH="overflows", status=1, says="0x120")
    material.bin_files(page.folder / "bins")
    convert = "rankdump convert -d DIR -o OUT -f NCHW"
    page.run(convert, DIR="bins", OUT="npy", status=1, says="3 tensors of 3 files")
    write_tree(page.folder / "native")
    page.run("rankdump ingest DIR --into TREE", DIR="native", TREE="taken", says="0 failed")
    page.environ["RANKDUMP_AGENT"] = f"unix:{page.environ['TMPDIR']}/a.sock"
    with standalone(page):
        page.run("rankdump pin JOB", JOB="digits", says="is pinned")
        page.run("rankdump unpin JOB", JOB="digits", says="is not pinned")
    here = "tests/integration/test_documented_commands.py"
    for command in ("rankdump freeze [JOB]", "rankdump faults [TREE]"):
        page.elsewhere(command, f"{here}::black_box")
    page.elsewhere("rankdump run -- COMMAND", f"{here}::trained")
    page.elsewhere("rankdump run --twice -- COMMAND", f"{here}::determinism")
    page.elsewhere("rankdump control JOB ACTION", f"{here}::control")


@contextlib.contextmanager
def standalone(page: DocumentPage) -> Generator[None]:
    """Run a daemon at the address to which the page's commands connect."""
    socket = page.environ["RANKDUMP_AGENT"].removeprefix("unix:")
    with page.background(
        f"rankdumpd standalone --socket {socket} --state-dir state", "listening on"
    ):
        yield


def apidump(page: DocumentPage, _: TrainedTrees) -> None:
    snippet = blocks(page.path, "python")[0]
    calls, compare = snippet.rsplit("\n\n", 1)
    material.script(page.folder / "train.py", calls)
    page.run("rankdump run -- python train.py", says="dump")
    for name in ("dump_of_torch", "dump_of_mindspore"):
        (page.folder / name).symlink_to(page.folder / "under_run")
    (page.folder / "dump").rename(page.folder / "under_run")
    material.script(page.folder / "train.py", calls, compare)
    page.run("python train.py")
    assert operators(page.folder / "dump") == operators(page.folder / "under_run")
    assert [*(page.folder / "compared").glob("*.csv")]
    page.run("rankdump ls dump", says="NN_Linear_0_forward")
    page.run("rankdump stats dump --nonfinite", says="all of them are finite")
    page.run("rankdump find-source dump train.py:24", says="NN_Linear_0_forward")
    page.run("rankdump order dump", says="NN_Linear_0_forward")
    page.run("rankdump status dump", says=r"closed +2/2")
    shutil.rmtree(page.folder / "dump")
    material.script(page.folder / "train.py", calls)
    page.run("torchrun --nproc-per-node 2 train.py")
    assert rankdump.open(page.folder / "dump").ranks == (0, 1)


def ascend(page: DocumentPage, _: TrainedTrees) -> None:
    written = page.here((ROOT / "examples" / "acl.json").read_text())
    (page.folder / "acl.json").write_text(written)
    (page.folder / "data/dump").mkdir(parents=True)
    page.run("rankdump config check acl.json", says=r"(?s)dialect: +acl.*of model Head")
    attached = 'import rankdump\nrankdump.attach(encoder, name="Encoder")\n'
    attached += (
        'rankdump.attach(head, name="Head")\nfor batch in batches:\n    head(encoder(batch))'
    )
    material.script(page.folder / "train.py", attached)
    page.run("rankdump run --config acl.json --output /data/dump -- python train.py", says="dump")
    (page.folder / "data").rename(page.folder / "under_run")
    (page.folder / "data/dump").mkdir(parents=True)
    page.environ["RANKDUMP_CONFIG"] = "acl.json"
    assert page.shell("python train.py").returncode == 0
    (page.folder / "data").rename(page.folder / "plain")
    (page.folder / "data/dump").mkdir(parents=True)
    del page.environ["RANKDUMP_CONFIG"]
    calls, tf = (page.here(text) for text in blocks(page.path, "python"))
    material.script(page.folder / "train.py", calls)
    assert page.shell("python train.py").returncode == 0
    dumped = operators(page.folder / "under_run/dump")
    assert dumped
    assert operators(page.folder / "plain/dump") == operators(page.folder / "data/dump") == dumped
    (page.folder / "data/dump").rename(page.folder / "of_calls")
    (page.folder / "data/dump").mkdir()
    material.script(
        page.folder / "train.py", "import rankdump", tf, "for _ in range(3): model(batches[0])"
    )
    assert page.shell("python train.py").returncode == 0
    page.run("rankdump convert -d /data/dump --recursive -o /data/npy", says="written")
    material.overflows(page.folder / "data/native")
    page.run("rankdump overflow /data/native", status=1, says="0x120")
    ingest = "rankdump ingest /data/native --into /data/dump --follow --delete-source"
    with page.running(ingest, "[1-9][0-9]* files"):
        pass
    assert not [*(page.folder / "data/native").glob("Conv2D*")]


def black_box(page: DocumentPage, _: TrainedTrees) -> None:
    """A job that steps until it is told to end, with the configuration of the page."""
    config = json.loads(blocks(page.path, "json")[0])
    config["rankdump"]["path"] = page.here("/data/dump")
    (page.folder / "black_box.json").write_text(json.dumps(config))
    material.script(page.folder / "train.py", STEPPING_JOB)
    page.environ["RANKDUMP_AGENT"] = f"unix:{page.environ['TMPDIR']}/b.sock"
    page.environ["RANKDUMP_CONFIG"] = "black_box.json"
    with standalone(page):
        job = threading.Thread(target=page.shell, args=("python train.py",))
        job.start()
        try:
            while not json.loads(page.shell("rankdump status --json").stdout)["black_box"]["steps"]:
                time.sleep(0.05)
            page.run('rankdump freeze --reason "loss looks odd"', says="data/dump/blackbox/")
            page.run("rankdump status", says="loss looks odd")
        finally:
            (page.folder / "stop").touch()
            job.join()
    page.run("rankdump faults /data/dump", says="cause: request, iteration .*loss looks odd")
    (frozen,) = (page.folder / "data/dump/blackbox").iterdir()
    command = "rankdump faults /data/dump/blackbox/37 --stacks"
    page.run(command, {"37": frozen.name}, says=f"frozen at iteration {frozen.name}")
    # It has been told to end, so it makes no step.
    del page.environ["RANKDUMP_CONFIG"]
    run = "rankdump run --blackbox --output DIR -- COMMAND"
    page.run(run, DIR="boxed", COMMAND="python train.py", says="the black box was not frozen")


def control(page: DocumentPage, _: TrainedTrees) -> None:
    """A job that steps until it is told to end, under the id of the page."""
    text = material.data_dump("/data/dump", iteration="0")
    (page.folder / "data_dump.json").write_text(page.here(text))
    material.script(page.folder / "train.py", STEPPING_JOB)
    material.script(page.folder / "control.py", blocks(page.path, "python")[0])
    page.environ["RANKDUMP_AGENT"] = f"unix:{page.environ['TMPDIR']}/b.sock"
    page.environ["RANKDUMP_COORDINATOR"] = page.environ["RANKDUMP_AGENT"]
    page.environ |= {"RANKDUMP_CONFIG": "data_dump.json", "RANKDUMP_JOB_ID": "train"}
    page.environ["RANKDUMP_BLACKBOX"] = "1"
    with standalone(page):
        job = threading.Thread(target=page.shell, args=("python train.py",))
        job.start()
        try:
            while not json.loads(page.shell("rankdump status --json").stdout)["sessions"]:
                time.sleep(0.05)
            for command in commands(page.path):
                action = command.split()[3]
                did = "frozen at" if action == "freeze" else f"{action}.* from"
                page.run(command, says=f"job train: {did} iteration [0-9]+.*, rank 0")
            assert re.fullmatch(r"\d+ \[\]\n", page.shell("python control.py").stdout)
            # As soon as the last of these changes has begun.
            while '"selected": "0|5-8|100-120"' not in page.shell("rankdump status --json").stdout:
                time.sleep(0.05)
        finally:
            (page.folder / "stop").touch()
            job.join()
        done = page.shell("rankdump control train stop")
        assert (done.returncode, "has ended" in done.stdout) == (1, True), done.stdout


def comparing(page: DocumentPage, trained: TrainedTrees) -> None:
    for name, tree in (("before", trained.tree), ("after", trained.other)):
        copied(tree, page.folder / name)
    both = {"A": "after", "B": "before"}
    page.run("rankdump diff after before --limit 9", status=1, says="the difference starts at")
    page.run("rankdump diff A B", both, status=1, says="before the first operator:\n  the weights")
    noise = "rankdump diff A B --noise C"
    page.run(noise, both, says="normal is within 4 times the error of after", C="after")
    page.run("rankdump card before", says=r"(?s)^2 ranks agree.*rank +iteration +batch +random")
    page.run("rankdump card TREE", TREE="before", says="learning rate")
    page.run("rankdump card TREE --json", TREE="before", says=r'"problems": \[\]')
    between = "rankdump diff A A --iteration-a 3 --iteration-b 5"
    page.run(between, status=1, says="the difference starts at", A="after")
    page.run("rankdump diff A/rank_1 B/rank_1", both, status=1, says="rank 1")
    _replay_call(page)
    command = "rankdump replay probed Functional_linear_0_forward"
    page.run(command, says="all results are within the rounding of their types")
    attempts = (
        "tests/jobs/test_restarted_jobs.py::test_diff_compares_last_attempts_unless_one_is_given"
    )
    page.elsewhere("rankdump diff A A --attempt-a 0 --attempt-b 1", attempts)
    with dask_scheduler() as address:
        dask = "rankdump diff A B --dask tcp://scheduler:8786"
        page.run(dask, {**both, "tcp://scheduler:8786": address}, status=1)


NOISY_JOB = """
import os
class Noise(nn.Module):
    def forward(self, x):
        seed = int.from_bytes(os.urandom(4), "little")
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
encoder.fc = nn.Sequential(encoder.fc, Noise())
session = rankdump.attach(model)
for step in range(2):
    session.step(step)
    train(model, batches[step])
"""


def determinism(page: DocumentPage, _: TrainedTrees) -> None:
    """A job of two ranks that is not deterministic, and one that replays a step as a noise run."""
    material.script(page.folder / "train.py", "import rankdump", NOISY_JOB)
    command = "rankdump run --twice --output twice -- torchrun --nproc-per-node 2 train.py"
    told = page.run(command, status=1, says=r"rank 0-1, iteration 0, forward")
    assert "not deterministic" in told
    assert re.search(r"starts at .*Noise-op0\n.*\n  its inputs agree, and output.0", told)
    material.script(page.folder / "train.py", blocks(page.path, "python")[0])
    (page.folder / "data_dump.json").write_text(material.data_dump("/unused"))
    noisy = "rankdump run --perturb 1ulp --config data_dump.json --output noise -- python train.py"
    said = page.run(noisy, says="this is a noise run")
    assert "1 step was replayed with the same digests" in said
    moved = r"4 times the error of noise \(input moved by 1ulp: batch.0\)"
    trees = {"after": "noise", "before": "noise"}
    page.run("rankdump diff after before --noise noise", trees, says=moved)
    trees = {"A": "noise", "B": "noise", "C": "noise"}
    page.run("rankdump diff A B --noise C", trees, says=moved)
    page.run("rankdump card TREE", TREE="noise", says=r"replay.differing +0.0")


@contextlib.contextmanager
def dask_scheduler() -> Generator[str]:
    """Run a cluster of one worker, and yield the address of its scheduler."""
    with distributed.LocalCluster(
        1, processes=False, threads_per_worker=1, protocol="tcp", dashboard_address=":0"
    ) as cluster:
        yield cast("distributed.LocalCluster", cluster).scheduler_address


def configuration(page: DocumentPage, _: TrainedTrees) -> None:
    text = material.data_dump("/data/dump", iteration="0|5-3")
    (page.folder / "data_dump.json").write_text(text)
    page.run(
        "rankdump config check data_dump.json", says="(?s)mindspore-sync.*'5-3' runs backwards"
    )
    (page.folder / "data_dump.json").write_text(page.here(material.data_dump("/data/dump")))
    (page.folder / "train.py").write_text(ARRAY_JOB)
    page.run("rankdump run --config data_dump.json -- python train.py", says=r"2/2 +40 +0")
    page.run(
        "rankdump run --config data_dump.json --output /data/second --baseline /data/dump"
        " -- python train.py --changed",
        says=r"(?s)2/2 +40 +38 .*rank 0: 38 linked tensors without a file",
    )
    command = "rankdump diff /data/second /data/dump"
    page.run(command, status=1, says="2 different, 38 same")


def converting(page: DocumentPage, _: TrainedTrees) -> None:
    material.bin_files(page.folder / "dump")
    page.run(
        "rankdump convert -d dump -o npy -f NCHW", status=1, says="(?s)ends at byte.*3 tensors"
    )
    page.run("ls npy", says=r"(?s)input.0.2x20x3x5.npy.*output.0.30x50.npy.*failed_file_list")


def coordinator(page: DocumentPage, _: TrainedTrees) -> None:
    """Run both daemons as processes, and a job on the agent."""
    daemons = {}
    settings = page.folder / "etc/rankdump/rankdumpd.toml"
    settings.parent.mkdir(parents=True)
    with contextlib.ExitStack() as running:
        socket = f"{page.environ['TMPDIR']}/cluster.sock"
        page.environ["RANKDUMP_AGENT"] = f"unix:{socket}"
        for name in ("coordinator", "agent"):
            settings.write_text(
                f'[coordinator]\nlisten = "127.0.0.1:0"\nstate_dir = "{page.folder}/merged"\n'
                f'[agent]\nlisten = "unix:{socket}"\nstate_dir = "{page.folder}/kept"\n'
                f'coordinator = "{daemons.get("coordinator", "")}"\n'
            )
            command = f"rankdumpd {name} --config /etc/rankdump/rankdumpd.toml"
            line = running.enter_context(page.running(command, "listening on"))
            daemons[name] = line.split()[-1]
        page.export("export RANKDUMP_COORDINATOR=host:7421", {"host:7421": daemons["coordinator"]})
        write_job(page)
        page.environ |= {"RANKDUMP_JOB_ID": "digits", "RANKDUMP_CONFIG": "data_dump.json"}
        done = page.shell("torchrun --nproc-per-node 2 train.py")
        assert done.returncode == 0, done.stdout
        with page.running("rankdump status --watch", r"all +18/18"):
            pass
        page.run("rankdump status --json", says='"job_id": "digits"')
        page.run("rankdump order --findings", says="")
        page.run("rankdump hints", says="gloo")


def fsck(page: DocumentPage, trained: TrainedTrees) -> None:
    copied(trained.tree, page.folder / "data/dump")
    (page.folder / "data_dump.json").write_text(page.here(material.data_dump("/data/dump")))
    page.run("rankdump fsck /data/dump", says="450 digests correct")
    page.run("rankdump fsck /data/dump --repair", says="450 digests correct")
    page.run("rankdump fsck /data/dump --rebuild --state-dir /var/lib/rankdump", says="")
    rebuild = "rankdumpd rebuild TREE --state-dir DIR"
    page.run(rebuild, TREE="/data/dump", DIR="another", says="")
    page.run("rankdump forecast /data/dump --config data_dump.json", says="iterations of 2 ranks")


def hints(page: DocumentPage, trained: TrainedTrees) -> None:
    page.elsewhere("rankdump hints", "tests/integration/test_documented_commands.py::coordinator")
    page.run("rankdump hints TREE", TREE=trained.tree, says="gloo")
    page.elsewhere("rankdump status /data/dump", "tests/jobs/test_hanging_jobs.py::start_job")
    page.run("rankdump order TREE", TREE=trained.tree, says="all_reduce")


def ingest(page: DocumentPage, _: TrainedTrees) -> None:
    for name in ("data", "dev/shm"):
        write_tree(page.folder / name / "native")
    page.run("rankdump ingest /data/native --into /data/tree", says="0 skipped, 0 failed")
    shutil.rmtree(page.folder / "data/tree")
    command = "rankdump ingest /dev/shm/native --into /data/tree --follow --delete-source"
    with page.running(command, "[1-9][0-9]* files"):
        pass
    assert not [*(page.folder / "dev/shm/native").rglob("*.npy")]


def order(page: DocumentPage, trained: TrainedTrees) -> None:
    copied(trained.tree, page.folder / "data/dump")
    tree = {"TREE": "/data/dump"}
    page.run("rankdump order TREE --iteration 7 --rank 1", tree, says="AllReduce")
    page.run("rankdump order TREE --findings", tree, says="")
    page.run("rankdump order TREE --attempt 0", tree, says="AllReduce")
    (job,) = (page.folder / "data/dump").glob("global_execution_order/*.job")
    command = "rankdump order TREE --job ID --json"
    page.run(command, tree, says='"entries"', ID=job.read_text().strip())
    names: dict[str, object] = {}
    exec(page.here(blocks(page.path, "python")[0]), names)
    assert isinstance(names["slow"], list)


def overflow(page: DocumentPage, _: TrainedTrees) -> None:
    material.overflows(page.folder / "dump/20261121180000/0/resnet/1/3")
    page.run("rankdump overflow dump", status=1, says="(?s)0x120.*1 with an overflow")


def reading(page: DocumentPage, _: TrainedTrees) -> None:
    material.two_ranks(page.folder / "tree")
    material.with_nan(page.folder / "dtypes")
    material.of_a_device(page.folder / "ascend")
    command = "rankdump ls tree --rank 1 --iteration 2 --op '*BiasAdd-op0'"
    page.run(command, says=r"(?s)input +0 +float32 +\(8,4\) +128 B.*2 tensors of 1 rank")
    page.run("rankdump status TREE", TREE="tree", says="all +6/6")
    page.run("rankdump stats dtypes --nonfinite", says="2 tensors not finite")
    command = "rankdump find-source tree train_2rank.py:25 --rank 1 --limit 1"
    page.run(command, says=r"(?s)AllReduce  Default/AllReduce-op0.*without a file")
    page.run("rankdump ls ascend", says="3 tensors of 1 device")
    file = next((page.folder / "ascend").rglob("MatMul.*"))
    page.run("rankdump show FILE", FILE=file, says="float16")
    _read_other_tools(page)
    names: dict[str, object] = {}
    snippet = blocks(page.path, "python")[0].replace('"tree"', repr(str(page.folder / "tree")))
    for line in snippet.splitlines():
        code, __, value = line.partition("  # ")
        if value and not value.startswith("a smaller"):
            assert eval(code, names) == eval(f"({value})"), line
        else:
            exec(code, names)


def _replay_call(page: DocumentPage) -> None:
    """Run the command of the list, on a dump in the folder `probed`."""
    write_dump("msprobe-tensor", page.folder).rename(page.folder / "probed")
    words = {"TREE": "probed", "CALL": "Functional_linear_0_forward"}
    page.run("rankdump replay TREE CALL", words, says="within rounding")


def _read_other_tools(page: DocumentPage) -> None:
    for kept, name in (("msprobe-weight", "after"), ("msprobe-tensor", "before")):
        write_dump(kept, page.folder).rename(page.folder / name)
    write_dump("flight", page.folder).rename(page.folder / "traces")
    log = write_dump("debug-mode", page.folder) / "rank_0.json"
    log.rename(page.folder / "run1.json")
    command = "rankdump diff after before --op '*Linear*'"
    page.run(command, status=1, says="the difference starts at fc/Linear-op0")
    page.run(
        "rankdump stats run1.json --op '*addmm*'", says=r"fc/addmm-op0 +input 0 +float32 +0.5595"
    )
    page.run("rankdump ls traces --rank 0", says=r"5  all_reduce  \(5\) +float32  scheduled")
    command = "rankdump order traces"
    page.run(command, says="(?s)missing 1.*never came to.*is scheduled on rank 0")


def security(page: DocumentPage, _: TrainedTrees) -> None:
    (page.folder / "root").mkdir()
    page.run("rankdumpd certs init /root/rankdump-ca")
    for who in commands(page.path):
        if who.startswith("rankdumpd certs issue"):
            page.run(who, says="issued|\\[tls\\]|RANKDUMP_TLS")
    page.run("rankdumpd certs show /root/rankdump-ca", says="(?s)coordinator.*node17|node17")
    page.environ["RANKDUMP_AGENT"] = f"unix:{page.environ['TMPDIR']}/asked.sock"
    with standalone(page):
        asked = {"ADDRESS": page.environ["RANKDUMP_AGENT"]}
        page.run("rankdump status --agent ADDRESS", asked, says="no rank has opened")
    page.run("rankdumpd certs revoke /root/rankdump-ca ann", says="ann")


def deploy(page: DocumentPage, _: TrainedTrees) -> None:
    for command in NEEDS_SYSTEMD:
        page.elsewhere(command, PACKAGE)
    page.elsewhere("/usr/lib/rankdump/bin/python3 /usr/share/doc/rankdump/first_dump.py", PACKAGE)
    for name in ("status", "ls"):
        page.elsewhere(f"rankdump {name} /var/dump/first", PACKAGE)
    page.elsewhere("pip install /usr/share/rankdump/rankdump-*.whl", PACKAGE)
    socket = page.environ["TMPDIR"].lstrip("/") + "/host.sock"
    variables = "export RANKDUMP_AGENT=unix:/run/rankdump/agent.sock RANKDUMP_CONFIG=data_dump.json"
    page.export(variables, {"run/rankdump/agent.sock": socket})
    write_job(page)
    with standalone(page):
        page.run("torchrun --nproc-per-node 2 train.py")
        page.run("rankdumpd health ADDRESS", ADDRESS=page.environ["RANKDUMP_AGENT"])
    assert rankdump.open(page.folder / "data/dump").ranks == (0, 1)


def limits(page: DocumentPage, _: TrainedTrees) -> None:
    for name in ("pin", "unpin"):
        page.elsewhere(
            f"rankdump {name} JOB", "tests/integration/test_documented_commands.py::all_commands"
        )


def mindspore(page: DocumentPage, _: TrainedTrees) -> None:
    for command in commands(page.path):
        page.elsewhere(
            command, "tests/mindspore/test_docs.py::test_documented_commands_for_two_ranks"
        )


def querying(page: DocumentPage, trained: TrainedTrees) -> None:
    copied(trained.tree, page.folder / "data/dump")
    # The agent wrote one, and the page shows a tree without.
    shutil.rmtree(page.folder / "data/dump/.rankdump/table", ignore_errors=True)
    page.run("rankdump index /data/dump", says=r"rows in 1 file written")
    (query,) = (command for command in commands(page.path) if "query /data/dump" in command)
    page.run(query, says=r"(?s)rank  tensors +norm\n +0 .*\n +1 ")
    shutil.rmtree(page.folder / "data/dump")
    material.with_statistics(page.folder / "data/dump")
    for drawn in [command for command in commands(page.path) if "plot /data/dump" in command]:
        target = drawn.split()[-1]
        page.run(
            drawn,
            says=rf"^{target} written: (l2norm of \d (operators|tensors)|elements of Gradients/e)",
        )
        assert (page.folder / target).stat().st_size > 10_000


def web(page: DocumentPage, trained: TrainedTrees) -> None:
    copied(trained.tree, page.folder / "data/dump")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        page.environ.pop(name, None)
    with page.running("rankdump web /data/dump", r"^http://127\.0\.0\.1:\d+/\?token=\S{40}"):
        pass
    for command in [command for command in commands(page.path) if " --job " in command]:
        with page.running(command, r"^http://127\.0\.0\.1:\d+/\?token=\S{40}"):
            pass
    page.elsewhere("rankdump web TREE", WEB)
    files = "RANKDUMP_TLS_CA=ca.pem RANKDUMP_TLS_CERT=node17.pem RANKDUMP_TLS_KEY=node17.key"
    page.elsewhere(f"export {files}", WEB_ROLES)
    listening = "rankdump web /data/dump --listen node17:8443 --revoked revoked"
    page.elsewhere(listening, WEB_ROLES)


def performance(page: DocumentPage, _: TrainedTrees) -> None:
    """A benchmark takes many minutes, so only the existence of each is checked."""
    for command in commands(page.path):
        if bench := re.match(r"python -m bench (\w+)", command):
            page.elsewhere(command, f"bench/{bench[1]}.py::measure")


SCENES: dict[str, Callable[[DocumentPage, TrainedTrees], None]] = {
    "README.md": readme,
    "docs/apidump.md": apidump,
    "docs/ascend.md": ascend,
    "docs/blackbox.md": black_box,
    "docs/comparing.md": comparing,
    "docs/configuration.md": configuration,
    "docs/control.md": control,
    "docs/converting.md": converting,
    "docs/commands.md": all_commands,
    "docs/coordinator.md": coordinator,
    "docs/determinism.md": determinism,
    "docs/fsck.md": fsck,
    "docs/hints.md": hints,
    "docs/ingest.md": ingest,
    "docs/limits.md": limits,
    "docs/mindspore.md": mindspore,
    "docs/order.md": order,
    "docs/overflow.md": overflow,
    "docs/performance.md": performance,
    "docs/querying.md": querying,
    "docs/reading.md": reading,
    "docs/security.md": security,
    "docs/web.md": web,
    "deploy/README.md": deploy,
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_give_the_documented_output(
    path: Path, tmp_path: Path, environ: dict[str, str], trained: TrainedTrees
):
    name = str(path.relative_to(ROOT))
    assert not unlabelled(path), "label the block `sh` or `console`"
    page = DocumentPage(path, tmp_path, environ)
    if scene := SCENES.get(name):
        scene(page, trained)
    page.finish()
