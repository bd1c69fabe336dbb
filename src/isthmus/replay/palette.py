"""Colours of the pictures. Groups differ in lightness too, so they are told apart without seeing colours."""

from __future__ import annotations

GROUPS = ("#2f6fd0", "#e08a1e", "#2a9d6f", "#a04fb0", "#c2453c", "#7a8a1c")
"""In byte order; more groups than colours start again."""

GROUPS_DARK = ("#6ea3f2", "#f0ae57", "#5cc79b", "#cf8bdc", "#ee857c", "#b5c552")

LIGHT = {
    "page": "#ffffff", "panel": "#f4f5f7", "text": "#1b1f24", "quiet": "#59636e", "line": "#d3d8de",
    "free": "#f1f3f6", "null": "#9aa4af", "hole": "#d9c9c0", "move": "#101418", "refusal": "#c02040",
}  # fmt: skip
DARK = {
    "page": "#14171b", "panel": "#1d2127", "text": "#e6e9ed", "quiet": "#9aa4af", "line": "#3a414a",
    "free": "#20252b", "null": "#5b6570", "hole": "#54453c", "move": "#ffffff", "refusal": "#ff6b81",
}  # fmt: skip


def rgb(colour: str) -> tuple[int, int, int]:
    """`#rrggbb` as three numbers."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
