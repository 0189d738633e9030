"""Manifests against the schemas of Kubernetes, which allow no unknown key."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

MANIFESTS = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OLDEST, NEWEST = "1.27", "1.37"
# Not Kubernetes' own: the Prometheus operator brings it.
FOREIGN = "PodMonitor"
CHECK = """
import sys, yaml, kubernetes_validate
version, foreign, *paths = sys.argv[1:]
for path in paths:
    for manifest in yaml.safe_load_all(open(path)):
        if manifest["kind"] != foreign:
            kubernetes_validate.validate(manifest, version, strict=True)
            print(manifest["kind"])
"""


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_match_the_kubernetes_schemas(version: str):
    python = os.environ["KUBERNETES_PYTHON"]
    paths = sorted(map(str, MANIFESTS.glob("*.yaml")))
    done = subprocess.run(
        [python, "-c", CHECK, version, FOREIGN, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {"DaemonSet", "StatefulSet", "Service", "PriorityClass", "Job"} <= {*done.stdout.split()}
