"""Layer groups come from what the modules do, and what nobody taught us is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from isthmus.errors import ModelError
from isthmus.memory.spec import ITEMSIZE
from isthmus.model import mixers
from isthmus.model.layout import ModelLayout, derive

S, F = "sliding_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def meta(model_type: str, **values: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="isthmus", dtype=torch.bfloat16).eval()


def layout(model_type: str, page_size: int = 16, dtype: str = "bfloat16", **values: Any) -> ModelLayout:
    return derive(meta(model_type, **values), page_size, dtype)


def test_gemma3_270m() -> None:
    """15 window layers and 3 full ones of one 256-wide head: 1,024 bytes a token and layer."""
    found = layout(
        "gemma3_text",
        hidden_size=640,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    full, window = found.groups
    assert (full.name, full.kind, full.window) == ("full", "append", None)
    assert (window.name, window.kind, window.window) == ("window", "window", 512)
    assert [i for i, group in found.layer_group.items() if group == "full"] == [5, 11, 17]
    assert full.spec.page_bytes == 3 * 16 * 1024
    assert window.spec.page_bytes == 15 * 16 * 1024
    assert full.spec.part("11.v").shape == (16, 1, 256)
    assert found.vocab_size == 262_208
    assert found.max_model_len == 32768


def test_gemma4_e2b_counts_owners_only() -> None:
    """35 layers, of which 15 own rows (3 full, 12 window) and 20 read those of layers 14 and 13."""
    found = layout(
        "gemma4_text",
        num_hidden_layers=35,
        layer_types=([S] * 4 + [F]) * 7,
        num_kv_shared_layers=20,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        hidden_size=64,
        intermediate_size=64,
        hidden_size_per_layer_input=8,
    )
    full, window = found.groups
    assert full.spec.token_bytes == 3 * 512 * 2 * 2
    assert window.spec.token_bytes == 12 * 256 * 2 * 2
    assert {o for i, o in found.owner.items() if i >= 15 and found.layer_group[i] == "full"} == {14}
    assert {o for i, o in found.owner.items() if i >= 15 and found.layer_group[i] == "window"} == {13}
    assert all(found.owner[i] == i for i in range(15))
    assert "and 4 that share" in found.describe()


def test_layers_that_store_what_nobody_shares_own_it() -> None:
    found = layout("gemma4_text", **SMALL, layer_types=[S, F] * 2, num_hidden_layers=4, num_kv_shared_layers=0)
    assert found.owner == {i: i for i in range(4)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_bytes_follow_the_cache_dtype_not_the_models(dtype: str) -> None:
    (group,) = layout("llama", dtype=dtype, page_size=4, **SMALL, num_hidden_layers=3).groups
    assert group.spec.page_bytes == 3 * 4 * 2 * (16 + 16) * ITEMSIZE[dtype]


def test_only_windows() -> None:
    found = layout("mistral", **SMALL, num_hidden_layers=2, sliding_window=8)
    (group,) = found.groups
    assert (group.name, group.window) == ("window", 8)


def test_several_windows_are_several_groups() -> None:
    model = meta("gemma2", **SMALL, layer_types=[S, F, S], num_hidden_layers=3, sliding_window=8)
    model.model.layers[2].self_attn.sliding_window = 4
    found = derive(model, 16, "bfloat16")
    assert [(g.name, g.window) for g in found.groups] == [("full", None), ("window4", 4), ("window8", 8)]
    assert found.layer_group == {0: "window8", 1: "full", 2: "window4"}


def test_experts_do_not_need_values() -> None:
    """Routing looks at values, which the meta device has not; the model is as before afterwards."""
    model = meta("gpt_oss", **SMALL, num_hidden_layers=2, num_local_experts=4, intermediate_size=32)
    assert len(derive(model, 16, "bfloat16").groups) == 2
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_a_real_model_gives_the_same_as_one_on_the_meta_device() -> None:
    values: dict[str, Any] = {**SMALL, "num_hidden_layers": 2, "layer_types": [S, F]}
    config = CONFIG_MAPPING["gemma3_text"](**values)
    real = AutoModelForCausalLM.from_config(config, attn_implementation="isthmus", dtype=torch.bfloat16)
    assert derive(real, 16, "bfloat16") == layout("gemma3_text", **values)


@pytest.mark.parametrize(
    ("model_type", "values", "named"),
    [
        ("qwen3_next", {}, "layer 0 of qwen3_next cannot be served: Qwen3NextGatedDeltaNet"),
        ("falcon_h1", {"num_hidden_layers": 2}, "layer 0 of falcon_h1 cannot be served: FalconH1Mixer"),
        ("mamba", {"num_hidden_layers": 2}, "layer 0 of mamba cannot be served: MambaMixer"),
        ("lfm2", {"num_hidden_layers": 3, "layer_types": [F, "conv", F]}, "layer 1 of lfm2 .* Lfm2ShortConv"),
        ("recurrent_gemma", {"num_hidden_layers": 3}, "layer 0 of recurrent_gemma cannot be served: "),
        ("deepseek_v32", {"num_hidden_layers": 2}, "layer 0 of deepseek_v32 cannot be served: "),
        ("gpt2", {}, "gpt2 has no list of 12 decoder layers"),
    ],
)
def test_what_nobody_taught_us_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, model_type: str, values: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(mixers, "MIXERS", {})
    with pytest.raises(ModelError, match=named) as caught:
        layout(model_type, **values)
    assert "\n" not in str(caught.value)


def test_attention_with_an_extra_argument_is_refused() -> None:
    """A bias we do not know would be ignored in silence."""
    model = meta("llama", **SMALL, num_hidden_layers=2)
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def biased(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, position_bias=torch.zeros(1, device="meta"), **kwargs)

    attention.forward = biased
    with pytest.raises(ModelError, match=r"layer 1 of llama .* LlamaAttention passes position_bias"):
        derive(model, 16, "bfloat16")


def test_attention_that_looks_ahead_is_refused() -> None:
    model = meta("gemma3_text", **SMALL, num_hidden_layers=2, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="Gemma3Attention is not causal"):
        derive(model, 16, "bfloat16")


def test_attention_with_a_mask_of_its_own_is_refused() -> None:
    """It says more than which tokens come later: Doge's weighs every value it masks."""
    model = meta("doge", **SMALL, num_hidden_layers=2)
    with pytest.raises(ModelError, match="DogeAttention passes attention_mask"):
        derive(model, 16, "bfloat16")


def test_a_module_that_knows_its_layer_but_is_handed_no_cache_keeps_nothing() -> None:
    found = layout("hunyuan_v1_dense", **SMALL, intermediate_size=96, num_hidden_layers=2, pad_token_id=0)
    assert [group.name for group in found.groups] == ["full"]
