"""Rules of an API dump: requests, scopes, steps and the removal of an earlier dump."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rankdump._compat.api_dump import StepCounter
from rankdump._compat.dump_files import clear_rank_folder
from rankdump._compat.dump_request import (
    ApiDumpRequest,
    ApiDumpSetting,
    check_setting,
    make_call_scope,
    make_dump_plan,
    make_dump_request,
)
from rankdump._core.plan import plan_from_json, plan_to_json
from rankdump._layout.api_tree import ApiCall, parse_call_name

SETTING = ApiDumpSetting("/data/dump")
RUN = ["LAYER_stem", "NN_Conv2d_0", "Functional_relu_0", "Torch_matmul_0", "NN_Conv2d_1"]


def asked(mode: object = "all", scope: object = None, dump_type: object = "all", **more: object):
    given = {"filter_data": True, "filter_stack": True, "statistic_category": None} | more
    return make_dump_request(mode, scope, dump_type, **given)


def calls(stems: Sequence[str]) -> list[ApiCall]:
    found = [parse_call_name(f"{stem}_forward") for stem in stems]
    assert None not in found
    return [call for call in found if call is not None]


@pytest.mark.parametrize(
    ("mode", "scope", "kept", "missing"),
    [
        ("all", (), RUN, []),
        ("list", ("NN_Conv2d_1", "Torch_matmul_0"), ["Torch_matmul_0", "NN_Conv2d_1"], []),
        ("list", ("NN_Conv2d_1", "NN_conv2d_0"), ["NN_Conv2d_1"], ["named NN_conv2d_0"]),
        ("range", ("NN_Conv2d_0", "Torch_matmul_0"), RUN[1:4], []),
        ("range", ("Torch_matmul_0", "Torch_matmul_0"), ["Torch_matmul_0"], []),
        ("range", ("Torch_matmul_0", "NN_Relu_9"), RUN[3:], ["NN_Relu_9, was not made"]),
        ("range", ("Torch_matmul_0", "NN_Conv2d_0"), RUN[3:], ["made before the first"]),
        ("range", ("NN_Relu_9", "NN_Relu_10"), [], ["NN_Relu_9, was", "NN_Relu_10, was"]),
        ("api_list", ("RELU", "conv", "gelu"), [RUN[1], RUN[2], RUN[4]], ["'gelu'"]),
    ],
)
def test_call_scopes_select_calls_and_list_missing_ones(
    mode: str, scope: tuple[str, ...], kept: list[str], missing: list[str]
):
    """Each mode selects what its name says, and says what never came."""
    asked_for = make_call_scope(mode, scope)
    assert [call.stem for call in calls(RUN) if asked_for.is_selected(call)] == kept
    said = asked_for.list_missing()
    assert len(said) == len(missing)
    assert all(part in sentence for part, sentence in zip(missing, said, strict=True))


def test_range_scope_selects_its_range_once():
    """What follows its end is left out, also when its begin comes again."""
    scope = make_call_scope("range", ("NN_Conv2d_0", "Torch_matmul_0"))
    assert [c.stem for c in calls(RUN * 2) if scope.is_selected(c)] == RUN[1:4]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"mode": "foo"}, ValueError, "mode: 'foo' is not allowed; allowed: all, list"),
        ({"mode": 3}, ValueError, "mode: 3"),
        ({"scope": ["NN_Conv2d_0"]}, ValueError, "with mode 'all'; allowed: None"),
        ({"mode": "list"}, TypeError, "scope None"),
        ({"mode": "list", "scope": []}, ValueError, "with mode 'list'; allowed: a list"),
        ({"mode": "list", "scope": ["NN_Conv2d"]}, ValueError, "Type_Name_ID"),
        ({"mode": "list", "scope": [1]}, TypeError, "scope [1]"),
        ({"mode": "list", "scope": "NN_Conv2d_0"}, TypeError, "list of names"),
        ({"mode": "range", "scope": ["NN_Conv2d_0"]}, ValueError, "[start, end]"),
        ({"mode": "range", "scope": ["a_1", "b"]}, ValueError, "'b'"),
        ({"mode": "api_list"}, TypeError, "scope None"),
        ({"dump_type": "tensor"}, ValueError, "dump_type: 'tensor'"),
        ({"filter_data": 1}, TypeError, "filter_data: 1"),
        ({"filter_stack": None}, TypeError, "filter_stack"),
        ({"overflow_check": 1}, TypeError, "overflow_check: 1"),
        ({"statistic_category": ["median"]}, ValueError, "'median'"),
        ({"statistic_category": []}, TypeError, "statistic_category"),
    ],
)
def test_wrong_parameters_raise_errors_with_allowed_values(
    given: dict[str, object], error: type[Exception], words: str
):
    """One line with the parameter, the value and what is allowed, as the tool raises it."""
    with pytest.raises(error) as raised:
        asked(**given)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_check_setting_rejects_wrong_values():
    assert check_setting(SETTING) is SETTING
    for wrong in (ApiDumpSetting("/d", codec="rar"), ApiDumpSetting("/d", release="1.0.12")):
        with pytest.raises(ValueError, match="is not allowed"):
            check_setting(wrong)
    with pytest.raises(TypeError, match="retain_backward: 1"):
        check_setting(ApiDumpSetting("/d", retain_backward=1))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("dump_type", "saved", "figures"),
    [
        ("all", "full", ("max", "min", "avg")),
        ("npy", "full", ()),
        ("statistics", "statistic", ("max", "min", "avg")),
        ("stack", "statistic", ()),
    ],
)
def test_make_dump_plan_of_each_dump_type(dump_type: str, saved: str, figures: tuple[str, ...]):
    """Each dump type keeps what its name says, in the tree of the framework."""
    plan = make_dump_plan(SETTING, asked(dump_type=dump_type), "torch")
    assert (plan.output.root, plan.output.layout) == ("/data/dump", "api-torch")
    assert (plan.output.file_mode, plan.output.folder_mode) == (0o400, 0o700)
    assert (plan.output.codec, plan.dialect) == ("none", "api_dump")
    assert (plan.content.saved, plan.content.statistics) == (saved, figures)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_make_dump_plan_of_release_1_0_18_has_other_statistics():
    """1.0.18 computes no mean unless it is asked to; 1.0.17 cannot be asked."""
    last = ApiDumpSetting("/data/dump", release="1.0.18")
    assert (
        make_dump_plan(last, ApiDumpRequest(), "mindspore").output.layout == "api-mindspore-1.0.18"
    )
    assert make_dump_plan(last, ApiDumpRequest(), "torch").content.statistics == (
        "max",
        "min",
        "l2norm",
    )
    given = asked(statistic_category=["md5", "avg", "md5"])
    assert make_dump_plan(last, given, "torch").content.statistics == ("md5", "avg")
    with pytest.raises(ValueError, match="release"):
        make_dump_plan(SETTING, given, "torch")


@pytest.mark.parametrize(
    ("loop", "numbers"),
    [
        # T: a call that trains, E: an evaluation, s: an optimizer's step.
        ("TsTsTs", [0, 1, 2]),
        ("TTTsTTTs", [0, 0, 0, 1, 1, 1]),
        ("TssTss", [0, 1]),
        ("sTsTs", [0, 1]),
        ("TsETs", [0, 1, 2]),
        ("TsEETsTs", [0, 1, 2, 3, 4]),
        ("EETs", [0, 1, 2]),
    ],
)
def test_step_counter_ends_steps_at_optimizers(loop: str, numbers: list[int]):
    """Accumulation is one step, several optimizers end one step, an evaluation has its own."""
    assert numbers_of(loop, has_optimizer=True) == numbers


def test_step_counter_without_optimizer_counts_calls():
    assert numbers_of("TTET", has_optimizer=False) == [0, 1, 2, 3]


def test_step_counter_accepts_steps_of_the_script():
    """Its first word is the step that runs, or the first after the calls so far."""
    steps = StepCounter()
    assert [steps.set_step(), steps.set_step(), steps.set_step(7), steps.set_step()] == [0, 1, 7, 8]
    steps.note_optimizer_step()
    assert not steps.note_call("m", trains=True, has_optimizer=lambda: True)
    assert steps.number == 8


def test_step_counter_knows_the_upcoming_step():
    steps = StepCounter()
    assert steps.upcoming_step == 0
    steps.note_call("m", trains=True, has_optimizer=lambda: True)
    steps.note_optimizer_step()
    assert (steps.number, steps.upcoming_step) == (0, 1)


def numbers_of(loop: str, *, has_optimizer: bool) -> list[int]:
    steps, found = StepCounter(), list[int]()
    for event in loop:
        if event == "s":
            steps.note_optimizer_step()
        else:
            steps.note_call(event, trains=event == "T", has_optimizer=lambda: has_optimizer)
            found.append(steps.number)
    return found


def grown(root: Path, *names: str) -> set[str]:
    """Make files, and return all there are."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")
    return left(root)


