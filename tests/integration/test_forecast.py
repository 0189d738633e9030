"""Forecast of a plan's need from one dumped iteration."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from rankdump._cli.command_group import run_command_line
from rankdump._core.manifest import make_manifest_name
from rankdump._core.plan import ContentSettings


def dump(rank, frames, iterations: int) -> None:
    chance = np.random.default_rng(rank.rank)
    rank.open()
    stream, sequence = rank.push(), 0
    for iteration in range(iterations):
        for number in range(12):
            sequence += 1
            array = chance.standard_normal(300 * (number + 1)).astype(np.float16)
            name = f"Default/{number}/X-op0"
            if rank.output.get("layout") == "api-torch":
                name = f"NN_X_{12 * iteration + number}_forward"
            about = {"op_name": name, "argument": "output"}
            stream.send(frames.record(sequence, array, iteration=iteration, **about))
        sequence += 1
        stream.send(frames.end(sequence, iteration, 12))
    stream.wait_acknowledged(sequence)
    stream.finish()


def measured(root: Path) -> tuple[int, int]:
    """Return the number of files, and the bytes of blocks that files and folders take, without
    `.rankdump`.
    """
    block = os.statvfs(root).f_frsize
    paths = [path for path in root.rglob("*") if ".rankdump" not in path.parts]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    folders = sum(path.is_dir() for path in paths)
    return len(sizes), sum(-(-each // block) * block for each in sizes) + 4096 * folders


@pytest.mark.parametrize("form", ["tensor", "full", "bin", "api"])
def test_forecast_from_one_iteration_matches_ten(
    make_agent, make_rank, frames, short_dir, capsys, form
):
    agent = make_agent()
    output = {"layout": "mindspore-async", "file_format": "bin"} if form == "bin" else {}
    output = {"layout": "api-torch"} if form == "api" else output
    content = ContentSettings(
        "full" if form in ("full", "api") else "tensor", ("max", "min", "avg")
    )
    roots = [short_dir / "one", short_dir / "ten"]
    for root, iterations in zip(roots, (1, 10), strict=True):
        for number in range(2):
            about = {"rank": number, "world_size": 2, "session_id": f"{root.name}{number}"}
            job = {"job_id": root.name, "content": content, "output": output}
            dump(make_rank(agent.address, root=root, **about, **job), frames, iterations)
    one, ten = roots
    said = ["forecast", "--iterations", "10", "--keep-free", "0", "--json", str(one)]
    assert run_command_line(said) == 0
    found = json.loads(capsys.readouterr().out)
    count, disk = measured(ten)
    assert found["tensors"] == 240
    assert found["disk_bytes"] == pytest.approx(disk, rel=0.02)
    assert found["files"] == pytest.approx(count, rel=0.02)
    assert (found["observed"], found["ranks"]) == (1, 2)


@pytest.fixture
def one(make_agent, make_rank, frames, short_dir) -> Path:
    rank = make_rank(make_agent().address)
    dump(rank, frames, 1)
    return rank.root


def config(folder: Path, root: Path, iteration: str = "0-9") -> str:
    path = folder / "data_dump.json"
    common = {
        "dump_mode": 0,
        "path": str(root),
        "net_name": "Net",
        "iteration": iteration,
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0],
    }
    body = {
        "common_dump_settings": common,
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
    }
    path.write_text(json.dumps(body))
    return str(path)


def test_forecast_output_and_exit_codes(one, short_dir, capsys, monkeypatch):
    room = shutil.disk_usage(one)
    monkeypatch.setattr("rankdump._core.forecast.KEEP_FREE_RATIO", 0.0)
    plenty = ["--keep-free", "0"]
    assert (
        run_command_line(["forecast", *plenty, str(one), "--config", config(short_dir, one)]) == 0
    )
    assert "10 iterations will take:" in capsys.readouterr().out
    huge = config(short_dir, one, f"0-{room.total}")
    assert run_command_line(["forecast", *plenty, str(one), "--config", huge]) == 1
    assert "it does not fit" in capsys.readouterr().out
    assert run_command_line(["forecast", "--keep-free", "110%", str(one)]) == 2
    assert run_command_line(["forecast", "--iterations", "1", "--config", huge, str(one)]) == 2
    (short_dir / "empty").mkdir()
    assert run_command_line(["forecast", str(short_dir / "empty")]) == 1
    assert "no iteration with tensors is complete" in capsys.readouterr().err


def test_run_with_require_fit_starts_only_fitting_jobs(one, short_dir, capfd):
    """A job is not started if its plan does not fit."""
    started = short_dir / "started"
    job = ["--", sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    huge = config(short_dir, short_dir / "new", f"0-{1 << 60}")
    asked = ["run", "--require-fit", "--config", huge]
    assert run_command_line([*asked, *job]) == 2
    assert "run once with iteration 0" in capfd.readouterr().err
    assert run_command_line([*asked, "--observed", str(one), *job]) == 1
    assert "the plan does not fit" in capfd.readouterr().err
    assert run_command_line(["run", "--require-fit", *job]) == 2
    capfd.readouterr()
    # The estimate may be too small without what a damaged manifest had.
    damaged = shutil.copytree(one, short_dir / "damaged")
    whole = sorted(damaged.rglob("manifest/*"))[0]
    manifest = whole.with_name(make_manifest_name(99, "s99"))
    manifest.write_text("{")
    small = config(short_dir, short_dir / "new", "0")
    asked = ["run", "--require-fit", "--config", small, "--observed", str(damaged)]
    assert run_command_line([*asked, *job]) == 1
    err = capfd.readouterr().err
    whole.write_text("{")
    assert run_command_line([*asked, *job]) == 2
    assert f"{whole}: manifest cannot be read: " in capfd.readouterr().err
    assert f"{manifest}: manifest cannot be read: " in err
    assert "name another tree with --observed" in err
    assert not started.exists()
