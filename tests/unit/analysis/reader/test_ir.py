"""`.ir` text to operators and lines, and a line of a script to operators and files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankdump._analysis.reader.source_lines import parse_ir_operators, read_ir_operators
from rankdump._core.graph import GraphNode, OperatorGraph, SourceLine
from rankdump._core.record import sanitize_line
from rankdump._layout.profile import PROFILES
from rankdump.errors import CorruptedError
from rankdump.reader import Frame, Search, graph_files, named, walk
from rankdumpd.agent.storage.graph_files import render_graph

SCOPE = "Default/network-Net/conv1-Conv2d"
TEXT = f"""# IR entry: @kernel_graph0
# Total params: 1
%para1_x: <Tensor[Float32], (8, 8)>
subgraph @kernel_graph0() {{
  %0(equiv_1) = Conv2D(%para1_x, %2) {{kernel_size: (3, 3)}} cnode_attrs: {{a: Bool(1)}}
      : (<Tensor[Float32], (8, 8)>) -> (<Tensor[Float32], (8, 8)>)
      # Fullname with scope: ({SCOPE}/Conv2D-op1)
      # In file /job/train.py:20~30, 4~53/    def construct(self, x, y):/
      # In file /job/train.py:24, 12~20/        l = self.net(x, y); g = 1/
      # In file /job/net.py:9~11, 8~20/        return self.conv1(/
  %1(CNode_2) = PrimFunc_ReLU(%0) primitive_attrs: {{}}
      # Fullname with scope: (Default/network-Net/relu-ReLU/ReLU-op0)
      # inlined:In file /job/train.py:24/        l = self.net(x, y); g = 1/
      # In file /job/odd dir/a:b.py:12/x = d[1:2] / 3/<~~This line of code can be shared./
  %2(CNode_3) = Depend(%1)
      # Fullname with scope: (Default/Depend-op0)
      # Corresponding forward node candidate:
      # In file /job/train.py:24, 12~20/        l = self.net(x, y); g = 1/
  Return(%2)
}}
"""
ONES = np.ones(2, np.float32)


def test_parse_ir_operators_reads_types_names_and_lines():
    """Types lose the prefix of 2.7, names are whole, every form of a line is read."""
    conv, relu, depend = parse_ir_operators(TEXT.splitlines(keepends=True))
    assert [o.op_type for o in (conv, relu, depend)] == ["Conv2D", "ReLU", "Depend"]
    assert conv.op_name == f"{SCOPE}/Conv2D-op1"
    assert conv.frames[0] == Frame("/job/train.py", 20, 30, "def construct(self, x, y):")
    assert [(f.file, f.line, f.last_line) for f in conv.frames[1:]] == [
        ("/job/train.py", 24, 24),
        ("/job/net.py", 9, 11),
    ]
    assert relu.frames[1] == Frame("/job/odd dir/a:b.py", 12, 12, "x = d[1:2] / 3")
    assert len(depend.frames) == 1


@given(st.text(max_size=400))
@example("  %0(a) = Op(\n# Fullname with scope: (\n# In file :/\n")
@example("  %0(a) = Op(\n      # In file a:99999999999999999999/x/\n")
def test_parse_ir_operators_accepts_any_text(text):
    """What is not understood is passed over."""
    assert all(operator.op_name for operator in parse_ir_operators(text.split("\n")))


lines = st.builds(
    SourceLine,
    file=st.text("abc/._- ", min_size=1).map(lambda name: f"/{name}.py"),
    line=st.integers(1, 10**6),
    function=st.just("forward"),
    code=st.text(st.characters(categories=["L", "N", "P", "Sm", "Zs"])).map(str.strip),
)


@given(st.lists(st.lists(lines, max_size=3), max_size=3), st.sampled_from(sorted(PROFILES)))
def test_parse_ir_operators_reads_graphs_of_the_agent(stacks, profile):
    """Every operator of a graph comes back, with its stack line by line."""
    nodes = tuple(
        GraphNode(f"Default/a-A/A-op{at}", "A", ("", "x)"), (), {"b": "(1)"}, tuple(stack))
        for at, stack in enumerate(stacks)
    )
    files = render_graph(OperatorGraph(3, nodes), PROFILES[profile])
    text = files["ms_output_trace_code_graph_3.ir"].decode()
    found = list(parse_ir_operators(text.split("\n")))
    assert [operator.op_name for operator in found] == [node.name for node in nodes]
    for operator, node in zip(found, nodes, strict=True):
        assert [(f.file, f.line, f.code) for f in operator.frames] == [
            (source.file, source.line, sanitize_line(source.code).strip()) for source in node.source
        ]


def test_read_ir_operators_names_an_unreadable_file(tmp_path):
    """The error names it."""
    with pytest.raises(CorruptedError, match=r"gone\.ir: cannot be read"):
        list(read_ir_operators(tmp_path / "gone.ir"))


def asked(tree, question):
    found = walk(tree.root)
    search = Search(question, named(found, lambda tensor: True))
    return search, search.origins(graph_files(tree.root, found.ranks))


@pytest.fixture
def dumped(tree):
    """The convolution under another number than the graph's, as 2.7.0 does; the other as it is."""
    tree.graph(0, TEXT)
    for iteration in (0, 1):
        tree.tensor(0, iteration, f"{SCOPE}/Conv2D-op0", ONES)
        tree.tensor(0, iteration, "Default/network-Net/relu-ReLU/ReLU-op0", ONES)
        tree.tensor(0, iteration, "conv1.weight", ONES, op_type="Parameter")
        tree.complete(0, iteration, world_size=1)
    return tree


