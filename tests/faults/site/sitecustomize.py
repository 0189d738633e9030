"""Startup hook of Python that installs the fault layer in daemons and their workers."""

from __future__ import annotations

import os

if "FAULTS_CONTROL" in os.environ:
    from faults.fault_layer import install

    install(os.environ["FAULTS_CONTROL"], os.environ["FAULTS_PREFIX"])
