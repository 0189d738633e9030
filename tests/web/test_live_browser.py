"""The live page in a real browser, beside a job of two ranks: it is renewed by itself, and the job
is controlled there by those who may.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, expect
from support.certificate_authority import CertificateAuthority, variables

import rankdump
from rankdump.errors import RankdumpError

from .conftest import PageMaker, WebServer, log_in
from .test_browser import list_serious_faults, take_picture

JOB = "run-0418"
WAIT_MS = 60_000
ITERATION = re.compile(r"latest iterations? (?:\d+ to )?(\d+)")
CONTROL = "/live/control?" + urlencode({"job": JOB})
FREEZE = "/live/confirm?" + urlencode({"job": JOB, "action": "freeze", "value": "loss looks odd"})


class RunningJob:
    """Agent and coordinator behind TLS, and two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, folder / "run-0418"
        folder.mkdir()
        self.authority = CertificateAuthority(folder / "ca")
        for role in ("rank", "operator", "reader"):
            self.authority.issue(role, role)
        self.authority.server()
        self.address = f"127.0.0.1:{find_free_port()}"
        self.daemon = self.start_daemon()
        config = {
            "common_dump_settings": {
                "dump_mode": 0,
                "input_output": 0,
                "kernels": [],
                "op_debug_mode": 0,
                "path": str(self.tree),
                "net_name": "Reader",
                "iteration": "all",
                "saved_data": "full",
                "support_device": [0, 1],
            },
            "e2e_dump_settings": {"enable": True, "trans_flag": True},
            "rankdump": {"blackbox": {"pause_s": 0}},
        }
        (folder / "data_dump.json").write_text(json.dumps(config))
        environ = self.present("rank") | {
            "RANKDUMP_AGENT": self.address,
            "RANKDUMP_CONFIG": str(folder / "data_dump.json"),
            "RANKDUMP_JOB_ID": JOB,
        }
        script = Path(__file__).with_name("stepping_job.py")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(folder / "end")],
                env=os.environ | environ,
            )
            for rank in range(2)
        ]

    def start_daemon(self) -> subprocess.Popen[str]:
        """Start it, and wait until it listens."""
        server = self.authority.credentials("server")
        settings = {
            "agent": {"listen": self.address, "state_dir": str(self.folder / "state")},
            "tls": {"ca": server.ca, "certificate": server.certificate, "key": server.key},
        }
        lines = [
            line
            for section, values in settings.items()
            for line in (f"[{section}]", *(f'{name} = "{text}"' for name, text in values.items()))
        ]
        config = self.folder / "rankdumpd.toml"
        config.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "rankdumpd", "standalone", "--config", str(config)]
        environ = os.environ | {"RANKDUMPD_AGENT__KEEP_FREE_RATIO": "0"}
        log = self.folder / "daemon.log"
        with log.open("w") as written:
            made = subprocess.Popen(command, stderr=written, text=True, env=environ)
        while f"listening on {self.address}" not in log.read_text():
            assert made.poll() is None, log.read_text()
            time.sleep(0.05)
        return made

    def present(self, role: str) -> dict[str, str]:
        """Return the environment of a certificate."""
        return variables(self.authority.credentials(role))

    def serve(self, role: str, browser: Browser) -> WebServer:
        """Start a server of pages with a role."""
        made = WebServer((self.tree,), options=("--job", self.address), environ=self.present(role))
        log_in(made, browser)
        return made

    def end_ranks(self) -> None:
        """Let the ranks end by themselves."""
        (self.folder / "end").touch()
        for rank in self.ranks:
            rank.wait()

    def end_daemon(self) -> None:
        self.daemon.send_signal(signal.SIGTERM)
        self.daemon.wait()


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[RunningJob]:
    made = RunningJob(folder / "live")
    try:
        while not has_tensors(made.tree):
            time.sleep(0.05)
        yield made
    finally:
        made.end_ranks()
        made.end_daemon()


def find_free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def has_tensors(tree: Path) -> bool:
    try:
        return bool(tree.is_dir() and rankdump.open(tree).tensors())
    except RankdumpError:
        return False


@pytest.fixture(scope="module")
def operator(job: RunningJob, browser: Browser) -> Iterator[WebServer]:
    made = job.serve("operator", browser)
    yield made
    assert made.stop() == 0


def read_iteration(page: Page) -> int:
    found = ITERATION.search(page.locator("h1").inner_text())
    assert found is not None
    return int(found[1])


def test_page_is_renewed_while_the_job_runs(open_page: PageMaker, operator: WebServer):
    page = open_page("/", at=operator)
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.wait_for_url("**/live")
    expect(page.locator("h1")).to_contain_text(f"job {JOB} runs: 2 ranks open, latest iteration")
    region = page.get_by_role("region", name=f"Ranks of job {JOB}")
    region.focus()
    page.wait_for_function(
        r"first => +document.querySelector('h1').textContent.match(/(\d+)\s*$/)[1] > first",
        arg=read_iteration(page),
    )
    # What has the focus is still there.
    expect(region).to_be_focused()


