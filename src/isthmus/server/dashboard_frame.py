"""What the dashboard and `isthmus top` show, at one moment, as JSON: states, bytes and counts, nobody's text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus import __version__
from isthmus.server import wire
from isthmus.server.metrics import pool_bytes

if TYPE_CHECKING:
    from isthmus.server.app import Front


def frame(front: Front) -> dict[str, Any]:
    """The newest of everything. `pool`, `regions` and `served` are of one report, so they agree to the byte."""
    client = front.client
    pool, regions, served, left_out = None, [], [], 0
    if client.viewed is not None:
        stats, view = client.viewed
        pool, left_out = pool_json(stats), view.left_out
        regions = [_plain(region) for region in view.regions]
        served = [_plain(sequence) for sequence in view.served]
    ended = [{"request_id": e.request_id, "output_tokens": e.output_tokens, **e.receipt} for e in client.ended]
    return {
        "time": time.time(),
        "version": __version__,
        "state": "draining" if front.draining else client.state,
        "restarts": client.restarts,
        "model": _model(front),
        "totals": front.metrics.totals(),
        "refused": front.metrics.refusals(),
        "pool": pool,
        "regions": regions,
        "served": served,
        "left_out": left_out,
        "ended": ended,
    }


def pool_json(stats: wire.Stats) -> dict[str, Any]:
    """The arena in bytes, as `/v1/pool` tells it."""
    parts = pool_bytes(stats)
    groups = [
        {
            "name": group.name,
            "page_bytes": group.page_bytes,
            "pages": {"live": group.live_pages, "cached": group.cached_pages, "hole": group.hole_pages},
            "bytes": {state: parts[group.name, state] for state in ("live", "cached", "hole")},
            "frontiers": [group.lo_byte, group.hi_byte],
            "table_entries": group.table_entries,
            "table_bytes": 4 * group.table_entries,
            "moved_pages": group.moved_pages,
            "moved_bytes": group.moved_pages * group.page_bytes,
            "evicted_pages": group.evicted_pages,
        }
        for group in stats.groups
    ]
    return {
        "arena_bytes": stats.total,
        "null_bytes": stats.null,
        "gap_bytes": stats.gap,
        "tail_bytes": stats.tail,
        "graph_bytes": stats.graph_bytes,
        "groups": groups,
        "ids": {"live": stats.ids, "capacity": stats.id_capacity},
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "refusals": stats.refusals,
        "memory_faults": stats.memory_faults,
        "fenced_pages": stats.fenced_pages,
    }


def _model(front: Front) -> dict[str, Any] | None:
    """What the completion box needs to know; None until the first engine is ready."""
    speller = front.newest_speller
    if speller is None:
        return None
    name = front.config.served_model_name or speller.info.name
    return {"id": name, "chat": speller.template is not None, "max_model_len": speller.info.max_model_len}


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    """By field names: structs travel between the processes as arrays."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