def left(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_clear_rank_folder_removes_only_that_rank_and_framework(tmp_path: Path):
    kept = {
        "notes.txt",
        "rank0/pt_net.pth",
        "rank0/mindspore_api_dump/a.npy",
        "rank0/mindspore_api_dump_info.pkl",
        "rank0/torch_api_dump_more/a.npy",
        "rank1/torch_api_dump/a.npy",
        "rank1/.dump_metadata/manifest/iteration_0.1.json",
    }
    old = [
        "rank0/torch_api_dump/a.npy",
        "rank0/torch_api_dump/sub/b.npy",
        "rank0/torch_api_dump_info.pkl",
        "rank0/torch_api_dump_info.csv",
        "rank0/torch_api_dump_stack.json",
    ]
    grown(tmp_path, *kept, *old)
    clear_rank_folder(str(tmp_path), 0, "torch")
    assert left(tmp_path) == kept
    clear_rank_folder(str(tmp_path / "nowhere"), 0, "torch")


def test_clear_rank_folder_keeps_manifests_of_another_framework(tmp_path: Path):
    folder = tmp_path / "rank0/.dump_metadata/manifest"
    grown(tmp_path, "rank0/mindspore_api_dump_info.pkl", "rank0/torch_api_dump_info.pkl")
    folder.mkdir(parents=True)
    texts = {
        "ours.json": '{"path": "rank0/torch_api_dump/a.npy"}',
        "theirs.json": '{"path": "rank0/mindspore_api_dump/a.npy"}',
        "nobodys.json": '{"path": ""}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    clear_rank_folder(str(tmp_path), 0, "torch")
    assert {path.name for path in folder.iterdir()} == {"theirs.json", "nobodys.json"}
    (tmp_path / "rank0/mindspore_api_dump_info.pkl").unlink()
    clear_rank_folder(str(tmp_path), 0, "torch")
    assert {path.name for path in folder.iterdir()} == {"theirs.json"}


def test_clear_rank_folder_follows_no_links(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    grown(elsewhere, "a.npy", "info.pkl", "rank0/torch_api_dump/a.npy", "manifest/m.json")
    before = left(elsewhere)
    rank = tmp_path / "dump/rank0"
    rank.mkdir(parents=True)
    (rank / "torch_api_dump").symlink_to(elsewhere)
    (rank / "torch_api_dump_info.pkl").symlink_to(elsewhere / "info.pkl")
    (rank / ".dump_metadata").symlink_to(elsewhere)
    (tmp_path / "dump/rank1").symlink_to(elsewhere / "rank0")
    for number in (0, 1):
        clear_rank_folder(str(tmp_path / "dump"), number, "torch")
    assert left(elsewhere) == before
