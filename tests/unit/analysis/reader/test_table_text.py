"""Lines of a file from its end: every whole line once, for blocks of any size."""

from __future__ import annotations

import io

import pytest

from rankdump._analysis.reader import statistic_tables
from rankdump._analysis.reader.statistic_tables import read_blocks_backward

TEXTS = [
    b"",
    b"a",
    b"\n",
    b"a\n",
    b"head\nb\nccc\n",
    b"a\n\n\nbbbbbbbbbbbbbbbbbbbb\nc\ntorn",
    b"x" * 40 + b"\ny",
    b"x\n" + b"torn" * 20,
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 100])
def test_blocks_have_every_whole_line_once(
    text: bytes, block_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(statistic_tables, "BLOCK_BYTES", block_bytes)
    for start in {0, text.find(b"\n") + 1}:
        blocks = [*read_blocks_backward(io.BytesIO(text), start=start)]
        whole = text[start : text.rfind(b"\n") + 1]
        assert b"".join(each.lines for each in reversed(blocks)) == whole
        for each in blocks:
            assert each.lines.endswith(b"\n")
            assert text[each.start :].startswith(each.lines)
            assert each.start == start or text[each.start - 1 :].startswith(b"\n")
