"""From hidden states to logits as every family does it."""

from __future__ import annotations

import pytest
import torch

from isthmus.engine.head import Head
from isthmus.errors import ModelError
from isthmus.model.layout import decoder
from tests.model.families import FAMILIES
from tests.model.harness import tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own(family: str) -> None:
    """Scaled and capped as the family has it, for any rows, in any order."""
    model_type, values = FAMILIES[family]
    if "layer_types" in values:
        values = {"num_hidden_layers": len(values["layer_types"]), **values}
    model = tiny(model_type, **values)
    tokens = torch.arange(5, 17)[None]
    with torch.inference_mode():
        wanted = model(tokens, use_cache=False).logits[0]
        hidden = decoder(model)(tokens, use_cache=False).last_hidden_state[0]
        rows = torch.tensor([11, 3, 0])
        torch.testing.assert_close(Head(model)(hidden[rows]), wanted[rows])


def test_layers_further_inside_are_refused() -> None:
    model = tiny("opt", hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ModelError, match="opt cannot be served: OPTForCausalLM keeps its layers inside another module"):
        Head(model)
