"""One query token per sequence over its pages: split over the keys, merged by whoever finishes last.

There are as many programs of a KV head as run at once, and each has its items, as the host has shared them out: so one
launch serves any number of items and a captured CUDA graph serves any lengths. An item is a range of one sequence's
cached tokens. The programs of a sequence that has several leave (maximum, sum, weighted rows) in the workspace; parts
are merged in the order of their slots, whoever does it, in two levels: one program alone would need longer to read
hundreds of parts than all of them needed to make them. The split over keys is that of Flash-Decoding (Dao, Haziza,
Massa and Sizov, 2023).

Blocks begin at multiples of BLOCK_N counted from token 0, so where pages have at least BLOCK_N tokens a block lies
in one page and one page number is looked up per block.

A program's rows are the query heads of one KV head, or a tile of them where they would not fit a program's registers:
GROUP heads of each of UNITS = KV_HEADS * TILES. Products take BLOCK_M rows, sixteen at least; merging takes BLOCK_R.
Where values are the first elements of the keys (SHARED) they are loaded once; the TAIL elements of a key behind them
are a product of their own.

Rows of FP8 are read as words of two numbers, and all sizes of rows are in words then: matrix units take pairs of tokens
of a value, which shared memory hands out by 16 bits and not by 8. So there are two products of half the width. They are
in fp16, if queries have 16 bits: it holds every number of FP8, and bfloat16 is further to convert to. Queries and
weights are scaled to fit it.
"""
# ruff: noqa: N803, PLR0912, PLR0915 - compile-time constants of kernels are in capitals; the loop shares all its names
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from isthmus.kernels.arrive import arrive_last
from isthmus.kernels.attention_parts import merge_parts, store_mean, store_part
from isthmus.kernels.attention_softmax import level, look_up, numbers, relative_scores, scores, weigh
from isthmus.kernels.dependent import let_next, wait_for_previous

FAN = tl.constexpr(16)
"""Parts that one program merges."""

_LIFT = tl.constexpr(32768.0)
"""Weights are at most 1, and fp16 has more below it than above: multiplied by this for a product in fp16 they are
rounded to 2^-40, and many small ones do not vanish."""


