"""What a model does after its last layer, by itself: from hidden states to logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from isthmus.errors import ModelError
from isthmus.model.layout import decoder


class Head:
    """The model's own forward over hidden states that are given.

    Families differ in what follows the head's matrix (scaling, soft caps), so their code runs, on a shallow copy of
    the model whose body hands over what it is given. The weights are shared.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """ModelError if the body is not the model's own child."""
        body = decoder(model)
        self._body = _Given(body)
        self._model = copy.copy(model)
        self._model._modules = {name: self._body if m is body else m for name, m in model._modules.items()}
        if self._body not in self._model._modules.values():
            raise ModelError(
                f"{model.config.model_type} cannot be served: {type(model).__name__} keeps its layers inside another "
                "module than the one below its head"
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[R, width]` -> logits `[R, vocab]` in the model's dtype."""
        self._body.hidden = hidden[None]
        try:  # some families ask their input for its length
            logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        finally:
            self._body.hidden = None
        return logits[0]


class _Given(nn.Module):
    """Stands for the layers; what else the model asks them for (a multiplier of the logits) is theirs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self._asked = (body,)  # in a tuple, so that it is no part of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_asked"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden)


@dataclass
class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    """Hidden states, and None for what else a family's own output has: router logits, shared rows."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
