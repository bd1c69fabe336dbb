"""The executor that runs a model out of one arena on a GPU.

    launch(step) = plan on the host -> one upload -> page moves -> table writes -> translate -> forward -> sample

Everything is queued on one stream, in order, and nothing is read back, so a step can be launched while the one before
it runs: sampled tokens stay on the device (one per row of the block table) and are the next step's inputs. From the
table writes to the forward a step is one call, which CUDA graphs hold. Where every sequence decodes greedy sampling is
part of the graph; in other steps what follows the layers is launched.

Without a GPU it runs under Triton's interpreter, launch by launch: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from isthmus.engine.chunk_places import ChunkPlaces
from isthmus.engine.device_plan import NOBODY, DevicePlan, PageOp, StatePlan, Tables, most_items, most_tiles
from isthmus.engine.device_sampler import DeviceSampler, Drawn, Scored, greedy, score_later
from isthmus.engine.grains import attention_shapes, grain_of, parts_of
from isthmus.engine.graphs import Graphs, Inputs
from isthmus.engine.head import Head
from isthmus.engine.packing import Layout, Packer
from isthmus.engine.padding import ALIGN, padded_items, padding_tiles
from isthmus.engine.samples import indices_of
from isthmus.engine.step import Result, Results, ScoreSpan, Step
from isthmus.kernels.attention import DecodeItems, PrefillTiles, Workspace
from isthmus.kernels.device import cores
from isthmus.kernels.pages import NOWHERE, copy_pages, fill_pages, scatter, translate
from isthmus.kernels.plan import FIELDS, most_parts
from isthmus.model.device_attention import DeviceBatch, GroupStep, LayerPages, latent_ranks
from isthmus.model.device_states import DeviceStates, StateInputs
from isthmus.model.layout import ModelLayout, decoder
from isthmus.model.mixers import mixers
from isthmus.model.state_batch import state_views

_WRITES = 1 << 11  # of table entries that a graph makes; steps with more of them, which are few, launch them
_PACKED_BYTES = 4 << 20  # of a step's arrays that are not a graph's, before they take a copy of their own
_SCORE_BYTES = 256 << 20  # of float32 logits at a time

Section: TypeAlias = NDArray[np.int32]

_ROW_BYTES = 4 * FIELDS
_NO_WORK = np.zeros((0, FIELDS), np.int32)


@dataclass(frozen=True)
class Outputs:
    """Of decodes alone; valid until the next replay of any graph."""

    logits: Tensor  # [T, >= vocab]
    tokens: Tensor  # int32 [T], greedy


class Launch:
    """Implements `isthmus.engine.step.Launched`: a step whose tokens are drawn, then scores of prompt tokens."""

    def __init__(self, drawn: Drawn | None, scored: Sequence[Scored] = ()) -> None:
        self._drawn = drawn
        self._scored = scored

    def wait(self) -> Sequence[Result]:
        """One entry per sample of the step, then one per target of its scores; waits for the device."""
        drawn = Results(np.zeros(0, np.int32)) if self._drawn is None else self._drawn.results()
        if not self._scored:
            return drawn
        return [*drawn, *(result for part in self._scored for result in part.results())]


class DeviceRunner:
    """Implements `isthmus.engine.step.Executor`.

    Args:
        model: built with `attn_implementation="isthmus"`, prepared by `isthmus.model.compile`, on its device.
        layout: what `isthmus.model.layout.derive` made of it.
        arena: uint8 [bytes] on the same device.
        num_ids: capacity of each id space (`pool.capacities`).
        max_num_seqs: rows of the block table.
        max_model_len: tokens of the longest sequence.
        eos_token_ids: masked while `min_tokens` holds the end back.
        max_num_batched_tokens: of a step.
        graphs: sizes to capture CUDA graphs of, for decodes alone (True) and for other steps (False); empty: none.
        early: kernels may begin before the one before them has ended (`isthmus.kernels.dependent`).
        poison: fill what nobody owns with NaN, at the start and at every release (for tests).
    """

    overlaps = True

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        arena: Tensor,
        num_ids: Mapping[str, int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        *,
        graphs: Mapping[bool, Sequence[int]],
        early: bool,
        poison: bool = False,
    ) -> None:
        self.model, self.layout, self.arena = model, layout, arena
        self.device = arena.device
        self._max_num_seqs = max_num_seqs
        self._groups = {group.name: group for group in layout.groups}
        self._tokens = [group.name for group in layout.groups if group.space == "tokens"]
        self._tables = Tables.of(layout.groups, num_ids, max_num_seqs, max_model_len)
        # Of the tables' entries, that of the null page of states.
        self._null_state = next((self._tables.at[g.name] for g in layout.groups if g.kind == "state"), 0)
        self._sampler = DeviceSampler(eos_token_ids, layout.vocab_size, self.device)
        self._head = Head(model)
        self._decoder = decoder(model)
        self._mixers = list(mixers(model))
        self._poison = poison
        if poison:
            arena.fill_(0xFF)  # NaN in every dtype a page can have
        ranks = latent_ranks(model)
        shapes = {name: attention_shapes(layout, name, ranks) for name in self._tokens}
        width = next(model.parameters()).dtype.itemsize
        self._grains = {name: grain_of(found, cores(self.device), width) for name, found in shapes.items()}
        lanes = max((max_num_seqs, *graphs.get(True, ())))  # of decodes, some of which no sequence ever has
        parts = [part for name in shapes for part in parts_of(shapes[name], self._grains[name], lanes, width)]
        workspace = Workspace.holding(parts, self.device)
        pages = {
            layer: LayerPages.of(arena, self._groups[layout.layer_group[layer]], layer, ranks.get(layer))
            for layer, owner in layout.owner.items()
            if owner == layer
        }
        self._batch = DeviceBatch(layout.layer_group, layout.owner, pages, workspace, early=early)
        self._early = early
        self._states = DeviceStates(state_views(arena, layout.groups))
        self._table = self._zeros(self._tables.size)
        self._page_tables = {name: self._zeros(max_num_seqs, self._tables.columns) for name in self._tokens}
        self._last = self._zeros(max_num_seqs + 1)  # sampled last, by row; one row more for padding
        self._decodes: Graphs[Outputs] | None = None
        self._mixed: Graphs[Tensor] | None = None
        self._fills = {
            "feed": max_num_seqs,
            "sequence_of": NOBODY,
            "index": NOWHERE,
        }  # of padding; 0 in what is not here
        # What graphs read in place: by decodes alone or not, and size.
        self._places = {(alone, size): self._layout(alone, size) for alone in graphs for size in graphs[alone]}
        fixed = max((layout.nbytes for layout in self._places.values()), default=0)
        self._packer = Packer(self.device, fixed + _PACKED_BYTES)
        most = max(max_num_batched_tokens + ALIGN, *(size for sizes in graphs.values() for size in sizes), 0)
        self._slots = {name: self._zeros(most, dtype=torch.int64) for name in self._tokens}
        self._lanes = torch.arange(most, device=self.device)
        if graphs:
            with torch.inference_mode():
                memory = torch.cuda.graph_pool_handle()
                if graphs.get(False):
                    self._mixed = Graphs(self._forward, partial(self._inputs, False), graphs[False], memory)
                self._decodes = Graphs(self._decode, partial(self._inputs, True), graphs[True], memory)

    def launch(self, step: Step) -> Launch:
        """Queue a step; returns before it has run."""
        plan = DevicePlan.of(step, self.layout.groups, self._tables, self._grains, self.layout.chunked)
        with torch.inference_mode():
            every = plan.decode and len(step.samples) == len(step.rows)  # one sample for each token, in order
            if self._decodes is not None and every and not step.scores:
                return self._replay(self._decodes, step, plan)
            return self._run(step, plan)

    def run(self, step: Step) -> list[Result]:
        """`launch` and wait."""
        return list(self.launch(step).wait())

    def warm_pages(self) -> None:
        """Compile what moves pages, by copying the null page of every group; page 1 must be nobody's."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        for group in self._groups.values():
            copy_pages(self.arena, group.spec.page_bytes, zero, zero + 1)

    def tables(self) -> tuple[dict[str, Section], Section]:
        """`({group: [ids + 1] physical pages}, block table [rows, columns])` after all that was launched. Waits."""
        tables, whole = self._tables, self._table.cpu().numpy()
        blocks = whole[: tables.num_rows * tables.columns].reshape(tables.num_rows, tables.columns)
        return {name: whole[at : at + tables.num_ids[name] + 1] for name, at in tables.at.items()}, blocks

    # -- decodes alone ----------------------------------------------------------------------------------------

    def _replay(self, graphs: Graphs[Outputs], step: Step, plan: DevicePlan) -> Launch:
        size, n = graphs.size(len(step.rows)), len(step.rows)
        views = self._upload(plan.padded(size), size, self._places[True, size])
        outputs = graphs.replay(size)
        if step.plain:
            return Launch(self._sampler.chosen(outputs.tokens, n))
        return Launch(self._draw(step, outputs.logits[:n], views["feed"]))

    def _decode(self, inputs: Inputs) -> Outputs:
        logits = self._head(self._forward(inputs))
        tokens = greedy(logits, self.layout.vocab_size)
        scatter(self._last, inputs.feed, tokens, len(tokens))
        return Outputs(logits, tokens)

    # -- with prefill chunks, or prompts that are scored ------------------------------------------------------

    def _run(self, step: Step, plan: DevicePlan) -> Launch:
        wanted = indices_of(step.samples)
        drawn = plan.rows[plan.sequence_of[wanted]]
        graph = self._graph_of(plan)
        if self._mixed is None or graph is None:
            size = -(-len(step.tokens) // ALIGN) * ALIGN
            plan = plan.padded(size)
            views = self._upload(plan, size, wanted=wanted, drawn=drawn)
            hidden = self._forward(self._given(views, size, plan))
        else:
            views = self._upload(plan, graph, self._places[False, graph], wanted=wanted, drawn=drawn)
            hidden = self._mixed.replay(graph)
        scores = self._scores(step.scores, hidden)
        if not step.samples:
            return Launch(None, scores)
        logits = self._head(hidden.index_select(0, views["wanted"]))
        if not step.plain:
            return Launch(self._draw(step, logits, views["drawn"]), scores)
        tokens = greedy(logits, self.layout.vocab_size)
        scatter(self._last, views["drawn"], tokens, len(tokens))
        return Launch(self._sampler.chosen(tokens), scores)

    def _graph_of(self, plan: DevicePlan) -> int | None:
        """The size of the graph that runs the step; None: none does."""
        if self._mixed is None:
            return None
        if plan.states is None:
            return self._mixed.size(len(plan.tokens))
        tokens = len(plan.tokens)
        # Padding costs less than launches, up to as many tokens again.
        sizes = (size for size in self._mixed.sizes if tokens < size <= 2 * (tokens + ALIGN))
        return next((size for size in sizes if self._chunk_places(size).hold(plan.states)), None)

    def _chunk_places(self, size: int) -> ChunkPlaces:
        return ChunkPlaces.of(size, self._max_num_seqs)

    @property
    def chunks_in_graphs(self) -> bool:
        """Can graphs run this model's steps with chunks? As far as steps were run until now."""
        return self._states.chunks_in_graphs

    # -- shared by both ---------------------------------------------------------------------------------------

    def _layout(self, alone: bool, size: int) -> Layout:
        """The places of what a graph reads, in bytes; `alone`: it is for decodes alone."""
        sequences = min(size, self._max_num_seqs)
        sizes = dict.fromkeys(("tokens", "feed", "positions", "sequence_of"), 4 * size)
        sizes |= {"end": 4 * sequences, "index": 4 * _WRITES, "value": 4 * _WRITES}
        for name in self._tokens:
            grain = self._grains[name]
            most = most_items(sequences, grain.programs) + (size - sequences if alone else 0)
            sizes |= {f"{name}.items": _ROW_BYTES * most, f"{name}.bounds": 4 * (grain.programs + 1)}
            sizes[f"{name}.first"] = 4 * sequences
            if not alone:
                sizes[f"{name}.tiles"] = _ROW_BYTES * most_tiles(size, sequences, grain)
        if not alone:
            sizes["rows"] = 4 * sequences
        if self._mixers and alone:
            sizes |= {"states.entry": 4 * size, "states.fresh": size}
        elif self._mixers:
            sizes |= self._chunk_places(size).sizes()
        return Layout.of(sizes, self._fills)

    def _inputs(self, alone: bool, size: int) -> Inputs:
        """What a graph reads, holding a step of padding."""
        places = self._places[alone, size]
        room = {name: capacity // 4 for name, (_, capacity) in places.places.items()}
        sections: dict[str, NDArray[Any]] = {name: np.zeros(n, np.int32) for name, n in room.items()}
        for name, fill in self._fills.items():
            sections[name][:] = fill
        if self._mixers and alone:
            sections["states.entry"][:] = self._null_state
            sections["states.fresh"] = np.ones(size, np.bool_)
        elif self._mixers:
            sections |= self._chunk_places(size).arrays(StatePlan.empty(self._null_state))
        return self._given(self._packer.upload(sections, places), size, None)

    def _given(self, views: Mapping[str, Tensor], size: int, plan: DevicePlan | None) -> Inputs:
        """Uploaded arrays as a forward of `size` tokens takes them; of a plan, only what it has."""
        groups, end = {}, views["end"]
        for name in self._tokens:
            items = tiles = None
            if f"{name}.items" in views and (plan is None or len(views[f"{name}.items"])):
                items = DecodeItems(views[f"{name}.items"].view(-1, FIELDS), views[f"{name}.bounds"])
            if f"{name}.tiles" in views and (plan is None or len(views[f"{name}.tiles"])):
                chunked, grain = name in self.layout.chunked, self._grains[name]
                rows, window = views[f"{name}.tiles"].view(-1, FIELDS), self._groups[name].window
                # Two launches always, so that the second is not compiled in the middle of serving.
                tiles = PrefillTiles(rows, grain.tile, most_parts(grain.tile_programs), window, chunked)
            groups[name] = GroupStep(self._slots[name][:size], self._page_tables[name], items, tiles)
        states = self._state_inputs(views, None if plan is None else plan.states) if self._mixers else None
        return Inputs(
            views["tokens"],
            views["feed"],
            views["positions"],
            views["sequence_of"],
            views["rows"] if "rows" in views else views["feed"][: len(end)],  # decodes: a token each
            views["index"],
            views["value"],
            {name: views[f"{name}.first"] for name in self._tokens},
            end,
            groups,
            states,
        )

    def _state_inputs(self, views: Mapping[str, Tensor], plan: StatePlan | None) -> StateInputs:
        """Of a plan, or of a graph."""
        entry, fresh = views["states.entry"], views["states.fresh"]
        if "states.starts" not in views:  # every sequence has one token
            lanes = self._lanes[: len(entry)]
            return StateInputs(np.arange(len(entry) + 1), entry, fresh, lanes, lanes, lanes, lanes[:0], lanes)
        where = (views[f"states.{name}"] for name in ("starts", "ends", "decodes", "chunks", "owner"))
        return StateInputs(np.zeros(0, np.int64) if plan is None else plan.query_start, entry, fresh, *where)

    def _upload(
        self, plan: DevicePlan, size: int, places: Layout | None = None, **more: Section
    ) -> Mapping[str, Tensor]:
        """Upload a step padded to `size` tokens, and move the pages that must; table writes without a place too."""
        sections = self._sections(plan, size, places)
        many = places is not None and len(plan.index) > _WRITES
        if many:
            sections |= {"index": plan.index[:0], "value": plan.index[:0], "all": plan.index, "values": plan.value}
        views = self._packer.upload(sections | more, places)
        for i, op in enumerate(plan.pages):
            self._apply(op, views, i)
        if many:
            scatter(self._table, views["all"], views["values"], len(plan.index))
        return views

    def _sections(self, plan: DevicePlan, size: int, places: Layout | None) -> dict[str, NDArray[Any]]:
        """What is uploaded, flat arrays by name. Padding reads nothing of the cache and writes nothing to it."""
        live, more = len(plan.tokens), size - len(plan.tokens)
        feed = plan.rows if plan.decode else plan.rows[plan.sequence_of]
        sections: dict[str, NDArray[Any]]
        sections = {"tokens": plan.tokens, "feed": feed, "positions": plan.positions, "sequence_of": plan.sequence_of}
        if places is None and more:  # those of a graph are filled where they lie
            sections = {name: _pad(array, more, self._fills.get(name, 0)) for name, array in sections.items()}
        sections |= {"index": plan.index, "value": plan.value, "end": plan.end}
        alone = places is not None and "rows" not in places.places  # the graph is for decodes alone
        if not alone:
            sections["rows"] = plan.rows
        for name, group in plan.groups.items():
            decodes = group.decodes
            tiles = _NO_WORK if group.tiles is None else group.tiles.tiles
            if more and alone:
                decodes = padded_items(decodes, live, size)
            elif more:
                tiles = np.concatenate((tiles, padding_tiles(live, size, self._grains[name].tile)))
            sections[f"{name}.first"] = group.first
            sections[f"{name}.items"], sections[f"{name}.bounds"] = decodes.items, decodes.bounds
            if not alone:
                sections[f"{name}.tiles"] = tiles
        if (states := plan.states) is not None and places is not None and not alone:
            sections |= self._chunk_places(size).arrays(states)
        elif states is not None:
            sections |= {"states.entry": states.entry, "states.fresh": states.fresh}
            if not plan.decode:
                sections |= {"states.starts": states.query_start[:-1], "states.ends": states.query_start[1:] - 1}
                sections |= {"states.decodes": states.decodes, "states.chunks": states.chunks}
                sections |= {"states.owner": states.owner}
        for i, op in enumerate(plan.pages):
            if op.destination is not None or self._poison:
                sections[f"source{i}"] = op.source
            if op.destination is not None:
                sections[f"destination{i}"] = op.destination
        return sections

    def _prepare(self, inputs: Inputs) -> None:
        """Bring the tables to where the planner is, and make this step's ids physical."""
        scatter(self._table, inputs.index, inputs.value, len(inputs.index))
        for name, group in inputs.groups.items():
            translate(
                self._table,
                inputs.rows,
                inputs.first[name],
                inputs.end,
                inputs.sequence_of,
                inputs.positions,
                group.page_table,
                group.slots,
                table_at=self._tables.at[name],
                table_size=self._tables.num_ids[name] + 1,
                blocks_at=0,
                block_columns=self._tables.columns,
                page_size=self._tables.page_size,
                columns=self._tables.columns,
            )

    def _apply(self, op: PageOp, views: Mapping[str, Tensor], i: int) -> None:
        page_bytes = self._groups[op.group].spec.page_bytes
        if op.destination is not None:
            copy_pages(self.arena, page_bytes, views[f"source{i}"], views[f"destination{i}"])
        elif self._poison:
            fill_pages(self.arena, page_bytes, views[f"source{i}"], 0xFF)

    def _forward(self, inputs: Inputs) -> Tensor:
        """Hidden states `[T, width]` behind the last layer's norm. Pages are where they must be."""
        self._prepare(inputs)
        self._batch.step, self._batch.positions = inputs.groups, inputs.positions
        if inputs.states is not None:
            self._states.step = inputs.states.step(self._table, early=self._early)
            for mixer in self._mixers:  # another executor may have had them
                mixer.batch = self._states
        # Ordinary launches: kernels that begin early rely on them to stand behind the tables' writes.
        last = self._last.index_select(0, inputs.feed)
        ids = torch.where(inputs.tokens < 0, last, inputs.tokens).clamp_(min=0)
        hidden: Tensor = self._decoder(
            input_ids=ids[None], position_ids=inputs.positions[None], use_cache=False, attention_batch=self._batch
        ).last_hidden_state
        return hidden[0]

    def _draw(self, step: Step, logits: Tensor, rows: Tensor) -> Drawn:
        """The samples' tokens, which their rows' next step takes in."""
        drawn = self._sampler(logits, step.samples)
        scatter(self._last, rows, drawn.tokens, len(drawn.tokens))
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

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def _pad(values: NDArray[np.int32], more: int, value: int) -> NDArray[np.int32]:
    return np.concatenate((values, np.full(more, value, np.int32))) if more else values
