"""The record filter, and summaries of empty dumps."""

from dataclasses import replace

import pytest

from rankdump._core.plan import (
    UNNAMED_MODEL,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
)
from rankdump._core.record import TensorSide
from rankdump._recorder.record_filter import RecordFilter, UnmatchedEntry, describe_unmatched
from rankdump._recorder.run_summary import RunFacts, explain_empty_dump, summarize_run

OP = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
MARKED = OperatorSelection(everything=False, marked=True)


def a_plan(**selection) -> DumpPlan:
    return DumpPlan(output=OutputSettings("/x"), selection=TensorSelection(**selection))


def operators(**lists) -> OperatorSelection:
    return OperatorSelection(everything=False, **lists)


@pytest.mark.parametrize(
    ("selection", "name", "side", "keep"),
    [
        ({}, OP, TensorSide.INPUT, True),
        ({"inputs": False}, OP, TensorSide.INPUT, False),
        ({"inputs": False}, OP, TensorSide.OUTPUT, True),
        ({"outputs": False}, OP, TensorSide.OUTPUT, False),
        ({"operators": operators(types=("conv",))}, OP, TensorSide.INPUT, True),
        ({"operators": operators(types=("conv",))}, "conv1.weight", TensorSide.OUTPUT, True),
        ({"operators": operators(types=("relu",))}, OP, TensorSide.INPUT, False),
        ({"operators": operators(names=(OP,))}, OP, TensorSide.INPUT, True),
        ({"operators": operators(names=(OP.lower(),))}, OP, TensorSide.INPUT, False),
        ({"operators": operators(patterns=(".*conv1.*",))}, OP, TensorSide.INPUT, True),
        ({"operators": operators(patterns=("conv1",))}, OP, TensorSide.INPUT, False),
        # What belongs to an operator is selected with it.
        ({"operators": operators(names=(OP,))}, f"Gradients/{OP}", TensorSide.INPUT, True),
        ({"operators": operators(names=(OP,))}, f"Recompute/{OP}", TensorSide.INPUT, True),
        ({"operators": operators()}, OP, TensorSide.INPUT, False),
    ],
)
def test_filter_decides_by_lists_and_sides(selection, name, side, keep):
    decision = RecordFilter(a_plan(**selection)).decide(name, side, 0)
    assert decision.is_kept is keep
    assert bool(decision.reason) is not keep


@pytest.mark.parametrize(
    ("selection", "named"),
    [
        ({}, False),
        ({"operators": OperatorSelection(everything=False, marked=True)}, False),
        ({"operators": operators(types=("AllReduce",))}, True),
        ({"operators": operators(patterns=(".*",))}, True),
        ({"models": (("Net", operators(names=("a/b-op0",))),)}, True),
        ({"models": (("Other", operators(names=("a/b-op0",))),)}, False),
        ({"watched": WatchedOperators((), ("Default/group-0/AllReduce-op0",))}, True),
    ],
)
def test_only_plans_with_lists_name_operators(selection, named) -> None:
    """Where a plan keeps everything, or what a script marks, no collective is asked for."""
    record_filter = RecordFilter(a_plan(**selection))
    assert record_filter.names_operators(0) is named
    assert record_filter.names_operators(0) is named
    assert not record_filter.has_decided


def decide(record_filter: RecordFilter, *slots: tuple[str, str, TensorSide, int]) -> None:
    for op_type, op_name, side, slot in slots:
        assert record_filter.decide(op_name, side, 0).is_kept
        record_filter.is_excluded((0, op_type, op_name, side, slot))


def test_a_model_that_did_not_run_is_unmatched_and_stands_for_its_entries() -> None:
    every, one = OperatorSelection(), operators(names=("x",))
    plan = a_plan(operators=operators(), models=(("Encoder", every), ("Encodr", one)))
    record_filter = RecordFilter(plan, lambda graph: "Encoder")
    decide(record_filter, ("Linear", "Default/fc/Linear-op0", TensorSide.INPUT, 0))
    assert record_filter.unmatched == (UnmatchedEntry("model_name", "Encodr", "Encodr"),)
    facts = run(tensors_kept=1, models=tuple(record_filter.models))
    said = summarize_run(
        replace(plan, dialect="acl"), facts, record_filter.unmatched, retired_in=None
    )
    assert said.warnings == (
        "dump_list names model_name Encodr, of which no operator ran; models that ran: Encoder",
    )


