"""Runner of a document's commands, as written, in a folder that stands for the host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TextIO
from unittest.mock import patch

from support.command_line import run_in_process

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md")
PATIENCE_S = 500
"""Longer than anything here takes; only a broken command waits for it."""

_BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
_PROGRAM = (
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:rankdumpd?|make|python|torchrun|pip|sudo|systemctl|export|/usr/\S+)"
)
_SIMULATED = re.compile(r"\btorchrun --nproc-per-node (\d+) ")
_LAUNCHER = f"{sys.executable} {Path(__file__).with_name('rank_launcher.py')}"
_OWN_PROCESS = {"run", "ingest", "query", "web", "--rebuild"}
"""Commands of `rankdump` that change their process, or give another one their output; others run in
that of the tests.
"""
_ABSOLUTE = re.compile(r"(?<![\w.}])/(?=(?:data|root|etc|dev|var)/)")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language, in the order of the page."""
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[str]:
    """Return the commands of a page, each once.

    They are the lines of `sh` blocks, those behind a `$` in `console` blocks, and what stands
    between backticks in the text when it is whole: a program with something to work on.
    """
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    shown = [line for text in blocks(page, "console") for line in text.splitlines()]
    lines += [line[2:] for line in shown if line.startswith("$ ")]
    lines = [re.sub(r"\s+# .*", "", line) for line in lines]
    spoken = re.findall(r"`([^`\n]+)`", _BLOCK.sub("", page.read_text()))
    return list(dict.fromkeys([*filter(None, lines), *filter(_whole, spoken)]))


def _whole(spoken: str) -> bool:
    if not re.match(rf"{_PROGRAM} ", spoken):
        return False
    program, *words = shlex.split(spoken)
    named = [word for word in words if not word.startswith("-")]
    return len(named) > (1 if program in ("rankdump", "rankdumpd") else 0)


def unlabelled(page: Path) -> list[str]:
    """Return commands in blocks that no label says to be commands: nobody would run them."""
    texts = [line for text in blocks(page, "") for line in text.splitlines()]
    return [line for line in texts if re.match(rf"(?:\$ )?{_PROGRAM} ", line)]


class DocumentPage:
    """A document whose commands are run one by one; none may be left out."""

    def __init__(self, path: Path, folder: Path, environ: Mapping[str, str]) -> None:
        self.path, self.folder = path, folder
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = {**os.environ, **environ, "PATH": programs}
        self._left = dict.fromkeys(commands(path))
        self.forks_ranks = True
        """Whether `torchrun` is replaced by the launcher of tests/support, which is faster."""

    def run(
        self,
        command: str,
        instead: Mapping[str, object] = MappingProxyType({}),
        *,
        status: int = 0,
        says: str = "",
        **words: object,
    ) -> str:
        """Run a command of the page, with `words` in the place of those in capitals.

        `instead` holds what stands for other words of it.
        It has to end with that status, and an expression has to match what it says.
        """
        done = self.shell(self._told(command, {**instead, **words}))
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}"
        assert re.search(says, done.stdout), f"{command} does not say {says!r}\n{done.stdout}"
        return done.stdout

    def export(self, command: str, instead: Mapping[str, object]) -> None:
        """Set the variables that a line of the page exports."""
        for word in shlex.split(self._told(command, instead).removeprefix("export ")):
            name, _, value = word.partition("=")
            self.environ[name] = value

    @contextlib.contextmanager
    def running(self, command: str, until: str, *, status: int = 0) -> Generator[str]:
        """Run a command of the page that ends at a signal, as `background` does."""
        with self.background(self._told(command, {}), until, status=status) as line:
            yield line

    @contextlib.contextmanager
    def background(self, command: str, until: str, *, status: int = 0) -> Generator[str]:
        """Run a command on a terminal while the block runs, from a line that matches an expression.

        The line is the value of the block. The command has to end with that status at SIGINT.
        """
        screen, terminal = pty.openpty()
        # Whatever the length of the paths, no part of a screen has to give way.
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 100, 0, 0))
        process = self._started(command, output=terminal)
        os.close(terminal)
        said: list[str] = []
        stuck = threading.Timer(PATIENCE_S, process.kill)
        stuck.start()
        try:
            with os.fdopen(screen, errors="replace") as lines:
                yield _line_with(until, lines, said)
                os.killpg(process.pid, signal.SIGINT)
                said += _rest(lines)
            assert process.wait() == status, f"{command}: {''.join(said)}"
        finally:
            stuck.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def elsewhere(self, command: str, test: str) -> None:
        """Leave a command to another test, `tests/FILE.py::NAME`, that runs it."""
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test
        self._told(command, {})

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line in the folder; what it says on both its outputs comes as one."""
        program, *words = shlex.split(line)
        if program == "rankdump" and _OWN_PROCESS.isdisjoint(words) and _simple(line):
            return self._run_here(line, words)
        process = self._started(line)
        try:
            said, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(line, process.returncode, said)

    def _run_here(self, line: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of `rankdump` in this process, as if it were in the folder of the page."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            with patch.dict(os.environ, self.environ, clear=True):
                done = run_in_process(*words)
        finally:
            os.chdir(before)
        return subprocess.CompletedProcess(line, done.returncode, done.stderr + done.stdout)

    def here(self, text: str) -> str:
        """Return text with the folders of a host replaced by those in the folder of this page."""
        return _ABSOLUTE.sub(f"{self.folder}/", text)

    def finish(self) -> None:
        """Fail for the commands that were not run; verbs of make and extras have to exist."""
        makefile = (ROOT / "Makefile").read_text()
        project = (ROOT / "pyproject.toml").read_text()
        for command in list(self._left):
            if verb := re.match(r"make ([a-z-]+)", command):
                assert re.search(rf"^{verb[1]}:", makefile, re.MULTILINE), command
                del self._left[command]
            elif extras := re.match(r"pip install 'rankdump\[([a-z,]+)\]'$", command):
                for extra in extras[1].split(","):
                    assert re.search(rf"^{extra} = \[", project, re.MULTILINE), command
                del self._left[command]
        assert not self._left, f"no test runs these of {self.path.name}: {list(self._left)}"

    def _told(self, command: str, words: Mapping[str, object]) -> str:
        assert command in commands(self.path), f"{self.path.name} does not say {command!r}"
        self._left.pop(command, None)
        line = re.sub(r"\[([A-Z]+)\]", r"\1", command)
        for word, value in words.items():
            line, count = re.subn(rf"\b{word}\b", str(value), line)
            assert count, f"{command}: no {word}"
        return self.here(line)

    def _started(self, line: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        if self.forks_ranks:
            line = _SIMULATED.sub(rf"{_LAUNCHER} \1 ", line)
        return subprocess.Popen(
            ["sh", "-c", f"exec {line}" if _simple(line) else line],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def _line_with(pattern: str, lines: TextIO, said: list[str]) -> str:
    for line in _rest(lines):
        said.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"ended without {pattern!r}: {''.join(said)}")


def _rest(lines: TextIO) -> Iterator[str]:
    # The end of a terminal is an error, not an end of file.
    with contextlib.suppress(OSError):
        yield from iter(lines.readline, "")


def _simple(line: str) -> bool:
    return not re.match(r"[A-Z_]+=", line) and not re.search(r"[|&;<>$*]", line)
