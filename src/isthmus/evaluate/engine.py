"""An engine in this process as the lm-evaluation-harness wants a model.

Texts become tokens as with the harness' own `hf` backend, so that the scores can be compared. All requests of a kind
are handed to the engine at once, which batches them as they fit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from isthmus.errors import ConfigError, IsthmusError, ModelError
from isthmus.llm import LLM, RequestOutput
from isthmus.params import SamplingParams

_log = logging.getLogger(__name__)

Scored: TypeAlias = tuple[Any, list[int], list[int]]
"""What it is for, the tokens before, the tokens to score."""

_SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""What a task may say of sampling besides the harness' own `until`, `max_gen_toks`, `do_sample` and `temperature`."""


class EngineLM(TemplateLM):  # type: ignore[misc]
    """One `LLM`.

    Args:
        llm: nobody else may use it meanwhile.
        chat: the harness will ask by the chat template. ModelError if there is none.
    """

    def __init__(self, llm: LLM, *, chat: bool = False) -> None:
        super().__init__()
        self.tokenizer = llm.tokenizer
        self._llm = llm
        self._context = llm.engine.scheduler.max_model_len
        if chat and not self.tokenizer.chat_template:
            raise ModelError(f"{llm.name} has no chat template: leave out --apply-chat-template")

    # -- texts and tokens -----------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts."""
        ends = (self.tokenizer.eos_token_id, *self._llm.end_token_ids)
        found = next((end for end in ends if end is not None), None)
        if found is None:
            raise ModelError(f"{self._llm.name} has no token that begins or ends a text, which the harness needs")
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """Positions of a window of a long text. The token after each is scored, and one is for the engine's output."""
        return self._context - 2

    @property
    def tokenizer_name(self) -> str:
        """Whose chat template it is."""
        return self._llm.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; by default with the special tokens that the text does not begin with itself."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; the last message is left open unless an answer is due."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    # -- requests -------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log probability of whole texts, each in windows as long as the context."""
        windows: list[Scored] = []
        ends = []
        for request in requests:
            (text,) = request.args
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        return [sum(scores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to one of the strings that end them."""
        prompts, params = [], []
        cut = 0
        for i, request in enumerate(requests):
            text, wanted = request.args
            params.append(self._params(wanted, seed=i))
            ids = self.tok_encode(text) or [self.prefix_token_id]
            room = self._context - (params[-1].max_tokens or 0)
            if room < 1:
                raise ConfigError(
                    f"a task wants {params[-1].max_tokens:,} tokens of output and max_model_len is {self._context:,}: "
                    "raise --max-model-len"
                )
            cut += len(ids) > room
            prompts.append({"prompt_token_ids": ids[-room:]})
        _warn_of_cut(cut)
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        return [_complete(output).outputs[0].text for output in outputs]

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each, the log probability of its last tokens, and whether every one of them is the most likely."""
        most = self._context - 1  # of a prompt
        prompts, counts = [], []
        cut = 0
        for _, before, scored in requests:
            if len(scored) >= most:
                raise ConfigError(
                    f"a task scores {len(scored):,} tokens at once and max_model_len is {self._context:,}: raise "
                    "--max-model-len"
                )
            cut += len(before) + len(scored) > most
            prompts.append({"prompt_token_ids": (before + scored)[-most:]})
            counts.append(len(scored))
        _warn_of_cut(cut)
        scores = [(0.0, True)] * len(prompts)

        def note(index: int, output: RequestOutput) -> None:
            if output.finished:
                scores[index] = _score(_complete(output), counts[index])
                output.prompt_logprobs = None  # those of all requests together could fill the host's memory

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        self._llm.generate(prompts, params, use_tqdm=not disable_tqdm, on_output=note)
        return scores

    def _params(self, wanted: Mapping[str, Any], seed: int) -> SamplingParams:
        """What a task's `generation_kwargs` mean. ConfigError for what the engine does not do."""
        given = dict(normalize_gen_kwargs(dict(wanted)))
        given.pop("do_sample")
        stop = [text for text in given.pop("until") if text]
        if given.pop("num_beams", 1) != 1:
            raise ConfigError("a task wants beam search, which this engine does not do")
        # A special token is no part of the text that stop strings are looked for in.
        special = self.tokenizer.get_added_vocab()
        known = {name: given.pop(name) for name in _SAMPLING if name in given}
        temperature, most = float(given.pop("temperature", 0.0)), given.pop("max_gen_toks")
        if given:
            raise ConfigError(f"a task wants {min(given)!r} of generation, which this engine does not know")
        return SamplingParams(
            temperature=temperature,
            max_tokens=most,
            stop=stop,
            stop_token_ids=[special[text] for text in stop if text in special],
            seed=seed,  # repeats of a question differ, runs of a task do not
            **known,
        )


def _complete(output: RequestOutput) -> RequestOutput:
    [only] = output.outputs
    if only.finish_reason == "abort":
        raise IsthmusError(f"a request of the evaluation ended early: {only.stop_reason}")
    return output


def _score(output: RequestOutput, count: int) -> tuple[float, bool]:
    assert output.prompt_logprobs is not None
    if count == 0:
        return 0.0, True
    pairs = zip(output.prompt_token_ids[-count:], output.prompt_logprobs[-count:], strict=True)
    entries = [entry[token] for token, entry in pairs if entry is not None]
    assert len(entries) == count, "the first token of a prompt follows nothing"
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def _warn_of_cut(count: int) -> None:
    if count:
        _log.warning("%d requests are longer than max_model_len: their contexts lose their beginnings", count)
