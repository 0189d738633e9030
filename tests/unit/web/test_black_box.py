"""Page of a black box: what happened, the way of the first bad value, and the steps before."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from support.web_trees import BAD_PLACE, LINEAR, MARKUP, fill_tree

from rankdump._cli.command_group import run_command_line
from rankdump._core.black_box import FaultKind
from rankdump._core.freeze_record import (
    FreezeRecord,
    FrozenCause,
    FrozenRank,
    FrozenStep,
    MissingRank,
    NonfiniteTensor,
    format_freeze_record,
    make_record_name,
)
from rankdump._core.status import SessionState

BAD_RANK, BAD_ITERATION = BAD_PLACE


def write_freeze(tree: Path) -> Path:
    """Write the record of a freeze into a tree: rank 1 has a NaN, rank 0 is missing."""
    bad = NonfiniteTensor("Linear", LINEAR, "output", 0, "", 1, 0, 90, 17)
    steps = (
        FrozenStep(0, 1, 5, gradient_norm="2.0", largest="3.5", numbers={"loss": "0.25"}),
        FrozenStep(1, 6, 9, first_nonfinite=bad, nonfinite=2, numbers={"loss": "nan"}),
    )
    place = "Linear", LINEAR, "output", 0
    cause = FrozenCause(
        *(FaultKind.NON_FINITE, BAD_ITERATION, "NaN in an output <b>", 1000, BAD_RANK),
        *place,
        source="train.py:7",
    )
    rank = FrozenRank(BAD_RANK, "s1", 1, SessionState.OPEN, held_steps=2, steps=steps)
    record = FreezeRecord(
        *("job", 0, BAD_ITERATION),
        world_size=2,
        frozen_us=50,
        causes=(cause,),
        ranks=(rank,),
        missing=(MissingRank(0, "its host was lost"),),
        host="node1",
    )
    state = tree / ".rankdump"
    state.mkdir(parents=True, exist_ok=True)
    (state / make_record_name("node1", "a")).write_bytes(format_freeze_record(record))
    return tree


@pytest.fixture
def frozen(tmp_path: Path) -> tuple[Path, Path]:
    """A dump, and the frozen tree beside it."""
    root = fill_tree(tmp_path / "tree", ranks=1)
    inner = fill_tree(root / "blackbox" / "1")
    return root, write_freeze(inner)


def test_black_box_says_what_the_command_says(frozen, open_pages, capsys):
    root, inner = frozen
    client = open_pages(root)
    fault = client.get("/blackbox.json").json()["fault"]
    assert run_command_line(["faults", str(root)]) == 0
    printed = capsys.readouterr().out
    sentences = (fault["cause"], *fault["bad_value"], *fault["carried"], *fault["ranks"])
    assert len(sentences) >= 4
    for line in sentences:
        assert line in printed
    assert any("rank 0 is missing" in line for line in fault["ranks"])
    assert [(step["iteration"], step["loss"]) for step in fault["steps"]] == [
        (0, "0.25"),
        (1, "nan"),
    ]
    text = client.get("/blackbox").text
    assert f"rankdump web {inner}" in text
    assert "<b>" not in text
    assert "0.25" in text
    assert 'href="/blackbox"' in client.get("/").text


def test_way_of_a_frozen_tree_that_is_served(frozen, open_pages):
    """Clean inputs, a bad output, and the operator that takes it."""
    client = open_pages(*frozen)
    body = client.get("/blackbox.json").json()
    assert body["tree"] == 1
    way = [(row["name"], row["side"], row["nonfinite"]) for row in body["way"]]
    assert way == [(LINEAR, "input", False), (LINEAR, "output", True), (MARKUP, "input", True)]
    text = html.unescape(client.get("/blackbox").text)
    links = [part.partition('"')[0] for part in text.split('href="') if part.startswith("/tensor?")]
    assert len(links) == 3
    assert all(link.endswith("tree=1") for link in links)
    assert client.get(links[0]).status_code == 200
    # The frozen tree itself has the same page.
    assert client.get("/blackbox.json", params={"tree": 1}).json()["way"] == body["way"]


def test_damaged_freeze_leaves_the_others(frozen, open_pages):
    root, inner = frozen
    other = write_freeze(root / "blackbox" / "2")
    (record,) = (inner / ".rankdump").iterdir()
    record.write_bytes(b"{")
    client = open_pages(root)
    bodies = [client.get("/blackbox.json", params={"freeze": at}).json() for at in range(2)]
    assert sorted(bodies[0]["frozen"]) == sorted(map(str, (inner, other)))
    by_root = {body["root"]: body for body in bodies}
    assert record.name in by_root[str(inner)]["problem"]
    assert by_root[str(other)]["fault"]["job_id"] == "job"
    answer = client.get("/blackbox.json", params={"freeze": 2})
    assert (answer.status_code, answer.json()["error"]) == (404, "no freeze 2: there are 2")


def test_tree_without_a_freeze_says_so(indexed):
    assert "No steps were frozen" in indexed.get("/blackbox").text
