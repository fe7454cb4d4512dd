"""Text is exact, however the tokens were cut into bursts and the prompt into strings."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.choice import ChoiceText
from services.gateway.detokenize import Detokenizer
from services.gateway.model import load_model
from services.gateway.parsers.assistant import AssistantParser
from services.gateway.parsers.events import Content, Event, ToolCall
from services.gateway.shield import Shield
from services.gateway.stops import StopMatcher
from shared.config import POCKET
from shared.control import TOOLS
from tests.text_kit import feed

MODEL = load_model("pocket", POCKET)
VOCABULARY = MODEL.vocabulary
ORACLE = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
TEXTS = [
    "Pepe ❤️🐈 한국어",
    '"quoted" words’',
    "naïve café",
    "日本語のテキスト",
    "\u200d👩‍👩‍👧",
    "plain words, 123",
    "\n\n\n\n",
]

some = settings(deadline=None, max_examples=60)
any_tokens = st.lists(st.integers(0, VOCABULARY.size - 1), max_size=40)
plain_tokens = st.lists(st.integers(9, VOCABULARY.size - 1), max_size=40)
control_texts = st.sampled_from(sorted(VOCABULARY.control.ids))
pieces_of_control = control_texts.flatmap(lambda text: st.integers(1, len(text)).map(lambda cut: text[:cut]))
ends_of_control = control_texts.flatmap(
    lambda text: st.integers(0, len(text) - 1).map(lambda cut: text[cut:])
)
hostile = st.lists(
    st.one_of(
        st.text(max_size=4),
        st.text("\ue0f0\ue0f1:0<|>", max_size=3),
        control_texts,
        pieces_of_control,
        ends_of_control,
    ),
    max_size=5,
).map("".join)


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`tokens` in bursts of the given sizes, the rest as one."""
    bursts, begin = [], 0
    for size in sizes:
        bursts.append(tokens[begin : begin + size])
        begin += size
    return [*bursts, tokens[begin:]]


@some
@given(any_tokens)
def test_fr_30_fr_32_deltas_join_to_the_decoding_of_all(tokens: list[int]) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    text = "".join(detokenizer.feed(token).text for token in tokens) + detokenizer.finish()
    assert text == ORACLE.decode(tokens, skip_special_tokens=True)


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 3), max_size=20))
@some
def test_fr_32_no_replacement_character_in_good_text(text: str, sizes: list[int]) -> None:
    tokens = VOCABULARY.encode(VOCABULARY.control.split(text))
    choice = _choice()
    deltas = [event for burst in cut(tokens, sizes) for event in feed(choice, burst)]
    deltas += choice.finish()
    assert _content(deltas) == text
    assert all("\ufffd" not in event.text for event in deltas if isinstance(event, Content))


@some
@given(
    any_tokens,
    st.lists(st.integers(1, 5), max_size=8),
    st.lists(st.sampled_from(["a", "e ", "\n", "th", "�"])),
)
def test_every_cut_into_bursts_gives_the_same_events(
    tokens: list[int], sizes: list[int], stops: list[str]
) -> None:
    outcomes = []
    for bursts in (cut(tokens, sizes), [tokens], [[token] for token in tokens]):
        choice = _choice(stops=stops, tools=True)
        events = [event for burst in bursts for event in feed(choice, burst)] + choice.finish()
        delivered = [(item.token, item.begin, item.end) for item in choice.take_delivered()]
        calls = [event for event in events if isinstance(event, ToolCall)]
        outcomes.append((_content(events), calls, delivered, choice.stop_offset))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@some
@given(plain_tokens, st.lists(st.text("ab e\nt", min_size=1, max_size=3), min_size=1, max_size=3))
def test_fr_27_text_ends_before_the_first_complete_stop(tokens: list[int], stops: list[str]) -> None:
    choice = _choice(stops=stops)
    text = _content(feed(choice, tokens) + choice.finish())
    whole = ORACLE.decode(tokens)
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    assert text == (whole[: min(ends)[1]] if ends else whole)
    kept = [item for item in choice.take_delivered() if item.begin < item.end]
    assert all(item.begin < len(text) for item in kept)


@some
@given(
    st.text("ab", max_size=12),
    st.lists(st.integers(1, 3), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4)),
)
def test_stop_matching_does_not_depend_on_the_cut(text: str, sizes: list[int], stops: list[str]) -> None:
    def run(parts: Sequence[Sequence[object]]) -> str:
        matcher, shown = StopMatcher(stops), ""
        for part in parts:
            released = matcher.feed("".join(map(str, part)))
            shown += released.text
            if released.stopped:
                return shown
        return shown + matcher.flush()

    characters = list(text)
    assert run(cut(characters, sizes)) == run([characters])  # type: ignore[arg-type]


@some
@given(st.lists(hostile, min_size=1, max_size=4), st.text(max_size=5))
def test_callers_text_never_becomes_a_control_token(strings: list[str], between: str) -> None:
    between = "".join(character for character in between if character not in "<|>\ue0f0\ue0f1")
    shield = Shield(VOCABULARY.control)
    covered = [str(shield.cover(text)) for text in strings]
    rendered = "<|im_start|>" + between.join(covered) + "<|im_end|>"
    segments = shield.uncover(rendered)
    assert [segment.token for segment in segments if segment.token is not None] == [1, 2]
    assert (
        "".join(segment.text for segment in segments) == "<|im_start|>" + between.join(strings) + "<|im_end|>"
    )


@some
@given(st.text(max_size=30))
def test_plain_text_is_encoded_as_the_tokenizer_does(text: str) -> None:
    if any(control in text for control in VOCABULARY.control.ids):
        return
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n"
    ours = VOCABULARY.encode(VOCABULARY.control.split(rendered))
    assert ours == ORACLE.encode(rendered, add_special_tokens=False).ids


def _choice(*, stops: Sequence[str] = (), tools: bool = False) -> ChoiceText:
    parser = AssistantParser(markers=TOOLS if tools else frozenset())
    return ChoiceText(VOCABULARY, stops=stops, min_tokens=0, parser=parser)


def _content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))
