"""Trees of earlier versions are read, checked and compared as by those versions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.golden_trees import FOLDER, answers, asked, beside, missing, restore, sum_of, sums

KEPT = sorted(path for path in FOLDER.glob("tree-*/*") if path.is_dir())
VERDICTS = {"equal": "same", "close": "normal"}
"""Words of today by those of 0.1.0."""
NAMES = [f"{path.parent.name}/{path.name}" for path in KEPT]


def recorded(kept: Path, what: str):
    return json.loads(beside(kept, what).read_text())


@pytest.mark.parametrize("kept", KEPT, ids=NAMES)
def test_old_tree_is_read_as_by_its_own_version(kept: Path, tmp_path: Path):
    """Today's readers and checks give what those of the tree's version gave."""
    tree = restore(kept, tmp_path / kept.name)
    assert sums(tree) == recorded(kept, "sums")
    assert recorded(kept, "answers")["fsck"]["clean"]
    expected = rename_verdicts(omit_places_in_b(recorded(kept, "answers")))
    omit_layer_marks(expected["stats"])
    assert missing(answers(tree), expected) == []


def rename_verdicts(expected: dict[str, Any]) -> dict[str, Any]:
    """Give comparisons the words of version 2 of the report; 0.1.0 wrote version 1."""
    for answer in expected.values():
        if isinstance(answer, dict) and "counts" in answer and "rows" in answer:
            answer["version"] = 2
            answer["counts"] = {VERDICTS.get(word, word): n for word, n in answer["counts"].items()}
            for row in answer["rows"]:
                row["verdict"] = VERDICTS.get(row["verdict"], row["verdict"])
    return expected


def omit_places_in_b(expected: dict[str, Any]) -> dict[str, Any]:
    """Remove the places of calls in side b: version 0.1.0 gave the rank and iteration of side a."""
    for answer in (each for each in expected.values() if isinstance(each, dict)):
        for origin in (*answer.get("origins", ()), *answer.get("rank_origins", ())):
            for suspect in origin["suspects"] if origin["side"] == "b" else ():
                for field in ("rank", "iteration", "source"):
                    del suspect[field]
    return expected


def omit_layer_marks(stats: dict[str, Any]) -> None:
    """Remove the marks of layers, which were among the tensors that have statistics."""
    kept = [each for each in stats["tensors"] if not each["op_name"].startswith("LAYER_")]
    stats["tensor_count"] -= len(stats["tensors"]) - len(kept)
    stats["tensors"] = kept


def test_restored_tree_has_its_hard_links(tmp_path: Path):
    """Tensors that share one file in the original share it in the copy."""
    kept = FOLDER / "tree-0.1.0" / "net"
    tree = restore(kept, tmp_path / "net")
    links = {n: what["link"] for n, what in recorded(kept, "other").items() if "link" in what}
    assert len(links) == 8
    assert all((tree / name).samefile(tree / first) for name, first in links.items())


@pytest.mark.parametrize("kept", KEPT, ids=NAMES)
def test_changed_byte_of_an_old_tree_is_found(kept: Path, tmp_path: Path):
    """The recorded checksums find every byte, and `fsck` those of the tensors."""
    tree, expected = restore(kept, tmp_path / kept.name), recorded(kept, "sums")
    chance = random.Random(7)
    for name in expected:
        path = tree / name
        if data := path.read_bytes():
            flip(path, chance.randrange(len(data)))
            assert sum_of(path) != expected[name]
            path.write_bytes(data)
    answers_then = recorded(kept, "answers")
    path = tree / chance.choice([tensor["path"] for tensor in answers_then["ls"]["tensors"]])
    flip(path, -1)
    assert missing(asked(["fsck", str(tree)]), answers_then["fsck"])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
