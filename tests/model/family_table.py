"""The table of families, made from the rows that the tests prove: `python -m tests.model.family_table` writes it.

README.md gets which families there are and how they stand in the arena; docs/families.md also what they take at the
sizes of a preset (`isthmus plan` knows it), or else at the default sizes of Transformers' config.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from isthmus.errors import ModelError
from isthmus.memory.group import chain_order
from isthmus.memory.spec import ITEMSIZE
from isthmus.model.latent import LATENT
from isthmus.model.layout import ModelLayout, decoder_layers, derive
from isthmus.presets import PRESETS
from tests.model.families import FAMILIES, config_of

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- families: made by tests/model/family_table.py -->", "<!-- end of families -->"
CONTEXT = 8192
DTYPE = "bfloat16"


def families() -> dict[str, str]:
    """A row's name by `model_type`; of several with one type the first."""
    found: dict[str, str] = {}
    for name in FAMILIES:
        found.setdefault(config_of(name)[0], name)
    return dict(sorted(found.items()))


def meta(model_type: str, values: dict[str, Any]) -> PreTrainedModel:
    """On the meta device: shapes without bytes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[model_type](**values), attn_implementation="isthmus", dtype=torch.bfloat16
        )


def arena(layout: ModelLayout, *, latent: bool) -> str:
    """Its regions from low to high."""
    if len(layout.groups) == 1:
        return _named(layout.groups[0].name, latent)
    return " · ".join(_named(group.name, latent) for group in chain_order(layout.groups))


def _named(group: str, latent: bool) -> str:
    name = re.sub(r"\d+$", "", group)
    return "latent" if latent and name == "full" else name


def by_arena() -> dict[str, list[str]]:
    """Families that stand in the arena in the same way."""
    found: dict[str, list[str]] = {}
    for model_type, name in families().items():
        model = meta(*config_of(name))
        layout = derive(model, 16, DTYPE)
        found.setdefault(arena(layout, latent=_is_latent(model)), []).append(model_type)
    return dict(sorted(found.items(), key=lambda item: (item[0].count("·"), item[0])))


def readme_part() -> str:
    """What stands between the marks in README.md."""
    lines = ["| in the arena, low to high | families (`model_type`) |", "|---|---|"]
    lines += [f"| {where} | {', '.join(names)} |" for where, names in by_arena().items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one model."""

    what: str  # whose sizes
    layout: ModelLayout
    latent: bool
    token: dict[str, int]  # of a token, per group
    state: int  # of a sequence
    naive: int  # of a token, when every layer that attends keeps keys and values of all heads

    @property
    def sequence(self) -> int:
        """Of CONTEXT tokens."""
        windows = {group.name: group.window or CONTEXT for group in self.layout.groups}
        return self.state + sum(n * min(CONTEXT, windows[name]) for name, n in self.token.items())

    @property
    def naive_sequence(self) -> int:
        return self.state + self.naive * CONTEXT


def sizes(model_type: str) -> Sizes:
    """At the sizes of the largest preset of that type, or at the config's default sizes."""
    presets = [(p.parameters, name) for name, p in PRESETS.items() if p.config["model_type"] == model_type]
    what = max(presets)[1] if presets else "default sizes"
    values = {k: v for k, v in PRESETS[what].config.items() if k != "model_type"} if presets else {}
    model = meta(model_type, values)
    layout = derive(model, 1, DTYPE)
    token = {group.name: group.spec.page_bytes for group in layout.groups if group.space == "tokens"}
    state = sum(group.spec.page_bytes for group in layout.groups if group.space == "states")
    return Sizes(what, layout, _is_latent(model), token, state, sum(_naive(model, layout)))


def _is_latent(model: PreTrainedModel) -> bool:
    return any(hasattr(module, LATENT) for module in model.modules())


def _naive(model: PreTrainedModel, layout: ModelLayout) -> Iterator[int]:
    specs = {group.name: group.spec for group in layout.groups}
    for i, layer in enumerate(decoder_layers(model)):
        if i not in layout.layer_group:
            continue
        m: Any = next((module for module in layer.modules() if hasattr(module, LATENT)), None)
        if m is not None:
            yield m.num_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim) * ITEMSIZE[DTYPE]
        else:
            spec, owner = specs[layout.layer_group[i]], layout.owner[i]
            yield sum(spec.part(f"{owner}.{which}").nbytes for which in "kv")


def page() -> str:
    """docs/families.md."""
    lines = []
    for model_type in families():
        try:
            found = sizes(model_type)
        except (ModelError, ValueError, TypeError):  # a config whose defaults are no model
            continue
        kept = [f"{_named(name, found.latent)} {n:,}" for name, n in found.token.items()]
        if found.state:
            kept.append(f"state {found.state:,} a sequence")
        ratio = found.naive_sequence / found.sequence
        lines.append(
            f"| {model_type} | {found.what} | {'; '.join(kept)} | {found.naive:,} | {found.sequence / 2**20:,.1f} | "
            f"{found.naive_sequence / 2**20:,.1f} | {ratio:.2f} |"
        )
        print(lines[-1], file=sys.stderr)
    return PAGE.format(context=f"{CONTEXT:,}", rows="\n".join(lines))


PAGE = """# Families

Every family here gives Transformers' own greedy tokens in `tests/model/test_families.py`: cold and from the prefix
cache at every page boundary, in chunks of 1, 7 and 64 tokens, preempted, with pages moved between steps, unified and
static, alone and mixed in a batch of unequal lengths, over an arena filled with NaN. A row of `tests/model/families.py`
is all that it takes to add one whose layers are known. A model with a layer that nobody has taught us is refused at
start, with the layer's class named.

What a token takes (bytes, bfloat16, states in the precision that the family keeps them in), against a naive cache, in
which every layer that attends keeps keys and values of all its heads for every token. For a sequence of {context}
tokens, in MiB; the last column is naive over ours.

| family | sizes of | a token, by group | naive | MiB | naive MiB | ratio |
|---|---|---|---|---|---|---|
{rows}

Made by `python -m tests.model.family_table`.
"""


def main() -> None:
    """Write both."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{readme_part()}\n{END}{after}")
    (ROOT / "docs" / "families.md").write_text(page())


if __name__ == "__main__":
    main()
