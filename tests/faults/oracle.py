"""Laws of a run, checked on the observations of it. Pure: it returns violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from faults.laws import grown, ordered
from faults.tensor_content import kept, names
from faults.values import FaultKind, LawBreach, RankLife, RunObservation, TensorName

from rankdump._core.drop_reasons import DROP_REASONS

_STORED = ("stored", "linked")
_KEPT = (*_STORED, "degraded")
_ALWAYS = frozenset({"buffer_full"})
"""A slow disk or an agent that is away: ranks wait for so long and no longer."""
_AGENT_KILLS = (FaultKind.KILL_AGENT, FaultKind.KILL_WORKER)
_MOST = 20
"""Breaches of a law that are told."""
REASONS_OF = {
    FaultKind.KILL_RANK: {"torn"},
    FaultKind.ENOSPC: {"disk_full", "disk_low"},
    FaultKind.INODES: {"disk_full", "inodes_low"},
    FaultKind.EIO: {"write_error"},
    FaultKind.DESCRIPTORS: {"no_descriptors", "write_error"},
    FaultKind.FLIPPED_CHUNK: {"corrupted"},
    FaultKind.FLIPPED_SLAB: {"corrupted"},
}
"""What a kind of fault may make an agent drop, beside what is always allowed."""


def breaches(seen: RunObservation, happened: Mapping[str, int]) -> tuple[LawBreach, ...]:
    """Return what does not hold; nothing is what one hopes for."""
    lives = {life.session_id: life for life in seen.lives}
    laws = {
        "every acknowledged number is accounted for": acknowledged(seen),
        "every file is the tensor of its name, bit for bit": exact(seen, lives.values()),
        "no tensor is there twice": once(seen),
        "what the ledger says is stored is there, and what it says is dropped is not": stored(
            seen, lives, happened
        ),
        "a drop has a reason, and that reason was played": reasoned(seen, happened),
        "expected = stored + linked + degraded + dropped": balanced(seen, lives),
        "a manifest is of an iteration that ended, and what it lists is there": listed(seen, lives),
        "whoever said goodbye left whole iterations": whole(seen),
        "the coordinator's balances are those of the manifests": told(seen),
        "what ranks executed stands in the published order, once": ordered(seen, lives),
        "no daemon grows while it lives": grown(seen),
        "nothing was wrong on the way": iter(seen.complaints),
    }
    found: list[LawBreach] = []
    for law, faults in laws.items():
        every = list(faults)
        found += [LawBreach(law, what) for what in every[:_MOST]]
        if len(every) > _MOST:
            found.append(LawBreach(law, f"and {len(every) - _MOST} more"))
    return tuple(found)


def acknowledged(seen: RunObservation) -> Iterator[str]:
    """Every number up to a rank's acknowledged one is in a ledger."""
    for life in seen.lives:
        there = seen.ledger.sequences.get(life.session_id, frozenset())
        missing = [n for n in range(1, life.acknowledged + 1) if n not in there]
        if missing:
            yield f"{_of(life)}: {len(missing)} of {life.acknowledged}, the first {missing[0]}"


def exact(seen: RunObservation, lives: Iterable[RankLife]) -> Iterator[str]:
    """Every file is known, readable, and has the content of its name."""
    by_name = {(life.rank, life.life): life for life in lives}
    for file in seen.files:
        name = file.name
        life = by_name.get((name.rank, name.life)) if name is not None else None
        if name is None or life is None or name.iteration > life.begun:
            yield f"{file.path}: nobody dumped it"
        elif file.fault:
            yield f"{file.path}: {file.fault}"


def once(seen: RunObservation) -> Iterator[str]:
    """No tensor has two files, or two rows of statistics."""
    times = Counter((file.name, file.row) for file in seen.files if file.name is not None)
    for (name, _), count in times.items():
        if count > 1:
            yield f"{name} is there {count} times"


def stored(
    seen: RunObservation, lives: Mapping[str, RankLife], happened: Mapping[str, int]
) -> Iterator[str]:
    """The ledger's paths are files with that tensor; no file is of a tensor that was dropped."""
    # A killed agent may have written the file of a record that comes damaged again, or when the
    # file cannot be read.
    unsure = {"corrupted"}
    if happened.get(FaultKind.EIO.value) and any(happened.get(k.value) for k in _AGENT_KILLS):
        unsure.add("write_error")
    files = {(f.root, f.path): f for f in seen.files if f.name is not None and not f.row}
    dropped: Counter[tuple[str, TensorName]] = Counter()
    safe: Counter[tuple[str, TensorName]] = Counter()
    for row in seen.ledger.rows:
        life = lives.get(row.session_id)
        if life is None or row.name is None:
            yield f"session {row.session_id} number {row.sequence}: nobody dumped it"
        elif row.fate not in _STORED:
            if row.reason not in unsure:
                dropped[life.root, row.name] += 1
        else:
            safe[life.root, row.name] += 1
            file = files.get((life.root, row.path))
            if file is None or file.name is None or _any_slot(file.name) != row.name:
                yield f"{_of(life)} number {row.sequence}: {row.path} is not there"
    there = Counter((f.root, _any_slot(f.name)) for f in files.values() if f.name is not None)
    for key, count in dropped.items():
        if there[key] > safe[key]:
            yield f"{key[1]}: {count} dropped and {safe[key]} kept, {there[key]} in the tree"


