"""Dumps that msprobe and torch's DebugMode wrote, read like trees."""

# Entries of these dumps all have a record, pairs two sides, and the dumps an order.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

from __future__ import annotations

import json

import numpy as np
import pytest
from support.foreign_dumps import write_dump

import rankdump
from rankdump import reader
from rankdump._analysis.compare.comparison import compare
from rankdump._analysis.compare.report import TensorVerdict
from rankdump._analysis.reader.foreign_dumps import read_foreign_order
from rankdump._core.events import EventKind
from rankdump.errors import CorruptedError


def verdicts(report):
    """Return how many pairs have each verdict."""
    return {
        verdict.value: sum(row.outcome.verdict is verdict for row in report.rows)
        for verdict in TensorVerdict
        if any(row.outcome.verdict is verdict for row in report.rows)
    }


def edit(path, change):
    """Change a JSON file in place."""
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


@pytest.fixture
def tensors(tmp_path):
    """One step of one process, with files."""
    return write_dump("msprobe-tensor", tmp_path)


def test_every_tensor_of_msprobe_is_the_one_that_its_json_describes(tensors):
    """Types, shapes and extremes in dump.json are those of the arrays."""
    dump = rankdump.open(tensors)
    entries = dump.tensors()
    assert (len(entries), dump.ranks, dump.iterations, dump.problems) == (74, (0,), (0,), ())
    rows = {(row.key.timestamp_us): row for row in dump.statistics()}
    assert len(rows) == 74
    for entry in entries:
        array, row = dump.load(entry), rows[entry.key.timestamp_us]
        assert array.shape == row.shape == entry.record.shape
        assert dump.load(entry.key).tolist() == array.tolist()
        if row.number("max") is not None and array.dtype != bool:
            assert (row.number("max"), row.number("min")) == (array.max(), array.min())


def test_names_are_ours_and_both_spellings_select(tensors):
    """Calls of modules, parameters and gradients are named as in our trees."""
    dump = rankdump.open(tensors)
    assert {
        "Default/fc/Linear-op0",
        "Gradients/Default/fc/Linear-op0",
        "fc.weight",
        "Gradients/fc.weight",
        "Functional_linear_0_forward",
        "Torch_cat_0_backward",
    } <= set(dump.operators)
    ours = dump.tensors(operator="Default/fc/Linear-op0")
    assert ours == dump.tensors(operator="Module.fc.Linear.forward.0")
    assert [entry.record.argument for entry in ours] == ["args.0", "out"]
    (first, second) = dump.tensors(operator="Torch_cat_0_forward", side="input")
    assert (first.record.argument, second.record.argument) == ("input.0.0", "input.0.1")


def test_sources_are_lines_of_the_program(tensors):
    """Lines of torch and of the tool are left out, so the innermost one is the user's."""
    sources = rankdump.open(tensors).sources
    assert sources["Default/norm/LayerNorm-op0"][-1].code.startswith("x = self.norm(")
    assert sources["Functional_linear_0_backward"] == sources["Functional_linear_0_forward"]


@pytest.mark.parametrize("below", ["", "step0", "step0/proc1", "step0/proc1/dump.json"])
def test_root_may_be_the_dump_or_a_step_or_a_rank(below, tensors):
    dump = rankdump.open(tensors / below)
    assert (len(dump.tensors()), dump.iterations) == (74, (0,))
    assert dump.load(dump.tensors()[0]).shape == (1, 4)
    assert "Functional_linear_0_forward" in dump.sources


def test_only_selected_ranks_and_steps_are_read(tmp_path):
    root = write_dump("msprobe-statistics", tmp_path)
    (root / "step1" / "rank0" / "dump.json").write_text('{"task": 1, "level": 1')
    dump = rankdump.open(root)
    assert len(dump.where(rank=1).statistics()) == 84
    assert dump.where(rank=1, iteration=0).statistics() == []
    with pytest.raises(CorruptedError, match=r"rank0/dump\.json: not a whole JSON file"):
        dump.statistics()


