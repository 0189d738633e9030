"""How long one connection may take, with a transport whose buffer tests fill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from rankdump._core.caller_roles import LOCAL_CALLER
from rankdump._http.http_server import HttpConnection
from rankdump._web.web_server import LoggedRefusals

STEP = 1 << 16
TIMEOUT_S = 3600.0


class FilledTransport(asyncio.Transport):
    """A transport whose client reads nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.buffered, self.is_aborted = 0, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop what is written: tests set what is buffered."""

    def get_write_buffer_size(self) -> int:
        """Return what tests have set."""
        return self.buffered

    def is_closing(self) -> bool:
        """Return whether it was aborted."""
        return self.is_aborted

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Note the end."""
        self.is_aborted = True


def connect() -> tuple[HttpConnection, FilledTransport]:
    config = uvicorn.Config(PlainTextResponse("a"), ws="none", log_config=None)
    made = HttpConnection(config, ServerState(), LoggedRefusals(), TIMEOUT_S, lambda ended: None)
    transport = FilledTransport()
    made.connection_made(transport)
    return made, transport


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize(("left", "is_aborted"), [(8 * STEP, False), (9 * STEP, True), (0, True)])
def test_answer_has_to_be_read_step_by_step(left, is_aborted):
    """64 KiB in each span; and who has read all has to ask again or leave."""

    async def test() -> None:
        made, transport = connect()
        made._stop_watch()
        transport.buffered = 9 * STEP
        made.pause_writing()
        transport.buffered = left
        made._end_late()
        assert transport.is_aborted is is_aborted
        assert (made._timer is None) is is_aborted
        made.connection_lost(None)

    run(test)


def test_time_of_the_application_does_not_count():
    async def test() -> None:
        made, _ = connect()
        assert made._timer is not None
        assert made.caller is LOCAL_CALLER
        made.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        # It has not answered yet: nothing is expected of the client.
        assert made._timer is None
        await asyncio.gather(*made.tasks)
        assert made._timer is not None
        made.connection_lost(None)
        assert made._timer is None

    run(test)
