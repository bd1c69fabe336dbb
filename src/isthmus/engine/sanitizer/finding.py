"""What a check found, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.memory import Group

KINDS = {
    "freed": "a page was given back while a sequence still needs it",
    "unbound": "a sequence needs a page that it never had",
    "stale": "a table entry names a place that the page has left",
    "foreign": "a sequence uses what is another's",
    "double": "a page has two owners",
    "unwritten": "a sequence reads tokens that nobody wrote",
    "rewritten": "a sequence writes where something is written already",
    "state": "a state is not that of the place where its sequence goes on",
    "moved": "a page was moved that must not move, or onto one that somebody has",
    "table": "the device translates otherwise than it was told",
    "range": "a table write names an id or a page that does not exist",
    "leak": "an id is live and nobody has it",
    "door": "the pool was asked for something that cannot be done to an id",
    "nan": "the results of a sequence are no numbers",
    "books": "the books of the pool contradict each other",
}
"""Labels of `isthmus:memory_faults_total`, and the first line of a report."""


@dataclass(frozen=True, order=True)
class Place:
    """A page that a fault is about. 0 where there is none."""

    group: str
    page: int = 0  # physical
    virtual: int = 0


@dataclass(frozen=True)
class Finding:
    """One fault, of one sequence where it is somebody's."""

    kind: str
    what: str  # what is there and what should be, on one line
    places: tuple[Place, ...] = ()  # the first is told in full
    stays: frozenset[int] = frozenset()  # who cannot go on
    harmed: bool = False  # whoever uses the ids of the places cannot go on either


def layers_of(group: Group) -> str:
    """The layers that own bytes of the group's pages, as text: `layers 0-4, 6`; empty if its parts do not say."""
    found = sorted({int(part.name.split(".")[0]) for part in group.spec.parts if part.name.split(".")[0].isdigit()})
    runs: list[list[int]] = []
    for layer in found:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text and ("layer " if len(found) == 1 else "layers ") + text


def report(
    finding: Finding, group: Group | None, who: Sequence[str], ended: Sequence[str], fate: str, history: Sequence[str]
) -> str:
    """A fault in full, for the log.

    Args:
        group: of the first place.
        who: the sequences the fault is found in, or that had the page last.
        ended: those that end because of it.
        fate: what became of the page.
        history: the page's last events, oldest first.
    """
    lines = [f"memory fault ({finding.kind}): {KINDS[finding.kind]}"]
    lines.append(f"  request   {', '.join(who) if who else 'nobody is known'}")
    if finding.places and group is not None:
        place = finding.places[0]
        layers = layers_of(group)
        more = f", and {len(finding.places) - 1} more" if len(finding.places) > 1 else ""
        page = f"page {place.page}" if place.page else "no page"
        virtual = f" (virtual id {place.virtual})" if place.virtual else ""
        lines.append(f"  group     {place.group}{f', {layers}' if layers else ''}")
        lines.append(f"  page      {page}{virtual}{more}")
    lines.append(f"  found     {finding.what}")
    lines.append(f"  done      {fate}; {_ends(ended)}")
    if history:
        lines.append("  history   of that page, oldest first")
        lines += [f"    {event}" for event in history]
    return "\n".join(lines)


def stop_reason(finding: Finding) -> str:
    """What a client is told."""
    place = finding.places[0] if finding.places else None
    where = f" (group {place.group}, page {place.page})" if place is not None else ""
    return f"memory fault: {KINDS[finding.kind]}{where}: the request was ended, send it again"


def _ends(ended: Sequence[str]) -> str:
    if not ended:
        return "everybody is served on"
    return f"ended: {', '.join(ended)}; everybody else is served on"
