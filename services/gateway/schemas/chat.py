"""POST /v1/chat/completions.

Text parts of a message are joined without a separator (FR-62). `annotations`, `audio`, `refusal` and `function_call` of
an assistant message are what an SDK sends back of an earlier answer; they are accepted and not rendered.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from services.gateway.schemas.fields import GenerationFields, Items, Json, Strict


class TextPart(Strict):
    """The only kind of part that a text model reads."""

    type: Literal["text"]
    text: str


Parts = Annotated[str | Items[TextPart] | None, Field(union_mode="left_to_right")]
RequiredParts = Annotated[str | Items[TextPart], Field(union_mode="left_to_right")]


class SystemMessage(Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: RequiredParts
    name: str | None = None


class UserMessage(Strict):
    """A user's turn; an empty one is allowed and is an empty turn."""

    role: Literal["user"]
    content: RequiredParts
    name: str | None = None


class CalledFunction(Strict):
    """`arguments` is JSON text, as the model wrote it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class CallMessage(Strict):
    """One call of an earlier assistant turn."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Parts = None
    reasoning_content: str | None = None
    tool_calls: Items[CallMessage] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Items[Json] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    """A tool's result."""

    role: Literal["tool"]
    content: RequiredParts
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ParametersShape(Strict):
    """The outermost shape of a tool's JSON schema; what is inside goes to the template as it came."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"] = "object"
    properties: dict[str, Json | bool] = Field(default_factory=dict)
    required: Items[str] = Field(default_factory=list)


class FunctionTool(Strict):
    """A function that the model may call. `strict`: the arguments follow `parameters`; else they are some object."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: ParametersShape | None = None
    strict: bool | None = None


class Tool(Strict):
    """Only functions."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Strict):
    """Which of the tools."""

    name: Annotated[str, Field(min_length=1, max_length=64)]


class NamedChoice(Strict):
    """The answer is one call of this tool."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationFields):
    """A conversation to answer. With `parallel_tool_calls` false an answer ends with its first tool call."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offers_tools(self) -> bool:
        """Whether the model is told of tools, and its calls are parsed."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def one_call(self) -> bool:
        """Whether the answer ends with its first call."""
        return self.offers_tools and self.parallel_tool_calls is False
