from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rankdump._cli.output import (
    TableColumn,
    format_ratio,
    format_reasons,
    format_shape,
    format_table,
    number_columns,
    shorten_text,
    wrap_text,
)
from rankdump._core.scope_names import format_scope_name, name_models
from rankdump._core.units import format_count


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: format_ratio(10, 4), "2.50x"),
        (lambda: format_ratio(10, 0), "-"),
        (lambda: format_shape((2, 3)), "(2,3)"),
        (lambda: format_shape(()), "()"),
        (lambda: format_count(1, "tensor"), "1 tensor"),
        (lambda: format_count(2000, "tensor"), "2,000 tensors"),
        (lambda: format_reasons({"b": 1, "a": 1, "c": 5, "none": 0}), "c 5, a 1, b 1"),
    ],
)
def test_format_functions_return_short_texts(call, text):
    """Each says one thing shortly."""
    assert call() == text


@given(st.text(max_size=80), st.integers(5, 60))
def test_shorten_text_fits_and_keeps_both_ends(text, width):
    """A shortened text is never wider than asked, and a text that fits is untouched."""
    short = shorten_text(text, width)
    assert cell_len(short) <= width
    if cell_len(text) <= width:
        assert short == text
    elif text.isascii() and text.isprintable():
        # Not by looking for the dots: the text may have some of its own.
        head = short[: (width - len("...")) // 4]
        assert short[len(head) :].startswith("...")
        tail = short[len(head) + len("...") :]
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(tail) >= len(head)


@given(st.text("abc -/", max_size=200), st.integers(20, 60))
def test_wrap_text_keeps_words_whole(text, width):
    """Folding moves words to other lines and never breaks one."""
    assert " ".join(wrap_text(text, width)).split() == text.split()
    assert wrap_text(text, None) == [text]


def test_format_table_shortens_only_flexible_columns():
    """A wide row is cut where it may be; numbers are never shortened."""
    columns = (TableColumn("name", is_flexible=True), *number_columns("count"))
    lines = format_table(columns, [["x" * 200, "1234567"], ["y", "8"]], width=40)
    assert [len(line) for line in lines] == [40, 40, 40]
    assert "..." in lines[1]
    assert lines[1].endswith("1234567")
    assert lines[2].startswith("y ")


def test_format_table_without_flexible_columns_is_not_cut():
    """Where nothing may give way the line grows rather than lies."""
    (_, line) = format_table(number_columns("a", "b"), [["1" * 30, "2" * 30]], width=20)
    assert line == "1" * 30 + " " + "2" * 30


@pytest.mark.parametrize(
    ("op_name", "said"),
    [
        ("Default/network-Net/conv1-Conv2d/Conv2d-op0", "conv1/Conv2d-op0"),
        ("Default/network-Net/Net-op3", "Net-op3"),
        ("Gradients/Default/network-Net/a-A/0-B/B-op0", "Gradients/a.0/B-op0"),
        ("Recompute/Default/network-Net/a-A/A-op1", "Recompute/a/A-op1"),
        ("layers.0.weight", "layers.0.weight"),
        ("Default/group-0/bucket-1/AllReduce-op4", "group-0.bucket-1/AllReduce-op4"),
        ("Gradients/layers.0.weight", "Gradients/layers.0.weight"),
        ("Default/_backbone-LeNet/relu-ReLU/ReLU-op0", "_backbone.relu/ReLU-op0"),
        ("Default/plain/op", "plain/op"),
        ("", ""),
    ],
)
def test_format_scope_name_omits_classes(op_name, said):
    """The classes that a scope repeats are left out, and nothing else."""
    assert format_scope_name(op_name) == said


def test_wrap_text_keeps_a_blank_line():
    """Between a table and its totals, on a terminal as in a pipe."""
    assert wrap_text("", 80) == wrap_text("", None) == [""]


def test_name_models_tells_several_models_apart():
    """One model needs no name; two of one class have their graph in theirs."""
    linear = "Default/network-{}/0-Linear/Linear-op0".format
    assert name_models([(0, linear("Net")), (0, linear("Net"))]) == {}
    assert name_models([(1, "0.weight"), (0, linear("G")), (1, linear("D"))]) == {0: "G", 1: "D"}
    assert name_models([(0, linear("G")), (1, linear("G"))]) == {0: "G[0]", 1: "G[1]"}
    assert name_models([(0, "0.weight"), (1, linear("G"))]) == {1: "G"}


def test_format_scope_name_begins_with_the_model_it_is_given():
    linear = "Default/network-G/0-Linear/Linear-op0"
    assert format_scope_name(linear, "G") == "G.0/Linear-op0"
    assert format_scope_name(f"Gradients/{linear}", "G") == "Gradients/G.0/Linear-op0"
    assert format_scope_name("Default/network-G/G-op0", "G") == "G-op0"
    assert format_scope_name("Default/network-Net/Net-op0", "G") == "G/Net-op0"
    assert format_scope_name("Gradients/Default/network-Net/Net-op0", "G") == "Gradients/G/Net-op0"
    assert format_scope_name("Default/AllReduce-op0", "G") == "AllReduce-op0"
