"""Requests as pydantic models: every field that exists, its range, and nothing else is let in.

Fields typed `Unsupported` exist in OpenAI's API and not here; they are named so that the answer says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from isthmus.errors import ConfigError
from isthmus.params import SamplingParams

Unsupported = Annotated[None, Field(description="Not supported: refused unless it is left out or null.")]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(min_length=1)]
MAX_LOGPROBS = 20
MAX_CHOICES = 128


class Strict(BaseModel):
    """No unknown field, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """What a stream holds beside text."""

    include_usage: bool | None = None


class IsthmusOptions(Strict):
    """This server's own extras."""

    receipt: bool | None = None


class Sampling(Strict):
    """What both kinds of completion share. Names that OpenAI lacks are vLLM's."""

    model: str | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.001, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    isthmus: IsthmusOptions | None = None
    best_of: Unsupported = None
    user: Unsupported = None
    metadata: Unsupported = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"{key!r:.40} is not a token id")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only for a stream: set stream to true")
        return self

    @property
    def include_usage(self) -> bool:
        """Does the stream end with a chunk of usage?"""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_receipt(self) -> bool:
        """Does the answer hold the receipts of its requests?"""
        return bool(self.isthmus and self.isthmus.receipt)

    def sampling(self, **more: Any) -> SamplingParams:
        """As the engine takes it. ConfigError naming a parameter that does not go with the others."""
        values = {
            name: getattr(self, name)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "seed", "n", "stop", "stop_token_ids", "include_stop_str_in_output",
                "min_tokens", "ignore_eos", "skip_special_tokens",
            )
        }  # fmt: skip
        values["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None}, **more)


class FieldError(ConfigError):
    """A field that does not go with the others. `ValueError` too, so pydantic reports it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _nothing_to_generate(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "0 needs echo, or there is nothing to answer")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One text or list of ids each."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """Which function the assistant called, and with what."""

    name: str
    arguments: str  # JSON


class ToolCall(Strict):
    """A call the assistant made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool
    reasoning_content: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None

    @model_validator(mode="after")
    def _content_where_due(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise FieldError("content", f"missing in a message of role {self.role}")
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "only an assistant's message has them")
        return self

    def text(self) -> str:
        """The content, parts joined by newlines."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Function(Strict):
    """A function the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object
    strict: bool | None = None  # arguments always follow the schema here


class Tool(Strict):
    """A tool the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """The tool the model must use."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    """A schema with a name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # the answer always follows the schema here


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    service_tier: Unsupported = None
    store: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_tokens", "means the same as max_completion_tokens: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs set to true")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise FieldError("tool_choice", "needs tools")
        if not self.tools and self.parallel_tool_calls is not None:
            raise FieldError("parallel_tool_calls", "needs tools")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise FieldError("tools", "two functions have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise FieldError("tool_choice", f"there is no tool {self.tool_choice.function.name!r:.80}")
        return self


class TokenizeRequest(Strict):
    """`POST /tokenize`: a prompt, or messages by the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(BaseModel):
    """Text of token ids, special tokens included."""

    prompt: str
