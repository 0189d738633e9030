"""Access control before every gRPC service. The caller is identified by its certificate or by the
mode of the socket; its call is admitted or refused, is audited, and ends when the certificate is
revoked.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import grpc

from rankdump._core.caller_roles import LOCAL_CALLER, CallerIdentity, explain_refusal, parse_roles
from rankdump._core.certificate_files import RevokedCertificates, compute_fingerprint
from rankdump._core.log_once import LogOnce
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.call_descriptions import describe_answer, describe_request
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.server.tls import ServerCertificates

REVOCATION_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of open streams for revoked certificates."""
_AUDITED_METHODS = frozenset(
    {"OpenSession", "Push", "Control", "Report", "Status", "Order", "Hints"}
)

_logger = logging.getLogger(__name__)

_HANDLER_FACTORIES: Mapping[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(slots=True, eq=False)
class _AdmittedCall:
    """A call that was admitted and is running."""

    method: str
    caller: CallerIdentity
    context: grpc.ServicerContext
    about: dict[str, object] = dataclasses.field(default_factory=dict[str, object])


class CallGate(grpc.ServerInterceptor):
    """Refuses calls that their caller may not make, audits the admitted ones, and ends open streams
    whose certificate is revoked.
    """

    def __init__(
        self,
        *,
        certificates: ServerCertificates | None = None,
        revoked: RevokedCertificates | None = None,
        audit: AuditLog | None = None,
        own_may: bool = False,
        counters: MetricCounters | None = None,
    ) -> None:
        """Without `certificates` every caller is local. With `own_may` a caller with this server's
        certificate, such as the supervisor of a worker, may call everything.
        """
        self._certificates, self._revoked, self._audit = certificates, revoked, audit
        self._own_may, self._counters = own_may, counters or MetricCounters()
        self._streams: set[_AdmittedCall] = set()
        self._logged = LogOnce(_logger)
        self._lock = threading.Lock()
        self._thread = BackgroundThread(self._run, "rankdumpd-gate")

    def start(self) -> None:
        """Start the thread that checks open streams."""
        if self._revoked:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread that checks open streams; may be repeated, and called without `start`."""
        self._thread.stop()

    def check_open_streams(self) -> None:
        """End the open streams whose certificate has been revoked."""
        listed = self._read_revoked()
        with self._lock:
            ended = [each for each in self._streams if each.caller.fingerprint in listed]
        for call in ended:
            _logger.warning(
                "the stream %s of %r (%s) is ended: its certificate is revoked",
                *(call.method, call.caller.name, call.caller.peer),
            )
            call.context.cancel()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return a handler that checks and audits a call before the service answers it."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        # The type of a handler depends on the types of its messages, which are not known here.
        found: Any = handler
        kind = (bool(found.request_streaming), bool(found.response_streaming))
        serve = found.unary_unary or found.unary_stream or found.stream_unary or found.stream_stream
        answer = self._stream if kind[1] else self._single
        return _HANDLER_FACTORIES[kind](
            partial(answer, handler_call_details.method, serve, kind[0]),
            found.request_deserializer,
            found.response_serializer,
        )

    def _single(
        self,
        method: str,
        serve: Callable[..., object],
        streamed: bool,
        request: object,
        context: grpc.ServicerContext,
    ) -> object:
        call = self._admit(method, context)
        with self._audited(call):
            answer = serve(_note_request(call, request, streamed=streamed), context)
            call.about |= describe_answer(answer)
            return answer

    def _stream(
        self,
        method: str,
        serve: Callable[..., Iterable[object]],
        streamed: bool,
        request: object,
        context: grpc.ServicerContext,
    ) -> Iterator[object]:
        call = self._admit(method, context)
        with self._lock:
            self._streams.add(call)
        try:
            request = _note_request(call, request, streamed=streamed)
            self._write(call, "begin")
            with self._audited(call, "end"):
                yield from serve(request, context)
        finally:
            with self._lock:
                self._streams.discard(call)

    def _admit(self, method: str, context: grpc.ServicerContext) -> _AdmittedCall:
        caller = LOCAL_CALLER
        if self._certificates:
            # The type stubs give each value as bytes, where gRPC returns a sequence of bytes.
            shown: Any = context.auth_context()
            caller = identify_caller(shown, context.peer())
        call = _AdmittedCall(method, caller, context)
        why = explain_refusal(
            method, caller, revoked=self._read_revoked(), own=self._read_own_fingerprint()
        )
        if why:
            # Each reason is logged once, because refused callers try again.
            self._logged.log(logging.WARNING, f"a call was refused: {why}")
            self._counters.add(
                "rankdump_refused_calls_total", code=grpc.StatusCode.PERMISSION_DENIED.name
            )
            self._write(call, "refused", result=grpc.StatusCode.PERMISSION_DENIED.name)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        return call

    @contextmanager
    def _audited(self, call: _AdmittedCall, what: str = "call") -> Generator[None]:
        """Write an audit line with the result of the call that the block serves."""
        failure = ""
        try:
            yield
        except GeneratorExit:
            failure = grpc.StatusCode.CANCELLED.name
            raise
        except BaseException:
            failure = grpc.StatusCode.UNKNOWN.name
            raise
        finally:
            self._write(call, what, result=_find_result(call.context) or failure or "OK")

    def _write(self, call: _AdmittedCall, what: str, **more: str) -> None:
        short = call.method.rpartition("/")[2]
        if self._audit and (what == "refused" or short in _AUDITED_METHODS):
            who = call.caller.audit_fields()
            self._audit.add(what, {"method": call.method.strip("/"), **who, **call.about, **more})

    def _read_revoked(self) -> frozenset[str]:
        return self._revoked.read_fingerprints() if self._revoked else frozenset()

    def _read_own_fingerprint(self) -> str:
        if self._certificates and self._own_may:
            return self._certificates.read_material().fingerprint
        return ""

    def _run(self) -> None:
        while not self._thread.wait(REVOCATION_CHECK_INTERVAL_S):
            self.check_open_streams()


def identify_caller(shown: Mapping[str, Iterable[bytes]], peer: str) -> CallerIdentity:
    """Return the identity of a caller from what gRPC reports about its certificate."""
    texts = {
        name: [each.decode(errors="replace") for each in shown.get(name, ())]
        for name in ("x509_pem_cert", "x509_common_name", "peer_uri")
    }
    fingerprint = compute_fingerprint("".join(texts["x509_pem_cert"][:1]).encode())
    name = "".join(texts["x509_common_name"][:1])
    return CallerIdentity(name, parse_roles(texts["peer_uri"]), fingerprint, peer)


def _note_request(call: _AdmittedCall, request: Any, *, streamed: bool) -> object:
    """Return the request or the stream of requests unchanged; its first message is described in
    `call`.
    """
    if not streamed:
        call.about |= describe_request(request)
        return request
    messages: Iterator[object] = request

    def first() -> Iterator[object]:
        for message in messages:
            call.about |= describe_request(message)
            yield message
            return

    # The generator handles the first message only, so later messages do not pay for it.
    return chain(first(), messages)


def _find_result(context: grpc.ServicerContext) -> str:
    """Return the status code that ended a call; empty when no code has been set."""
    # The type stubs lack this method for contexts of a server.
    known: Any = context
    code = known.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return "" if context.is_active() else grpc.StatusCode.CANCELLED.name
