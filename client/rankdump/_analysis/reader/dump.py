"""Dump tree as a Python object: its tensors, arrays, statistics and source lines, each of which is
read on first use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from rankdump._analysis.reader.fingerprints import (
    FingerprintsByRecord,
    read_fingerprints_of_tree,
)
from rankdump._analysis.reader.foreign_dumps import find_foreign_reader
from rankdump._analysis.reader.manifests import (
    find_other_sessions,
    list_jobs_by_time,
    read_first_statuses,
    read_tree_sessions,
)
from rankdump._analysis.reader.query import Named, Query, selected
from rankdump._analysis.reader.run_cards import FoundCards, RankCard, read_run_cards
from rankdump._analysis.reader.shard_join import TensorShard, join_shards, plan_join
from rankdump._analysis.reader.source_lines import (
    Frame,
    find_backward_name,
    graph_files,
    read_operators,
)
from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.table_rows import (
    find_places_by_name,
    iterate_named,
    read_table_rows,
)
from rankdump._analysis.reader.tensor_loader import load as load_entry
from rankdump._analysis.reader.tree import (
    Entries,
    Entry,
    Figures,
    PlaceInTime,
    Table,
    Tree,
    place_in_time_of,
)
from rankdump._analysis.reader.tree_files import FolderIndex
from rankdump._analysis.reader.tree_status import count_tree_drops
from rankdump._analysis.reader.tree_walk import find_root, walk
from rankdump._core.plan import IterationSelection
from rankdump._core.record import TensorKey
from rankdump._core.tensor_layout import TensorLayout
from rankdump._core.units import format_count
from rankdump._layout import tree_paths
from rankdump._layout.dump_folders import ROOT_FORMS
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_paths import make_mindspore_readable_key
from rankdump.errors import CorruptedError

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack

    from rankdump._analysis.reader.query import Filters
    from rankdump._analysis.table.table_query import QueryLimits


def check_ours(root: Path) -> None:
    """Raise a CorruptedError if a folder is a dump of another tool that has no tensors."""
    reader = find_foreign_reader(root)
    if reader is not None and reader.read_calls is None:
        reader.read_tree(root, ())


def open_dump(path: str | PathLike[str]) -> Dump:
    """Return the dump in a folder, or in a file of another tool; CorruptedError if there is no
    dump.
    """
    root = Path(fspath(path))
    if root.is_file() and find_foreign_reader(root) is not None:
        check_ours(root)
        return Dump(_TreeCache(root))
    if root.is_file():
        raise CorruptedError(f"{root}: is not a dump: expected a folder that contains {ROOT_FORMS}")
    if not root.is_dir():
        raise CorruptedError(f"{root}: no such folder; expected one that contains {ROOT_FORMS}")
    places = FolderIndex(root, sized=False)
    places.find_folders()
    is_foreign = places.is_empty and find_foreign_reader(root) is not None
    if is_foreign:
        check_ours(root)
    if places.folders or is_foreign:
        return Dump(_TreeCache(root))
    likely = find_root(root)
    hint = f"; did you mean {likely}?" if likely else ""
    raise CorruptedError(f"{root}: not a dump tree: no folder {ROOT_FORMS} in it{hint}")


class _TreeCache:
    """Cache of the parts of a tree that were read; all dumps that were selected from the tree share
    it.
    """

    def __init__(self, root: Path, job_id: str = "", attempt: int | None = None) -> None:
        self.root, self.job_id, self.attempt = root, job_id, attempt
        self._trees: dict[tuple[Query, ...], Tree] = {}
        self._attempts: dict[int, _TreeCache] = {}
        self._jobs: dict[str, _TreeCache] = {}

    def tree(self, queries: tuple[Query, ...]) -> Tree:
        """Return a tree with at least the places that the queries select."""
        places = tuple(query.places for query in queries if not query.places.empty)
        # a tree that was read for a subset of the queries has at least their places
        for count in range(len(places) + 1):
            if places[:count] in self._trees:
                return self._trees[places[:count]]
        tree = walk(self.root, *places, job_id=self.job_id, attempt=self.attempt)
        return self._trees.setdefault(places, tree)

    def list_problems(self) -> tuple[str, ...]:
        """Return the problems in the parts that were read."""
        return tuple(problem for tree in self._trees.values() for problem in tree.problems)

    def of_attempt(self, attempt: int) -> _TreeCache:
        """Return the cache for an attempt of the same job."""
        if attempt == self.attempt:
            return self
        return self._attempts.setdefault(attempt, _TreeCache(self.root, self.job_id, attempt))

    def of_job(self, job_id: str) -> _TreeCache:
        """Return the cache for a job in the tree."""
        return self._jobs.setdefault(job_id, _TreeCache(self.root, job_id, self.attempt))


class Dump:
    """The tensors of a tree, or those that `where` selected.

    Parts of the tree are read on first use: `where(rank=0)` opens no other rank.

    All filters are the keywords of `where`: `rank`, `graph`, `iteration` (a number, or text such
    as `0|2-3`), `operator` (a glob over name or type, or a compiled expression found anywhere in
    the name), `op_type` (a glob), `side`, `attempt` (of a job that was restarted).
    """

    def __init__(self, source: _TreeCache, queries: tuple[Query, ...] = ()) -> None:
        self._source, self._queries = source, queries
        self._by_key: dict[PlaceInTime, Mapping[TensorKey, list[Entry]]] = {}

    def __repr__(self) -> str:
        count = format_count(len(self._entries), "tensor")
        return f"<Dump of {self.root}: {count} of {format_count(len(self.ranks), self._tree.unit)}>"

    @property
    def root(self) -> Path:
        """The folder that contains the folders of ranks, times or devices."""
        return self._source.root

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences about unreadable files, and about missing files that a manifest names."""
        return self._tree.problems

    @property
    def walked_problems(self) -> tuple[str, ...]:
        """Problems of the parts that were read so far; nothing is read for this."""
        return self._source.list_problems()

    def where(self, **filters: Unpack[Filters]) -> Dump:
        """Return the part of this dump that the filters select; ConfigError for a bad filter."""
        if not filters:
            return self
        query, attempt = selected(filters), filters.get("attempt")
        source = self._source if attempt is None else self._source.of_attempt(int(attempt))
        return Dump(source, (*self._queries, query))

    def matching(self, query: Query) -> Dump:
        """Return the part of this dump that a query selects."""
        return self if query.empty else Dump(self._source, (*self._queries, query))

    def of_job(self, job_id: str) -> Dump:
        """Return the dump of one of several jobs; if the tree has no such job, CorruptedError lists
        the jobs.
        """
        if not find_other_sessions(self.root, job_id):
            return self
        return Dump(self._source.of_job(job_id), self._queries)

    @property
    def attempts(self) -> tuple[int, ...]:
        """Attempts of the job, ascending; a job that was not restarted has only attempt 0."""
        return self._tree.attempts

    @property
    def has_several_attempts(self) -> bool:
        """Whether tensors of several attempts of one job are selected."""
        if self._source.attempt is not None:
            return False
        # For most dumps, one manifest of each session is sufficient; the whole tree may be large.
        known = {status.attempt for status in read_first_statuses(self.root).values()}
        known.update(each.status.attempt for each in read_tree_sessions(self.root))
        return len(known) > 1 and len(self.attempts) > 1 and len(self.jobs) == 1

    @property
    def jobs(self) -> tuple[str, ...]:
        """Ids of the jobs that dumped into the tree."""
        return self._tree.jobs

    @property
    def dropped_count(self) -> int:
        """Number of tensors that the plan selects and that are not in the tree, as far as the
        manifests count them.
        """
        return count_tree_drops(self._tree)

    def list_jobs_by_time(self) -> tuple[str, ...]:
        """Return the jobs that `of_job` can select, the one that began last at the end. A dump that
        is restricted to one job has only that job.
        """
        own = self._source.job_id
        return (own,) if own else list_jobs_by_time(self.root)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks, ascending; without filters, including those with an empty folder.

        In a tree of CANN without manifests they are the numbers of devices.
        """
        named = {rank for rank, _, _ in self._places}
        return tuple(sorted(named if self._queries else named.union(self._tree.ranks)))

    @property
    def world_size(self) -> int:
        """Largest number of ranks of a job according to the manifests; 0 if it is not known."""
        return max((manifest.world_size for manifest in self._tree.manifests), default=0)

    @property
    def is_filtered(self) -> bool:
        """Whether this dump is a part that filters, a job or an attempt select."""
        source = self._source
        return bool(self._queries or source.job_id or source.attempt is not None)

    @property
    def filed_iterations(self) -> frozenset[int]:
        """Iterations in which any rank has files of tensors; constants belong to no iteration."""
        places = self._tree.entries.graphs_in_time
        return frozenset(when for _, _, when in places if when is not None)

    @property
    def tabled_tensors(self) -> int:
        """Number of tensors in iterations without files, if all of them are listed in manifests and
        are rows of tables with one iteration each; else 0.
        """
        tree, filed = self._tree, self.filed_iterations
        listed = {(each.status.rank, each.status.iteration) for each in tree.manifests}
        has_constants = any(when is None for _, _, when in tree.entries.graphs_in_time)
        is_tabled = not has_constants and all(
            (table.rank, table.when) in listed
            and table.dated
            and not (table.info or table.form or table.operator)
            for table in tree.tables
        )
        statuses = [each.status for each in tree.manifests] if is_tabled else []
        return sum(
            each.expected - sum(each.dropped.values())
            for each in statuses
            if each.iteration not in filed
        )

    @property
    def retired(self) -> tuple[tuple[int, int], ...]:
        """Ranks and iterations that retention has removed by age or size, and that therefore do not
        count as missing.

        Only the filters of rank and iteration apply.
        """
        return tuple(sorted(place for place in self._tree.gone if self._keeps_place(*place)))

    @property
    def graphs(self) -> tuple[int, ...]:
        """Numbers of graphs or models, ascending."""
        return tuple(sorted({graph for _, graph, _ in self._places}))

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations, ascending; constants belong to none."""
        return tuple(sorted({when for _, _, when in self._places if when is not None}))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of operators and parameters, in the order in which the first rank ran them.

        Names are raw if a manifest has them, else as the files spell them.
        """
        return tuple(dict.fromkeys(tensor.op_name for tensor in self._iterate_named()))

    @property
    def constants(self) -> tuple[Entry, ...]:
        """Tensors that never change, each of which is dumped once for its graph."""
        return tuple(entry for entry in self._entries if entry.key.constant)

    def tensors(self, **filters: Unpack[Filters]) -> list[Entry]:
        """Return the tensors by rank, iteration and time, including those of repeated runs."""
        return list(self.where(**filters)._entries)

    def load(
        self,
        tensor: TensorKey | Entry,
        *,
        format: str = "",  # noqa: A002 - the word for it in every file and tool
        attempt: int | None = None,
        full: bool = False,
    ) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array; bfloat16 as float32.

        With `full`, a shard is joined with those of the other ranks of its mesh to the logical
        tensor, whatever ranks the filters select; a tensor without a layout is returned as it is.
        Partial values are reduced in float64.

        A tensor of a bin file has its shape on the device. With `format`, for example `NCHW`, it
        is converted and cropped to the original shape in the header. As in CANN's own tool, that
        shape is used unchanged, so `format` should be the original format of the operator.

        A key may have raw names. Its time stamp selects one of several runs, by default the last;
        `attempt` restricts them to those of one attempt.
        CorruptedError when there is no such tensor, its file is damaged, or its shards do not
        cover the logical tensor; UnsupportedError for elements that are not numbers, and for
        unsupported formats and reductions.
        """
        if attempt is not None and not isinstance(tensor, Entry):
            return self.where(attempt=attempt).load(tensor, format=format, full=full)
        entry = tensor if isinstance(tensor, Entry) else self._entry(tensor)
        record = entry.record
        if full and record is not None and record.layout is not None:
            if record.layout.is_sample:
                raise CorruptedError(f"{entry.op_name}: the dump has {record.layout}")
            return self._join_shards(entry, record.layout)
        return load_entry(entry, tensor_format=format)

    def statistics(self, **filters: Unpack[Filters]) -> list[Figures]:
        """Return the rows of the `statistic.csv` files, in their order.

        CorruptedError names the invalid file and line.
        """
        dump = self.where(**filters)
        if not self._tree.tables:
            return []
        known = TableRecords(self._tree, dump._places_asked)
        return [
            row
            for table in self._tree.tables
            if dump._may_hold(table)
            for row in read_table_rows(table, known)
            if dump._keeps(row)
        ]

    @property
    def has_fingerprints(self) -> bool:
        """Whether a manifest lists fingerprints."""
        return any(each.fingerprints is not None for each in self._tree.manifests)

    def read_fingerprints(self, problems: list[str]) -> FingerprintsByRecord:
        """Return the fingerprints of the ranks and iterations that the filters select; add a
        problem for each damaged file.
        """
        if not self.has_fingerprints:
            return {}
        return read_fingerprints_of_tree(self.root, self._keeps_place, problems)

    def table(self) -> pa.Table:
        """Return a row for each tensor and its statistics, as a table of Arrow.

        docs/querying.md has the columns. Needs `pip install 'rankdump[table]'`. Tensors whose file
        cannot be read are left out.
        """
        from rankdump._analysis.reader.tensor_columns import make_columns_of_tree

        return make_columns_of_tree(self._tree, [], self._keeps)

    def pandas(self) -> Any:
        """Return `table()` as a DataFrame of pandas, which has to be installed."""
        return self.table().to_pandas()

    def polars(self) -> Any:
        """Return `table()` as a DataFrame of Polars, which has to be installed."""
        return import_module("polars").from_arrow(self.table())

    def sql(self, statement: str, *, limits: QueryLimits | None = None) -> pa.Table:
        """Return the rows of one SELECT over `tensors`, `iterations`, `events` and `findings`.

        Without filters, tensors and iterations are those of the table of the tree, where it has
        one. QueryError for a statement that cannot be run, ExhaustedError when it needs more
        memory than the limits allow.
        """
        from rankdump._analysis.reader.table_views import find_views
        from rankdump._analysis.table.table_query import run_query

        views = find_views(
            self.root,
            get_tree=lambda: self._tree,
            make_table=self.table,
            is_filtered=bool(self._queries or self._source.job_id),
        )
        return run_query(statement, views, limits)

    @property
    def cards(self) -> tuple[RankCard, ...]:
        """Run cards by rank and iteration: what each iteration was computed from.

        Only the filters of rank, iteration and attempt apply. Empty for a tree without run cards;
        cards that cannot be read are left out, and `card_problems` names them.
        """
        return self.found_cards.cards

    @property
    def card_problems(self) -> tuple[str, ...]:
        """Sentences about run cards that cannot be read."""
        return self.found_cards.problems

    @cached_property
    def found_cards(self) -> FoundCards:
        """Run cards, together with the problems of cards that cannot be read."""
        return self._read_cards(self._keeps_place)

    def find_cards_of(self, iterations: Container[int]) -> FoundCards:
        """Return the run cards of iterations on all ranks, whatever the filters select."""
        return self._read_cards(lambda rank, iteration: iteration in iterations)

    def _read_cards(self, keeps: Callable[[int, int], bool]) -> FoundCards:
        source = self._source
        return read_run_cards(source.root, keeps, job_id=source.job_id, attempt=source.attempt)

    @cached_property
    def sources(self) -> Mapping[str, tuple[Frame, ...]]:
        """Call stack of each operator, outermost line first, by its full name.

        Read from the `.ir` files of the selected ranks and graphs, or from the stack files of an
        API dump, where a backward call has the stack of its forward call. Empty without such files.
        """
        found: dict[str, tuple[Frame, ...]] = {}
        for file in graph_files(self.root, self._tree.ranks, self._tree.tool):
            if self._keeps_graph(file.rank, file.graph):
                for operator in read_operators(file):
                    found.setdefault(operator.op_name, operator.frames)
                    backward = find_backward_name(operator.op_name)
                    if backward:
                        found.setdefault(backward, operator.frames)
        return found

    def _join_shards(self, entry: Entry, layout: TensorLayout) -> npt.NDArray[Any]:
        """Return the logical tensor that an entry is a shard of."""
        every = Dump(self._source)
        entries = {entry.key.rank: entry}
        for rank in layout.mesh.list_ranks():
            key = entry.key._replace(rank=rank)
            found = every._keyed(place_in_time_of(key)).get(_without_time(key), ())
            if found and rank not in entries:
                entries[rank] = max(found, key=lambda each: each.key.timestamp_us)
        shards = [
            TensorShard(rank, record.shape, record.layout, record.digest)
            for rank, each in entries.items()
            if (record := each.record) is not None and record.layout is not None
        ]
        name = f"{entry.op_name} {entry.key.side.value} {entry.key.slot}"
        plan = plan_join(shards, name=name)
        return join_shards(plan, lambda rank: load_entry(entries[rank]), name=name)

    @property
    def _tree(self) -> Tree:
        return self._source.tree(self._queries)

    @cached_property
    def _entries(self) -> Entries:
        every = self._tree.entries
        return every.where(self._keeps) if self._queries else every

    def _iterate_named(self) -> Iterator[Entry | Figures]:
        return iterate_named(self._tree, self._keeps, queries=self._places_asked)

    @property
    def _places_asked(self) -> list[Query]:
        return [query.places for query in self._queries]

    @cached_property
    def _places(self) -> set[tuple[int, int, int | None]]:
        """Rank, graph and iteration of each tensor; the iteration of constants is None."""
        queries = self._queries
        found = find_places_by_name(self._tree, self._places_asked)
        if found is not None and all(query == query.places for query in queries):
            return found
        keys = (tensor.key for tensor in self._iterate_named())
        return {(key.rank, key.graph, None if key.constant else key.iteration) for key in keys}

    def _keyed(self, place: PlaceInTime) -> Mapping[TensorKey, list[Entry]]:
        """Return the tensors of a place by key; the result is cached."""
        if place not in self._by_key:
            at = place.iteration
            iterations = IterationSelection(str(at), ((at, at),)) if place.dated else None
            query = Query(rank=place.rank, iterations=iterations)
            found: defaultdict[TensorKey, list[Entry]] = defaultdict(list)
            for entry in self._source.tree((*self._queries, query)).entries:
                if query.keeps(entry) and self._keeps(entry):
                    found[_without_time(entry.key)].append(entry)
            self._by_key[place] = found
        return self._by_key[place]

    def _may_hold(self, table: Table) -> bool:
        where = table.rank, table.graph, table.when
        return all(query.keeps_place(*where, dated=table.dated) for query in self._queries)

    def _keeps(self, tensor: Named) -> bool:
        return all(query.keeps(tensor) for query in self._queries)

    def _keeps_graph(self, rank: int, graph: int) -> bool:
        return all(q.rank in (None, rank) and q.graph in (None, graph) for q in self._queries)

    def _keeps_place(self, rank: int, iteration: int) -> bool:
        return all(query.keeps_iteration(rank, iteration) for query in self._queries)

    def _entry(self, key: TensorKey) -> Entry:
        keys = (
            key,
            *(make_mindspore_readable_key(key, profile) for profile in PROFILES.values()),
            tree_paths.make_cann_readable_key(key),
        )
        spellings = dict.fromkeys(map(_without_time, keys))
        found = [
            entry
            for name in spellings
            for entry in self._keyed(place_in_time_of(name)).get(name, ())
        ]
        if not found:
            where = f"rank {key.rank}, graph {key.graph}, iteration {key.iteration}"
            raise CorruptedError(
                f"{self.root}: no tensor {key.side.value} {key.slot} of {key.op_name} in {where}"
            )
        exact = [entry for entry in found if entry.key.timestamp_us == key.timestamp_us]
        return exact[0] if exact else max(found, key=lambda entry: entry.key.timestamp_us)


def _without_time(key: TensorKey) -> TensorKey:
    """Return a key that identifies a tensor within one run."""
    return key._replace(timestamp_us=0, task=0, stream=0, tensor_format="", element="")
