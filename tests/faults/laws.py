"""Laws of daemons beside the trees: published orders, and memory. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from faults.tensor_content import OPERATORS
from faults.values import PlacedOperator, RankLife, RunObservation, TensorName

_MORE_PARTS, _MORE_MIB = 0.2, 36
"""An agent remembers files to link to in up to 20 MB, and a rank's iteration in half a KiB."""
_MORE_DESCRIPTORS = 12


def ordered(seen: RunObservation, lives: Mapping[str, RankLife]) -> Iterator[str]:
    """Each operator of an iteration that a rank ended is in the order, once; no other does."""
    begun = {(each.root, each.rank, each.life): each.begun for each in lives.values()}
    for placed in seen.placed:
        name = placed.name
        if name is None or name.iteration > begun.get((placed.root, name.rank, name.life), -1):
            yield f"{placed}: nobody executed it"
    for placed, count in seen.placed.items():
        if count > 1:
            yield f"{placed.name} stands in the order {count} times"
    for (rank, iteration), some in unplaced(seen, lives).items():
        # What a dead process left behind may come after its rank has started anew.
        said = seen.late.get((rank, iteration), 0)
        if len(some) > said:
            yield (
                f"rank {rank} iteration {iteration}: {len(some)} operators are not in the order, "
                f"{said} are said to be late; the first is {some[0].name}"
            )


def unplaced(
    seen: RunObservation, lives: Mapping[str, RankLife]
) -> dict[tuple[int, int], list[PlacedOperator]]:
    """Return operators of ended iterations that are in no order, by rank and iteration."""
    found: defaultdict[tuple[int, int], list[PlacedOperator]] = defaultdict(list)
    for end in seen.ledger.ends:
        life = lives.get(end.session_id)
        if life is not None:
            missing = [due for due in _executed(life, end.iteration) if due not in seen.placed]
            if missing:
                found[life.rank, end.iteration] += missing
    return found


def _executed(life: RankLife, iteration: int) -> Iterable[PlacedOperator]:
    for number in range(OPERATORS):
        yield PlacedOperator(life.root, TensorName(life.rank, life.life, iteration, number, 0))


def grown(seen: RunObservation) -> Iterator[str]:
    """No daemon has much more memory or descriptors at its end than after its first tenth."""
    for each in seen.growths:
        life = f"{each.who}, {each.seconds:.0f} s"
        if each.late_mib > each.early_mib * (1 + _MORE_PARTS) + _MORE_MIB:
            yield f"{life}: {each.late_mib} MiB, and {each.early_mib} after its first tenth"
        if each.late_descriptors > each.early_descriptors + _MORE_DESCRIPTORS:
            yield (
                f"{life}: {each.late_descriptors} descriptors, and {each.early_descriptors} "
                f"after its first tenth"
            )
