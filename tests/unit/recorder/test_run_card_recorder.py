"""Run card of a rank: what it has of process, step and model, and what never goes wrong with it."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rankdump._core.record import TensorSide
from rankdump._core.run_card import ModelSummary, ParameterDigest, parse_card
from rankdump._recorder import run_card_recorder
from rankdump._recorder.declared_layouts import DeclaredLayouts, LayoutDeclaration, declare_layout
from rankdump._recorder.run_card_recorder import (
    ALLOWED_VARIABLES,
    RunCardRecorder,
    find_cann_version,
    find_revision,
    mask_arguments,
    read_random_states,
)

COMMIT, OTHER = "ab" * 20, "cd" * 20


class Causes:
    """Black box that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def add_digest(self, name: str, digest: str) -> None:
        self.told.append((name, digest))

    def note(self, numbers: object) -> None:
        self.told.append(numbers)

    def add_rates(self, optimizer: object, rates: object) -> None:
        raise AssertionError("the black box has its own names of rates")


def make_recorder(environ: dict[str, str], black_box: Causes | None = None) -> RunCardRecorder:
    warnings: list[str] = []
    recorder = RunCardRecorder(
        DeclaredLayouts(warnings.append), black_box, warn=warnings.append, environ=environ
    )
    recorder.warnings = warnings  # type: ignore[attr-defined]
    return recorder


def test_optimizers_of_a_step_are_numbered():
    """Names of the first one are those that earlier versions wrote."""
    recorder = make_recorder({}, Causes())
    critic, generator = object(), object()
    for _ in range(2):
        recorder.begin_step()
        for rate in (0.1, 0.2):  # a critic that steps twice
            recorder.add_rates(critic, [rate, 0.3])
        recorder.add_rates(generator, [0.5, 0.6])
        assert parse_card(recorder.make_card()).numbers == {
            "learning_rate.0": "0.2",
            "learning_rate.1": "0.3",
            "learning_rate.1.0": "0.5",
            "learning_rate.1.1": "0.6",
        }
    recorder.begin_step()
    recorder.add_rates(generator, [0.5])
    assert parse_card(recorder.make_card()).numbers == {"learning_rate.0": "0.5"}


def test_rates_of_many_optimizers_leave_space_for_other_numbers():
    recorder = make_recorder({})
    recorder.begin_step()
    optimizers = [object() for _ in range(100)]
    for each in optimizers:
        recorder.add_rates(each, [0.1])
    recorder.note({"loss": 1.0})
    numbers = parse_card(recorder.make_card()).numbers
    assert len(numbers) < 20
    assert "loss" in numbers