def reasoned(seen: RunObservation, happened: Mapping[str, int]) -> Iterator[str]:
    """Every drop has a known reason that a fault explains."""
    allowed = set(_ALWAYS)
    for kind, reasons in REASONS_OF.items():
        if happened.get(kind.value):
            allowed |= reasons
    counts = drops(seen)
    for reason, count in counts.items():
        if reason not in DROP_REASONS:
            yield f"{count} dropped as {reason!r}, which is no reason"
        elif reason not in allowed:
            yield f"{count} dropped as {reason}, and no fault was played that explains it"
    flips = sum(happened.get(k.value, 0) for k in (FaultKind.FLIPPED_CHUNK, FaultKind.FLIPPED_SLAB))
    if counts["corrupted"] > flips:
        yield f"{counts['corrupted']} dropped as corrupted, and {flips} bytes were flipped"


def drops(seen: RunObservation) -> Counter[str]:
    """Return how many tensors were dropped, by reason, by agents and by ranks."""
    counts = Counter(row.reason for row in seen.ledger.rows if row.fate == "dropped")
    for refused in seen.ledger.refused.values():
        counts.update(refused)
    for end in seen.ledger.ends:
        counts.update(end.dropped)
    for sums in seen.ledger.folded.values():
        counts.update({word: n for word, n in sums.items() if word not in _KEPT})
    return counts


def balanced(seen: RunObservation, lives: Mapping[str, RankLife]) -> Iterator[str]:
    """Of each iteration that ended every tensor is accounted for, once."""
    rows: Counter[tuple[str, int]] = Counter()
    for row in seen.ledger.rows:
        if row.name is not None:
            rows[row.session_id, row.name.iteration] += 1
    for end in seen.ledger.ends:
        key, life = (end.session_id, end.iteration), lives.get(end.session_id)
        if life is None:
            yield f"session {end.session_id}, which no rank opened, ended {end.iteration}"
            continue
        due = _due(life, end.iteration)
        sums = sum(seen.ledger.folded.get(key, {}).values())
        figures = seen.ledger.figures.get(key, 0) + sum(seen.ledger.refused.get(key, {}).values())
        accounted = rows[key] + sums + figures + sum(end.dropped.values())
        if not end.expected == due == accounted:
            yield (
                f"{_of(life)} iteration {end.iteration}: {due} dumped, "
                f"{end.expected} expected, {accounted} accounted for"
            )


def listed(seen: RunObservation, lives: Mapping[str, RankLife]) -> Iterator[str]:
    """A manifest is of an iteration that its rank had ended, adds up, and its files are there."""
    files = {(file.root, file.path) for file in seen.files}
    ends = {(end.session_id, end.iteration) for end in seen.ledger.ends}
    for manifest in seen.manifests:
        life = lives.get(manifest.session_id)
        where = f"manifest of iteration {manifest.iteration} of session {manifest.session_id}"
        if life is None or manifest.iteration not in life.ended:
            yield f"{where}: it had not ended"
            continue
        if (manifest.session_id, manifest.iteration) not in ends:
            yield f"{where}: the ledger does not say that it ended"
        if manifest.expected != manifest.kept + sum(manifest.dropped.values()):
            yield f"{where}: {manifest.expected} expected, {manifest.kept} kept"
        gone = [path for path in manifest.paths if path and (life.root, path) not in files]
        if gone:
            yield f"{where}: {len(gone)} files are not there, the first {gone[0]}"


def whole(seen: RunObservation) -> Iterator[str]:
    """A session that ended well has the end and the manifest of each of its iterations."""
    ends = {(end.session_id, end.iteration) for end in seen.ledger.ends}
    manifests = {(each.session_id, each.iteration) for each in seen.manifests}
    for life in seen.lives:
        due = {(life.session_id, iteration) for iteration in life.ended} if life.closed else set()
        for what, there in (("end", ends), ("manifest", manifests)):
            if missing := sorted(due - there):
                yield f"{_of(life)}: no {what} of iterations {[i for _, i in missing][:8]}"


def told(seen: RunObservation) -> Iterator[str]:
    """What the coordinator knows of an iteration is what its manifest says."""
    closed = {life.session_id for life in seen.lives if life.closed}
    for each in seen.manifests:
        key = each.session_id, each.iteration
        due = each.expected, each.kept, sum(each.dropped.values())
        found = seen.balances.get(key)
        if found != due and (found is not None or each.session_id in closed):
            yield f"session {key[0]} iteration {key[1]}: {due} in its manifest, {found} told"


def _due(life: RankLife, iteration: int) -> int:
    return sum(map(kept, names(life.rank, life.life, iteration)))


def _any_slot(name: TensorName) -> TensorName:
    return TensorName(name.rank, name.life, name.iteration, name.number, -1)


def _of(life: RankLife) -> str:
    return f"rank {life.rank} life {life.life} ({life.session_id})"


def told_once(breaches_: Collection[LawBreach]) -> list[str]:
    """Return the breaches as lines for people."""
    return [f"{breach.law}: {breach.what}" for breach in breaches_]