def test_a_model_of_arrays_that_did_not_run_is_no_fault() -> None:
    """`dump_op_switch` adds it, whether the script dumps arrays or not."""
    models = (("Encoder", OperatorSelection()), (UNNAMED_MODEL, OperatorSelection()))
    record_filter = RecordFilter(a_plan(models=models), lambda graph: "Encoder")
    decide(record_filter, ("Linear", "Default/fc/Linear-op0", TensorSide.INPUT, 0))
    assert record_filter.unmatched == ()


def test_entries_that_leave_out_nothing_are_unmatched() -> None:
    wanted = OperatorSelection(
        without_types=(TensorExclusion("linear"), TensorExclusion("Linear", ("input0",))),
        without_names=(TensorExclusion("Default/fc/Linear-op0", ("input0", "output3")),),
    )
    record_filter = RecordFilter(a_plan(operators=wanted))
    assert record_filter.unmatched == ()  # no operator was selected, so none could be left out
    decide(record_filter, ("Linear", "Default/fc/Linear-op0", TensorSide.OUTPUT, 0))
    texts = [(each.kind, each.text) for each in record_filter.unmatched]
    assert texts == [
        ("optype_blacklist", "linear"),
        ("optype_blacklist", "Linear input0"),
        ("opname_blacklist", "Default/fc/Linear-op0 input0, output3"),
    ]
    decide(record_filter, ("Linear", "Default/fc/Linear-op0", TensorSide.INPUT, 0))
    said = summarize_run(
        replace(a_plan(), dialect="acl"),
        run(tensors_kept=1),
        record_filter.unmatched,
        retired_in=None,
    )
    words = "dump_list names optype_blacklist linear, which no selected tensor matched"
    assert said.warnings == (words,)


def run(**facts) -> RunFacts:
    whole = RunFacts(
        device=0,
        iterations_seen=3,
        iterations_armed=3,
        last_iteration=2,
        operators_seen=True,
        tensors_kept=0,
    )
    return replace(whole, **facts)


def test_summary_names_collectives_that_were_not_seen() -> None:
    facts = run(tensors_kept=1, unseen_collectives={"python_group": 0, "backend_call": 2})
    said = summarize_run(a_plan(), facts, [], retired_in=None)
    assert (
        said.warnings
        == said.notes
        == (
            "not in the execution order: 2 collectives (the script called the backend itself, past "
            "torch's operators), collectives (a class in Python implements the group)",
        )
    )


def test_summary_of_a_rejected_rank_does_not_blame_its_plan() -> None:
    """Law: operators that did not run after the rejection are no fault of the configuration."""
    plan = a_plan(operators=operators(names=("x",)))
    unmatched = [UnmatchedEntry("kernels", "x")]
    facts = {"iterations_armed": 0, "refused": True}
    said = summarize_run(plan, run(**facts), unmatched, retired_in=None)
    assert said.warnings == ("nothing was dumped: the agent rejected this rank",)
    facts["refused"] = False
    assert len(summarize_run(plan, run(**facts), unmatched, retired_in=None).warnings) == 2


@pytest.mark.parametrize(
    ("selection", "facts", "reason"),
    [
        ({}, {"tensors_kept": 1}, ""),
        ({"devices": (1, 2)}, {}, "support_device [1, 2] excludes this rank's device 0"),
        ({}, {"iterations_seen": 0}, "no iteration ran"),
        (
            {"iterations": IterationSelection("100-120", ((100, 120),))},
            {"iterations_armed": 0},
            'iteration "100-120" selects none of the 3 iterations that ran, up to 2',
        ),
        ({}, {"operators_seen": False}, "no operator was observed"),
        (
            {},
            {"operators_selected": False},
            "kernels and input_output match no operator that ran",
        ),
        ({}, {"iterations_armed": 0, "switched": True}, "dump_stop() was called"),
        ({"operators": MARKED}, {"operators_selected": False}, "dump_mode 2 dumps what set_dump"),
        (
            {"operators": MARKED},
            {"operators_selected": False, "marked": True},
            "set_dump() and input_output match no operator that ran",
        ),
        ({}, {"tensors_lost": 4}, "every one of the 4 tensors that the plan selects was lost"),
        ({"trigger": "overflow"}, {"tensors_lost": 4}, "every one of the 4 tensors"),
        ({}, {}, "the operators that the plan selects had no tensor"),
    ],
)
def test_summary_explains_an_empty_dump(selection, facts, reason):
    cause = explain_empty_dump(a_plan(**selection), run(**facts))
    assert (cause is not None) is bool(reason)
    if cause is not None:
        assert cause.reason.startswith(reason)
        assert cause.fault


