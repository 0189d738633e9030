"""Access control before every gRPC service: the caller is known by its certificate or by the mode
of the socket, its call is admitted or refused, audited, and ended when its certificate is
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

from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.callers import (
    LOCAL_CALLER,
    CallerIdentity,
    describe_request,
    explain_refusal,
    parse_roles,
)
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.server.tls import RevokedCertificates, ServerCertificates, compute_fingerprint

REVOCATION_CHECK_INTERVAL_S = 1.0
"""How often open streams are looked at for certificates that were revoked."""
_MAX_LOGGED_REASONS = 1000
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
    """A call that was let in."""

    method: str
    caller: CallerIdentity
    context: grpc.ServicerContext
    about: dict[str, object] = dataclasses.field(default_factory=dict[str, object])


class CallGate(grpc.ServerInterceptor):
    """Refuses calls that are not for their caller, writes down the others, and ends the streams
    of a certificate that is revoked while they are open.
    """

    def __init__(
        self,
        *,
        certificates: ServerCertificates | None = None,
        revoked: RevokedCertificates | None = None,
        audit: AuditLog | None = None,
        own_may: bool = False,
        meters: MetricCounters | None = None,
    ) -> None:
        """Without certificates every caller is of this host. With `own_may` who shows the very
        certificate of this server may do everything: a front that asks its workers.
        """
        self._certificates, self._revoked, self._audit = certificates, revoked, audit
        self._own_may, self._meters = own_may, meters or MetricCounters()
        self._streams: set[_AdmittedCall] = set()
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._thread = BackgroundThread(self._run, "rankdumpd-gate")

    def start(self) -> None:
        """Begin to look after open streams."""
        if self._revoked:
            self._thread.start()

    def stop(self) -> None:
        """End that; may be repeated, and called without `start`."""
        self._thread.stop()

    def check_open_streams(self) -> None:
        """End the open streams of certificates that are revoked by now."""
        listed = self._listed()
        with self._lock:
            ended = [each for each in self._streams if each.caller.fingerprint in listed]
        for visit in ended:
            _logger.warning("%s of %s ends: its certificate is revoked", visit.method, visit.caller)
            visit.context.cancel()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the gate before what would answer a call."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        # Typed by its messages, which are any here.
        found: Any = handler
        kind = (bool(found.request_streaming), bool(found.response_streaming))
        behave = (
            found.unary_unary or found.unary_stream or found.stream_unary or found.stream_stream
        )
        answer = self._stream if kind[1] else self._single
        return _HANDLER_FACTORIES[kind](
            partial(answer, handler_call_details.method, behave, kind[0]),
            found.request_deserializer,
            found.response_serializer,
        )

    def _single(
        self,
        method: str,
        behave: Callable[..., object],
        streamed: bool,
        request: object,
        context: grpc.ServicerContext,
    ) -> object:
        visit = self._let_in(method, context)
        with self._written_down(visit):
            return behave(_note_request(visit, request, streamed=streamed), context)

    def _stream(
        self,
        method: str,
        behave: Callable[..., Iterable[object]],
        streamed: bool,
        request: object,
        context: grpc.ServicerContext,
    ) -> Iterator[object]:
        visit = self._let_in(method, context)
        with self._lock:
            self._streams.add(visit)
        try:
            request = _note_request(visit, request, streamed=streamed)
            self._write(visit, "begin")
            with self._written_down(visit, "end"):
                yield from behave(request, context)
        finally:
            with self._lock:
                self._streams.discard(visit)

    def _let_in(self, method: str, context: grpc.ServicerContext) -> _AdmittedCall:
        caller = LOCAL_CALLER
        if self._certificates:
            # The stubs say bytes where it is a sequence of them.
            shown: Any = context.auth_context()
            caller = identify_caller(shown, context.peer())
        visit = _AdmittedCall(method, caller, context)
        why = explain_refusal(method, caller, revoked=self._listed(), own=self._own())
        if why:
            self._say(why)
            self._meters.add(
                "rankdump_refused_calls_total", code=grpc.StatusCode.PERMISSION_DENIED.name
            )
            self._write(visit, "refused", result=grpc.StatusCode.PERMISSION_DENIED.name)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        return visit

    @contextmanager
    def _written_down(self, visit: _AdmittedCall, what: str = "call") -> Generator[None]:
        """Write down how a call ended."""
        unheard = ""
        try:
            yield
        except GeneratorExit:
            unheard = grpc.StatusCode.CANCELLED.name
            raise
        except BaseException:
            unheard = grpc.StatusCode.UNKNOWN.name
            raise
        finally:
            self._write(visit, what, result=_find_result(visit.context) or unheard or "OK")

    def _write(self, visit: _AdmittedCall, what: str, **more: str) -> None:
        short = visit.method.rpartition("/")[2]
        if self._audit and (what == "refused" or short in _AUDITED_METHODS):
            who = visit.caller.audit_fields()
            self._audit.add(what, {"method": visit.method.strip("/"), **who, **visit.about, **more})

    def _say(self, why: str) -> None:
        """Log why callers are refused, each reason once: they will try again."""
        with self._lock:
            if why in self._said or len(self._said) >= _MAX_LOGGED_REASONS:
                return
            self._said.add(why)
        _logger.warning("refused: %s", why)

    def _listed(self) -> frozenset[str]:
        return self._revoked.read_fingerprints() if self._revoked else frozenset()

    def _own(self) -> str:
        if self._certificates and self._own_may:
            return self._certificates.read_material().fingerprint
        return ""

    def _run(self) -> None:
        while not self._thread.wait(REVOCATION_CHECK_INTERVAL_S):
            self.check_open_streams()


def identify_caller(shown: Mapping[str, Iterable[bytes]], peer: str) -> CallerIdentity:
    """Return who a call over TLS comes from, by what gRPC tells of the certificate."""
    texts = {
        name: [each.decode(errors="replace") for each in shown.get(name, ())]
        for name in ("x509_pem_cert", "x509_common_name", "peer_uri")
    }
    fingerprint = compute_fingerprint("".join(texts["x509_pem_cert"][:1]).encode())
    name = "".join(texts["x509_common_name"][:1])
    return CallerIdentity(name, parse_roles(texts["peer_uri"]), fingerprint, peer)


def _note_request(visit: _AdmittedCall, request: Any, *, streamed: bool) -> object:
    """Return a request of which the visit remembers what it is about; of many it is the first."""
    if not streamed:
        visit.about |= describe_request(request)
        return request
    messages: Iterator[object] = request

    def first() -> Iterator[object]:
        for message in messages:
            visit.about |= describe_request(message)
            yield message
            return

    # What follows the first costs nothing.
    return chain(first(), messages)


def _find_result(context: grpc.ServicerContext) -> str:
    """Return the code that ended a call; empty when nothing did yet."""
    # The stubs do not know that a server can ask for it as well.
    known: Any = context
    code = known.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return "" if context.is_active() else grpc.StatusCode.CANCELLED.name
