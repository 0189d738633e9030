from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("start", "missing", "extra"),
    [
        ("from rankdump._cli.main import main; main()", "click", "cli"),
        ("from rankdump._cli.main import main; main()", "rich", "cli"),
        ("from rankdumpd.__main__ import run; run()", "click", "daemon"),
        ("from rankdumpd.__main__ import run; run()", "prometheus_client", "daemon"),
    ],
)
def test_main_names_a_missing_extra_in_one_line(start, missing, extra):
    """Without the extra a command says what to install, in one line, with code 2."""
    code = f"import sys; sys.modules[{missing!r}] = None; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install 'rankdump[{extra}]'" in done.stderr


@pytest.mark.parametrize(("module", "extra"), [("rankdump", "cli"), ("rankdumpd", "daemon")])
def test_base_install_names_the_extras(module, extra):
    """With nothing but what `pip install rankdump` brings, each program says its own extra."""
    extras = (
        "click",
        "rich",
        "grpc_health",
        "grpc_reflection",
        "prometheus_client",
        "cryptography",
    )
    code = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({extras!r})); "
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"pip install 'rankdump[{extra}]'" in done.stderr


def test_closed_pipe_ends_without_a_traceback(tree):
    """`rankdump ls | head -1` prints no traceback."""
    for number in range(300):
        tree.tensor(0, 0, f"Default/{'long' * 20}-Name/Op-op{number}", np.ones(1, np.float32))
    script = (
        f"{sys.executable} -m rankdump ls {tree.root} --limit 0 --op '*' | head -1; "
        "exit ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("redirection", "fault"),
    [("> /dev/full", "No space left on device"), ("1>&-", "standard output is closed")],
)
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", ["ls {} --limit 0 --op '*'", "ls {} --json", "--help"])
def test_output_that_cannot_be_written_is_one_line(tree, command, redirection, fault, unbuffered):
    for number in range(300):
        tree.tensor(0, 0, f"Default/{'long' * 20}-Name/Op-op{number}", np.ones(1, np.float32))
    script = f"{sys.executable} -m rankdump {command.format(tree.root)} {redirection}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rankdump: the output cannot be written: {fault}\n"


def test_error_is_printed_where_no_output_is_open(tmp_path):
    script = f"{sys.executable} -m rankdump ls {tmp_path}/none 1>&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none" in done.stderr


def test_names_that_are_not_text_are_printed_escaped(tree):
    """A name that is no text, as damage leaves it, is shown as far as it goes."""
    table = tree.row(0, 0, "Default/a-A/A-op0", np.ones(1, np.float32))
    table.write_bytes(table.read_bytes().replace(b"Default", b"Def\xffult"))
    done = subprocess.run(
        [sys.executable, "-m", "rankdump", "stats", tree.root],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Def\\udcffult" in done.stdout


@pytest.mark.slow
def test_command_writes_pages_in_a_process_without_pandas(tree, tmp_path):
    """Libraries that look for pandas when they are imported, as bokeh does, go on without it."""
    tree.tensor(0, 0, "Default/a-A/A-op0", np.ones(1, np.float32), tabled=True)
    tree.complete(0, 0)
    roots, start = [str(tree.root)], [sys.executable, "-m", "rankdump"]
    for command in (["diff", *roots * 2, "--html", "diff.html"], ["plot", *roots, "-o", "x.html"]):
        done = subprocess.run(
            [*start, *command], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "A-op0" in (tmp_path / command[-1]).read_text()


def test_status_watch_ends_with_ctrl_c(tree):
    """`status --watch` shows the ranks again and again until Ctrl-C, which is no failure."""
    tree.tensor(0, 0, "Default/a-A/A-op0", np.ones(1, np.float32))
    tree.complete(0, 0, world_size=1)
    watch = subprocess.Popen(
        [sys.executable, "-m", "rankdump", "status", str(tree.root), "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORCE_COLOR": "1"},  # a terminal for rich: it draws while it runs
    )
    assert watch.stdout is not None
    first = next(line for line in watch.stdout if "closed" in line)
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=60)
    assert (watch.returncode, err) == (0, "")
    assert first.split()[:3] == ["0", "closed", "1/1"]


def test_help_of_every_command_fits_in_its_line():
    """The list of commands shows a whole sentence for each of them."""
    done = subprocess.run(
        [sys.executable, "-m", "rankdump", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        check=True,
    )
    lines = done.stdout.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 10
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []
