"""Log probabilities in OpenAI's two forms, where tokens share a text or have none of their own."""

from __future__ import annotations

from isthmus.server.logprobs import CompletionLogprobs, chat_logprobs
from isthmus.server.wire import Scored

ENTRY = [Scored(7, -2.0, 3, "\ufffd"), Scored(8, -0.5, 1, "a"), Scored(9, -1.0, 2, "\ufffd")]


def test_of_tokens_with_one_text_the_likeliest_stands() -> None:
    found = CompletionLogprobs(2).add([None, ENTRY, [Scored(1, -3.0, 9, "bc")]], "é")
    assert found["top_logprobs"] == [None, {"a": -0.5, "\ufffd": -1.0}, {"bc": -3.0}]
    assert found["token_logprobs"] == [None, -2.0, -3.0]
    assert found["tokens"] == ["é", "\ufffd", "bc"]
    assert found["text_offset"] == [0, 1, 2]


def test_offsets_go_on_from_piece_to_piece() -> None:
    logprobs = CompletionLogprobs(0)
    assert logprobs.add([ENTRY])["text_offset"] == [0]
    assert logprobs.add([ENTRY, ENTRY])["text_offset"] == [1, 2]


def test_a_part_of_a_character_has_no_bytes() -> None:
    (token,) = chat_logprobs([ENTRY], 1)["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("\ufffd", -2.0, None)
    assert token["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
