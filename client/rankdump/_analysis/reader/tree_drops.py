"""Tensors that the plan selects and that a tree lacks, or has only in part: counts, sentences."""

from __future__ import annotations

from collections import Counter, defaultdict

from rankdump._analysis.reader.query import ranges
from rankdump._analysis.reader.tree import Tree
from rankdump._core.drop_reasons import count_lost, describe_degraded, describe_drops


def describe_tree_drops(tree: Tree) -> list[str]:
    """Return one sentence for each reason for which ranks lost tensors, or kept less of them."""
    by_rank: defaultdict[int, Counter[str]] = defaultdict(Counter)
    degraded: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for manifest in tree.manifests:
        by_rank[manifest.status.rank].update(manifest.status.dropped)
        degraded[manifest.status.rank].update(manifest.status.degraded_by)
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, dropped in sorted(by_rank.items()):
        for text in (*describe_degraded(degraded[rank]), *describe_drops(dropped)):
            by_text[text].append(rank)
    return [
        f"{'rank' if len(own) == 1 else 'ranks'} {ranges(own)}: {text}"
        for text, own in by_text.items()
    ]


def count_tree_drops(tree: Tree) -> int:
    """Return how many tensors that the plan selects are not in the tree."""
    return sum(lost for losses in count_losses(tree).values() for lost in losses.values())


def count_losses(tree: Tree) -> defaultdict[tuple[int, int], Counter[int]]:
    """Return how many tensors of complete iterations were lost, by rank and attempt."""
    found: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for manifest in tree.manifests:
        status = manifest.status
        found[status.rank, status.attempt][status.iteration] += count_lost(status.dropped)
    return found
