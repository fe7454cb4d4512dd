"""Fields that both generation endpoints share: OpenAI's own, ours, and those that are accepted and mean nothing here.

Bounds that are settings (choices, stops, ids, …) are checked in `resolve.py`, which knows the settings and the model.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from shared.protocol.messages import Priority

T = TypeVar("T")

Json = dict[str, object]
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first faulty item: a body of a million faults costs no more than one of a single one."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class Strict(BaseModel):
    """Base of every request model."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class StreamOptions(Strict):
    """`include_usage`: one last chunk with the usage. `include_obfuscation` is accepted and ignored."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SpeculationFields(Strict):
    """Drafter and most drafts a round; `{"drafter": "none"}` is plain decode, `auto` leaves it to the worker. Absent = what
    the worker runs by default."""

    drafter: Literal["auto", "none", "mtp", "block", "ngram"]
    k: Annotated[int, Field(ge=0)] | None = None


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """`schema` is followed with and without `strict`; an absent one is that of any object."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """A JSON value of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationFields(Strict):
    """Everything about how to generate, and nothing about the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Items[str] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None

    # extensions
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Items[TokenId] | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    cache: bool | None = None
    reuse: Literal["exact", "decode"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    speculation: SpeculationFields | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    # hints where the conversation goes on: they name nothing that could be read or shared
    prompt_cache_key: str | None = None
    user: str | None = None

    # accepted and ignored: they speak of the caller's own affairs
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def choices(self) -> int:
        """Choices wanted."""
        return self.n if self.n is not None else 1

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, as a tuple in either spelling."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_chunk(self) -> bool:
        """Whether the stream ends with a usage chunk (FR-50)."""
        return self.streamed and self.stream_options is not None and self.stream_options.include_usage
