"""The executor that runs a model out of one arena on a GPU.

    launch(step) = plan on the host -> one upload -> page moves -> table writes -> translate -> forward -> sample

Everything is queued on one stream, in order, and nothing is read back, so a step can be launched while the one before
it runs: sampled tokens stay on the device (one per row of the block table) and are the next step's inputs. A step in
which every sequence decodes is the replay of a CUDA graph; one with prefill chunks runs the same layers launch by
launch.

Without a GPU it runs under Triton's interpreter, launch by launch: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.engine.device_plan import NOBODY, DevicePlan, PageOp, Tables, most_items
from isthmus.engine.device_sampler import DeviceSampler, Drawn, Scored, greedy, is_plain, score_later
from isthmus.engine.graphs import DecodeGraphs, Inputs, Outputs, lane_counts
from isthmus.engine.head import Head
from isthmus.engine.packing import Layout, Packer
from isthmus.engine.step import Sampled, SampleRow, ScoreSpan, Step
from isthmus.kernels.attention import DecodeItems, PrefillTiles, Workspace, prefill_tile
from isthmus.kernels.pages import copy_pages, fill_pages, scatter, translate
from isthmus.kernels.plan import FIELDS
from isthmus.model.device_attention import DeviceBatch, GroupStep, LayerPages
from isthmus.model.layout import ModelLayout

_PROGRAMS_PER_CORE = 2  # of a decode
_ALIGN = 8  # tokens: a flat batch with prefill chunks is padded to a multiple, which matrix products like
_PACKED_BYTES = 4 << 20  # of a step's arrays that are not a graph's, before they take a copy of their own
_SCORE_BYTES = 256 << 20  # of float32 logits at a time

Sections = Mapping[str, NDArray[np.int32]]


class Results:
    """What a step will have sampled (`isthmus.engine.step.Launched`)."""

    def __init__(self, parts: Sequence[Drawn | Scored]) -> None:
        self._parts = parts

    def wait(self) -> list[Sampled]:
        """One entry per sample of the step, then one per target of its scores; waits for the device."""
        return [result for part in self._parts for result in part.results()]


class DeviceRunner:
    """Implements `isthmus.engine.step.Executor`.

    Args:
        model: built with `attn_implementation="isthmus"`, prepared by `isthmus.model.compile`, on its device.
        layout: what `isthmus.model.layout.derive` made of it.
        arena: uint8 [bytes] on the same device.
        num_ids: capacity of the id space "tokens".
        max_num_seqs: rows of the block table.
        max_model_len: tokens of the longest sequence.
        eos_token_ids: masked while `min_tokens` holds the end back.
        graphs: capture CUDA graphs for steps of decodes alone.
        poison: fill what nobody owns with NaN, at the start and at every release (for tests).
    """

    overlaps = True

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        arena: Tensor,
        num_ids: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        *,
        graphs: bool,
        poison: bool = False,
    ) -> None:
        self.model, self.layout, self.arena = model, layout, arena
        self.device = arena.device
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._groups = {group.name: group for group in layout.groups}
        self._tables = Tables.of(layout.groups, num_ids, max_num_seqs, max_model_len)
        self._sampler = DeviceSampler(eos_token_ids, layout.vocab_size, self.device)
        self._head = Head(model)
        self._poison = poison
        if poison:
            arena.fill_(0xFF)  # NaN in every dtype a page can have
        shape = {name: _shape(layout, name) for name in self._groups}
        programs = _PROGRAMS_PER_CORE * _cores(self.device)
        # Programs of a KV head, which is also how many items are worth having.
        self._targets = {name: max(1, programs // s.kv_heads) for name, s in shape.items()}
        width = next(model.parameters()).dtype.itemsize
        self._tile = {name: prefill_tile(s.group, s.k_dim, s.v_dim, width) for name, s in shape.items()}
        workspaces = {
            name: Workspace.of(
                most_items(max_num_seqs, self._targets[name], max_model_len), s.kv_heads * s.group, s.v_dim, self.device
            )
            for name, s in shape.items()
        }
        pages = {
            layer: LayerPages.of(arena, self._groups[layout.layer_group[layer]], layer)
            for layer, owner in layout.owner.items()
            if owner == layer
        }
        self._batch = DeviceBatch(layout.layer_group, layout.owner, pages, workspaces, self._targets)
        self._table = self._zeros(self._tables.size)
        self._page_tables = {name: self._zeros(max_num_seqs, self._tables.columns) for name in self._groups}
        self._last = self._zeros(max_num_seqs + 1)  # sampled last, by row; one row more for padding
        self._slots: dict[str, Tensor] = {}  # of graphs, which read them in place
        self._places: dict[int, Layout] = {}  # by lanes of a graph
        self._graphs: DecodeGraphs | None = None
        if graphs:
            sizes = lane_counts(max_num_seqs)
            self._slots = {name: self._zeros(max(sizes), dtype=torch.int64) for name in self._groups}
            self._places = {lanes: self._layout(lanes) for lanes in sizes}
        fixed = max((layout.nbytes for layout in self._places.values()), default=0)
        self._packer = Packer(self.device, fixed + _PACKED_BYTES)
        if graphs:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(self._decode, self._inputs, sizes)

    def launch(self, step: Step) -> Results:
        """Queue a step; returns before it has run."""
        plan = DevicePlan.of(step, self.layout.groups, self._tables, self._tile, self._targets)
        with torch.inference_mode():
            every = plan.decode and len(step.samples) == len(step.rows)  # one sample for each token, in order
            if self._graphs is not None and every and not step.scores:
                return self._replay(self._graphs, step, plan)
            return self._run(step, plan)

    def run(self, step: Step) -> list[Sampled]:
        """`launch` and wait."""
        return self.launch(step).wait()

    def warm_pages(self) -> None:
        """Compile what moves pages, by copying the null page of every group; page 1 must be nobody's."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        for group in self._groups.values():
            copy_pages(self.arena, group.spec.page_bytes, zero, zero + 1)

    # -- decodes alone, as a graph ----------------------------------------------------------------------------

    def _replay(self, graphs: DecodeGraphs, step: Step, plan: DevicePlan) -> Results:
        lanes = graphs.lanes(len(step.rows))
        sections = self._sections(plan, lanes)
        views = self._packer.upload(sections, self._places[lanes])
        self._prepare(plan, views, {name: slots[:lanes] for name, slots in self._slots.items()})
        outputs = graphs.replay(lanes)
        n = len(step.rows)
        return Results([self._sample(step.samples, outputs.logits[:n], outputs.tokens[:n], views["rows"])])

    def _layout(self, lanes: int) -> Layout:
        """The places of what a graph reads, in bytes."""
        sizes = dict.fromkeys(("tokens", "feed", "positions", "sequence_of"), 4 * lanes)
        for name in self._groups:
            most = most_items(lanes, self._targets[name], self._max_model_len)
            sizes |= {f"{name}.items": 4 * 8 * most, f"{name}.count": 4}
        return Layout.of(sizes)

    def _inputs(self, lanes: int) -> Inputs:
        """What the graph of so many lanes reads, holding a step of padding."""
        items = {f"{name}.items": _padding_items(0, lanes) for name in self._groups}
        counts = {f"{name}.count": _array([lanes]) for name in self._groups}
        lane = {"tokens": np.zeros(lanes, np.int32), "positions": np.zeros(lanes, np.int32)}
        lane |= {"feed": np.full(lanes, self._max_num_seqs, np.int32), "sequence_of": np.full(lanes, NOBODY, np.int32)}
        views = self._packer.upload({**lane, **items, **counts}, self._places[lanes])
        groups = {}
        for name, slots in self._slots.items():
            slots.fill_(NOBODY)
            groups[name] = GroupStep(slots[:lanes], self._page_tables[name], _items(views, name), None)
        return Inputs(views["tokens"], views["feed"], views["positions"], groups)

    def _decode(self, inputs: Inputs) -> Outputs:
        self._batch.step, self._batch.live = inputs.groups, len(inputs.tokens)
        logits = self._head(self._hidden(inputs.tokens, inputs.feed, inputs.positions))
        tokens = greedy(logits, self.layout.vocab_size)
        scatter(self._last, inputs.feed, tokens, len(tokens))
        return Outputs(logits, tokens)

    # -- anything, launch by launch ---------------------------------------------------------------------------

    def _run(self, step: Step, plan: DevicePlan) -> Results:
        lanes = -(-len(step.tokens) // _ALIGN) * _ALIGN
        wanted = _array([sample.index for sample in step.samples])
        views = self._packer.upload({**self._sections(plan, lanes), "wanted": wanted})
        slots = {name: torch.empty(lanes, dtype=torch.int64, device=self.device) for name in self._groups}
        self._prepare(plan, views, slots)
        self._batch.step = {
            name: GroupStep(slots[name], self._page_tables[name], _items(views, name), self._tiles(views, name))
            for name in self._groups
        }
        self._batch.live = len(step.tokens)
        hidden = self._hidden(views["tokens"], views["feed"], views["positions"])
        scores = self._scores(step.scores, hidden)
        if not step.samples:
            return Results(scores)
        logits = self._head(hidden.index_select(0, views["wanted"]))
        tokens = greedy(logits, self.layout.vocab_size)
        rows = views["rows"].index_select(0, views["sequence_of"].index_select(0, views["wanted"]))
        scatter(self._last, rows, tokens, len(tokens))
        return Results([self._sample(step.samples, logits, tokens, rows), *scores])

    # -- shared by both ---------------------------------------------------------------------------------------

    def _sections(self, plan: DevicePlan, lanes: int) -> dict[str, NDArray[np.int32]]:
        """What is uploaded, flat arrays by name, the token arrays padded to so many lanes."""
        more = lanes - len(plan.tokens)
        sections = {
            "tokens": _pad(plan.tokens, more, 0),
            "feed": _pad(plan.rows[plan.sequence_of], more, self._max_num_seqs),
            "positions": _pad(plan.positions, more, 0),
            "sequence_of": _pad(plan.sequence_of, more, NOBODY),
            "rows": plan.rows,
            "index": plan.index,
            "value": plan.value,
        }
        for name, group in plan.groups.items():
            sections |= {f"{name}.first": group.first, f"{name}.end": group.end}
            if group.items is not None:
                items = group.items
                if plan.decode and more:  # lanes of a graph must write their rows too
                    items = np.concatenate((items, _padding_items(len(plan.tokens), lanes)))
                sections |= {f"{name}.items": items, f"{name}.count": _array([len(items)])}
            if group.tiles is not None:
                sections[f"{name}.tiles"] = group.tiles
        for i, op in enumerate(plan.pages):
            sections[f"source{i}"] = op.source
            if op.destination is not None:
                sections[f"destination{i}"] = op.destination
        return sections

    def _prepare(self, plan: DevicePlan, views: Mapping[str, Tensor], slots: Mapping[str, Tensor]) -> None:
        """Bring arena and tables to where the planner is, and make this step's ids physical."""
        for i, op in enumerate(plan.pages):
            self._apply(op, views, i)
        scatter(self._table, views["index"], views["value"], len(plan.index))
        for name, group in plan.groups.items():
            translate(
                self._table,
                views["rows"],
                views[f"{name}.first"],
                views[f"{name}.end"],
                views["sequence_of"],
                views["positions"],
                self._page_tables[name],
                slots[name],
                table_at=self._tables.at[name],
                table_size=self._tables.num_ids + 1,
                blocks_at=0,
                block_columns=self._tables.columns,
                page_size=self._tables.page_size,
                columns=int((group.end - group.first).max()),
            )

    def _apply(self, op: PageOp, views: Mapping[str, Tensor], i: int) -> None:
        page_bytes = self._groups[op.group].spec.page_bytes
        if op.destination is not None:
            copy_pages(self.arena, page_bytes, views[f"source{i}"], views[f"destination{i}"])
        elif self._poison:
            fill_pages(self.arena, page_bytes, views[f"source{i}"], 0xFF)

    def _hidden(self, tokens: Tensor, feed: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[T, width]` behind the last layer's norm."""
        ids = torch.where(tokens < 0, self._last.index_select(0, feed), tokens).clamp_(min=0)
        hidden: Tensor = self.model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_batch=self._batch
        ).last_hidden_state
        return hidden[0]

    def _sample(self, samples: Sequence[SampleRow], logits: Tensor, tokens: Tensor, rows: Tensor) -> Drawn:
        """The samples' tokens, `tokens` being the greedy ones, which `_last` has for `rows` already."""
        if all(is_plain(sample) for sample in samples):
            return Drawn.of(tokens)
        drawn = self._sampler(logits, samples)
        scatter(self._last, rows, drawn.tokens, len(samples))
        return drawn

    def _scores(self, spans: Sequence[ScoreSpan], hidden: Tensor) -> list[Scored]:
        """By blocks of rows: logits of a whole prompt may be larger than the model."""
        rows = max(1, _SCORE_BYTES // (4 * self.layout.vocab_size))
        scored = []
        for span in spans:
            targets = span.targets.tolist()
            for i in range(0, len(targets), rows):
                block = targets[i : i + rows]
                logits = self._head(hidden[span.start + i : span.start + i + len(block)])
                scored.append(score_later(logits[:, : self.layout.vocab_size], block, [span.top] * len(block)))
        return scored

    def _tiles(self, views: Mapping[str, Tensor], name: str) -> PrefillTiles | None:
        tiles = views.get(f"{name}.tiles")
        if tiles is None:
            return None
        return PrefillTiles(tiles, self._tile[name], self._groups[name].window)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class _Shape:
    """Attention of the layers of one group; the largest of each where they differ."""

    kv_heads: int
    group: int  # query heads per key head
    k_dim: int
    v_dim: int


def _shape(layout: ModelLayout, name: str) -> _Shape:
    spec = next(group.spec for group in layout.groups if group.name == name)
    layers = [layer for layer, group in layout.layer_group.items() if group == name]
    key = [spec.part(f"{layout.owner[layer]}.k") for layer in layers]
    value = [spec.part(f"{layout.owner[layer]}.v") for layer in layers]
    kv_heads = max(part.shape[1] for part in key)
    group = max(layout.heads[layer] // part.shape[1] for layer, part in zip(layers, key, strict=True))
    k_dim, v_dim = max(part.shape[2] for part in key), max(part.shape[2] for part in value)
    return _Shape(kv_heads, group, k_dim, v_dim)


def _cores(device: torch.device) -> int:
    """Multiprocessors; a few where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _pad(values: NDArray[np.int32], more: int, value: int) -> NDArray[np.int32]:
    return np.concatenate((values, np.full(more, value, np.int32))) if more else values


def _array(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _items(views: Mapping[str, Tensor], name: str) -> DecodeItems | None:
    items = views.get(f"{name}.items")
    return None if items is None else DecodeItems(items, views[f"{name}.count"])


def _padding_items(start: int, lanes: int) -> NDArray[np.int32]:
    """Items that read nothing and write zeros to tokens [start, lanes)."""
    items = np.zeros((lanes - start, FIELDS), np.int32)
    items[:, 0] = np.arange(start, lanes)
    items[:, 6] = 1
    return items
