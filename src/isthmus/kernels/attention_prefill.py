"""Many query tokens of one sequence: tiles of queries over the cached rows in pages, then over the step's own rows.

The query heads of one KV head are packed with the queries into the rows of a tile, so K and V are read once for all
of them; TILES, SHARED and TAIL are as in `isthmus.kernels.attention_decode`. The step's own rows come from the
activations, rounded as pages would round them: how a prompt is cut into chunks changes nothing. The tiling is that of
FlashAttention-2 (Dao, 2023).

Where a step has few tiles, each with many keys in line, the host cuts the line into parts
(`isthmus.kernels.plan.split_long`). A part is a row of the plan like a whole tile, and its slot of the workspace is the
number of that row; a small kernel merges them, launched behind this one.
"""
# ruff: noqa: N803, PLR0912, PLR0915 - compile-time constants of kernels are in capitals; the two loops share all names
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.kernels.attention_parts import merge_parts, store_mean, store_part
from isthmus.kernels.attention_softmax import add_block, look_up, relative_scores, scores, widen
from isthmus.kernels.plan import ALIGN
from isthmus.kernels.write_kv import to_page

MERGED_ROWS = tl.constexpr(16)
"""Rows of a tile that a program merges at a time."""

MERGERS = 2
"""Programs for each part: together they have one go at the rows of a tile that is cut in four."""

_ALIGN = tl.constexpr(ALIGN)


