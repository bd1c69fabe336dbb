"""What the front and the engine process say to each other: msgpack arrays over one pair of sockets.

    front -> engine    Submit, Abort, Reset, Look
    engine -> front    Ready or Failed once, then a Report after each step and each batch of orders

A Report carries everything that happened since the last one, so that what a client sees and what the metrics say
never contradict each other.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from isthmus.params import SamplingParams


class Start(Struct):
    """First line on the engine process's standard input, as JSON. When that input closes, the process ends."""

    endpoint: str  # where the front listens
    folder: str  # private to the two; for files too large to send
    engine_args: dict[str, Any]


class Submit(Struct, array_like=True, tag="submit"):
    """Serve a request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


class Abort(Struct, array_like=True, tag="abort"):
    """End a request whose client is gone; unknown ids are those that ended meanwhile."""

    request_id: str


class Reset(Struct, array_like=True, tag="reset"):
    """Forget all cached prefixes that no request uses."""

    call: int  # answered in `Report.done`


class Look(Struct, array_like=True, tag="look"):
    """Tell what lies where and who is being served, in the next report. Sent only while somebody watches."""


class ModelInfo(Struct, array_like=True, tag="ready"):
    """What the front needs to know of the model."""

    name: str
    tokenizer_file: str  # tokenizer.json as the engine has it in memory
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]  # variables of chat templates: bos_token, eos_token, ...
    end_token_ids: list[int]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int


class Failed(Struct, array_like=True, tag="failed"):
    """The engine process ends, and why."""

    message: str  # one line
    by_user: bool  # settings or a model that the user must change


class Scored(Struct, array_like=True):
    """A token's log probability at one position."""

    token_id: int
    logprob: float
    rank: int
    text: str


class Piece(Struct, array_like=True):
    """What was added to one continuation."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[Scored]] | None = None  # per token: the chosen one, then the most likely
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Update(Struct, array_like=True):
    """What was added to one request."""

    request_id: str
    pieces: list[Piece]
    finished: bool
    cached_tokens: int
    queue_seconds: float | None = None  # until it first ran; on its first update
    prompt_logprobs: list[list[Scored] | None] | None = None  # per prompt token; on the first update
    receipt: dict[str, Any] | None = None  # on the last update


class Rejected(Struct, array_like=True):
    """A request that the engine can never serve."""

    request_id: str
    message: str


class GroupStats(Struct, array_like=True):
    """One group's region of the arena."""

    name: str
    page_bytes: int
    live_pages: int  # owned by requests
    cached_pages: int  # kept for prefixes only
    hole_pages: int
    lo_byte: int
    hi_byte: int
    moved_pages: int  # since the start
    evicted_pages: int  # since the start
    table_entries: int


class Stats(Struct, array_like=True):
    """The engine at one moment. `total = null + gap + tail + Σ page_bytes · (live + cached + hole)`."""

    running: int
    waiting: int
    total: int
    null: int
    gap: int
    tail: int
    groups: list[GroupStats]
    ids: int  # live ids of the space of tokens
    id_capacity: int
    steps: int
    preemptions: int
    refusals: int  # plans that the pool refused to steps
    graph_bytes: int  # of the device beside the arena; 0 where there are no CUDA graphs
    memory_faults: dict[str, int] = {}  # since the start, by kind; none without --check-memory
    fenced_pages: int = 0  # of all groups: live, and nobody's any more


class Cells(Struct, array_like=True):
    """A region's span in cells of `pages` pages on its own grid; their number is bounded, whatever its size."""

    name: str
    lo: int  # first page of the span
    hi: int  # one past its last
    pages: int  # of a cell; those at the frontiers may have fewer
    runs: list[int]  # by threes, low to high: equal cells in a row, live pages of each, cached pages of each


class Served(Struct, array_like=True):
    """A continuation that has not ended, and its request's receipt so far."""

    request_id: str
    index: int
    state: str
    prompt_tokens: int
    cached_tokens: int
    done_tokens: int  # that went through the model or came from the prefix cache
    output_tokens: int
    limit: int
    waited_seconds: float
    waited_for: dict[str, float]
    restorable: dict[str, int]
    known_tokens: int
    cut_by: str | None
    preemptions: int


class View(Struct, array_like=True):
    """What `Look` asks for."""

    regions: list[Cells]
    served: list[Served]  # running ones first, oldest first; not more than a screen holds
    left_out: int  # of the others


class Report(Struct, array_like=True, tag="report"):
    """Everything since the last one."""

    updates: list[Update]
    rejected: list[Rejected]
    done: list[int]  # `Reset.call`s that were carried out
    stats: Stats
    view: View | None = None  # if there was a `Look`


ToEngine: TypeAlias = Submit | Abort | Reset | Look
ToFront: TypeAlias = ModelInfo | Failed | Report

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