@pytest.mark.parametrize(
    ("trigger", "words"), [("overflow", "no overflow"), ("exception", "no operator")]
)
def test_summary_without_overflow_or_error_is_no_warning(trigger, words):
    """Law: a plan for overflows or errors causes no warning if there are none."""
    cause = explain_empty_dump(a_plan(trigger=trigger), run())
    assert cause is not None
    assert not cause.fault
    assert words in cause.reason


def test_summary_of_excluded_tensors_is_no_warning():
    cause = explain_empty_dump(a_plan(), run(left_out=True))
    assert cause is not None
    assert not cause.fault


@pytest.mark.parametrize(
    ("dialect", "lists", "sides", "steps"),
    [
        ("acl", "dump_list", "dump_mode", "dump_step"),
        ("tf", "dump_layer", "dump_mode", "dump_step"),
        ("mindspore", "kernels", "input_output", "iteration"),
    ],
)
def test_summary_uses_the_terms_of_each_dialect(dialect, lists, sides, steps):
    """Every term is one of the configuration that the plan came from."""
    plan = replace(a_plan(iterations=IterationSelection("7-9", ((7, 9),))), dialect=dialect)
    causes = [
        explain_empty_dump(plan, run(operators_selected=False)),
        explain_empty_dump(plan, run(iterations_armed=0)),
    ]
    assert [cause and cause.reason for cause in causes] == [
        f"{lists} and {sides} match no operator that ran",
        f'{steps} "7-9" selects none of the 3 iterations that ran, up to 2',
    ]


@pytest.mark.parametrize(
    ("dialect", "entry", "said"),
    [
        ("acl", UnmatchedEntry("layer", "a"), "dump_list names layer a,"),
        ("acl", UnmatchedEntry("layer", "a", "Net"), "dump_list names layer a of model Net,"),
        ("tf", UnmatchedEntry("layer", "a"), "dump_layer names layer a,"),
        ("plan", UnmatchedEntry("kernels", "a", "Net"), "the plan names kernels a of model Net,"),
        ("mindspore", UnmatchedEntry("kernels", "a"), "no operator that ran matches an entry of"),
    ],
)
def test_summary_names_unmatched_entries_in_terms_of_the_dialect(dialect, entry, said):
    plan = replace(a_plan(), dialect=dialect)
    told = summarize_run(plan, run(tensors_kept=1), [entry], retired_in=None)
    (warning,) = told.warnings
    assert warning.startswith(said)
    assert told.notes == told.warnings


def test_summary_has_what_watch_rules_did():
    facts = run(tensors_kept=1)
    told = summarize_run(
        a_plan(), facts, [], retired_in=None, unmatched_rules=["unmatched"], rule_notes=["noted"]
    )
    assert told.warnings == ("unmatched",)
    assert told.notes == ("unmatched", "noted")


@pytest.mark.parametrize(
    ("lists", "seen", "unmatched"),
    [
        ({"names": (OP,)}, [OP], []),
        ({"names": (OP,)}, [], [OP]),
        ({"types": ("conv", "relu")}, [OP], ["relu"]),
        ({"patterns": ("x.*", ".*conv1.*")}, [OP], ["name-regex(x.*)"]),
        # An operator that another entry selected first still matches this one.
        ({"names": (OP,), "types": ("CONV",)}, [OP], []),
        ({"names": (OP,)}, [f"Gradients/{OP}"], []),
        ({"types": ("conv",)}, ["conv1.weight"], []),
    ],
)
def test_filter_lists_unmatched_entries(lists, seen, unmatched):
    """Law: an entry is unused until any operator matches it, whatever side is kept."""
    selection = RecordFilter(a_plan(operators=operators(**lists), inputs=False))
    for name in seen:
        selection.decide(name, TensorSide.INPUT, 0)
    assert [entry.text for entry in selection.unmatched] == unmatched


def test_filter_without_lists_has_no_unmatched_entries():
    assert RecordFilter(a_plan()).unmatched == ()
    assert RecordFilter(a_plan(operators=MARKED)).unmatched == ()


