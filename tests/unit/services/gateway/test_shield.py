"""Control tokens are found by a search that does not grow with their number, and as the plain definition finds them."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.shield import ControlTokens, Shield

_TEXTS = st.text("<x|>y", min_size=1, max_size=5)


def _split_plainly(tokens: dict[str, int], text: str) -> list[tuple[str, int | None]]:
    """By trying every token at every place, the longest first."""
    found: list[tuple[str, int | None]] = []
    plain, place = "", 0
    while place < len(text):
        here = max((token for token in tokens if text.startswith(token, place)), key=len, default=None)
        if here is None:
            plain, place = plain + text[place], place + 1
            continue
        found += [(plain, None)] if plain else []
        found.append((here, tokens[here]))
        plain, place = "", place + len(here)
    return found + ([(plain, None)] if plain else [])


@settings(deadline=None, max_examples=300)
@given(st.lists(_TEXTS, max_size=6, unique=True), st.text("<x|>y", max_size=24))
def test_the_longest_control_token_wins_wherever_several_begin(texts: list[str], text: str) -> None:
    tokens = {token: place for place, token in enumerate(texts)}
    segments = ControlTokens(tokens).split(text)
    assert [(segment.text, segment.token) for segment in segments] == _split_plainly(tokens, text)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(_TEXTS, max_size=6, unique=True),
    st.text("<x|>y", max_size=24),
    st.text("<x|>y", max_size=4),
    st.data(),
)
def test_a_text_and_its_beginning_are_cut_as_each_alone_is(
    texts: list[str], text: str, other: str, data: st.DataObject
) -> None:
    control = ControlTokens({token: place for place, token in enumerate(texts)})
    begins = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from(["", other]))
    assert control.split_both(text, begins) == (control.split(text), control.split(begins))


@settings(deadline=None, max_examples=300)
@given(st.lists(_TEXTS, max_size=6, unique=True), st.lists(st.text("<x|>y", max_size=12), max_size=4))
def test_callers_strings_give_no_control_token_and_come_back_whole(
    texts: list[str], strings: list[str]
) -> None:
    shield = Shield(ControlTokens({token: place for place, token in enumerate(texts)}))
    covered = shield.cover(strings)
    assert isinstance(covered, list)
    for apart, string in zip(covered, strings, strict=True):
        segments = shield.uncover(apart)
        assert all(segment.token is None for segment in segments)
        assert "".join(segment.text for segment in segments) == string
    if not any(len(text) == 1 or any(text in string for string in strings) for text in texts):
        joined = shield.uncover("".join(covered[:2]))  # nor across the border of two
        assert all(segment.token is None for segment in joined)


def test_thousands_of_control_tokens_with_one_beginning_hold_nobody_up() -> None:
    """A short prompt is made on the event loop: 2,048 characters of `<` took a second of it, with 6,242 such tokens."""
    control = ControlTokens({f"<|reserved_special_token_{place}|>": place for place in range(6000)})
    for text in ("<" * 20_000, "<|reserved_special_token_1" * 800, "<|" * 10_000):
        begun = time.thread_time()
        shield = Shield(control)
        assert "".join(segment.text for segment in shield.uncover(str(shield.cover(text)))) == text
        assert time.thread_time() - begun < 1.0