@triton.jit(do_not_specialize=["p_table", "p_tiles", "p_sinks", "p_relative", "table_stride", "page_vectors", "window"])
def prefill_kernel(
    p_query: tl.tensor,
    p_out: tl.tensor,
    p_own_key: tl.tensor,
    p_own_value: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_table: tl.tensor,
    p_tiles: tl.tensor,
    p_rows: tl.tensor,
    p_stats: tl.tensor,
    p_sinks: tl.tensor,
    p_relative: tl.tensor,
    scaling: tl.float32,
    softcap: tl.float32,
    k_scale: tl.float32,
    v_scale: tl.float32,
    relative_token: tl.int64,
    relative_head: tl.int64,
    query_token: tl.int64,
    query_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    table_stride: tl.int64,
    page_vectors: tl.int32,
    window: tl.int32,
    KV_HEADS: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DISTANCES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    units: tl.constexpr = KV_HEADS * TILES
    i_head = tl.program_id(0) % units
    i_own = i_head // TILES
    i_tile = tl.program_id(0) // units
    p_tile = p_tiles + i_tile * 8
    chunk_start = tl.load(p_tile + 1)
    chunk_end = tl.load(p_tile + 2)
    tile_start = tl.load(p_tile + 3)
    if tile_start >= chunk_end:  # a graph has room for more tiles than most steps have
        return
    p_pages = p_table + tl.load(p_tile) * table_stride
    past = tl.load(p_tile + 4)
    width = tl.load(p_tile + 5)
    index = tl.load(p_tile + 6)
    parts = tl.load(p_tile + 7)  # 0: the tile is whole
    tile_end = tl.minimum(tile_start + BLOCK_Q, chunk_end)

    o_row = tl.arange(0, BLOCK_M)
    o_query = tile_start + o_row // GROUP
    o_head = i_head * GROUP + o_row % GROUP
    o_key = tl.arange(0, BLOCK_K)
    o_value = tl.arange(0, BLOCK_V)
    o_tail = tl.arange(0, BLOCK_T)
    live = o_query < tile_end
    key_inside = (o_key < K_DIM - TAIL)[None, :]
    value_inside = (o_value < V_DIM)[None, :]
    tail_inside = (o_tail < TAIL)[None, :]
    o_flat = o_query.to(tl.int64)[:, None]
    p_row = p_query + o_flat * query_token + o_head[:, None] * query_head + o_key[None, :]
    b_query = tl.load(p_row, mask=live[:, None] & key_inside, other=0.0)
    if TAIL > 0:
        p_row = p_query + o_flat * query_token + o_head[:, None] * query_head + (K_DIM - TAIL + o_tail)[None, :]
        b_rest = tl.load(p_row, mask=live[:, None] & tail_inside, other=0.0)
    if DISTANCES > 0:
        p_bias = p_relative + o_flat * relative_token + o_head[:, None] * relative_head
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # Keys are counted from the sequence's first token here, and in the flat batch below.
    first = 0
    b_first = tl.zeros([BLOCK_M], tl.int32)
    b_position = past + o_query - chunk_start
    if CHUNKED:
        first = (past + tile_start - chunk_start) // window * window
        b_first = b_position // window * window
    elif WINDOW:
        first = tl.maximum(past + tile_start - chunk_start - window + 1, 0)
        b_first = b_position - window + 1
    cut = first // _ALIGN * _ALIGN + index * width
    until = tl.where(index + 1 < parts, cut + width, past + tile_end - chunk_start)
    first = tl.maximum(first, cut)
    end = tl.minimum(until, past)
    begin = first // BLOCK_N * BLOCK_N
    b_page = look_up(p_pages, begin, first, end, PAGE_SIZE, BLOCK_N)
    for start in tl.range(begin, tl.where(first < end, end, 0), BLOCK_N):
        o_token = start + tl.arange(0, BLOCK_N)
        seen = (o_token >= first) & (o_token < end)
        # The factor VECTOR tells the compiler how wide it may load.
        page = b_page.to(tl.int64) * page_vectors * VECTOR
        b_page = look_up(p_pages, start + BLOCK_N, first, end, PAGE_SIZE, BLOCK_N)
        b_place = o_token % PAGE_SIZE * KV_HEADS + i_own
        p_block = p_key + (page + b_place * K_DIM)[:, None] + o_key[None, :]
        b_key = tl.load(p_block, mask=seen[:, None] & key_inside, other=0.0)
        if TAIL > 0:
            p_block = p_key + (page + b_place * K_DIM)[:, None] + (K_DIM - TAIL + o_tail)[None, :]
            b_tail = tl.load(p_block, mask=seen[:, None] & tail_inside, other=0.0)
        if SHARED:
            b_value = b_key
        else:
            p_block = p_value + (page + b_place * V_DIM)[:, None] + o_value[None, :]
            b_value = tl.load(p_block, mask=seen[:, None] & value_inside, other=0.0)
        visible = seen[None, :]
        if WINDOW:
            visible = visible & (o_token[None, :] >= b_first[:, None])
        b_score = tl.dot(b_query, tl.trans(widen(b_key, b_query.dtype)), input_precision=PRECISION)
        if TAIL > 0:
            b_score = tl.dot(b_rest, tl.trans(widen(b_tail, b_query.dtype)), b_score, input_precision=PRECISION)
        b_score = scores(b_score, visible, scaling * k_scale, softcap, SOFTCAP)
        if DISTANCES > 0:
            b_distance = b_position[:, None] - o_token[None, :]
            b_score += relative_scores(p_bias, b_distance, live[:, None] & visible, DISTANCES)
        b_max, b_sum, b_out = add_block(
            b_score, widen(b_value, b_query.dtype), b_max, b_sum, b_out, not WINDOW, PRECISION
        )

    own_first = chunk_start + tl.maximum(first - past, 0)
    own_end = chunk_start + until - past
    for start in tl.range(own_first, own_end, BLOCK_N):
        o_token = start + tl.arange(0, BLOCK_N)
        seen = o_token < own_end
        o_from = o_token.to(tl.int64)
        p_block = p_own_key + i_own * key_head + o_from[:, None] * key_token + o_key[None, :]
        b_key = tl.load(p_block, mask=seen[:, None] & key_inside, other=0.0)
        b_key = to_page(b_key, k_scale, p_key.dtype.element_ty, LIMIT)
        if TAIL > 0:
            p_block = p_own_key + i_own * key_head + o_from[:, None] * key_token + (K_DIM - TAIL + o_tail)[None, :]
            b_tail = tl.load(p_block, mask=seen[:, None] & tail_inside, other=0.0)
            b_tail = to_page(b_tail, k_scale, p_key.dtype.element_ty, LIMIT)
        if SHARED:
            b_value = b_key
        else:
            p_block = p_own_value + i_own * value_head + o_from[:, None] * value_token + o_value[None, :]
            b_value = tl.load(p_block, mask=seen[:, None] & value_inside, other=0.0)
            b_value = to_page(b_value, v_scale, p_value.dtype.element_ty, LIMIT)
        visible = seen[None, :] & (o_token[None, :] <= o_query[:, None])
        if WINDOW:
            visible = visible & ((past + o_token - chunk_start)[None, :] >= b_first[:, None])
        b_score = tl.dot(b_query, tl.trans(widen(b_key, b_query.dtype)), input_precision=PRECISION)
        if TAIL > 0:
            b_score = tl.dot(b_rest, tl.trans(widen(b_tail, b_query.dtype)), b_score, input_precision=PRECISION)
        b_score = scores(b_score, visible, scaling * k_scale, softcap, SOFTCAP)
        if DISTANCES > 0:
            b_distance = o_query[:, None] - o_token[None, :]
            b_score += relative_scores(p_bias, b_distance, live[:, None] & visible, DISTANCES)
        b_max, b_sum, b_out = add_block(
            b_score, widen(b_value, b_query.dtype), b_max, b_sum, b_out, not WINDOW, PRECISION
        )

    if parts > 0:
        slot = i_tile * units + i_head
        store_part(p_rows, p_stats, slot, b_max, b_sum, b_out, o_row, o_value, live, BLOCK_M, V_DIM)
    else:
        p_mean = p_out + o_flat * out_token + o_head[:, None] * out_head + o_value[None, :]
        store_mean(p_mean, b_max, b_sum, b_out, p_sinks, o_head, live, live[:, None] & value_inside, v_scale, SINKS)


@triton.jit(do_not_specialize=["p_tiles", "p_sinks"])
def merge_kernel(
    p_out: tl.tensor,
    p_tiles: tl.tensor,
    p_rows: tl.tensor,
    p_stats: tl.tensor,
    p_sinks: tl.tensor,
    v_scale: tl.float32,
    out_token: tl.int64,
    out_head: tl.int64,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    i_head = tl.program_id(0) % UNITS
    i_tile = tl.program_id(0) // UNITS
    p_tile = p_tiles + i_tile * 8
    parts = tl.load(p_tile + 7)
    if parts == 0:
        return
    tile_start = tl.load(p_tile + 3)
    index = tl.load(p_tile + 6)
    rows = tl.minimum(BLOCK_Q, tl.load(p_tile + 2) - tile_start) * GROUP
    slot = (i_tile - index) * UNITS + i_head
    o_value = tl.arange(0, BLOCK_V)
    # The programs of a tile's parts go round its rows.
    stride = tl.num_programs(1) * parts * MERGED_ROWS
    for start in tl.range((tl.program_id(1) * parts + index) * MERGED_ROWS, rows, stride):
        o_row = start + tl.arange(0, MERGED_ROWS)
        live = o_row < rows
        b_max, b_sum, b_out = merge_parts(p_rows, p_stats, slot, UNITS, parts, o_row, o_value, live, BLOCK_M, V_DIM, 3)
        o_head = i_head * GROUP + o_row % GROUP
        o_flat = (tile_start + o_row // GROUP).to(tl.int64)
        p_row = p_out + o_flat[:, None] * out_token + o_head[:, None] * out_head + o_value[None, :]
        inside = live[:, None] & (o_value < V_DIM)[None, :]
        store_mean(p_row, b_max, b_sum, b_out, p_sinks, o_head, live, inside, v_scale, SINKS)
