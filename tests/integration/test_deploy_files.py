"""Files of deploy/ that no package test runs: scripts for Slurm and manifests for Kubernetes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.worker_host import RankPlace, dump, tensors

from rankdump._core.rank_identity import JobLauncher, derive_job_id
from rankdumpd.settings import DaemonSettings, load_settings

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))


def run(name: str, place: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run one of the Slurm scripts as on its host, with the test's commands first in PATH."""
    bin_dir = place / "bin"
    bin_dir.mkdir(exist_ok=True)
    commands = {"rankdump": f'exec {sys.executable} -m rankdump "$@"', "systemctl": "exit 1"}
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


def test_package_and_project_have_the_same_licence():
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    (terms,) = re.findall(r'^license = "(.*)"$', project, re.MULTILINE)
    (authors,) = re.findall(r'^authors = \[\{ name = "(.*)" \}\]$', project, re.MULTILINE)
    said = (DEPLOY / "debian" / "copyright").read_text()
    assert f"Copyright: 2026 {authors}\nLicense: {terms}\n" in said
    text = (DEPLOY.parent / "LICENSE").read_text()
    assert terms == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_scripts_never_fail(script: Path, short_dir: Path):
    """The status is 0 without Slurm's variables, without an agent, and without a folder."""
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    for environ in ({}, {"SLURM_JOB_ID": "../7"}, {"SLURM_JOB_ID": "7"}):
        done = run(script.name, short_dir, **environ)
        assert done.returncode == 0, done.stderr
    assert not (short_dir.parent / "7").exists()


def test_task_prolog_sets_the_agent_of_a_task_with_a_plan(short_dir: Path):
    assert run("task-prolog.sh", short_dir, SLURM_JOB_ID="7").stdout == ""
    told = run("task-prolog.sh", short_dir, SLURM_JOB_ID="7", RANKDUMP_CONFIG="dump.json").stdout
    assert told.splitlines() == [
        f"export RANKDUMP_AGENT=unix:{short_dir}/agent.sock",
        f"export RANKDUMP_OUTPUT={short_dir}/dumps/7",
    ]
    own = {"RANKDUMP_CONFIG": "x", "RANKDUMP_AGENT": "unix:/a", "RANKDUMP_OUTPUT": "/b"}
    assert run("task-prolog.sh", short_dir, SLURM_JOB_ID="7", **own).stdout == ""


