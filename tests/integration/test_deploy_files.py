"""The files of deploy/ that no package test runs: Slurm's scripts and Kubernetes' objects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from suites.worker_host import RankPlace, dump, tensors

from rankdumpd.settings import load

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))


def run(name: str, place: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script of Slurm's as one of its hosts would, with the commands of a test in front."""
    bin_dir = place / "bin"
    bin_dir.mkdir(exist_ok=True)
    commands = {"rankdump": f'exec {sys.executable} -m rankdump.cli "$@"', "systemctl": "exit 1"}
    for command, line in commands.items():
        (bin_dir / command).write_text(f"#!/bin/sh\n{line}\n")
        (bin_dir / command).chmod(0o755)
    own = {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "RANKDUMP_DUMPS": str(place / "dumps"),
        "RANKDUMP_OWNER": str(os.getuid()),
        "RANKDUMP_SOCKET": str(place / "agent.sock"),
    }
    return subprocess.run(
        ["sh", str(DEPLOY / "slurm" / name)],
        env=own | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_package_and_project_state_the_same_terms():
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    (terms,) = re.findall(r'^license = \{ text = "(.*)" \}$', project, re.MULTILINE)
    said = (DEPLOY / "debian" / "copyright").read_text()
    assert said.endswith(f"License: not-stated\n {terms}\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_slurm_never_fails(script: Path, short_dir: Path):
    """Without Slurm's variables, without an agent, without a folder: status 0."""
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    for environ in ({}, {"SLURM_JOB_ID": "../7"}, {"SLURM_JOB_ID": "7"}):
        done = run(script.name, short_dir, **environ)
        assert done.returncode == 0, done.stderr
    assert not (short_dir.parent / "7").exists()


def test_a_task_with_a_plan_is_told_where_the_agent_is(short_dir: Path):
    assert run("task-prolog.sh", short_dir, SLURM_JOB_ID="7").stdout == ""
    told = run("task-prolog.sh", short_dir, SLURM_JOB_ID="7", RANKDUMP_CONFIG="dump.json").stdout
    assert told.splitlines() == [
        f"export RANKDUMP_AGENT=unix:{short_dir}/agent.sock",
        f"export RANKDUMP_OUTPUT={short_dir}/dumps/7",
    ]
    own = {"RANKDUMP_CONFIG": "x", "RANKDUMP_AGENT": "unix:/a", "RANKDUMP_OUTPUT": "/b"}
    assert run("task-prolog.sh", short_dir, SLURM_JOB_ID="7", **own).stdout == ""


def test_a_job_of_slurm_from_prolog_to_epilog(make_agent, short_dir: Path):
    """Its folder is there before it, its dump after it; an empty folder goes."""
    agent = make_agent()
    socket = agent.address.removeprefix("unix:")
    run("prolog.sh", short_dir, SLURM_JOB_ID="7", RANKDUMP_SOCKET=socket)
    tree = short_dir / "dumps" / "7"
    assert tree.stat().st_mode & 0o7777 == 0o2750
    place = RankPlace(short_dir, agent.address)
    place.tree = tree
    with place.session(0) as session:
        session.step(0)
        dump(session, tensors(0, 0, 5))
    done = run("epilog.sh", short_dir, SLURM_JOB_ID="7", RANKDUMP_SOCKET=socket)
    assert done.returncode == 0
    assert "job 7:" in done.stderr
    assert re.search(r"^ +0 +closed +1/1 +5 +5 ", done.stderr, re.MULTILINE), done.stderr
    run("prolog.sh", short_dir, SLURM_JOB_ID="8", RANKDUMP_SOCKET=socket)
    run("epilog.sh", short_dir, SLURM_JOB_ID="8", RANKDUMP_SOCKET=socket)
    assert not tree.with_name("8").exists()


def objects(name: str) -> dict[str, Any]:
    """Return the objects of a file by their kind."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    return {each["kind"]: each for each in found}


def pod_of(name: str, kind: str) -> dict[str, Any]:
    return objects(name)[kind]["spec"]["template"]["spec"]


def mounts(container: dict[str, Any], pod: dict[str, Any]) -> dict[str, str]:
    """Return the paths in a container with those of the host behind them."""
    volumes = {v["name"]: v.get("hostPath", {}).get("path", "") for v in pod["volumes"]}
    return {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}


def test_containers_share_what_ranks_and_agent_need(tmp_path: Path):
    """Socket and shared memory stand at the same path in both, and on the host."""
    text = objects("daemonset.yaml")["ConfigMap"]["data"]["rankdumpd.toml"]
    (tmp_path / "rankdumpd.toml").write_text(text)
    agent = load(tmp_path / "rankdumpd.toml", {}).agent
    pod = pod_of("daemonset.yaml", "DaemonSet")
    (container,) = pod["containers"]
    where = mounts(container, pod)
    runtime = str(Path(agent.listen.removeprefix("unix:")).parent)
    for folder in (runtime, agent.state_dir, agent.roots):
        assert where[folder] == folder
    assert mounts(pod["initContainers"][0], pod).keys() == {runtime, agent.state_dir, agent.roots}
    assert pod["terminationGracePeriodSeconds"] > agent.drain_timeout_s + 12
    job = pod_of("job.yaml", "Job")
    (train,) = job["containers"]
    assert mounts(train, job)[runtime] == runtime
    environ = {each["name"]: each.get("value") for each in train["env"]}
    assert environ["RANKDUMP_AGENT"] == agent.listen
    group = container["securityContext"]["runAsGroup"]
    assert job["securityContext"]["supplementalGroups"] == [group]
    assert f"-g {group} rankdump" in (DEPLOY / "kubernetes" / "Dockerfile").read_text()


def test_the_container_of_the_agent_may_do_little():
    (container,) = pod_of("daemonset.yaml", "DaemonSet")["containers"]
    allowed = container["securityContext"]
    assert allowed["runAsNonRoot"]
    assert allowed["readOnlyRootFilesystem"]
    assert not allowed["allowPrivilegeEscalation"]
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"]
