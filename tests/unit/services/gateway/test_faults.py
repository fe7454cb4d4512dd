"""What a refused body says."""

from __future__ import annotations

from typing import Final

import pytest

from services.gateway import faults
from services.gateway.schemas.completions import CompletionRequest
from shared.errors import InvalidRequest

PROMPTS: Final = [
    ([], "prompt", "at least 1 item"),
    ("", "prompt", "at least 1 character"),
    ([""], "prompt[0]", "at least 1 character"),
    (["a", ""], "prompt[1]", "at least 1 character"),
    (["a", 3], "prompt[1]", "valid string"),
    ([[]], "prompt[0]", "at least 1 item"),
    ([[1], "a"], "prompt[1]", "valid list"),
    ([1, "a"], "prompt[1]", "valid integer"),
    ([1, -1], "prompt[1]", "greater than or equal to 0"),
    (3, "prompt", "valid string"),
]


@pytest.mark.parametrize(("prompt", "param", "says"), PROMPTS, ids=[str(case[0]) for case in PROMPTS])
def test_fr_54_a_prompt_of_no_kind_is_told_by_the_kind_that_was_meant(
    prompt: object, param: str, says: str
) -> None:
    """Of the four spellings of a prompt, faults were told of one that nobody used: an empty text was not an integer."""
    with pytest.raises(InvalidRequest) as caught:
        faults.validate(CompletionRequest, {"model": "pocket", "prompt": prompt})
    assert caught.value.param == param
    assert says in caught.value.message
