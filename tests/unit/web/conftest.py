"""Pages of a small tree, with a table and without one, and a client in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.web_trees import fill_tree

from rankdump._analysis.reader.dump import open_dump
from rankdump._analysis.table_index import index_tree
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import (
    ComparisonProcesses,
    ComparisonRequest,
    ComparisonState,
    compare_request,
)
from rankdump._web.comparison_view import RowSelection
from rankdump._web.dump_source import DumpSource
from rankdump._web.job_source import JobSource
from rankdump._web.query_process import QueryAnswer, QueryProcess
from rankdump.errors import RankdumpError


class OwnQueries(QueryProcess):
    """Runs statements in this process."""

    def run(self, root: Path, sql: str) -> QueryAnswer:
        """Return the rows."""
        found = open_dump(root).sql(sql)
        rows = tuple(tuple(row.values()) for row in found.to_pylist())
        return QueryAnswer(tuple(found.column_names), rows, len(found))


class OwnComparisons(ComparisonProcesses):
    """Compares in this process."""

    def look(self, request: ComparisonRequest, wanted: RowSelection) -> ComparisonState:
        """Return the result, or why there is none."""
        try:
            view = compare_request(request, [0, 0])
        except RankdumpError as error:
            return ComparisonState("failed", failure=str(error))
        return ComparisonState("ready", summary=view.summarize(), excerpt=view.select(wanted))


ClientMaker = Callable[..., TestClient]


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tree without a table and with one; tests only read."""
    folder = tmp_path_factory.mktemp("web")
    found = {name: fill_tree(folder / name) for name in ("walked", "indexed")}
    index_tree(found["indexed"])
    return found


@pytest.fixture
def open_pages() -> Iterator[ClientMaker]:
    """A function that returns a client of the pages of some trees."""
    sources: list[DumpSource] = []

    def make(
        *roots: Path,
        comparisons: ComparisonProcesses | None = None,
        job: JobSource | None = None,
    ) -> TestClient:
        own = list(map(DumpSource, roots))
        sources.extend(own)
        made = WebPages(own, OwnQueries(), comparisons or OwnComparisons(), job)
        return TestClient(made.make_application())

    yield make
    for source in sources:
        source.close()


@pytest.fixture(params=["walked", "indexed"])
def pages(trees, open_pages, request) -> TestClient:
    return open_pages(trees[request.param])


@pytest.fixture
def indexed(trees, open_pages) -> TestClient:
    return open_pages(trees["indexed"])