def test_card_has_process_step_and_models():
    box = Causes()
    recorder = make_recorder({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hunter2"}, box)
    assert recorder.has_black_box
    recorder.begin_step()
    recorder.name_model(0, "Net")
    recorder.name_model(1, "Critic")
    recorder.add_model(0, ModelSummary("", 1, 2, "00"))
    recorder.use_settings({"torch.initial_seed": "3"})
    recorder.add_digest("batch.0", "0f")
    recorder.note({"learning_rate.0": 0.5, "loss": float("nan")})
    for graph in (0, 1):
        recorder.add_parameters(graph, {"w": ParameterDigest("float32", 1)})
    card = parse_card(recorder.make_card())
    assert card.environment == {"OMP_NUM_THREADS": "2"}
    assert card.versions["python"].startswith("3.")
    assert card.versions["numpy"] == np.__version__
    assert card.command == mask_arguments(card.command)
    assert len(card.revision) in (0, 40)
    assert card.models == (ModelSummary("Net", 1, 2, "00"),)
    assert card.numbers == {"learning_rate.0": "0.5", "loss": "nan"}
    assert dict(card.digests) == {"batch.0": "0f"}
    assert list(card.parameters) == ["w", "Critic:w"]
    assert [type(each) for each in box.told] == [tuple, dict]
    recorder.begin_step()
    card = parse_card(recorder.make_card())
    assert (card.numbers, card.digests, card.parameters) == ({}, {}, {})
    assert card.settings == {"torch.initial_seed": "3"}


def test_error_leaves_the_card_out_and_is_told_once(monkeypatch):
    """The end of an iteration is sent all the same."""
    recorder = make_recorder({})

    def fail() -> None:
        raise OSError("no command line")

    monkeypatch.setattr("rankdump._recorder.run_card_recorder.read_command", fail)
    assert recorder.make_card() == b""
    (warning,) = recorder.warnings  # type: ignore[attr-defined]
    assert warning == "the run card of an iteration is left out: OSError('no command line')"


def test_card_that_is_too_large_is_left_out():
    recorder = make_recorder({})
    recorder.use_settings({"x": "y" * (1 << 19)})
    assert recorder.make_card() == b""
    assert "too large" in recorder.warnings[0]  # type: ignore[attr-defined]


def test_declared_layout_of_a_parameter_is_found():
    layouts = DeclaredLayouts(lambda text: None)
    recorder = RunCardRecorder(layouts, None, warn=lambda text: None, environ={})
    assert recorder.find_layout("w", (2,)) is None
    declared = declare_layout(1, (4,), {"tp": 2}, {"tp": "Shard(0)"})
    assert isinstance(declared, LayoutDeclaration)
    layouts.add("w", TensorSide.OUTPUT, 0, declared)
    found = recorder.find_layout("w", (2,))
    assert found is not None
    assert found.global_offset == (2,)
    assert recorder.find_layout("w", (3,)) is recorder.find_layout("v", (2,)) is None


def test_no_allowed_variable_has_the_name_of_a_secret():
    for name in ALLOWED_VARIABLES:
        assert mask_arguments([f"{name}=value"]) == (f"{name}=value",)
    assert sorted(ALLOWED_VARIABLES) == list(ALLOWED_VARIABLES)


def test_long_arguments_are_masked_before_they_are_cut(monkeypatch):
    secret = "hf_" + "a1B2" * 100
    monkeypatch.setattr(sys, "orig_argv", ["python", "x" * 250 + " " + secret, *["y"] * 200])
    command = run_card_recorder.read_command()
    assert "a1B2" not in "".join(command)
    assert len(command) == 129
    assert max(map(len, command)) <= 256


def write_repository(folder: Path, head: str, **files: str) -> None:
    git = folder / ".git"
    for name, text in {"HEAD": head, **files}.items():
        path = git / name.replace("__", "/").replace("_refs", "-refs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("head", "files", "expected"),
    [
        (f"{COMMIT}\n", {}, COMMIT),
        ("ref: refs/heads/main\n", {"refs__heads__main": f"{COMMIT}\n"}, COMMIT),
        (
            "ref: refs/heads/main\n",
            {"packed_refs": f"# pack-refs\n{OTHER} refs/heads/mainly\n{COMMIT} refs/heads/main\n"},
            COMMIT,
        ),
        ("ref: refs/heads/new\n", {}, ""),
        ("ref: ../../secret\n", {}, ""),
        ("hunter2\n", {}, ""),
        ("ref: refs/heads/main\n", {"refs__heads__main": "hunter2\n"}, ""),
    ],
)
def test_revision_is_read_without_git(tmp_path, head, files, expected):
    write_repository(tmp_path, head, **files)
    (tmp_path / "src" / "deep").mkdir(parents=True)
    assert find_revision(tmp_path / "src" / "deep") == expected


def test_revision_of_a_worktree_is_that_of_its_own_head(tmp_path):
    main, tree = tmp_path / "main", tmp_path / "tree"
    write_repository(
        main,
        f"{OTHER}\n",
        worktrees__tree__HEAD="ref: refs/heads/topic\n",
        worktrees__tree__commondir="../..\n",
        refs__heads__topic=f"{COMMIT}\n",
    )
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {main / '.git' / 'worktrees' / 'tree'}\n")
    assert find_revision(tree) == COMMIT
    assert find_revision(main) == OTHER


def test_version_of_cann_is_that_of_the_folder_that_the_environment_names(tmp_path):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("Name=x\nVersion=8.0.RC3\n")
    assert find_cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == "8.0.RC3"
    (tmp_path / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[7.5.0.1:8]\n")
    assert find_cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == "7.5.0.1"
    assert find_cann_version({"ASCEND_HOME_PATH": "/no/such"}) == find_cann_version({}) == ""


def test_states_of_generators_are_digests():
    random.seed(1)
    np.random.seed(1)
    first = read_random_states()
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in first.values())
    random.random()
    second = read_random_states()
    assert first["random.python"] != second["random.python"]
    assert first["random.numpy"] == second["random.numpy"]
    np.random.rand()
    random.seed(1)
    third = read_random_states()
    assert third["random.python"] == first["random.python"]
    assert third["random.numpy"] != first["random.numpy"]