def test_black_boxes_are_frozen_by_hand(open_page: PageMaker, operator: WebServer, job: RunningJob):
    page = open_page("/live", at=operator)
    page.get_by_role("link", name="Control").click()
    page.get_by_label("Why").fill("loss looks odd")
    page.get_by_role("button", name="Freeze ...").click()
    expect(page.locator("h1")).to_have_text(f"Freeze the black boxes of job {JOB}?")
    expect(page.locator("main")).to_contain_text("all that run: 0-1 (2 ranks)")
    expect(page.locator("main")).to_contain_text(f"blackbox/<iteration> in {job.tree}")
    assert not (job.tree / "blackbox").exists()
    page.get_by_role("button", name="Freeze the black boxes").click()
    expect(page.locator("h1")).to_contain_text(
        re.compile(rf"job {JOB}: frozen at iteration \d+ .*ranks 0-1"), timeout=WAIT_MS
    )
    page.get_by_role("link", name="Back to the job").click()
    expect(page.locator("main")).to_contain_text("loss looks odd; rankdump faults", timeout=WAIT_MS)
    (frozen,) = (job.tree / "blackbox").iterdir()
    page.get_by_role("link", name="Frozen steps").click()
    expect(page.locator("main")).to_contain_text(str(frozen))
    page.set_viewport_size({"width": 1200, "height": 680})
    take_picture(page, "blackbox")


def test_plan_is_changed_and_the_page_says_so(open_page: PageMaker, operator: WebServer):
    page = open_page(CONTROL, at=operator)
    expect(page.locator("main")).to_contain_text("ranks 0-1: every iteration of operators all")
    page.get_by_label("Of each tensor").select_option("statistic")
    page.locator("form", has=page.locator("[value=saved-data]")).get_by_role("button").click()
    expect(page.locator("main")).to_contain_text("their statistics are kept")
    page.get_by_role("button", name="Change what is kept").click()
    expect(page.locator("h1")).to_contain_text(
        re.compile(r"saved-data statistic from iteration \d+ on, ranks 0-1"), timeout=WAIT_MS
    )
    page.get_by_role("link", name="Back to the job").click()
    expect(page.locator("main")).to_contain_text(
        re.compile(r"ranks 0-1: since iteration \d+ it dumps every iteration"), timeout=WAIT_MS
    )


def test_reader_has_no_buttons_and_is_refused(job: RunningJob, browser: Browser):
    """Not by the page: by the daemon, which is asked with the certificate of the server."""
    server = job.serve("reader", browser)
    context = browser.new_context()
    context.add_cookies(server.cookies)
    page = context.new_page()
    page.goto(server.base + "/live")
    expect(page.locator("h1")).to_contain_text(f"job {JOB} runs")
    expect(page.get_by_role("link", name="Freeze black boxes")).to_have_count(0)
    page.goto(server.base + CONTROL)
    expect(page.locator("form.order")).to_have_count(0)
    page.goto(server.base + FREEZE)
    with page.expect_response("**/live/order") as told:
        page.get_by_role("button", name="Freeze the black boxes").click()
    assert told.value.status == 403
    expect(page.get_by_role("alert")).to_contain_text(
        "the certificate of 'reader' has the wrong role"
    )
    context.close()
    assert server.stop() == 0


def test_form_of_another_site_is_refused(operator: WebServer, browser: Browser):
    """The browser sends no cookie with it, nor the origin of the server."""
    context = browser.new_context()
    context.add_cookies(operator.cookies)
    page = context.new_page()
    page.set_content(
        f"<form method=post action='{operator.base}/live/order'><button>x</button></form>"
    )
    with page.expect_response("**/live/order") as told:
        page.locator("button").click()
    assert told.value.status == 403
    assert "does not come from a page of this server" in told.value.text()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/live", CONTROL, FREEZE])
def test_nothing_serious_is_inaccessible(
    open_page: PageMaker, operator: WebServer, path: str, scheme: str
):
    page = open_page(path, at=operator, scheme=scheme, width=800)
    assert list_serious_faults(page) == []
    overhang = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overhang) == 0


def test_pictures(open_page: PageMaker, operator: WebServer):
    page = open_page("/live", at=operator, width=1200, height=680)
    expect(page.locator("h1")).to_contain_text("runs")
    take_picture(page, "live")
    page = open_page(FREEZE, at=operator, width=1200, height=420)
    take_picture(page, "confirm")


def test_end_of_the_job_is_told_and_its_daemon_may_come_back(
    open_page: PageMaker, operator: WebServer, job: RunningJob
):
    page = open_page("/live", at=operator)
    title = page.locator("h1")
    job.end_ranks()
    expect(title).to_contain_text(f"job {JOB} has ended: 2 ranks closed", timeout=WAIT_MS)
    expect(page.get_by_role("link", name="Freeze black boxes")).to_have_count(0)
    job.end_daemon()
    expect(title).to_contain_text("it is asked again every second", timeout=WAIT_MS)
    expect(page.locator("main")).to_contain_text("2 ranks closed")
    job.daemon = job.start_daemon()
    expect(title).not_to_contain_text("it is asked again", timeout=WAIT_MS)