def test_msprobe_dump_is_compared_with_another(tensors, tmp_path):
    """The origin is the call that reads the changed weight; elements are compared in blocks."""
    report = compare(write_dump("msprobe-weight", tmp_path), tensors)
    assert verdicts(report) == {"same": 29, "different": 45}
    for row in report.rows:
        same = np.array_equal(*(reader.load(side.entry) for side in (row.pair.a, row.pair.b)))
        assert same == (row.outcome.verdict is TensorVerdict.SAME)
    (suspect,) = {each.name_a for each in report.origins[0].suspects}
    assert suspect == "Functional_linear_0_forward"
    (row,) = [row for row in report.rows if row.name_a == "fc.weight"]
    assert row.outcome.measures.max_absolute == pytest.approx(0.5)


def test_msprobe_dump_is_compared_with_our_own_tree(tensors, tree):
    """Modules and API calls pair by their names, whoever wrote the dump."""
    (weight,) = rankdump.open(tensors).tensors(
        operator="Functional_linear_0_forward", side="output"
    )
    name = "Default/network-Net/fc-Linear/Linear-op0"
    tree.tensor(0, 0, name, np.zeros((1, 4, 3), np.float32), op_type="Linear", argument="out")
    tree.complete(0, 0)
    report = compare(tree.root, tensors)
    (row,) = [row for row in report.rows if row.pair.a is not None and row.pair.b is not None]
    assert (row.name_b, row.outcome.verdict) == ("Default/fc/Linear-op0", TensorVerdict.DIFFERENT)
    largest = np.abs(rankdump.open(tensors).load(weight)).max()
    assert row.outcome.measures.max_absolute == pytest.approx(largest)


def test_checksums_decide_where_there_are_no_files(tmp_path):
    """CRC-32 of msprobe's md5 mode: equal ones are equal tensors, others are not."""
    a, b = write_dump("msprobe-md5", tmp_path), write_dump("msprobe-md5-weight", tmp_path)
    assert verdicts(compare(a, a)) == {"same": 53}
    report = compare(b, a)
    assert verdicts(report) == {"same": 20, "different": 33}
    for row in report.rows:
        same = row.pair.a.digest == row.pair.b.digest
        assert same == (row.outcome.verdict is TensorVerdict.SAME)
    edit(
        b / "step0" / "proc1" / "dump.json",
        lambda body: body["data"]["Functional.embedding.0.forward"]["output"][0].update(
            md5="0" * 8
        ),
    )
    changed = compare(b, a, operator="Functional_embedding_0_forward")
    assert [(row.outcome.verdict.value, row.outcome.findings) for row in changed.rows][2] == (
        "normal",
        ("their checksums differ",),
    )


def test_equal_sums_of_exclusive_ors_prove_nothing(tmp_path):
    """msprobe's xor mode has no statistics, and its sums are equal for different tensors."""
    root = write_dump("msprobe-xor", tmp_path)
    report = compare(root, root)
    assert set(verdicts(report)) == {"unknown"}
    assert "exclusive ors" in report.rows[0].outcome.findings[0]
    other = tmp_path / "other" / "step0" / "proc1"
    other.mkdir(parents=True)
    text = (root / "step0" / "proc1" / "dump.json").read_text()
    (other / "dump.json").write_text(text.replace('"md5": "0x', '"md5": "0x1'))
    changed = compare(other.parents[1], root)
    known = [row for row in changed.rows if row.pair.a.digest]
    assert {row.outcome.verdict for row in known} == {TensorVerdict.DIFFERENT}
    assert len(known) == 51


def test_table_of_sql_has_the_statistics(tensors):
    table = rankdump.open(tensors).table()
    by_name = {(row["name"], row["side"], row["slot"]): row for row in table.to_pylist()}
    row = by_name["Default/fc/Linear-op0", "output", 0]
    assert row["max"] == pytest.approx(2.745887279510498)
    assert (len(by_name), row["dtype"], row["iteration"]) == (74, "float32", 0)


