"""Streams of text equal the whole decode, and stop strings are found wherever the pieces are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from isthmus.engine.detokenize import Detokenizer, StopStrings, TextDecoder, TextStream
from tests.engine.toy_tokenizers import CORPUS, byte_level, gemma, llama, metaspace, token_id

TOKENIZERS = [byte_level, llama, gemma, metaspace]


def streamed(decoder: TextDecoder, prompt: list[int], output: list[int], cuts: int, *, skip_special: bool) -> str:
    stream = TextStream(decoder, prompt, skip_special=skip_special)
    pieces = [stream.push(output[i : i + cuts]) for i in range(0, len(output), cuts)]
    return "".join(pieces) + stream.flush()


@pytest.mark.parametrize("build", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_whole_decode_of_any_tokens(build: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = build()
    # Two ids past the vocabulary: a model's head is often padded, and such tokens have no text.
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=24)
    output, skip_special = data.draw(ids), data.draw(st.booleans())
    whole = tokenizer.decode(output, skip_special_tokens=skip_special)
    cuts = data.draw(st.integers(1, 3))
    assert streamed(TextDecoder(tokenizer), [], output, cuts, skip_special=skip_special) == whole


@pytest.mark.parametrize("build", TOKENIZERS)
@settings(deadline=None)
@given(text=st.one_of(st.text(max_size=30), st.text(alphabet=CORPUS, max_size=40)), split=st.integers(0, 40))
def test_prompt_and_stream_joined_are_the_text_wherever_the_prompt_ends(
    build: Callable[[], Tokenizer], text: str, split: int
) -> None:
    tokenizer = build()
    ids = tokenizer.encode(text).ids
    prompt, output = ids[:split], ids[split:]
    decoder = TextDecoder(tokenizer)
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(ids)
    joined = before + streamed(decoder, prompt, output, 1, skip_special=True)
    if not before.endswith("\ufffd") and not (prompt and prompt[-1] in decoder.byte_tokens):
        assert joined == whole


def test_a_character_that_spans_tokens_comes_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂b").ids
    stream = TextStream(TextDecoder(tokenizer), [], skip_special=True)
    pieces = [stream.push([token]) for token in ids]
    assert len(ids) > 4
    assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]


def test_a_leading_space_survives_after_a_prompt_and_a_special_token() -> None:
    tokenizer = llama()
    the, cat, eos = (token_id(tokenizer, t) for t in ("▁the", "▁cat", "<eos>"))
    stream = TextStream(TextDecoder(tokenizer), [the], skip_special=True)
    assert [stream.push([token]) for token in (cat, eos, cat)] == [" cat", "", " cat"]


def test_an_endless_run_of_broken_bytes_is_held_and_then_told() -> None:
    tokenizer = byte_level()
    broken = tokenizer.encode("🙂").ids[-1]
    output = [broken] * 500 + tokenizer.encode("ok").ids
    assert streamed(TextDecoder(tokenizer), [], output, 1, skip_special=True) == tokenizer.decode(output)


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    include=st.booleans(),
)
def test_the_same_stop_is_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    finder, seen, hit = StopStrings(stops, include=include), "", None
    for start, end in itertools.pairwise(borders):
        piece, hit = finder.push(text[start:end])
        seen += piece
        if hit is not None:
            break
    else:
        seen += finder.flush()
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    if not ends:
        assert (seen, hit) == (text, None)
        return
    end, _, stop = min(ends)
    assert hit == stop
    assert seen == (text[:end] if include else text[: end - len(stop)])


def test_nothing_of_a_stop_string_leaks_while_it_is_possible() -> None:
    finder = StopStrings(["\n\nUser:"], include=False)
    assert finder.push("hi\n") == ("hi", None)
    assert finder.push("\nUs") == ("", None)
    assert finder.push("ed") == ("\n\nUsed", None)
    assert finder.push("\n\nUser: x") == ("", "\n\nUser:")


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(TextDecoder(tokenizer), [], stop=["cat the"])
    text, stop = "", None
    for token in tokenizer.encode("a cat the mat").ids:
        piece, stop = detokenizer.push([token])
        text += piece
        if stop:
            break
    assert (text, stop) == ("a ", "cat the")


def test_text_of_the_first_min_tokens_is_not_searched() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("xxyx").ids
    detokenizer = Detokenizer(TextDecoder(tokenizer), [], stop=["x"], min_tokens=2)
    assert detokenizer.push(ids[:3]) == ("xxy", None)
    assert detokenizer.push(ids[3:]) == ("", "x")


def test_a_held_prefix_that_never_completes_is_told_at_the_end() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(TextDecoder(tokenizer), [], stop=["cathedral"])
    assert detokenizer.push(tokenizer.encode("the cat").ids) == ("the ", None)
    assert detokenizer.finish() == ("cat", None)


def test_special_tokens_show_when_asked() -> None:
    tokenizer = byte_level()
    eos = token_id(tokenizer, "<eos>")
    for skip, want in ((True, "aa"), (False, "a<eos>a")):
        a = tokenizer.encode("a").ids
        assert streamed(TextDecoder(tokenizer), [], [*a, eos, *a], 1, skip_special=skip) == want
