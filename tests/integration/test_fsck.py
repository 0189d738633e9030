"""Trees that agents wrote, checked: nothing is wrong with them until something is done to them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from suites.flips import flipped

from rankdump.cli.commands import answer
from rankdump.contract.plan import Content
from rankdump.fsck import Kind, Report, check_tree, mend
from rankdump.wire.v1 import agent_pb2

STARTED = "20250102030405"
IN, OUT = agent_pb2.SIDE_INPUT, agent_pb2.SIDE_OUTPUT
RANDOM = np.random.default_rng(8)
FORMS = {
    "npy": ({"layout": "mindspore-sync"}, Content()),
    "full": ({"layout": "mindspore-sync"}, Content("full")),
    "cann-bin": ({"layout": "cann", "file_format": "bin", "started": STARTED}, Content()),
    "async-bin": ({"layout": "mindspore-async", "file_format": "bin"}, Content()),
    "op-npy": ({"layout": "cann-op-step", "started": STARTED}, Content()),
    "api": ({"layout": "api-torch"}, Content("full", ("max", "min", "avg"))),
}


def wide(name: str) -> tuple[np.ndarray, str]:
    """Elements of a type that numpy lacks, as their bits."""
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
    """Makes trees of an agent, of two iterations."""
    agent = make_agent()

    def make(form: str, codec: str = "zstd", tensors=(*TENSORS, LARGE)) -> Path:
        output, content = FORMS[form]
        root = short_dir / f"{form}-{codec}-{len(tensors)}"
        who = root.name
        rank = make_rank(
            agent.address, root=root, codec=codec, output=output, content=content,
            session_id=f"s{who}", job_id=who,
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
                        sequence, array, iteration=iteration, side=side, slot=slot, dtype=dtype,
                        timestamp_us=1_700_000_000_000_000 + 1000 * iteration + ord(name[8]),
                        **api,
                    )
                )
            sequence += 1
            stream.send(frames.end(sequence, iteration, len(tensors)))
        stream.send(frames.goodbye(sequence + 1, 2)).wait_acknowledged(sequence + 1)
        stream.finish()
        return root

    return make


def named(root: Path) -> list[Path]:
    """The files that manifests name."""
    found = []
    for path in sorted(root.rglob(".dump_metadata/manifest/*.json")):
        found += [root / each["path"] for each in json.loads(path.read_bytes())["records"]]
    return sorted(set(found))


def words(report: Report) -> set[tuple[str, str]]:
    return {(damage.kind.value, damage.path) for damage in report.damages}


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_what_an_agent_wrote_is_clean(dumped, form, codec):
    root = dumped(form, codec)
    report = check_tree(root, workers=2)
    assert report.damages == ()
    assert (report.digests, report.unchecked) == (2 * len(TENSORS) + 2, ())
    assert report.files == len(named(root))


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("form", ["npy", "cann-bin", "api"])
def test_every_byte_that_is_flipped_is_found(dumped, form, codec):
    """One after the other in each file that a manifest names; of large files some."""
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
