"""POST /v1/completions: a raw prompt or several, as text or as token ids.

A text prompt is the caller's whole prompt, so control tokens in it are control tokens. Several prompts are several
requests (`several`); `suffix` and `best_of` other than 1 are refused. With `echo` a prompt may be told, and scored, without any
completion: `max_tokens` 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.gateway.schemas.fields import GenerationFields, Items, TokenId

TextPrompt = Annotated[str, Field(min_length=1)]
IdsPrompt = Annotated[Items[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationFields):
    """A prompt to continue."""

    prompt: Annotated[
        TextPrompt
        | IdsPrompt
        | Annotated[Items[TextPrompt], Field(min_length=1)]
        | Annotated[Items[IdsPrompt], Field(min_length=1)],
        Field(union_mode="left_to_right"),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @property
    def echoes(self) -> bool:
        """Whether each choice begins with the prompt."""
        return bool(self.echo)

    @property
    def prompts(self) -> int:
        """How many there are."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return 1
        return len(self.prompt)

    def parts(self) -> list[CompletionRequest]:
        """The same request of each prompt alone."""
        if self.prompts == 1:
            return [self]
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompt]

    def single_prompt(self) -> str | list[int]:
        """The prompt of a request that has one, in whichever of the four spellings it came."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return (
            first
            if isinstance(first, str | list)
            else [part for part in self.prompt if isinstance(part, int)]
        )