@triton.jit
def _join_parts(
    p_to: tl.tensor,
    out_head: tl.int64,
    p_rows: tl.tensor,
    p_stats: tl.tensor,
    p_counters: tl.tensor,
    p_sinks: tl.tensor,
    base: tl.tensor,
    index: tl.tensor,
    parts: tl.tensor,
    i_head: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_out: tl.tensor,
    o_group: tl.tensor,
    o_value: tl.tensor,
    v_scale: tl.float32,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Leave part `index` of a sequence whose slots begin at `base`; merge if no other program is left to do it."""
    live = o_group < GROUP
    slot = (base + index) * UNITS + i_head
    store_part(p_rows, p_stats, slot, b_max, b_sum, b_out, o_group, o_value, live, GROUP, V_DIM)
    leader = index // FAN * FAN
    slot = (base + leader) * UNITS + i_head
    members = tl.minimum(parts - leader, FAN)
    if arrive_last(p_counters + slot, members):
        # A part is little, and nothing else is left to do while it comes.
        stages: tl.constexpr = 2 if BLOCK_R * BLOCK_V > 8192 else 3 if BLOCK_R * BLOCK_V > 2048 else 8
        o_row = tl.arange(0, BLOCK_R)
        real = o_row < GROUP
        o_head = i_head * GROUP + o_row
        p_row = p_to + o_head[:, None] * out_head + o_value[None, :]
        inside = real[:, None] & (o_value < V_DIM)[None, :]
        b_max1, b_sum1, b_out1 = merge_parts(
            p_rows, p_stats, slot, UNITS, members, o_row, o_value, real, GROUP, V_DIM, stages
        )
        if parts <= FAN:
            store_mean(p_row, b_max1, b_sum1, b_out1, p_sinks, o_head, real, inside, v_scale, SINKS)
        else:
            tl.debug_barrier()  # no thread may still be reading the slot that is overwritten
            store_part(p_rows, p_stats, slot, b_max1, b_sum1, b_out1, o_row, o_value, real, GROUP, V_DIM)
            runs = tl.cdiv(parts, FAN)
            slot = base * UNITS + i_head
            # Slot 1 of a sequence begins no run of FAN, so its counter is free to count the runs.
            if arrive_last(p_counters + slot + UNITS, runs):
                b_max2, b_sum2, b_out2 = merge_parts(
                    p_rows, p_stats, slot, FAN * UNITS, runs, o_row, o_value, real, GROUP, V_DIM, stages
                )
                store_mean(p_row, b_max2, b_sum2, b_out2, p_sinks, o_head, real, inside, v_scale, SINKS)


@triton.jit
def _item(p_items: tl.tensor, work: tl.tensor, stop: tl.tensor) -> tl.tensor:
    """A row of `plan_decode`; nothing to read if there is none."""
    p_item, there = p_items + work * 8, work < stop
    token = tl.load(p_item, mask=there, other=0)
    sequence = tl.load(p_item + 1, mask=there, other=0)
    first = tl.load(p_item + 2, mask=there, other=0)
    end = tl.load(p_item + 3, mask=there, other=0)
    base = tl.load(p_item + 4, mask=there, other=0)
    index = tl.load(p_item + 5, mask=there, other=0)
    parts = tl.load(p_item + 6, mask=there, other=0)
    last = tl.load(p_item + 7, mask=there, other=0)
    return token.to(tl.int64), sequence, first, tl.where(first < end, end, 0), base, index, parts, last


@triton.jit
def _first_pages(
    p_pages: tl.tensor, first: tl.tensor, end: tl.tensor, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Of an item's first block."""
    return look_up(p_pages, first // BLOCK_N * BLOCK_N, first, end, PAGE_SIZE, BLOCK_N)


@triton.jit(
    do_not_specialize=["p_table", "p_items", "p_bounds", "p_sinks", "p_relative", "table_stride", "page_vectors"]
)
def decode_kernel(
    p_query: tl.tensor,
    p_out: tl.tensor,
    p_key: tl.tensor,
    p_value: tl.tensor,
    p_table: tl.tensor,
    p_items: tl.tensor,
    p_bounds: tl.tensor,
    p_rows: tl.tensor,
    p_stats: tl.tensor,
    p_counters: tl.tensor,
    p_sinks: tl.tensor,
    p_relative: tl.tensor,
    scaling: tl.float32,
    softcap: tl.float32,
    v_scale: tl.float32,
    relative_token: tl.int64,
    relative_head: tl.int64,
    query_token: tl.int64,
    query_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    table_stride: tl.int64,
    page_vectors: tl.int32,
    KV_HEADS: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DISTANCES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    let_next(DEPENDENT)
    units: tl.constexpr = KV_HEADS * TILES
    each: tl.constexpr = 1 if FP8 is None else 2
    given: tl.constexpr = p_query.dtype.element_ty
    levelled: tl.constexpr = each == 2 and given != tl.float32
    dtype: tl.constexpr = tl.float16 if levelled else given
    o_group = tl.arange(0, BLOCK_M)
    o_key = tl.arange(0, BLOCK_K)
    o_tail = tl.arange(0, BLOCK_T)
    o_value = tl.arange(0, BLOCK_V)
    o_mean = tl.arange(0, BLOCK_V * each)
    live = o_group < GROUP
    key_inside = (o_key < K_DIM - TAIL)[None, :]
    value_inside = (o_value < V_DIM)[None, :]
    tail_inside = (o_tail < TAIL)[None, :]
    i_head = tl.program_id(0) % units
    p_own = p_bounds + tl.program_id(0) // units
    begin, stop = tl.load(p_own), tl.load(p_own + 1)
    token, sequence, first, end, base, index, parts, last = _item(p_items, begin, stop)
    b_page = _first_pages(p_table + sequence * table_stride, first, end, PAGE_SIZE, BLOCK_N)
    wait_for_previous(DEPENDENT)
    for work in tl.range(begin, stop):
        # The next item is asked for while this one is worked on.
        token1, sequence1, first1, end1, base1, index1, parts1, last1 = _item(p_items, work + 1, stop)
        p_pages = p_table + sequence * table_stride
        o_head = i_head * GROUP + o_group
        p_row = p_query + token * query_token + o_head[:, None] * query_head
        b_query, b_rest = (), ()
        for i in tl.static_range(each):
            p_part = p_row + (o_key * each + i)[None, :]
            b_query += (tl.load(p_part, mask=live[:, None] & key_inside, other=0.0),)  # type: ignore[assignment]
            if TAIL > 0:
                p_part = p_row + ((K_DIM - TAIL + o_tail) * each + i)[None, :]
                b_rest += (tl.load(p_part, mask=live[:, None] & tail_inside, other=0.0),)  # type: ignore[assignment]
        b_scaling = scaling
        if levelled:
            b_query, b_rest, b_power = level(b_query, b_rest, dtype)
            b_scaling = scaling * b_power[:, None]
        if DISTANCES > 0:
            p_bias = p_relative + token * relative_token + o_head[:, None] * relative_head
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_out = ()
        for _ in tl.static_range(each):
            b_out += (tl.zeros([BLOCK_M, BLOCK_V], tl.float32),)  # type: ignore[assignment]
        for start in tl.range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            o_token = start + tl.arange(0, BLOCK_N)
            seen = (o_token >= first) & (o_token < end)
            # The factor VECTOR tells the compiler how wide it may load.
            page = b_page.to(tl.int64) * page_vectors * VECTOR
            b_page = look_up(p_pages, start + BLOCK_N, first, end, PAGE_SIZE, BLOCK_N)
            b_place = o_token % PAGE_SIZE * KV_HEADS + i_head // TILES
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
            b_keys = numbers(b_key, FP8, dtype)
            b_score = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i in tl.static_range(each):
                b_score = tl.dot(b_query[i], tl.trans(b_keys[i]), b_score, input_precision=PRECISION)
            if TAIL > 0:
                b_tails = numbers(b_tail, FP8, dtype)
                for i in tl.static_range(each):
                    b_score = tl.dot(b_rest[i], tl.trans(b_tails[i]), b_score, input_precision=PRECISION)
            b_score = scores(b_score, seen[None, :], b_scaling, softcap, SOFTCAP)
            if DISTANCES > 0:
                inside = live[:, None] & seen[None, :]
                b_score += relative_scores(p_bias, (last - o_token)[None, :], inside, DISTANCES)
            b_max, b_sum, b_weight, b_decay = weigh(b_score, b_max, b_sum, True)
            b_weight = (b_weight * _LIFT if levelled else b_weight).to(dtype)
            b_values, b_more = numbers(b_value, FP8, dtype), ()
            for i in tl.static_range(each):
                b_old = b_out[i] * b_decay[:, None]
                b_more += (tl.dot(b_weight, b_values[i], b_old, input_precision=PRECISION),)  # type: ignore[assignment]
            b_out = b_more
        b_rows = b_out[0] if each == 1 else tl.interleave(b_out[0], b_out[1])  # type: ignore[misc]
        if levelled:
            b_rows *= 1 / _LIFT
        b_page = _first_pages(p_table + sequence1 * table_stride, first1, end1, PAGE_SIZE, BLOCK_N)
        p_to = p_out + token * out_token
        if parts == 1:
            p_mean = p_to + o_head[:, None] * out_head + o_mean[None, :]
            written = live[:, None] & (o_mean < V_DIM * each)[None, :]
            store_mean(p_mean, b_max, b_sum, b_rows, p_sinks, o_head, live, written, v_scale, SINKS)
        else:
            _join_parts(
                p_to,
                out_head,
                p_rows,
                p_stats,
                p_counters,
                p_sinks,
                base,
                index,
                parts,
                i_head,
                b_max,
                b_sum,
                b_rows,
                o_group,
                o_mean,
                v_scale,
                units,
                GROUP,
                V_DIM * each,
                SINKS,
                BLOCK_R,
                BLOCK_V * each,
            )
        token, sequence, first, end, base, index, parts, last = (
            token1,
            sequence1,
            first1,
            end1,
            base1,
            index1,
            parts1,
            last1,
        )
