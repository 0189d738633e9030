"""The launcher's variables: who wins, and what is not a number."""

import sys
import types

import pytest

from rankdump.contract.errors import ConfigError
from rankdump.identity import Identity, identify, introduction


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Identity()),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            Identity(rank=3, world_size=8, device=1),
        ),
        (
            {"RANK_ID": "5", "RANK_SIZE": "16", "DEVICE_ID": "6"},
            Identity(rank=5, world_size=16, device=6),
        ),
        ({"RANK_ID": "3"}, Identity(rank=3, world_size=4)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            Identity(rank=1, world_size=2),
        ),
        (
            {"SLURM_PROCID": "7", "SLURM_NTASKS": "9", "SLURM_LOCALID": "2", "SLURM_JOB_ID": "77"},
            Identity(rank=7, world_size=9, device=2, job_id="77"),
        ),
        # torchrun inside a Slurm job: the inner launcher wins.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "2", "WORLD_SIZE": "4"},
            Identity(rank=2, world_size=4),
        ),
        # MindSpore compares support_device with DEVICE_ID.
        ({"DEVICE_ID": "4", "LOCAL_RANK": "0"}, Identity(device=4)),
        ({"RANKDUMP_JOB_ID": "a", "TORCHELASTIC_RUN_ID": "b"}, Identity(job_id="a")),
        ({"RANK": ""}, Identity()),
    ],
)
def test_the_first_variable_that_is_set_counts(environ, expected):
    assert identify(environ) == expected


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "1e3", " 1", "99999999999"])
def test_a_variable_that_is_no_number_is_named(text):
    with pytest.raises(ConfigError, match="RANK") as caught:
        identify({"RANK": text})
    assert repr(text) in str(caught.value)


def test_every_session_has_a_secret_of_its_own():
    """Long enough not to be guessed, and not shown where a request is."""
    first, second = (introduction(Identity(), plan_json=b"", config_source=b"") for _ in "ab")
    assert len(first.secret) == 32
    assert first.secret != second.secret
    assert "secret" not in repr(first)


def test_a_folder_named_torch_is_not_torch(monkeypatch):
    """A job without torch may import a package of that name that is only a folder."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    request = introduction(Identity(), plan_json=b"", config_source=b"")
    assert (request.framework, request.device_target) == ("numpy", "CPU")
