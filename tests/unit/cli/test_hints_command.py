"""`rankdump hints`, from a tree and from a coordinator."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from rankdump._cli.command_group import run_command_line
from rankdump._core.timeouts import (
    HINTS_FILE,
    HintLevel,
    TimeoutHint,
    TimeoutLimit,
    format_hints,
    hint_from_json,
)
from rankdump._wire.status_messages import timeout_hint_to_wire
from rankdump.wire.v1 import coordinator_pb2 as pb

LIMIT = TimeoutLimit("HCCL_EXEC_TIMEOUT", 1_836_000_000, "default of CANN", (0, 1))
NEAR = TimeoutHint(
    job_id="j", group="world", backend="hccl", level=HintLevel.WARNING, waiting=True,
    kind="all_reduce", name="AllReduce", iteration=3, sequence=7, first_rank=0, last_rank=1,
    spread_us=1_000_000_000, dump_us=900_000_000, limit=LIMIT, limits=(LIMIT,),
    projected_us=1_000_000_000, projected_iteration=-1,
    settings=("export HCCL_EXEC_TIMEOUT=2244",), reason="rank 0 has waited 1000 s for rank 1",
)  # fmt: skip
FINE = replace(
    NEAR, group="a-long-name-of-a-tensor-parallel-group", level=HintLevel.OK, waiting=False,
    spread_us=2500, dump_us=0, projected_us=2500, settings=(), limit=None,
    reason="rank 1 came 2.5 ms late",
)  # fmt: skip


def told(capsys, *arguments: object) -> tuple[int, str, str]:
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def tree_of(root: Path, *hints: TimeoutHint) -> Path:
    (root / ".dump_metadata").mkdir()
    (root / ".dump_metadata" / HINTS_FILE).write_text(format_hints(hints))
    return root


def test_hints_of_a_tree_fit_100_columns(tmp_path: Path, capsys):
    code, out, _ = told(capsys, "hints", tree_of(tmp_path, NEAR, FINE))
    title, near, fine, blank, *said = out.splitlines()
    assert code == 1
    assert max(map(len, (title, near, fine))) <= 100
    assert title.split()[:3] == ["group", "backend", "limit"]
    assert near.split()[:2] == ["world", "(waits)"]
    assert near.endswith("1,000 s   900 s   54%  1,000 s")
    assert fine.endswith("2.5 ms    0 ms     -   2.5 ms")
    assert blank == ""
    assert said == [
        "warning: rank 0 has waited 1000 s for rank 1",
        "  export HCCL_EXEC_TIMEOUT=2244",
        "ok: rank 1 came 2.5 ms late",
    ]


def test_hints_succeeds_without_urgent_hints(tmp_path: Path, capsys):
    assert told(capsys, "hints", tree_of(tmp_path, FINE))[0] == 0


def test_hints_json_has_every_field(tmp_path: Path, capsys):
    code, out, _ = told(capsys, "hints", tree_of(tmp_path, NEAR), "--json")
    (hint,) = json.loads(out)["hints"]
    assert code == 1
    assert hint_from_json(hint) == NEAR
    assert hint["share"] == pytest.approx(0.5447)


def test_hints_rejects_missing_files_and_two_sources_in_one_line(tmp_path: Path, capsys):
    code, _, err = told(capsys, "hints", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert "no hints have been written" in err
    code, _, err = told(capsys, "hints", tmp_path, "--coordinator", "x:1")
    assert code == 2


def two_jobs(request: pb.HintsRequest, context: grpc.ServicerContext) -> pb.HintsResponse:
    """What a coordinator says that knows two jobs."""
    hints = [NEAR, replace(FINE, job_id="k")]
    chosen = [hint for hint in hints if request.job_id in ("", hint.job_id)]
    return pb.HintsResponse(hints=map(timeout_hint_to_wire, chosen))


@pytest.fixture
def address(tmp_path: Path):
    hints = grpc.unary_unary_rpc_method_handler(
        two_jobs,
        request_deserializer=pb.HintsRequest.FromString,
        response_serializer=pb.HintsResponse.SerializeToString,
    )
    service = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        handler = grpc.method_handlers_generic_handler(service, {"Hints": hints})
        server.add_generic_rpc_handlers((handler,))
        address = f"unix:{tmp_path / 's'}"
        server.add_insecure_port(address)
        server.start()
        yield address
        server.stop(None).wait()


def test_hints_are_fetched_from_the_coordinator(address: str, capsys, monkeypatch):
    code, out, _ = told(capsys, "hints", "--coordinator", address)
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("job ")] == ["job j", "job k"]
    monkeypatch.setenv("RANKDUMP_COORDINATOR", address)
    code, out, _ = told(capsys, "hints", "--job", "k")
    assert code == 0
    assert "job" not in out
    assert (
        told(capsys, "hints", "--job", "unknown")[1]
        == "no process group of several ranks is known\n"
    )
