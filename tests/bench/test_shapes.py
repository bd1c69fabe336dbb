"""Named shapes: what they cache is what their published numbers say, and every bench takes them for MODEL."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from isthmus.bench.shapes import as_model, write
from isthmus.engine.detokenize import TextDecoder
from isthmus.flags import Parser, add_engine_flags
from isthmus.model.layout import derive
from isthmus.model.source import build_model, resolve
from isthmus.presets import PRESETS

KV = 2 * 256 * 2  # K and V of one head of 256 in bf16
EXPECTED = {
    # (full layers, bytes a token), (window layers, bytes a token, window), parameters (the published ones: 1.0B, 3.9B)
    "gemma-3-1b": ((4, 4 * KV), (22, 22 * KV, 512), 999_885_952),
    "gemma-3-4b": ((5, 5 * 4 * KV), (29, 29 * 4 * KV, 1024), 3_880_263_168),
}


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    add_engine_flags(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shape_caches_what_its_numbers_say(name: str, tmp_path: Path) -> None:
    folder = write(PRESETS[name], tmp_path / name)
    model = build_model(
        resolve(str(folder), load_format="dummy"), torch.bfloat16, load_format="dummy", device="meta"
    )  # fmt: skip
    layout = derive(model, 16, "bfloat16")
    (full_layers, full_bytes), (window_layers, window_bytes, window), parameters = EXPECTED[name]
    groups = {group.name: group for group in layout.groups}
    assert groups["full"].spec.token_bytes == full_bytes
    assert groups["window"].spec.token_bytes == window_bytes
    assert groups["window"].window == window
    members = list(layout.layer_group.values())
    assert (members.count("full"), members.count("window")) == (full_layers, window_layers)
    assert members[:6] == ["window"] * 5 + ["full"]
    assert sum(p.numel() for p in model.parameters()) == parameters
    rope = model.config.rope_parameters
    assert rope["full_attention"]["rope_theta"] == 1e6
    assert rope["sliding_attention"]["rope_theta"] == 1e4
    assert rope["full_attention"].get("factor", 1.0) == (8.0 if name == "gemma-3-4b" else 1.0)


def test_every_id_has_a_text_and_texts_become_ids(tmp_path: Path) -> None:
    name = "gemma-3-1b"
    tokenizer = resolve(str(write(PRESETS[name], tmp_path / name)), load_format="dummy").load_tokenizer()
    decoder = TextDecoder(tokenizer)
    size = PRESETS[name].config["vocab_size"]
    assert all(decoder.exists(token) for token in (0, 3, 99, 100, size - 1))
    assert not decoder.exists(size)
    assert decoder.decode([100, size - 1]) == " 64 3ffff"
    assert decoder.decode(tokenizer("Two words\n", add_special_tokens=False).input_ids) == "Two words\n"


def test_a_shape_stands_for_a_directory_while_the_bench_runs(tmp_path: Path) -> None:
    args = parse("gemma-3-1b")
    with as_model(args):
        folder = Path(args.model)
        assert (folder.name, args.load_format) == ("gemma-3-1b", "dummy")
        assert (folder / "config.json").is_file()
    assert not folder.exists()
    (tmp_path / "x.yaml").write_text("model: gemma-3-1b\n")
    args = parse("--config", str(tmp_path / "x.yaml"))
    with as_model(args):
        assert Path(args.model).name == "gemma-3-1b"


def test_other_models_are_left_alone() -> None:
    args = parse("demo", "--pool-bytes", "1m")
    with as_model(args):
        assert args.model == "demo"
        assert not hasattr(args, "load_format")
