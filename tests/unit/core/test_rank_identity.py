"""Identity of a rank from the launcher's variables: their order, and values that are no numbers."""

import sys
import types

import pytest

from rankdump._core.rank_identity import RankIdentity, identify_rank, make_session_request
from rankdump.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankIdentity()),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            RankIdentity(rank=3, world_size=8, device=1),
        ),
        (
            {"RANK_ID": "5", "RANK_SIZE": "16", "DEVICE_ID": "6"},
            RankIdentity(rank=5, world_size=16, device=6),
        ),
        ({"RANK_ID": "3"}, RankIdentity(rank=3, world_size=4)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            RankIdentity(rank=1, world_size=2),
        ),
        (
            {"SLURM_PROCID": "7", "SLURM_NTASKS": "9", "SLURM_LOCALID": "2", "SLURM_NNODES": "3"},
            RankIdentity(rank=7, world_size=9, device=2, spans_hosts=True),
        ),
        # torchrun inside a Slurm job: the inner launcher wins.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "2", "WORLD_SIZE": "4"},
            RankIdentity(rank=2, world_size=4),
        ),
        # MindSpore compares support_device with DEVICE_ID.
        ({"DEVICE_ID": "4", "LOCAL_RANK": "0"}, RankIdentity(device=4)),
        ({"RANK": ""}, RankIdentity()),
    ],
)
def test_identify_rank_uses_the_first_variable_set(environ, expected):
    found = identify_rank({**environ, "RANKDUMP_JOB_ID": "job"}, "/data")
    assert found == expected


def test_identify_rank_falls_back_to_torchs_process_group(monkeypatch):
    """Spawned ranks have no variables, ranks that Lightning started the size and no rank.

    A group that is not initialised does not count.
    """
    group = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 2,
        get_world_size=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert (identify_rank({}, "/data").rank, identify_rank({}, "/data").world_size) == (2, 3)
    given = identify_rank({"RANK": "1", "WORLD_SIZE": "2"}, "/data")
    assert (given.rank, given.world_size) == (1, 2)
    started = {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "3"}
    for environ in (started, {**started, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}):
        found = identify_rank({**environ, "RANKDUMP_JOB_ID": "job"}, "/data")
        assert (found.rank, found.world_size, found.device) == (2, 3, 1)
    group.is_initialized = lambda: False
    assert identify_rank({}, "/data").world_size == 1


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "1e3", " 1", "99999999999"])
def test_identify_rank_rejects_a_variable_that_is_not_a_number(text):
    with pytest.raises(ConfigError, match="RANK") as caught:
        identify_rank({"RANK": text}, "/data")
    assert repr(text) in str(caught.value)


def test_session_request_has_its_own_secret():
    """It is too long to be guessed, and not in the request's repr."""
    first, second = (
        make_session_request(RankIdentity(), plan_json=b"", config_source=b"") for _ in "ab"
    )
    assert len(first.secret) == 32
    assert first.secret != second.secret
    assert "secret" not in repr(first)


def test_session_request_ignores_a_folder_named_torch(monkeypatch):
    """A job without torch may import a package of that name that is only a folder."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    request = make_session_request(RankIdentity(), plan_json=b"", config_source=b"")
    assert (request.framework, request.device_target) == ("numpy", "CPU")


def test_session_request_has_mindspores_version_and_device(monkeypatch):
    """Also in a process in which torch is not loaded."""
    mindspore = types.ModuleType("mindspore")
    mindspore.__version__ = "2.7.0"  # pyright: ignore[reportAttributeAccessIssue]
    mindspore.get_context = {"device_target": "Ascend"}.get  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "mindspore", mindspore)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    request = make_session_request(RankIdentity(), plan_json=b"", config_source=b"")
    assert (request.framework, request.device_target) == ("mindspore 2.7.0", "Ascend")