@pytest.mark.parametrize(
    ("step", "named", "told"),
    [
        ("3", "", ["export RANKDUMP_JOB_ID=7.3"]),
        ("3", "mine", []),
        # The number of every batch script: its steps inherit what it has.
        ("4294967291", "", []),
        ("", "", []),
    ],
)
def test_task_prolog_sets_the_job_id_of_a_step(
    short_dir: Path, step: str, named: str, told: list[str]
):
    """It is the id that ranks derive without the prolog."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "RANKDUMP_JOB_ID": named}
    own = {"RANKDUMP_CONFIG": "x", "RANKDUMP_AGENT": "unix:/a", "RANKDUMP_OUTPUT": "/b"}
    assert run("task-prolog.sh", short_dir, **environ, **own).stdout.splitlines() == told
    if told:
        derived = derive_job_id(
            environ, world_size=2, tree="/b", launcher=JobLauncher(1, 1), host="h"
        )
        assert told == [f"export RANKDUMP_JOB_ID={derived}"]


def test_epilog_waits_only_for_its_own_job(make_agent, short_dir: Path):
    """It waits for job 7, and not for job 9, which continues on the same agent."""
    agent = make_agent()
    socket = agent.address.removeprefix("unix:")
    own = {"RANKDUMP_SOCKET": socket, "RANKDUMP_PATIENCE_S": "600"}
    for job in ("7", "9"):
        run("prolog.sh", short_dir, SLURM_JOB_ID=job, **own)
    places = {job: RankPlace(short_dir, agent.address) for job in ("7", "9")}
    for job, place in places.items():
        place.tree = short_dir / "dumps" / job
    with places["9"].session(0, job="9") as other:
        other.step(0)
        dump(other, tensors(0, 0, 5))
        with places["7"].session(0, job="7") as session:
            session.step(0)
            dump(session, tensors(0, 0, 5))
            hurried = own | {"RANKDUMP_PATIENCE_S": "0"}
            said = run("epilog.sh", short_dir, SLURM_JOB_ID="7", **hurried).stderr
            assert f"tensors of 1 ranks are not yet written to {places['7'].tree}" in said
        # It would not end within the patience of a test if it waited for job 9.
        said = run("epilog.sh", short_dir, SLURM_JOB_ID="7", **own).stderr
        assert "not yet written" not in said


def test_slurm_scripts_serve_a_job_from_prolog_to_epilog(make_agent, short_dir: Path):
    """The prolog makes the folder of the job, the epilog keeps its dump or removes an
    empty folder.
    """
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


def all_objects(name: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest file."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def objects(name: str) -> dict[str, Any]:
    """Return the objects of a manifest file by their kind."""
    return {each["kind"]: each for each in all_objects(name)}


def pod_of(name: str, kind: str) -> dict[str, Any]:
    return objects(name)[kind]["spec"]["template"]["spec"]


def mounts(container: dict[str, Any], pod: dict[str, Any]) -> dict[str, str]:
    """Return the paths in a container with the paths of the host that are mounted there."""
    volumes = {v["name"]: v.get("hostPath", {}).get("path", "") for v in pod["volumes"]}
    return {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}


def test_containers_share_socket_and_shared_memory(tmp_path: Path):
    """Socket and shared memory have the same path in both containers and on the host."""
    agent = settings_of("daemonset.yaml", tmp_path).agent
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


PODS = [("daemonset.yaml", "DaemonSet"), ("coordinator.yaml", "StatefulSet")]


def settings_of(name: str, folder: Path) -> DaemonSettings:
    """Return the settings in the ConfigMap of a manifest file."""
    path = folder / "rankdumpd.toml"
    path.write_text(objects(name)["ConfigMap"]["data"]["rankdumpd.toml"])
    return load_settings(path, {})


@pytest.mark.parametrize(("name", "kind"), PODS)
def test_pods_have_their_certificates_and_ports(name: str, kind: str, tmp_path: Path):
    """They agree with the settings, and the secret's keys with the command that makes it."""
    settings, pod = settings_of(name, tmp_path), pod_of(name, kind)
    (container,) = pod["containers"]
    (tls,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tls")
    (volume,) = (v for v in pod["volumes"] if v["name"] == "tls")
    command = (DEPLOY / "kubernetes" / name).read_text()
    assert f"create secret generic {volume['secret']['secretName']} " in command
    for path in (settings.tls.ca, settings.tls.certificate, settings.tls.key):
        assert str(Path(path).parent) == tls
        assert f"--from-file={Path(path).name}=" in command
    # Others on the host may not read a key; the group of the process may.
    assert volume["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == 7420
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert settings.metrics.listen == f"0.0.0.0:{ports['metrics']}"
    assert {"livenessProbe", "readinessProbe"} <= container.keys()
    assert {each["key"] for each in pod["tolerations"]} == {
        "nvidia.com/gpu",
        "huawei.com/Ascend910",
    }


def test_agents_report_to_the_coordinators_service(tmp_path: Path):
    """Its name is in the certificate; the coordinator writes to the folder of the agents."""
    service = objects("coordinator.yaml")["Service"]
    host = "{name}.{namespace}.svc".format(**service["metadata"])
    (port,) = service["spec"]["ports"]
    agent, coordinator = (settings_of(name, tmp_path) for name, _ in PODS)
    assert agent.agent.coordinator == f"{host}:{port['port']}"
    assert coordinator.coordinator.listen == f"0.0.0.0:{port['port']}"
    assert f"--host {host}" in (DEPLOY / "kubernetes" / "coordinator.yaml").read_text()
    pod = pod_of("coordinator.yaml", "StatefulSet")
    labels = objects("coordinator.yaml")["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod["containers"]
    claims = objects("coordinator.yaml")["StatefulSet"]["spec"]["volumeClaimTemplates"]
    (state,) = (m for m in container["volumeMounts"] if m["name"] == claims[0]["metadata"]["name"])
    assert state["mountPath"] == coordinator.coordinator.state_dir
    assert coordinator.coordinator.roots == agent.agent.roots
    assert agent.agent.roots in {m["mountPath"] for m in container["volumeMounts"]}


def test_namespace_allows_agents_and_has_the_priority_class():
    """hostPath needs a `privileged` namespace; the class is defined before its use."""
    around = objects("namespace.yaml")
    labels = around["Namespace"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
    for name, kind in PODS:
        assert (
            pod_of(name, kind)["priorityClassName"] == around["PriorityClass"]["metadata"]["name"]
        )
        assert objects(name)[kind]["metadata"]["namespace"] == "rankdump"


def test_pod_monitors_match_pods_and_certificates():
    for monitor in all_objects("podmonitor.yaml"):
        assert (monitor["apiVersion"], monitor["kind"]) == (
            "monitoring.coreos.com/v1",
            "PodMonitor",
        )
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["scheme"], endpoint["path"]) == ("https", "/metrics")
        (name, kind) = next(
            each
            for each in PODS
            if objects(each[0])[each[1]]["spec"]["template"]["metadata"]["labels"].items()
            >= monitor["spec"]["selector"]["matchLabels"].items()
        )
        ports = pod_of(name, kind)["containers"][0]["ports"]
        assert endpoint["port"] in {port["name"] for port in ports}
        named = f"--host {endpoint['tlsConfig']['serverName']}"
        assert named in (DEPLOY / "kubernetes" / name).read_text()


@pytest.mark.parametrize(("name", "kind"), PODS)
def test_containers_have_few_privileges(name: str, kind: str):
    pod = pod_of(name, kind)
    (container,) = pod["containers"]
    allowed = pod["securityContext"] | container["securityContext"]
    assert allowed["runAsNonRoot"]
    assert allowed["readOnlyRootFilesystem"]
    assert not allowed["allowPrivilegeEscalation"]
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"]
