"""Server between a rank and its agent that duplicates, reorders or damages batches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from faults.values import FaultKind

from rankdump.wire.v1 import agent_pb2

_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_retries", 0))
_SERVICE = "/rankdump.wire.v1.AgentService/"


class MessageTamperer(grpc.GenericRpcHandler):
    """Forwards every call; safe to use from several threads."""

    def __init__(self, listen: str, target: str) -> None:
        self._lock = threading.Lock()
        self._wanted: Counter[FaultKind] = Counter()
        self.done: Counter[FaultKind] = Counter()
        """Number of changed batches, by kind."""
        self._channel = grpc.insecure_channel(
            target, [*_OPTIONS, ("grpc.max_reconnect_backoff_ms", 500)]
        )
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(listen)
        self._server.start()

    def want(self, kind: FaultKind) -> None:
        """Change the next suitable batch."""
        with self._lock:
            self._wanted[kind] += 1

    def forget(self, kind: FaultKind) -> None:
        """Cancel pending changes of a kind."""
        with self._lock:
            self._wanted[kind] = 0

    def close(self) -> None:
        """Stop forwarding."""
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a call, for gRPC."""
        if handler_call_details.method == f"{_SERVICE}Push":
            return grpc.stream_stream_rpc_method_handler(self._push)
        method = handler_call_details.method

        def ask(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return self._channel.unary_unary(method)(request, timeout=20)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")
                raise

        return grpc.unary_unary_rpc_method_handler(ask)

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        call = self._channel.stream_stream(f"{_SERVICE}Push")(self._tampered(requests))

        def gone() -> None:
            call.cancel()

        context.add_callback(gone)
        try:
            yield from call
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")

    def _tampered(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        try:
            for request in requests:
                yield from self._changed(request)
        except Exception:  # the rank has gone: gRPC says it by an exception without a name
            return

    def _changed(self, request: bytes) -> Iterator[bytes]:
        with self._lock:
            wanted = [kind for kind, count in self._wanted.items() if count]
        for kind in wanted:
            message = agent_pb2.PushRequest.FromString(request)
            changed = _CHANGES[kind](message) if message.HasField("batch") else None
            if changed is not None:
                with self._lock:
                    self._wanted[kind] -= 1
                    self.done[kind] += 1
                yield from (each.SerializeToString() for each in changed)
                return
        yield request


def _doubled(message: agent_pb2.PushRequest) -> list[agent_pb2.PushRequest]:
    return [message, message]


def _swapped(message: agent_pb2.PushRequest) -> list[agent_pb2.PushRequest] | None:
    """Return the two halves of a batch, the second one first."""
    frames = list(message.batch.frames)
    half = len(frames) // 2
    if not half or frames[half - 1].sequence == frames[half].sequence:
        return None
    parts = (frames[half:], frames[:half])
    return [agent_pb2.PushRequest(batch=agent_pb2.FrameBatch(frames=part)) for part in parts]


def _flipped(message: agent_pb2.PushRequest) -> list[agent_pb2.PushRequest] | None:
    for frame in message.batch.frames:
        body = frame.chunk if frame.HasField("chunk") else frame.record
        if body.data:
            at = len(body.data) // 2
            wrong = bytes([body.data[at] ^ 0x10])
            body.data = body.data[:at] + wrong + body.data[at + 1 :]
            return [message]
    return None


_CHANGES = {
    FaultKind.DOUBLED: _doubled,
    FaultKind.SWAPPED: _swapped,
    FaultKind.FLIPPED_CHUNK: _flipped,
}
