"""Graphs of plain-array jobs, compiled orders, and names in old profiles."""

from __future__ import annotations

import numpy as np
import pytest
from support.agent_double import Running, bodies, event_names, introduction_of, kinds

import rankdump
from rankdump._core.graph import GraphNode, GraphParameter, TensorType
from rankdump._core.plan import (
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.pipeline import DumpPipeline

ONE = np.ones(1)
CONV1 = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
CONV2 = "Default/network-Net/conv2-Conv2d/Conv2d-op0"


def a_plan(profile: str = "ms2.3", **selection) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings("/x", profile=profile), selection=TensorSelection(**selection)
    )


def started(running: Running, profile: str = "ms2.3", **selection) -> rankdump.Session:
    return rankdump.Session(a_plan(profile, **selection), agent=running.address)


def of_pipeline(running: Running, plan: DumpPlan) -> DumpPipeline:
    pipeline = DumpPipeline(plan, introduction_of(plan), running.address)
    pipeline.start()
    return pipeline


def nodes(running: Running) -> list[list[str]]:
    return [[node.name for node in part.nodes] for part in bodies(running, "graph_part")]


def test_array_operators_are_described_with_the_line_of_the_caller(running):
    """Law: the stack begins with the script and holds no line of ours."""

    def layer(session: rankdump.Session) -> None:
        session.dump("Add", "a", "input", 0, np.ones((2, 3), "f4"))  # the line of a
        session.dump("Add", "a", "output", 1, np.ones(3, "i8"))
        session.dump("Add", "a", "output", 0, np.ones((2, 3), "f2"))

    with started(running) as session:
        layer(session)
        session.dump("Sub", "b", "input", 0, ONE)
    (part,) = bodies(running, "graph_part")
    first, second = part.nodes
    assert (first.name, first.op_type, list(first.inputs)) == ("a", "Add", [""])
    assert [(o.dtype, list(o.shape)) for o in first.outputs] == [
        ("float16", [2, 3]),
        ("int64", [3]),
    ]
    innermost = first.source[-1]
    assert (innermost.file, innermost.function) == (__file__, "layer")
    assert innermost.code.endswith("# the line of a")
    assert not [line.file for line in first.source if "client/rankdump" in line.file]
    assert second.name == "b"
    order = kinds(running)
    assert order.index("graph_part") < order.index("iteration_end")


def test_graph_describes_only_the_first_dumped_iteration(running):
    with started(running, iterations=IterationSelection("1-2", ((1, 2),))) as session:
        for i in range(4):
            session.step(i)
            session.dump("Add", f"op{i}", "input", 0, ONE)
    assert nodes(running) == [["op1"]]


def test_graph_of_an_iteration_that_raised_is_sent(running):
    def job() -> None:
        with started(running) as session:
            session.dump("Add", "a", "input", 0, ONE)
            raise KeyError

    with pytest.raises(KeyError):
        job()
    assert nodes(running) == [["a"]]


@pytest.mark.parametrize("trigger", ["always", "exception"])
def test_graph_is_sent_only_with_other_data(running, trigger):
    with started(running, trigger=trigger) as session:
        session.dump("Add", "a", "input", 0, ONE)
    assert bool(nodes(running)) is (trigger == "always")


@pytest.mark.parametrize(
    ("op_types", "kinds_of"), [(None, ["Conv2d", "Conv2d"]), (["A", "B"], ["A", "B"])]
)
def test_graph_has_the_compiled_order(running, op_types, kinds_of):
    """Law: the graph has exactly the given operators, in that order, with their descriptions."""
    with started(running) as session:
        session.graph([CONV2, CONV1], op_types=op_types)
        for name in (CONV1, "elsewhere"):
            session.dump(kinds_of[1], name, "output", 0, ONE)
    (part,) = bodies(running, "graph_part")
    assert part.compiled
    assert [(n.name, n.op_type) for n in part.nodes] == list(
        zip([CONV2, CONV1], kinds_of, strict=True)
    )
    assert [len(n.outputs) for n in part.nodes] == [0, 1]


def test_graph_described_late_is_sent_at_the_end(running):
    with started(running) as session:
        session.step(0)
        session.dump("Add", "a", "input", 0, ONE)
        session.step(1)
        session.graph(["x", "y"], graph=3)
    assert [(p.graph, p.compiled) for p in bodies(running, "graph_part")] == [(0, False), (3, True)]


