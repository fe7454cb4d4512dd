"""A prompt with its generation header and without, by one rendering or two: the texts are jinja's own."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.header import HERE, texts_of
from services.gateway.rendering import ChatTemplate, RenderLimits
from shared.clock import SYSTEM
from shared.config import POCKET
from shared.errors import InvalidRequest

LIMITS = RenderLimits(characters=1000, window=1000, longest=1, deadline_ns=1 << 62, clock=SYSTEM)
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
AT_ITS_END = {
    "pocket": (POCKET / "chat_template.jinja").read_text(),
    "plain": TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "nested": TURNS
    + "{%- if add_generation_prompt -%}<a>{% if messages %}{{ messages[0].role }}{% endif %}{%- endif -%}\n",
    "alone": "{% if add_generation_prompt %}<assistant>{% endif %}",
    "empty": TURNS + "{% if add_generation_prompt %}{% endif %}",
}
OTHERWISE = {
    "never": TURNS,
    "else": TURNS + "{% if add_generation_prompt %}<assistant>{% else %}<end>{% endif %}",
    "not": TURNS + "{% if not add_generation_prompt %}<end>{% endif %}",
    "twice": "{% if add_generation_prompt %}!{% endif %}"
    + TURNS
    + "{% if add_generation_prompt %}<a>{% endif %}",
    "text behind": TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}<end>",
    "set": TURNS + "{% set ask = add_generation_prompt %}{% if ask %}<a>{% endif %}",
    "in a loop": "{% for m in messages %}{% if add_generation_prompt %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("source", [*AT_ITS_END.values(), *OTHERWISE.values()], ids=[*AT_ITS_END, *OTHERWISE])
def test_both_texts_are_jinja_s_own(source: str) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain = environment.from_string(source)
    expected = tuple(
        plain.render(messages=MESSAGES, add_generation_prompt=header) for header in (True, False)
    )
    template = ChatTemplate(source, {})
    assert template.render({"messages": MESSAGES}, date=SYSTEM.now(), limits=LIMITS) == expected


@pytest.mark.parametrize("source", AT_ITS_END.values(), ids=AT_ITS_END)
def test_a_header_at_the_end_is_cut_off_one_rendering(source: str) -> None:
    assert ChatTemplate(source, {})._passes == (True,)


@pytest.mark.parametrize("source", OTHERWISE.values(), ids=OTHERWISE)
def test_any_other_template_is_rendered_twice(source: str) -> None:
    assert ChatTemplate(source, {})._passes == (True, False)


def test_the_mark_counts_in_no_limit() -> None:
    template = ChatTemplate(AT_ITS_END["plain"], {})
    messages = [{"role": "user", "content": "x" * (1000 - len("<user><assistant>"))}]
    full, _ = template.render({"messages": messages}, date=SYSTEM.now(), limits=LIMITS)
    assert len(full) == 1000
    assert HERE not in full
    messages[0]["content"] += "x"
    with pytest.raises(InvalidRequest, match="at least 1001 prompt tokens"):
        template.render({"messages": messages}, date=SYSTEM.now(), limits=LIMITS)


def test_what_a_template_writes_is_known() -> None:
    source = "{% if tools %}# Tools\n{% endif %}{{ '<|im_start|>' ~ messages[0].role }}{{- 'assistant\n' -}}"
    texts = texts_of(ImmutableSandboxedEnvironment(), source)
    assert texts >= {"# Tools\n", "<|im_start|>", "assistant\n"}
