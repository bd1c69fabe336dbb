"""The answers to a demand: a plan that meets it, or a refusal that says what is missing. `Pool.plan` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.memory.arena import Chain, Span
from isthmus.memory.ids import VirtualPages


@dataclass(frozen=True)
class Plan:
    """How a demand will be met. True. Good for one commit, before any other change of the pool."""

    demand: Mapping[str, int]
    ids: Mapping[str, VirtualPages]  # per space: the fresh ids commit will mint, one per page of its covering groups
    spans: tuple[tuple[Span, ...], ...]  # per chain and region, where each will end up
    epoch: int  # the pool's count of changes when this was planned; -1: a what-if, not to be committed


@dataclass(frozen=True)
class Refusal:
    """Why a demand cannot be met, even with every hole closed. False."""

    demand: Mapping[str, int]
    short_bytes: int  # at least this much is missing; 0 when only page grids or pins are in the way
    message: str

    def __bool__(self) -> bool:
        return False

    @classmethod
    def of(
        cls, demand: Mapping[str, int], need: Mapping[str, int], chains: Sequence[Chain], arena_bytes: int
    ) -> Refusal:
        """These chains cannot be arranged for `need[group]` pages, those of the demand and what stays live."""
        short = 0
        for chain in chains:
            wanted = sum(need[r.name] * r.page_bytes for r in chain.regions)
            short += max(0, wanted - (chain.hi - chain.lo))
        asked = ", ".join(f"{n} {name}" for name, n in demand.items() if n)
        live = ", ".join(f"{region.live} {region.name}" for chain in chains for region in chain.regions)
        reason = f"{short:,} bytes are missing" if short else "page borders, walls or pins leave no room"
        message = f"no room for {asked} pages in an arena of {arena_bytes:,} bytes with {live} pages live: {reason}"
        return cls(demand, short, message)


class StalePlanError(RuntimeError):
    """The pool changed after the plan was made: plan again."""
