"""Status codes of gRPC calls that end with an error of rankdump."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import grpc

from rankdump._wire.channel import get_status_code
from rankdump.errors import RankdumpError, RetryableError
from rankdumpd.server.metrics import MetricCounters

_logger = logging.getLogger(__name__)


@contextmanager
def abort_on_error(context: grpc.ServicerContext, counters: MetricCounters) -> Generator[None]:
    """End the call with the status of the block's RankdumpError, which is logged and counted.

    Any other exception passes: gRPC logs it and ends the call with UNKNOWN.
    """
    try:
        yield
    except RankdumpError as error:
        code = get_status_code(error)
        level = logging.INFO if isinstance(error, RetryableError) else logging.WARNING
        _logger.log(level, "call failed with %s: %s", code.name, error)
        counters.add("rankdump_refused_calls_total", code=code.name)
        context.abort(code, str(error))
