"""What is lost, in tokens computed again per byte gained, when a part of the prefix cache goes.

A *point* is a node at which a lookup is expected to end: every kind can restore its boundary and, in a model where
that takes more than the pages of the chain, somebody said that he may come back to it.

    tokens(point)   = its boundary less that of the nearest point above it: what its absence costs the next lookup
    worth           = tokens(point) * recency / bytes,   recency = 1 / (1 + age)

The bytes decide what goes together. Without its windows and its snapshot a point is gone, so they are one unit; or
the whole stretch of the chain that leads to this point alone goes, which is a larger unit for the same loss.
Pages that no point needs are worth nothing. (Value over size for hybrid models: Marconi, arXiv 2411.19379.)

Everything is vectorised over all nodes; trees are walked by doubling pointers (`_settle`), in log(depth) passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from isthmus.cache.nodes import Nodes, Slots
from isthmus.cache.roles import Roles

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]


def worth(nodes: Nodes, roles: Roles, bound: Mapping[str, Bool], age: Float) -> dict[str, Float]:
    """Weigh every node: per lock and slot, what evicting that part of the node costs per byte.

    Under the covering group's name its id with everything the node holds; where ids are chained that is never less
    than the worth of a node below. Under a window's its page there alone, under the states' its snapshot.
    `bound[group][slot]`: does the node hold a page there? `age[slot]`: how long ago it was used, in lookups.
    Parts that are not held have any value.
    """
    top = nodes.top
    parent, depth = nodes.parent[:top], nodes.depth[:top]
    points = _points(nodes, roles, bound)
    above = _settle(np.where(points | (depth == 0), np.arange(top), parent))[parent]  # the nearest point
    gain = np.where(points, (depth - depth[above]) * roles.page_size / (1 + age), 0.0)
    held = nodes.snapshot[:top].astype(bool) * float(sum(roles.page_bytes[name] for name in roles.states))
    size = held.copy()  # of what restores a boundary, besides the chain
    for name in roles.spans:
        size += (depth - roles.kinds[name].dead(depth * roles.page_size)) * roles.page_bytes[name]
    alone = gain / np.maximum(size, 1)
    value = dict.fromkeys(roles.states[:1], alone)
    for name in roles.spans:
        value[name] = _spread(nodes, points, alone, roles.kinds[name].dead(depth * roles.page_size))
        if name in roles.covering:
            value[name] = np.maximum(value[name], alone)  # the snapshot goes with the id
    if roles.chained:
        for name in (*roles.covering, *roles.windows):
            held += bound[name] * roles.page_bytes[name]
        value[roles.covering[0]] = _chained(nodes, points, gain, held)
    return value


def _points(nodes: Nodes, roles: Roles, bound: Mapping[str, Bool]) -> Bool:
    top = nodes.top
    depth = nodes.depth[:top]
    points = depth > 0
    for name in roles.spans:
        here = np.arange(top)
        gap = _settle(np.where(bound[name], nodes.parent[:top], here))  # the nearest node without a page, or the root
        points &= depth[gap] <= roles.kinds[name].dead(depth * roles.page_size)
    if roles.states:
        points &= nodes.snapshot[:top] > 0
    return points & nodes.restore[:top] if roles.spans or roles.states else points


def _chained(nodes: Nodes, points: Bool, gain: Float, held: Float) -> Float:
    """Worth of nodes that go from the leaves up: of the stretch that leads to one point, as a unit."""
    top = nodes.top
    parent, children = nodes.parent[:top], nodes.children[:top]
    live, here = np.flatnonzero(nodes.depth[:top]), np.arange(top)
    child = np.zeros(top, np.int64)
    child[parent[live]] = live  # the only child, where there is one
    leads_to = _settle(np.where(points | (children != 1), here, child))
    size = np.bincount(leads_to, weights=held, minlength=top)
    value = (gain / np.maximum(size, 1))[leads_to]
    # Children go first, so a node is worth at least what they are: the maximum over all below it.
    up = parent
    while up.any():
        higher = value.copy()
        np.maximum.at(higher, up, value)
        if np.array_equal(higher, value):
            break  # then no farther descendant is worth more either
        value, up = higher, up[up]
    return value


def _spread(nodes: Nodes, points: Bool, alone: Float, start: Slots) -> Float:
    """Give each node the highest worth among the points whose window it lies in: columns [start, depth)."""
    value = np.zeros(nodes.top)
    at = np.flatnonzero(points)
    low, gain = start[at], alone[at]
    while True:
        inside = nodes.depth[at] > low
        at, low, gain = at[inside], low[inside], gain[inside]
        if not len(at):
            return value
        np.maximum.at(value, at, gain)
        at = nodes.parent[at]


def _settle(pointer: Slots) -> Slots:
    """Where each pointer ends when it is followed until it points at itself."""
    while True:
        further = pointer[pointer]
        if np.array_equal(further, pointer):
            return further
        pointer = further
