"""Control of a running job: changes what the job dumps, and freezes its black boxes, without
restarting it.

All ranks begin with a change in the same iteration, which the coordinator of the job chooses. Each
function waits some seconds until every rank has answered.

    import rankdump.control

    done = rankdump.control.set_iterations("train", "0|5-8|100-120", coordinator="head:7421")
    print(done.iteration, done.exceptions)

The default address of the coordinator is that in RANKDUMP_COORDINATOR, or `127.0.0.1:7421`.
Certificates are those that the environment names; over TLS their role must be `operator`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable

import grpc

from rankdump._config.control_changes import check_values
from rankdump._core.daemon_endpoint import DEFAULT_COORDINATOR_ADDRESS
from rankdump._core.job_control import ControlAction, ControlledRank, ControlOrder, ControlResult
from rankdump._wire.channel import (
    TlsCredentials,
    explain_failure,
    is_call_lost,
    make_error,
    open_channel,
    read_credentials,
)
from rankdump._wire.control_messages import control_request_to_wire, result_from_wire
from rankdump.errors import RankdumpError, RejectedError, UnavailableError, UnsupportedError
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

__all__ = [
    "ControlResult",
    "ControlledRank",
    "freeze",
    "set_iterations",
    "set_operators",
    "set_saved_data",
    "start",
    "stop",
]

ANSWER_TIMEOUT_S = 60.0
"""Longest wait in seconds for a coordinator, which itself waits for ranks for at most half a
minute.
"""
RETURN_TIMEOUT_S = 20.0
"""Longest wait in seconds for a coordinator that has ended while it carried out an order."""
_RETRY_INTERVAL_S = 0.2
# Without this option gRPC would wait longer after each attempt.
_CHANNEL_OPTIONS = (("grpc.max_reconnect_backoff_ms", 500),)


def start(job_id: str, *, coordinator: str = "") -> ControlResult:
    """Dump every iteration from now on, whatever the configuration or the script says."""
    return carry_out(job_id, ControlAction.START, coordinator=coordinator)


def stop(job_id: str, *, coordinator: str = "") -> ControlResult:
    """Dump no iteration from now on."""
    return carry_out(job_id, ControlAction.STOP, coordinator=coordinator)


def set_iterations(job_id: str, iterations: str, *, coordinator: str = "") -> ControlResult:
    """Dump these iterations, given as in a configuration: `0|5-8|100-120`, or `all`.

    ConfigError for a text that is not allowed.
    """
    return carry_out(job_id, ControlAction.ITERATIONS, (iterations,), coordinator=coordinator)


def set_operators(
    job_id: str, *entries: str | list[str] | tuple[str, ...], coordinator: str = ""
) -> ControlResult:
    """Dump these operators, by entries as in `kernels` of a configuration, or `all`.

    An entry is a full scope name, a part of an operator's type, or `name-regex(...)`; entries may
    also be given as one list, as in `kernels`. ConfigError for an expression that is not valid.
    """
    lists = (each if isinstance(each, list | tuple) else [each] for each in entries)
    values = (entry for each in lists for entry in each)
    return carry_out(job_id, ControlAction.OPERATORS, values, coordinator=coordinator)


def set_saved_data(job_id: str, saved: str, *, coordinator: str = "") -> ControlResult:
    """Keep the elements of each tensor (`tensor`), its statistics (`statistic`) or both (`full`).

    ConfigError for another word.
    """
    return carry_out(job_id, ControlAction.SAVED_DATA, (saved,), coordinator=coordinator)


def freeze(job_id: str, reason: str = "", *, coordinator: str = "") -> ControlResult:
    """Freeze the black boxes of all ranks on all hosts; the report contains the reason."""
    return carry_out(job_id, ControlAction.FREEZE, filter(None, [reason]), coordinator=coordinator)


def carry_out(
    job_id: str,
    action: ControlAction,
    values: Iterable[str] = (),
    *,
    coordinator: str = "",
    warn: Callable[[str], None] = lambda text: None,
    order_id: str = "",
) -> ControlResult:
    """Carry out an action; `warn` is called with texts about surprising effects.

    An order with the id of an earlier one asks for the result of that order; without an id it is a
    new order. RejectedError if the job is unknown, has ended, or is being controlled by someone
    else; UnavailableError if no coordinator answers at the address.
    """
    values = tuple(values)
    check_values(action, values, warn)
    address = coordinator or os.environ.get("RANKDUMP_COORDINATOR") or DEFAULT_COORDINATOR_ADDRESS
    order = ControlOrder(order_id or uuid.uuid4().hex, job_id, action, values)
    own = read_credentials(os.environ)
    with open_channel(address, own, _CHANNEL_OPTIONS) as channel:
        try:
            answer = _ask_coordinator(channel, order)
        except grpc.RpcError as failure:
            raise _describe_failure(failure, address, own) from None
        except _LostCoordinatorError:
            raise UnavailableError(
                f"the coordinator at {address} ended while it carried out the order, and does not "
                f"run again after {RETURN_TIMEOUT_S:.0f} s: ranks that had the order by then "
                "begin with it in one iteration, the others do not; repeat the call when it runs "
                "(rankdump status --agent ADDRESS says which plan each rank has)"
            ) from None
    return result_from_wire(answer)


class _LostCoordinatorError(Exception):
    """A coordinator has ended while it carried out an order, and has not come back."""


def _ask_coordinator(
    channel: grpc.Channel, order: ControlOrder
) -> coordinator_pb2.JobControlResponse:
    """Send an order, and send it again if the coordinator ends meanwhile and comes back.

    The repeated order has the same id, so ranks that have it already keep their iteration.
    _LostCoordinatorError if the coordinator does not come back.
    """
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    request = control_request_to_wire(order)
    until_s: float | None = None
    while until_s is None or time.monotonic() < until_s:
        try:
            return stub.Control(request, timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as failure:
            if until_s is None and is_call_lost(failure):
                until_s = time.monotonic() + RETURN_TIMEOUT_S
            if until_s is None or not isinstance(make_error(failure), UnavailableError):
                raise
        time.sleep(_RETRY_INTERVAL_S)
    raise _LostCoordinatorError


def _describe_failure(failure: grpc.RpcError, address: str, own: TlsCredentials) -> RankdumpError:
    error = explain_failure(failure, address, own)
    if isinstance(error, UnavailableError):
        return UnavailableError(f"no coordinator answers at {address}: {error}")
    if isinstance(error, UnsupportedError):
        return RejectedError(
            f"the daemon at {address} is no coordinator that controls jobs: a job has one "
            "if its agents name it in agent.coordinator"
        )
    return type(error)(f"coordinator at {address}: {error}")
