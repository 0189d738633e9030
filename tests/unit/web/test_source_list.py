"""Trees that come while a server runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rankdump._web import dump_source
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.dump_source import SourceList
from rankdump._web.query_process import QueryProcess


def test_tree_that_does_not_exist_yet_follows_when_it_does(trees, tmp_path: Path):
    """Numbers of trees stay: pages name a tree by its number."""
    later, found = tmp_path / "later", SourceList()
    found.add([later, trees["walked"]])
    assert [source.root for source in found[: len(found)]] == [trees["walked"]]
    later.symlink_to(trees["indexed"])
    found.add([later, trees["indexed"], trees["walked"]])
    assert len(found) == 3
    assert [source.root for source in found] == [trees["walked"], later, trees["indexed"]]
    assert found[2].root == trees["indexed"]
    found.close()


def test_tables_of_few_trees_are_open(trees, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dump_source, "MAX_OPEN", 1)
    found = SourceList()
    found.add([trees["walked"], trees["indexed"]])
    for number in range(len(found)):
        assert found[number].get_rows("SELECT count(*) AS n FROM tensors")[0]["n"] > 0
    assert [source._state.table is None for source in found] == [True, False]
    assert found[0].get_rows("SELECT 1 AS one") == [{"one": 1}]
    found.close()


def test_pages_without_a_tree_say_so(trees):
    sources = SourceList()
    pages = WebPages(sources, QueryProcess(), ComparisonProcesses())
    client = TestClient(pages.make_application())
    answer = client.get("/overview.json")
    assert answer.status_code == 404
    assert answer.json()["error"].startswith("there is no tree yet: it comes when its job begins")
    assert "there is no tree yet" in client.get("/").text
    sources.add([trees["indexed"]])
    assert client.get("/").status_code == 200
    sources.close()