@pytest.mark.parametrize(
    ("name", "graph", "keep"),
    [
        (OP, 0, True),
        (f"Gradients/{OP}", 0, True),
        (f"Recompute/{OP}", 0, True),
        (OP, 1, False),
        ("conv1.weight", 0, True),
        ("Gradients/conv1.weight", 0, True),
        ("conv2.weight", 0, False),
        ("Default/network-Net/conv1-Conv2d/inner-Relu/Relu-op0", 0, False),
        ("Default/network-Net/Net-op0", 0, False),
    ],
)
def test_filter_selects_marked_scopes_and_parameters_of_their_graph(name, graph, keep):
    selection = RecordFilter(a_plan(operators=MARKED))
    selection.set_marks(0, frozenset({"network-Net/conv1-Conv2d", "conv1.weight"}))
    decision = selection.decide(name, TensorSide.INPUT, graph)
    assert decision.is_kept is keep
    assert decision.reason == ("" if keep else "set_dump did not mark the operator")


def test_filter_follows_changed_marks():
    """Law: earlier decisions are revised after a mark."""
    selection = RecordFilter(a_plan(operators=MARKED))
    for names, keep in [((), False), (("network-Net/conv1-Conv2d",), True), ((), False)]:
        selection.set_marks(0, frozenset(names))
        assert selection.decide(OP, TensorSide.INPUT, 0).is_kept is keep
        assert selection.has_marks is keep


# -- models

MODELS = (("A", operators(names=("conv1",), spelt=True)), ("B", OperatorSelection()))
NAMES = {0: "A", 1: "B", 2: "C"}


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        (operators(), [0, 1]),
        (OperatorSelection(), [0, 1, 2]),
        (operators(types=("conv",)), [0, 1, 2]),
    ],
)
def test_filter_has_separate_lists_for_models(rest, kept):
    """Law: the list without a model applies to models without a list."""
    selection = RecordFilter(a_plan(operators=rest, models=MODELS), NAMES.__getitem__)
    other = "Default/network-Net/conv2-Conv2d/Conv2d-op0"
    for _ in range(2):
        assert [g for g in NAMES if selection.decide(OP, TensorSide.INPUT, g).is_kept] == kept
        assert selection.decide(other, TensorSide.INPUT, 1).is_kept
        assert not selection.decide(other, TensorSide.INPUT, 0).is_kept


def test_filter_decides_again_when_a_model_gets_its_name():
    names = {0: "B"}
    selection = RecordFilter(a_plan(models=MODELS), names.__getitem__)
    assert selection.decide("x", TensorSide.INPUT, 0).is_kept
    names[0] = "A"
    selection.clear_cache()
    assert not selection.decide("x", TensorSide.INPUT, 0).is_kept


def test_filter_matches_entries_only_with_operators_of_their_model():
    """Law: an entry of one model's list is not matched by another model's operator."""
    every = operators(names=("conv1",), ranges=(("a", "b"),), spelt=True)
    models = (("A", operators(names=("conv1", "fc"), spelt=True)),)
    selection = RecordFilter(a_plan(operators=every, models=models), NAMES.__getitem__)
    selection.decide("b", TensorSide.INPUT, 1)
    selection.decide(OP, TensorSide.INPUT, 0)
    assert selection.unmatched == (
        UnmatchedEntry("layer", "conv1"),
        UnmatchedEntry("opname_range begin", "a"),
        UnmatchedEntry("layer", "fc", "A"),
    )


# -- exclusions


def test_filter_excludes_tensors_by_type_name_and_position():
    """Law: an operator with excluded tensors stays selected; each slot is decided separately."""
    lists = OperatorSelection(
        without_types=(TensorExclusion("Relu"),),
        without_names=(TensorExclusion("conv1", ("input0",)),),
    )
    selection = RecordFilter(a_plan(operators=lists))
    assert selection.decide(OP, TensorSide.INPUT, 0).is_kept
    assert not selection.has_excluded
    for _ in range(2):
        assert not selection.is_excluded((0, "Conv2d", OP, TensorSide.INPUT, 1))
        assert not selection.is_excluded((0, "Conv2d", OP, TensorSide.OUTPUT, 0))
        assert selection.is_excluded((0, "Conv2d", OP, TensorSide.INPUT, 0))
        assert selection.is_excluded((0, "Relu", "x", TensorSide.OUTPUT, 7))
    assert selection.has_excluded


def test_filter_excludes_tensors_by_the_list_of_their_model():
    lists = OperatorSelection(without_types=(TensorExclusion("Relu"),))
    selection = RecordFilter(a_plan(models=(("A", lists),)), NAMES.__getitem__)
    left = [g for g in NAMES if selection.is_excluded((g, "Relu", "x", TensorSide.OUTPUT, 0))]
    assert left == [0]


