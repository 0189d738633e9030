"""Python's own hook at every start: daemons and their workers get the failing layer by it."""

from __future__ import annotations

import os

if "FAULTS_CONTROL" in os.environ:
    from faults.fault_layer import install

    install(os.environ["FAULTS_CONTROL"], os.environ["FAULTS_PREFIX"])