def test_order_joins_the_collectives_of_msprobe(tmp_path):
    """Calls of all ranks in their own order; an all-reduce is one entry of both ranks."""
    order = read_foreign_order(write_dump("msprobe-statistics", tmp_path))
    joined = [entry for entry in order.entries if entry.kind is EventKind.ALL_REDUCE]
    assert [entry.ranks for entry in joined] == [(0, 1)] * 5
    assert order.findings == []
    for rank in (0, 1):
        own = [entry for entry in order.entries if rank in entry.ranks]
        at = [entry.rank_positions[entry.ranks.index(rank)] for entry in own]
        assert at == list(range(len(own)))


# -- half a dump, and hostile ones


def test_lost_json_is_one_line(tensors):
    """msprobe writes dump.json at the end of a step; a killed job has tensors alone."""
    (tensors / "step0" / "proc1" / "dump.json").unlink()
    (problem,) = rankdump.open(tensors).problems
    assert problem.startswith("step0/proc1/dump.json: missing or empty")


def test_torn_json_is_one_line(tensors):
    path = tensors / "step0" / "proc1" / "dump.json"
    path.write_bytes(path.read_bytes()[:4096])
    (problem,) = rankdump.open(tensors).problems
    assert "dump.json: not a whole JSON file" in problem


def test_missing_and_additional_files_are_named(tensors):
    folder = tensors / "step0" / "proc1" / "dump_tensor_data"
    (folder / "Torch.cat.0.forward.output.0.pt").unlink()
    (folder / "Late.pt").write_bytes(b"")
    missing, late = rankdump.open(tensors).problems
    assert missing.endswith("Torch.cat.0.forward.output.0.pt: named by dump.json, but missing")
    assert "does not name 1 of its files, such as Late.pt" in late


def test_two_processes_without_ranks_are_not_mixed(tensors):
    """msprobe leaves two folders when a job without ranks runs twice into one."""
    step = tensors / "step0"
    (step / "proc2").mkdir()
    (step / "proc2" / "dump.json").write_text('{"task": "tensor", "level": "L1", "data": {}}')
    with pytest.raises(CorruptedError, match="proc1 and proc2 are both of rank 0"):
        _ = rankdump.open(tensors).ranks
    assert len(rankdump.open(step / "proc1").tensors()) == 74


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda leaf: leaf.update(data_name="../../x.pt"), "is not the name of a file"),
        (lambda leaf: leaf.update(shape=[-1]), r"shape \[-1\]"),
        (lambda leaf: leaf.update(shape="many"), "shape 'many'"),
        (lambda leaf: leaf.update(dtype=7), "dtype 7"),
    ],
)
def test_hostile_json_is_one_line(change, match, tensors):
    def edit_leaf(body):
        change(body["data"]["Functional.embedding.0.forward"]["output"][0])

    edit(tensors / "step0" / "proc1" / "dump.json", edit_leaf)
    dump = rankdump.open(tensors)
    assert dump.tensors() == []
    (problem,) = dump.problems
    with pytest.raises(CorruptedError, match=match):
        raise CorruptedError(problem)


def test_deep_json_is_one_line(tensors):
    path = tensors / "step0" / "proc1" / "dump.json"
    nested = "[" * 500 + "]" * 500
    path.write_text(
        f'{{"task": "", "level": "", "data": {{"A.b.0.forward": {{"output": {nested}}}}}}}'
    )
    (problem,) = rankdump.open(tensors).problems
    assert "nested more than" in problem


def test_damaged_tensor_is_named_with_its_file(tensors):
    path = next((tensors / "step0" / "proc1" / "dump_tensor_data").glob("Torch.cat.0.forward.o*"))
    path.write_bytes(path.read_bytes()[:300])
    (entry,) = rankdump.open(tensors).tensors(operator="Torch.cat.0.forward", side="output")
    with pytest.raises(CorruptedError, match=r"Torch\.cat.*not an archive of torch\.save"):
        reader.load(entry)


# -- DebugMode


@pytest.mark.parametrize("name", ["debug-mode", "debug-mode-text"])
def test_logs_of_debug_mode_are_rows(name, tmp_path):
    """The JSON of 2.14 and the text of 2.13 say the same of the same program."""
    rows = rankdump.open(write_dump(name, tmp_path)).statistics()
    assert len(rows) == 110
    (output,) = [r for r in rows if "fc/addmm" in r.op_name and r.key.side.value == "output"]
    assert output.op_name == "Default/network-Net/fc/addmm-op0"
    assert (output.dtype, output.shape, output.finite) == ("float32", (3, 3), True)
    assert output.number("l1norm") == 5.014888346195221


