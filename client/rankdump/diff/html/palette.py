"""Colours and marks of the page, the same in every chart and table."""

from __future__ import annotations

from rankdump.diff.values import Verdict

COLOURS = {
    Verdict.EQUAL.value: "#9aa5b1",
    Verdict.CLOSE.value: "#4c8bb8",
    Verdict.DIFFERENT.value: "#d9622b",
    Verdict.NAN.value: "#8e3fa8",
    Verdict.SHAPE.value: "#8a5a2b",
    Verdict.UNMATCHED.value: "#c9a227",
    Verdict.UNREADABLE.value: "#222222",
    Verdict.UNKNOWN.value: "#c9ced6",
}
MARKS = {
    Verdict.EQUAL.value: "circle",
    Verdict.CLOSE.value: "circle",
    Verdict.DIFFERENT.value: "diamond",
    Verdict.NAN.value: "star",
    Verdict.SHAPE.value: "square",
    Verdict.UNMATCHED.value: "inverted_triangle",
    Verdict.UNREADABLE.value: "asterisk",
    Verdict.UNKNOWN.value: "circle",
}
RANKS = (
    "#1f6f8b",
    "#d9822b",
    "#3a7d44",
    "#a23b72",
    "#6b5b95",
    "#8c6d31",
    "#2f4b7c",
    "#e05263",
    "#509e9a",
    "#7a7a7a",
)
"""Of ranks in turn; begins anew after the last."""
