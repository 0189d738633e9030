"""Domain errors as gRPC status codes, and back: one table per side."""

from __future__ import annotations

import grpc

from rankdump.contract.errors import (
    ConfigError,
    DamagedError,
    ExhaustedError,
    ForbiddenError,
    PermanentError,
    ProtocolError,
    RankdumpError,
    RefusedError,
    RetryableError,
    UnavailableError,
    UnsupportedError,
)

TO_CODE: tuple[tuple[type[RankdumpError], grpc.StatusCode], ...] = (
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    (DamagedError, grpc.StatusCode.DATA_LOSS),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (RetryableError, grpc.StatusCode.UNAVAILABLE),
    (PermanentError, grpc.StatusCode.FAILED_PRECONDITION),
)
"""What a server answers; the first row that fits counts."""

FROM_CODE: dict[grpc.StatusCode, type[RankdumpError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.FAILED_PRECONDITION: RefusedError,
    grpc.StatusCode.PERMISSION_DENIED: ForbiddenError,
    grpc.StatusCode.UNAUTHENTICATED: ForbiddenError,
    grpc.StatusCode.DATA_LOSS: DamagedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExhaustedError,
}
"""What a client makes of an answer; any other code may pass later: UnavailableError."""


def code_of(error: RankdumpError) -> grpc.StatusCode:
    """Return the status code a server answers with."""
    for kind, code in TO_CODE:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(failure: grpc.RpcError) -> RankdumpError:
    """Return what a failed call means to its caller."""
    if not isinstance(failure, grpc.Call):
        return UnavailableError(str(failure))
    kind = FROM_CODE.get(failure.code(), UnavailableError)
    return kind(failure.details() or failure.code().name)