def test_logs_are_compared_and_lead_to_the_line(tmp_path):
    report = compare(write_dump("debug-mode-weight", tmp_path), write_dump("debug-mode", tmp_path))
    assert verdicts(report) == {"same": 54, "different": 56}
    suspect = report.origins[0].suspects[0]
    assert suspect.name_a == "Default/network-Net/fc/t-op0"
    assert suspect.source[-1].code.startswith("x = self.fc(")


def test_first_cause_of_nan_is_found_in_a_log(tmp_path):
    """A NaN in the L1 norm is one in the tensor; hashes of both kinds are told apart."""
    rows = rankdump.open(write_dump("debug-mode-nan", tmp_path)).statistics()
    first = next(row for row in rows if row.finite is False)
    assert (first.op_type, first.key.side.value) == ("log", "output")
    assert all(row.record.digest.startswith("xor:") for row in rows)


def test_rank_and_iteration_come_from_names(tmp_path):
    log = (write_dump("debug-mode-text", tmp_path) / "rank_0.log").read_bytes()
    root = tmp_path / "logs"
    for name in ("step2/rank_0.log", "step2/rank_1.log", "step3/rank1.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(log)
    dump = rankdump.open(root)
    assert (dump.ranks, dump.iterations) == ((0, 1), (2, 3))
    assert len(dump.statistics(rank=1)) == 220
    (root / "step3" / "other_rank_1.log").write_bytes(log)
    with pytest.raises(CorruptedError, match="both of rank 1, iteration 3"):
        _ = rankdump.open(root).ranks


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('"version": 2', "a log of version 2; version 1 is read"),
        ('"version": 1, "logs": [{"type": "op", "call_depth": "x"}]}', "record 0 is not one of"),
        ('"version": 1, "logs": [7]}', "record 0 is not one of"),
        ('"version": 1, "logs": [{"type": "op"', "not a whole JSON file"),
    ],
)
def test_damaged_logs_are_one_line(text, match, tmp_path):
    path = tmp_path / "log.json"
    end = "" if text.endswith(("}", '"')) else "}"
    path.write_text('{"format": "torch.utils._debug_mode.DebugMode.logs", ' + text + end)
    with pytest.raises(CorruptedError, match=match) as caught:
        rankdump.open(path).statistics()
    assert str(path) in str(caught.value)


def test_collectives_of_logs_are_joined(tmp_path):
    """By the name of the group where it is an argument, and by their number where it is not."""
    start = "    c10d::allreduce_(['t: f32[4]'], ScriptObject <c10d.ProcessGroup>, None, False)\n"
    names = ("tp", "tp"), ("tp", "dp")
    for rank in (0, 1):
        lines = [
            f"    _c10d_functional::all_reduce(t: f32[4], sum, {pair[rank]})  ->  t: f32[4]\n"
            for pair in names
        ]
        waits = "    _c10d_functional::wait_tensor(t: f32[4])  ->  t: f32[4]\n"
        (tmp_path / f"rank_{rank}.log").write_text("".join([start, *lines, waits]))
    order = read_foreign_order(tmp_path)
    kinds = [(e.kind, e.ranks) for e in order.entries if e.kind is EventKind.ALL_REDUCE]
    assert [ranks for _, ranks in kinds] == [(0, 1), (0, 1), (0,), (1,)]
    assert order.findings == []


def test_damaged_line_of_a_text_is_named(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("    aten::t(t: f32[3])  ->  t: f32[3]  # {'hash': __import__('os')}\n")
    with pytest.raises(CorruptedError, match="line 1: the hashes"):
        rankdump.open(path).statistics()
    path.write_text("    aten::t(t: f32[3])  ->  t: f32[3]\nTraceback\n")
    with pytest.raises(CorruptedError, match="line 2 is not one of DebugMode: 'Traceback'"):
        rankdump.open(path).statistics()
