"""One arena of bytes for every kind of cache: specs, ids, regions, planning, deltas and a journal. NumPy only."""

from isthmus.memory.delta import Copies, Delta, Frees, Moves, Op, Writes
from isthmus.memory.group import Group
from isthmus.memory.ids import IdSpace, PageTable, PhysicalPages, VirtualLike, VirtualPages
from isthmus.memory.journal import Journal
from isthmus.memory.plan import Plan, Refusal, StalePlanError
from isthmus.memory.pool import Pool
from isthmus.memory.records import JournalError
from isthmus.memory.replay import DivergenceError, Replay, replay
from isthmus.memory.spec import LayerKV, PageSpec, Part, kv_spec, opaque_spec, state_spec
from isthmus.memory.usage import ArenaUsage, GroupUsage

__all__ = [
    "ArenaUsage",
    "Copies",
    "Delta",
    "DivergenceError",
    "Frees",
    "Group",
    "GroupUsage",
    "IdSpace",
    "Journal",
    "JournalError",
    "LayerKV",
    "Moves",
    "Op",
    "PageSpec",
    "PageTable",
    "Part",
    "PhysicalPages",
    "Plan",
    "Pool",
    "Refusal",
    "Replay",
    "StalePlanError",
    "VirtualLike",
    "VirtualPages",
    "Writes",
    "kv_spec",
    "opaque_spec",
    "replay",
    "state_spec",
]
