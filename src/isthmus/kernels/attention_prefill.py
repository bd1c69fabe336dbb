"""Many query tokens of one sequence: tiles of queries over the cached rows in pages, then over the step's own rows.

The query heads of one KV head are packed with the queries into the rows of a tile, so K and V are read once for all
of them; TILES, SHARED and TAIL are as in `isthmus.kernels.attention_decode`. The step's own rows come from the
activations, rounded as pages would round them: how a prompt is cut into chunks changes nothing. The tiling is that of
FlashAttention-2 (Dao, 2023).
"""
# ruff: noqa: N803, PLR0912, PLR0915 - compile-time constants of kernels are in capitals; the two loops share all names
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.kernels.attention_softmax import add_block, finish, look_up, relative_scores, scores, widen
from isthmus.kernels.write_kv import to_page


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
    p_tile = p_tiles + tl.program_id(0) // units * 8
    p_pages = p_table + tl.load(p_tile) * table_stride
    chunk_start = tl.load(p_tile + 1)
    chunk_end = tl.load(p_tile + 2)
    tile_start = tl.load(p_tile + 3)
    past = tl.load(p_tile + 4)
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
    own_first = tl.maximum(chunk_start + first - past, chunk_start)
    begin = first // BLOCK_N * BLOCK_N
    b_page = look_up(p_pages, begin, first, past, PAGE_SIZE, BLOCK_N)
    for start in tl.range(begin, tl.where(first < past, past, 0), BLOCK_N):
        o_token = start + tl.arange(0, BLOCK_N)
        seen = (o_token >= first) & (o_token < past)
        # The factor VECTOR tells the compiler how wide it may load.
        page = b_page.to(tl.int64) * page_vectors * VECTOR
        b_page = look_up(p_pages, start + BLOCK_N, first, past, PAGE_SIZE, BLOCK_N)
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

    for start in tl.range(own_first, tile_end, BLOCK_N):
        o_token = start + tl.arange(0, BLOCK_N)
        seen = o_token < tile_end
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
        visible = o_token[None, :] <= o_query[:, None]
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

    b_mean = finish(b_max, b_sum, b_out, p_sinks, o_head, live, v_scale, SINKS)
    p_row = p_out + o_flat * out_token + o_head[:, None] * out_head + o_value[None, :]
    tl.store(p_row, b_mean.to(p_out.dtype.element_ty), mask=live[:, None] & value_inside)
