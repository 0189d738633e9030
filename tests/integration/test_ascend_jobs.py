"""Jobs with configurations of Ascend through a real daemon: the tree, read and converted,
equals the tensors of the layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rankdump
from rankdump.reader import Dump, status, walk

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "jobs" / "ascend_models.py"
LAUNCHER = Path(__file__).parents[1] / "support" / "rank_launcher.py"
CLI = [sys.executable, "-m", "rankdump"]
LAYERS = {"Encoder": ("", "conv", "act"), "Head": ("", "fc")}
SECTION = {"codec": "none"}


def acl(folder: Path, *items: dict, **words: object) -> Path:
    body = {"dump_path": str(folder), "dump_mode": "all", "dump_level": "op", **words}
    path = folder / "acl.json"
    listed = {"dump_list": list(items)} if items else {"dump_list": [{"model_name": "Encoder"}]}
    path.write_text(json.dumps({"dump": body | listed, "rankdump": SECTION}))
    return path


def mindspore(folder: Path, file_format: str) -> Path:
    common = {
        "dump_mode": 0,
        "path": str(folder),
        "net_name": "Both",
        "iteration": "1-2",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
        "op_debug_mode": 0,
        "file_format": file_format,
    }
    path = folder / "data_dump.json"
    path.write_text(json.dumps({"common_dump_settings": common, "rankdump": SECTION}))
    return path


def dumped(folder: Path, config: Path, mode: str, *, ranks: int = 1) -> None:
    job = [sys.executable]
    if ranks > 1:
        job += [str(LAUNCHER), str(ranks)]
    command = [*CLI, "run", "--config", str(config), "--", *job, str(JOB), str(folder), mode]
    environ = {**os.environ, "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr


def seen_by(folder: Path, rank: int) -> dict[str, np.ndarray]:
    with np.load(folder / f"seen_{rank}.npz") as kept:
        return dict(kept)


def assert_as_seen(tree: Dump, seen: dict[str, np.ndarray], model: str, iteration: int) -> int:
    """Check the input and output of every layer in an iteration; return how many were compared."""
    compared = 0
    for entry in tree.tensors(iteration=iteration):
        layer = next(
            (name for name in LAYERS[model] if name and f"/{name}-" in entry.op_name),
            "" if entry.op_type == model else None,
        )
        if layer is None or f"network-{model}" not in entry.op_name:
            continue
        found = tree.load(entry)
        expected = seen[f"{model}/{layer}|{iteration}|{entry.key.side.value}"]
        np.testing.assert_array_equal(found, expected)
        compared += 1
    return compared


@pytest.mark.torch
def test_model_call_is_an_iteration_on_two_ranks(tmp_path):
    """With an acl.json under `rankdump run` no step is called; both devices share one folder."""
    config = acl(tmp_path, {"model_name": "Encoder"}, {"model_name": "Head", "layer": ["fc"]})
    dumped(tmp_path, config, "model calls", ranks=2)
    folders = sorted(path for path in tmp_path.iterdir() if path.name.isdecimal())
    assert len(folders) == 1
    assert sorted(path.name for path in folders[0].iterdir()) == ["0", "1"]
    for rank in (0, 1):
        seen = seen_by(tmp_path, rank)
        tree = rankdump.open(tmp_path).where(rank=rank)
        assert tree.iterations == (0, 1, 2, 3)
        for iteration in tree.iterations:
            assert assert_as_seen(tree, seen, "Encoder", iteration) == 6
            assert assert_as_seen(tree, seen, "Head", iteration) == 2
    assert all(each.complete and each.is_balanced for each in status(tmp_path).iterations)
    assert walk(tmp_path).problems == ()


@pytest.mark.torch
@pytest.mark.parametrize("file_format", ["bin", "npy"])
def test_asynchronous_data_dump_json_writes_bin_and_npy_trees(file_format, tmp_path):
    """Files of both formats have equal elements, in the tree that MindSpore defines for Ascend."""
    dumped(tmp_path, mindspore(tmp_path, file_format), "steps")
    seen, tree = seen_by(tmp_path, 0), rankdump.open(tmp_path)
    assert tree.iterations == (1, 2)
    for iteration in tree.iterations:
        assert assert_as_seen(tree, seen, "Encoder", iteration) == 6
        assert assert_as_seen(tree, seen, "Head", iteration) == 4
    place = next(path for path in tmp_path.iterdir() if path.name.isdecimal())
    files = sorted(path.name for path in (place / "0/Both/0/1").iterdir())
    conv = [name for name in files if name.startswith("Conv2d.")]
    if file_format == "bin":
        assert len(conv) == 1
        assert conv[0].count(".") == 4
    else:
        assert len(conv) == 2
        assert all(name.endswith(".NCHW.npy") for name in conv)
        assert len({name.split(".")[4] for name in conv}) == 1


@pytest.mark.torch
def test_converted_tree_equals_the_layers_tensors(tmp_path):
    """`rankdump convert` writes bfloat16 as float32, under the names of msaccucmp."""
    config = acl(tmp_path, {"model_name": "Head"}, dump_step="2")
    dumped(tmp_path, config, "model calls")
    out = tmp_path / "converted"
    command = [*CLI, "convert", "-d", str(tmp_path), "-o", str(out), "--recursive"]
    subprocess.run(command, check=True, timeout=60)
    made = {path.name.split(".")[0]: [] for path in out.rglob("*.npy")}
    for path in out.rglob("*.npy"):
        made[path.name.split(".")[0]].append(path)
    assert set(made) == {"Head", "Linear", "Parameter"}
    seen = seen_by(tmp_path, 0)
    for path in made["Linear"]:
        side = path.name.split(".")[-3]
        np.testing.assert_array_equal(np.load(path), seen[f"Head/fc|2|{side}"])
    assert len(made["Linear"]) == 2


@pytest.mark.torch
def test_dump_config_is_the_plan_of_a_session(tmp_path):
    """The plan dumps outputs of two layers in steps 1 and 2."""
    (tmp_path / "other").mkdir()
    dumped(tmp_path, acl(tmp_path / "other"), "config")
    tree = rankdump.open(tmp_path)
    names = {(e.key.net_name, e.op_type, e.key.side.value, e.key.iteration) for e in tree.tensors()}
    assert names == {
        (model, kind, "output", step)
        for model, kind in (("Encoder", "Conv2d"), ("Head", "Linear"))
        for step in (1, 2)
    }


@pytest.mark.torch
def test_two_configurations_apply_to_their_models(tmp_path):
    """The second one also with statistics only; the job checks the codes that the calls return."""
    for name in ("first", "second", "other"):
        (tmp_path / name).mkdir()
    first = acl(tmp_path / "first", {"model_name": "Encoder"}, dump_step="0|3")
    first.rename(tmp_path / "first.json")
    second = acl(tmp_path / "second", {"model_name": "Head", "layer": ["fc"]}, dump_data="stats")
    second.rename(tmp_path / "second.json")
    dumped(tmp_path, acl(tmp_path / "other"), "acl")
    seen = seen_by(tmp_path, 0)
    one = rankdump.open(tmp_path / "first")
    assert one.iterations == (0, 3)
    assert {entry.key.net_name for entry in one.tensors()} == {"Encoder"}
    for iteration in one.iterations:
        assert assert_as_seen(one, seen, "Encoder", iteration) == 6
    rows = rankdump.open(tmp_path / "second").statistics()
    assert len(rows) == 2 * 4
    for row in rows:
        # The job's second half calls the head for the fifth time and on.
        expected = seen[f"Head/fc|{4 + row.key.iteration}|{row.key.side.value}"]
        assert row.number("max") == pytest.approx(float(expected.max()), rel=1e-5)
        assert row.values["Count"] == str(expected.size)
    assert [p.name for p in (tmp_path / "other").iterdir() if p.name.isdecimal()] == []
