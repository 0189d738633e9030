"""A running `rankdump web` and a real Chromium. Every test fails for a message on the console, an
error of a script, an answer that says so, and a request that leaves the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Response, sync_playwright
from support.tree_builder import TreeBuilder
from support.web_trees import fill_training_tree

from rankdump._analysis.table_index import index_tree

AXE = Path("build/axe/package/axe.min.js")
SHOTS = Path(os.environ.get("WEB_SCREENSHOTS") or "build/web")


@dataclass
class WebServer:
    """A process of `rankdump web`."""

    roots: tuple[Path, ...]
    process: subprocess.Popen[str] = field(init=False)
    address: str = field(init=False)
    """With the token."""
    cookies: list[Any] = field(default_factory=list)
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "rankdump", "web", *map(str, self.roots), "--no-browser"]
        self.process = subprocess.Popen(
            [*command, *self.options],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | self.environ,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    @property
    def base(self) -> str:
        """Address without a path."""
        split = urlsplit(self.address)
        return f"{split.scheme}://{split.netloc}"

    def stop(self) -> int:
        """End it as Ctrl-C does; return its exit code."""
        self.process.send_signal(signal.SIGINT)
        self.process.communicate()
        return self.process.returncode


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        # Without a sandbox of its own: containers rarely let root have one.
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    # Pictures in the documentation show this path.
    with tempfile.TemporaryDirectory(prefix="training-") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def training_tree(folder: Path) -> Path:
    root = fill_training_tree(folder / "run-0417")
    index_tree(root)
    return root


@pytest.fixture(scope="session")
def server(browser: Browser, training_tree: Path) -> Iterator[WebServer]:
    made = WebServer((training_tree,))
    log_in(made, browser)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def pair_server(browser: Browser, training_tree: Path, folder: Path) -> Iterator[WebServer]:
    """A server of a run with a fault, and of its reference without."""
    reference = fill_training_tree(folder / "run-0416", has_fault=False)
    made = WebServer((training_tree, reference))
    log_in(made, browser)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def renamed_server(browser: Browser, folder: Path) -> Iterator[WebServer]:
    """A server of two trees, which have one operator under other names and types."""
    roots = folder / "renamed", folder / "original"
    names = "mlp-Old/GeLU-op0", "ffn-New/QuickGelu-op0"
    for root, name, shape in zip(roots, names, ((4, 6), (6, 4, 1)), strict=True):
        tree = TreeBuilder(root)
        values = np.arange(24, dtype=np.float32).reshape(shape)
        tree.tensor(0, 0, "Default/network-Net/embed-Linear/Linear-op0", values.reshape(4, 6))
        tree.tensor(0, 0, f"Default/network-Net/{name}", values)
        tree.complete(0, 0, world_size=1)
    made = WebServer(roots)
    log_in(made, browser)
    yield made
    made.stop()


def log_in(server: WebServer, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.address)
    assert "token" not in page.url
    server.cookies = list(context.cookies())
    context.close()


PageMaker = Callable[..., Page]


@pytest.fixture
def open_page(server: WebServer, browser: Browser) -> Iterator[PageMaker]:
    """A function that opens a path in a window of its own."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def watch(page: Page, base: str) -> None:
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"script: {error}"))
        page.on("request", lambda request: check(request.url, base))
        page.on("response", check_status)

    def check_status(answer: Response) -> None:
        if answer.status >= 400:
            complaints.append(f"{answer.status} {answer.url}")

    def check(address: str, base: str) -> None:
        if not address.startswith((base + "/", "data:")):
            complaints.append(f"left the host: {address}")

    def make(
        path: str = "/",
        *,
        at: WebServer = server,
        width: int = 1280,
        height: int = 800,
        scheme: Any = None,
    ) -> Page:
        context = browser.new_context(
            color_scheme=scheme or "light", viewport={"width": width, "height": height}
        )
        contexts.append(context)
        context.add_cookies(at.cookies)
        page = context.new_page()
        watch(page, at.base)
        page.goto(at.base + path)
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []
