"""A running job for the live page: the connection to the coordinator, the agent or both at an
address. Imports gRPC, so commands import this module on use.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

from rankdump import control
from rankdump._analysis.reader.job_sentences import format_result
from rankdump._cli.daemon_client import fetch_agent_status, fetch_job_status, freeze_job
from rankdump._cli.options import load_credentials
from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.status import StatusView
from rankdump._web.job_source import ControlOutcome
from rankdump._wire.channel import open_channel
from rankdump.errors import ForbiddenError, RankdumpError, RejectedError, UnavailableError

_ANSWER_TIMEOUT_S = 5.0
_OPERATOR_URI = b"rankdump://role/operator"
_URI_TAG = 0x86
"""DER tag of a URI among the alternative names of a certificate."""


class JobConnection:
    """Connection to the daemon at an address; whether it is a coordinator or an agent is found out
    by calling it.
    """

    def __init__(self, address: str) -> None:
        """ConfigError for an address that needs certificates if there are none."""
        self._credentials = load_credentials()
        open_channel(address, self._credentials).close()
        self._address = address
        self._is_coordinator: bool | None = None
        self._is_agent: bool | None = None

    @property
    def address(self) -> str:
        """Address of the daemon."""
        return self._address

    def read_status(self) -> StatusView:
        """Return the status of all jobs; from a daemon that is both coordinator and agent, the
        combined one.
        """
        try:
            return self._ask_daemon()
        except UnavailableError as error:
            if self._is_coordinator is not None:
                raise
            # The coordinator's service was called first, but the address may be that of an agent.
            text = str(error).replace("no coordinator answers", "no daemon answers", 1)
            raise UnavailableError(text) from None
        except RejectedError:
            # Another daemon may listen at the address now.
            self._is_coordinator = self._is_agent = None
            raise

    def list_actions(self) -> tuple[ControlAction, ...]:
        """Return the actions that may be requested: an agent can only freeze, a coordinator can
        also change plans.
        """
        if not has_operator_role(self._credentials.certificate):
            return ()
        if self._is_coordinator:
            return tuple(ControlAction)
        return (ControlAction.FREEZE,) if self._is_agent else ()

    def send_control(self, order: ControlOrder) -> ControlOutcome:
        """Let the job carry out an order; return the result."""
        if self._is_coordinator:
            result = control.carry_out(
                order.job_id,
                order.action,
                order.values,
                coordinator=self._address,
                order_id=order.id,
            )
            lines = format_result(order.job_id, order.action, order.values, result)
            return ControlOutcome(tuple(lines), not result.exceptions)
        if order.action is not ControlAction.FREEZE:
            raise RejectedError(
                f"the daemon at {self._address} is no coordinator, which alone changes what a job "
                "dumps: a job has one if its agents name it in agent.coordinator"
            )
        found = freeze_job(self._address, order.job_id, " ".join(order.values))
        trees = (f"frozen tree: {tree}" for tree in found.trees)
        return ControlOutcome((*trees, *found.notes), bool(found.trees))

    def _ask_daemon(self) -> StatusView:
        merged = own = None
        refusal: RankdumpError = UnavailableError(f"nobody answers at {self._address}")
        if self._is_coordinator is not False:
            try:
                merged = fetch_job_status(self._address, timeout_s=_ANSWER_TIMEOUT_S)
            except ForbiddenError:
                raise
            except RejectedError as error:
                refusal = error
            self._is_coordinator = merged is not None
        if self._is_agent is not False:
            try:
                own = fetch_agent_status(self._address, timeout_s=_ANSWER_TIMEOUT_S)
            except ForbiddenError:
                raise
            except RejectedError as error:
                refusal = error
            self._is_agent = own is not None
        if merged is None and own is None:
            raise refusal
        if merged is None or own is None:
            return merged or own or StatusView()
        # The coordinator does not know any rank until the agent has reported to it.
        return _add_agent_parts(merged, own) if merged.sessions else own


def _add_agent_parts(merged: StatusView, own: StatusView) -> StatusView:
    """Return the view of a coordinator, completed with what only an agent knows."""
    return replace(
        merged,
        findings=tuple(dict.fromkeys((*merged.findings, *own.findings))),
        disks=own.disks,
        usage=own.usage,
        memory=own.memory,
        needs=own.needs,
        ledger=own.ledger,
        backlog=own.backlog,
        black_box=own.black_box,
    )


def has_operator_role(certificate: str) -> bool:
    """Return whether a certificate file seems to have the role that control needs; without a
    certificate, every caller may control. The daemon decides; this only determines what is shown.
    """
    if not certificate:
        return True
    try:
        text = Path(certificate).read_text(errors="replace")
        first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER)]
        body = ssl.PEM_cert_to_DER_cert(f"{first.strip()}\n{ssl.PEM_FOOTER}\n")
    except (OSError, ValueError):
        return False
    return bytes((_URI_TAG, len(_OPERATOR_URI))) + _OPERATOR_URI in body