def test_graph_with_wrong_number_of_types_is_a_warning(running, caplog):
    with started(running) as session:
        session.graph(["x", "y"], op_types=["Add"])
    assert "1 op_types for 2 names" in caplog.text
    assert nodes(running) == []


def test_graph_described_by_an_adapter_is_sent(running):
    pipeline = of_pipeline(running, a_plan())
    recorder = pipeline.recorder
    assert recorder.is_describing
    recorder.describe(0, GraphNode("b", "Add", inputs=("a", "w", "")))
    recorder.describe_parameter(0, GraphParameter("w", TensorType("int8", (2,))))
    recorder.finish_event(recorder.start_event(graph=0, name="b"))
    pipeline.end_iteration(ran=True)
    pipeline.begin_iteration(1)
    assert not recorder.is_describing
    recorder.describe(0, GraphNode("late", "Add"))
    recorder.describe_parameter(0, GraphParameter("late", TensorType("int8", (2,))))
    pipeline.close()
    (part,) = bodies(running, "graph_part")
    assert list(part.nodes[0].inputs) == ["a", "w", ""]
    assert [(p.name, p.type.dtype, list(p.type.shape)) for p in part.parameters] == [
        ("w", "int8", [2])
    ]


# -- names for readers that know only the last component


def short(name: str) -> str:
    return name.rpartition("/")[2]


def test_old_profile_gives_every_operator_its_own_last_component(running):
    """Law: tensors, events, graph and arguments of an operator always have one name."""
    names = [CONV1, CONV2, f"Gradients/{CONV1}", CONV1.replace("op0", "op1")]
    plan = DumpPlan(output=OutputSettings("/x", profile="ms2.0"))
    pipeline = of_pipeline(running, plan)
    recorder = pipeline.recorder
    for iteration in range(2):
        pipeline.begin_iteration(iteration)
        for name in names:
            begun = recorder.start_event(graph=0, name=name)
            assert recorder.is_wanted(0, name, TensorSide.INPUT)
            recorder.observe(
                TensorObservation(0, "Conv2d", name, TensorSide.INPUT, 0, "", ArraySource(ONE))
            )
            recorder.finish_event(begun)
            recorder.describe(0, GraphNode(name, "Conv2d", inputs=(CONV2, "conv1.weight", "")))
            recorder.end_call(0, name)
        pipeline.end_iteration(ran=True)
    pipeline.close()
    found = [r.op_name for r in bodies(running, "record")]
    assert (
        list(map(short, found))
        == [
            "Conv2d-op0",
            "Conv2d-op1",
            "Conv2d-op2",
            "Conv2d-op3",
        ]
        * 2
    )
    assert found[:4] == [found[0], found[1], f"Gradients/{CONV1[:-1]}2", f"{CONV1[:-1]}3"]
    assert event_names(running) == found
    (part,) = bodies(running, "graph_part")
    assert [n.name for n in part.nodes] == found[:4]
    assert list(part.nodes[0].inputs) == [found[1], "conv1.weight", ""]


def test_old_profile_names_gradients_after_their_parameters(running):
    pipeline = of_pipeline(running, a_plan("ms2.0"))
    for name in ("conv1.weight", "Gradients/conv1.weight"):
        source = ArraySource(ONE)
        pipeline.recorder.observe(
            TensorObservation(0, "Parameter", name, TensorSide.OUTPUT, 0, "", source)
        )
    pipeline.close()
    found = [r.op_name for r in bodies(running, "record")]
    assert found == ["conv1.weight", "grad.conv1.weight"]


def test_old_profile_keeps_marks_of_gradients(running):
    plan = a_plan("ms2.0", operators=OperatorSelection(everything=False, marked=True))
    pipeline = of_pipeline(running, plan)
    pipeline.recorder.set_marks(0, frozenset({"conv1.weight", "network-Net/conv2-Conv2d"}))
    wanted = ["conv1.weight", "Gradients/conv1.weight", CONV2, f"Gradients/{CONV2}"]
    assert all(pipeline.recorder.is_wanted(0, name, TensorSide.OUTPUT) for name in wanted)
    assert not pipeline.recorder.is_wanted(0, CONV1, TensorSide.OUTPUT)
    pipeline.close()


@pytest.mark.parametrize("profile", ["ms2.3", "ms2.4"])
def test_other_profiles_keep_names(running, profile):
    with started(running, profile) as session:
        for name in (CONV1, CONV2):
            session.dump("Conv2d", name, "input", 0, ONE)
    assert [r.op_name for r in bodies(running, "record")] == [CONV1, CONV2]
