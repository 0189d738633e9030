"""Errors on the wire: each has one status code, and stays permanent or retryable."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from rankdump import errors
from rankdump._wire.channel import CODES_BY_ERROR, ERRORS_BY_CODE, get_status_code, make_error
from rankdump.errors import (
    ConfigError,
    CorruptedError,
    ExhaustedError,
    PermanentError,
    ProtocolError,
    RankdumpError,
    RejectedError,
    RetryableError,
    UnavailableError,
    UnsupportedError,
)

Code = grpc.StatusCode
EVERY_CLASS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, PermanentError | RetryableError)
]


def made(kind: type[RankdumpError]) -> RankdumpError:
    return kind("f", "k", 1, "a") if issubclass(kind, ConfigError) else kind("what")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigError, Code.INVALID_ARGUMENT),
        (ProtocolError, Code.INVALID_ARGUMENT),
        (UnsupportedError, Code.UNIMPLEMENTED),
        (RejectedError, Code.FAILED_PRECONDITION),
        (CorruptedError, Code.DATA_LOSS),
        (ExhaustedError, Code.RESOURCE_EXHAUSTED),
        (UnavailableError, Code.UNAVAILABLE),
        (RetryableError, Code.UNAVAILABLE),
        (PermanentError, Code.FAILED_PRECONDITION),
        (RankdumpError, Code.INTERNAL),
    ],
)
def test_error_has_its_status_code(kind: type[RankdumpError], code: grpc.StatusCode):
    assert get_status_code(made(kind)) is code


@pytest.mark.parametrize("kind", EVERY_CLASS)
def test_error_stays_permanent_or_retryable(kind: type[RankdumpError]):
    """A permanent error is permanent on the other side, a retryable one retryable."""
    back = ERRORS_BY_CODE.get(get_status_code(made(kind)), UnavailableError)
    assert issubclass(back, PermanentError) is issubclass(kind, PermanentError)


def test_error_table_rows_are_all_reachable():
    """No row is hidden by an earlier one that always matches."""
    for index, (kind, _) in enumerate(CODES_BY_ERROR):
        assert not any(issubclass(kind, earlier) for earlier, _ in CODES_BY_ERROR[:index])


class FailingServicer(grpc.GenericRpcHandler):
    """Fails every call with the status code that its method names."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        name = handler_call_details.method.rpartition("/")[2]

        def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(Code[name], request.decode())
            raise AssertionError("abort returned")

        return grpc.unary_unary_rpc_method_handler(fail)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[FailingServicer()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    server.stop(0).wait()


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_status_code_becomes_an_error_with_its_text(channel: grpc.Channel, code: grpc.StatusCode):
    """Every status code becomes an error with the text of the server."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/test/{code.name}")(b"3 of 4")
    error = make_error(caught.value)
    assert type(error) is ERRORS_BY_CODE.get(code, UnavailableError)
    assert str(error) == "3 of 4"


def test_status_code_without_details_is_the_message(channel: grpc.Channel):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test/DATA_LOSS")(b"")
    assert str(make_error(caught.value)) == "DATA_LOSS"


def test_failure_without_a_status_is_retryable():
    """A closed channel, for example, fails without a status."""
    assert isinstance(make_error(grpc.RpcError("closed")), UnavailableError)