# -- ranges and watched operators


def test_filter_adds_ranges_to_lists_without_caching():
    """Law: decisions by the position of the program are never cached."""
    inside: set[tuple[int, str]] = set()
    lists = operators(names=("a",), ranges=(("b", "c"),))
    plan = a_plan(operators=lists, inputs=False)
    selection = RecordFilter(plan, in_range=lambda graph, name: (graph, name) in inside)
    assert selection.decide("a", TensorSide.OUTPUT, 0).is_kept
    assert not selection.decide("b", TensorSide.OUTPUT, 0).is_kept
    inside.add((0, "b"))
    assert selection.decide("b", TensorSide.OUTPUT, 0).is_kept
    assert not selection.decide("b", TensorSide.INPUT, 0).is_kept
    assert not selection.decide("b", TensorSide.OUTPUT, 1).is_kept
    inside.clear()
    assert not selection.decide("b", TensorSide.OUTPUT, 0).is_kept


def test_filter_wants_only_outputs_of_watched_operators():
    """Law: an operator that is not watched is not selected, whatever the lists contain."""
    watched = WatchedOperators(("relu",), ("conv1", "nobody"))
    selection = RecordFilter(a_plan(watched=watched, operators=operators(names=("x",))))
    assert selection.decide(OP, TensorSide.OUTPUT, 0).is_kept
    assert not selection.decide(OP, TensorSide.INPUT, 0).is_kept
    assert not selection.decide(f"Gradients/{OP}", TensorSide.OUTPUT, 0).is_kept
    assert not selection.decide("x", TensorSide.OUTPUT, 0).is_kept
    assert selection.unmatched == (
        UnmatchedEntry("layer", "relu"),
        UnmatchedEntry("watcher_nodes", "nobody"),
    )


# -- what is said at the end


@pytest.mark.parametrize(
    ("dialect", "entry", "words"),
    [
        ("acl", UnmatchedEntry("layer", "x", "M"), "dump_list names layer x of model M, which no"),
        (
            "acl",
            UnmatchedEntry("opname_range end", "x"),
            "dump_list names opname_range end x, which no",
        ),
        ("tf", UnmatchedEntry("layer", "x"), "dump_layer names layer x, which no operator matched"),
        (
            "mindspore",
            UnmatchedEntry("kernels", "x"),
            "no operator that ran matches an entry of kernels",
        ),
        (
            "plan",
            UnmatchedEntry("kernels", "x", "M"),
            "the plan names kernels x of model M, which no",
        ),
    ],
)
@pytest.mark.parametrize("seen", [True, False])
def test_summary_names_entries_that_no_operator_matched(dialect, entry, words, seen):
    """Law: the summary uses terms of the configuration, and is silent if no operator ran."""
    plan = replace(a_plan(), dialect=dialect)
    said = summarize_run(plan, run(operators_seen=seen, tensors_kept=1), [entry], retired_in=None)
    assert len(said.notes) == seen
    assert all(note.startswith(words) for note in said.notes)
    assert said.warnings == said.notes


def test_operators_that_match_nothing_are_described():
    names = {"Default/network-Net/a-Linear/Linear-op0", "Gradients/Default/network-Net/b-Conv2d/x"}
    chosen = OperatorSelection(
        everything=False,
        types=("linear", "pool"),
        names=("Default/none",),
        patterns=(".*b-Conv2d.*", "a"),
    )
    assert describe_unmatched(chosen, names) == (
        "'Default/none', 'pool', 'name-regex(a)' match none of the 2 operators that it has seen "
        "so far"
    )
    one = replace(chosen, types=("linear",), names=(), patterns=("a",))
    assert describe_unmatched(one, names).startswith("'name-regex(a)' matches none of the 2 ")
    many = replace(one, types=tuple(f"t{at}" for at in range(9)))
    assert "'t4' and 5 more match none of" in describe_unmatched(many, names)


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (OperatorSelection(), 3),
        (OperatorSelection(everything=False, types=("op",)), 3),
        (OperatorSelection(everything=False, types=("none",)), 0),
        (OperatorSelection(everything=False, types=tuple(map(str, range(1000)))), 1000),
    ],
)
def test_nothing_is_said_of_operators_that_match_or_are_not_known(chosen, count):
    names = {f"Default/a/Op-op{at}" for at in range(count)}
    assert describe_unmatched(chosen, names) == ""
