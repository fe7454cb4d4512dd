"""Headers that are parsed when somebody asks are what they would have been at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.transport.fields import Fields, clean, parse_headers
from shared.transport.wire import Raw

BLOCKS = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [
                b"NATS/1.0",
                b"NATS/1.0 404",
                b"NATS/1.0 100 Idle Heartbeat",
                b"Nats-Sequence: 3",
                b"a: b",
                b"",
                b"c",
                b" a :d ",
            ]
        ),
        max_size=6,
    ).map(b"\r\n".join),
)


@settings(deadline=None, max_examples=200)
@given(BLOCKS)
def test_a_block_reads_as_it_is_parsed(block: bytes) -> None:
    parsed, fields = parse_headers(block), Fields(block)
    assert (dict(fields), len(fields), fields.get("a"), repr(fields)) == (
        parsed,
        len(parsed),
        parsed.get("a"),
        repr(parsed),
    )
    assert clean(fields) == clean(parsed)
    assert fields == parsed
    assert Raw(subject="s", data=b"", headers=fields).status == parsed.get("Status", "")


def test_what_the_server_added_is_left_out() -> None:
    block = b"NATS/1.0\r\nNats-Msg-Id: 1\r\ntraceparent: 2\r\n\r\n"
    assert dict(clean(Fields(block))) == {"traceparent": "2"}
    assert clean({"Nats-Sequence": "1", "a": "b"}) == {"a": "b"}