@pytest.mark.parametrize(
    ("question", "types"),
    [
        ("train.py:24", ["Conv2D", "ReLU", "Depend"]),
        ("/job/train.py:24", ["Conv2D", "ReLU", "Depend"]),
        ("/home/me/job/train.py:24", ["Conv2D", "ReLU", "Depend"]),
        ("./train.py:24", ["Conv2D", "ReLU", "Depend"]),
        ("rain.py:24", []),
        ("other/train.py:24", []),
        ("train.py:20", ["Conv2D"]),
        ("train.py:25", []),
        ("net.py:10", ["Conv2D"]),
        ("net.py:12", []),
        ("a:b.py:12", ["ReLU"]),
        ("self.net(x, y)", ["Conv2D", "ReLU", "Depend"]),
        ("l  =  self.net(x,  y)", ["Conv2D", "ReLU", "Depend"]),
        ("d[1:2", ["ReLU"]),
        ("d[1:2]", ["ReLU"]),
        ("", []),
        ("nowhere", []),
    ],
)
def test_search_finds_the_operators_of_a_line(dumped, question, types):
    """By a place, whole path components compared, or by a piece of the text.

    A line inside a function that is recorded as a whole counts only where the stack went on there.
    """
    search, found = asked(dumped, question)
    assert [origin.op_type for origin in found] == types
    assert "/job/train.py" in search.files


def test_search_finds_the_files_of_an_operator(dumped):
    """By the whole name, else by the scope without its number, which is said."""
    _, (conv, relu, depend) = asked(dumped, "train.py:24")
    assert [t.key.iteration for t in conv.tensors] == [0, 1]
    assert {t.op_name for t in conv.tensors} == {f"{SCOPE}/Conv2D-op0"}
    assert (conv.exact, relu.exact) == (False, True)
    assert len(relu.tensors) == 2
    assert depend.tensors == ()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("complete", [True, False])
def test_search_finds_files_in_every_profile(tree, profile, complete):
    """Full and short file names lead back to the graph's name, with and without manifests."""
    tree.profile = PROFILES[profile]
    tree.graph(0, TEXT)
    tree.tensor(0, 0, f"{SCOPE}/Conv2D-op1", ONES)
    if complete:
        tree.complete(0, 0, world_size=1)
    _, (conv,) = asked(tree, "net.py:9")
    assert len(conv.tensors) == 1
    assert conv.exact


def test_search_finds_rows_of_tables(tree):
    """With figures alone the table is where the operator's output is."""
    tree.graph(0, TEXT)
    table = tree.row(0, 0, f"{SCOPE}/Conv2D-op1", ONES)
    tree.complete(0, 0, world_size=1)
    _, (conv,) = asked(tree, "net.py:9")
    assert [tree.root / tensor.relative for tensor in conv.tensors] == [table]


def test_search_does_not_match_short_names_without_numbers(tree):
    """Every MatMul has the same short scope: a wrong file is worse than none."""
    tree.profile = PROFILES["ms2.0"]
    tree.graph(0, TEXT)
    tree.tensor(0, 0, "Default/other/Conv2D-op7", ONES)
    _, (conv,) = asked(tree, "net.py:9")
    assert conv.tensors == ()
