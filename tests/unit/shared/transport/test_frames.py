"""What a connection brings, however it is cut; headers as they come from the server; a listener that fails."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from shared.transport.fields import parse_headers
from shared.transport.frames import Splitter
from shared.transport.wire import Raw

OURS, FOREIGN = 7, 8
HEAD = b"NATS/1.0\r\na: b\r\n\r\n"


class _Streams(asyncio.Protocol):
    """nats-py's side."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.got.append(data)


def _read(pieces: Sequence[bytes]) -> tuple[list[Raw], bytes]:
    """What our listener heard, and what was passed on."""
    streams, heard = _Streams(), list[Raw]()
    splitter = Splitter(streams, {OURS: heard.append})
    for piece in pieces:
        splitter.data_received(piece)
    return heard, b"".join(streams.got)


def _message(sid: int, data: bytes, *, head: bytes = b"", reply: bytes = b"") -> bytes:
    begin = b"HMSG" if head else b"MSG"
    sizes = b"%d %d" % (len(head), len(head) + len(data)) if head else b"%d" % len(data)
    line = b" ".join(filter(None, (begin, b"a.b", b"%d" % sid, reply, sizes)))
    return line + b"\r\n" + head + data + b"\r\n"


frames = st.one_of(
    st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b'INFO {"a": "MSG "}\r\n', b"-ERR 'x'\r\n"]),
    st.builds(
        _message,
        st.sampled_from([OURS, FOREIGN]),
        st.sampled_from([b"", b"x", b"\r\n", b"MSG a.b 7 5\r\nPING\r\n", b"x" * 300]),
        head=st.sampled_from([b"", HEAD]),
        reply=st.sampled_from([b"", b"_INBOX.1"]),
    ),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 40), max_size=30))
def test_a_connection_may_be_cut_anywhere(sent: list[bytes], sizes: list[int]) -> None:
    whole, pieces = b"".join(sent), []
    for size in sizes:
        pieces.append(whole[:size])
        whole = whole[size:]
    heard, passed = _read([*pieces, whole])
    ours = [frame for frame in sent if b" a.b 7 " in frame.partition(b"\r\n")[0]]
    assert [_message(OURS, raw.data, head=_head(raw), reply=raw.reply.encode()) for raw in heard] == ours
    assert passed == b"".join(frame for frame in sent if frame not in ours)


def _head(raw: Raw) -> bytes:
    assert raw.headers in ({}, {"a": "b"})
    return HEAD if raw.headers else b""


class _Parsed:
    """What nats-py's own parser makes of a connection."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, bytes]] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, head: bytes) -> None:
        if sid == OURS:
            self.messages.append((subject.decode(), reply.decode(), data))

    async def _other(self, *_: object) -> None: ...

    _process_err = _process_ping = _process_pong = _process_info = _other


@settings(deadline=None, max_examples=100)
@given(st.lists(frames, max_size=6), st.integers(1, 40))
async def test_nats_py_reads_the_same(sent: list[bytes], size: int) -> None:
    whole, parsed = b"".join(sent), _Parsed()
    await Parser(parsed).parse(whole)
    heard, _ = _read([whole[at : at + size] for at in range(0, len(whole), size)])
    assert [(raw.subject, raw.reply, raw.data) for raw in heard] == parsed.messages


@pytest.mark.parametrize(
    "line",
    [
        b"MSG \r\n",
        b"MSG a.b 7\r\n",
        b"MSG a.b 7 x\r\n",
        b"MSG a.b 7 -9\r\n",
        b"MSG a.b x 2\r\n",
        b"MSG a.b 7 1 2 3\r\n",
        b"HMSG a.b 7 2\r\n",
        b"HMSG a.b 7 x 2\r\n",
        b"HMSG a.b 7 3 2\r\n",
        b"HMSG a.b 7 1 2 3 4\r\n",
        b"x" * (2 << 20),
    ],
)
def test_what_is_no_frame_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        _read([line + b"xx\r\nPING\r\n" * (line[:1] != b"x")])


async def test_a_reader_is_told_of_it_at_once_however_much_follows() -> None:
    here, there = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=here)
    streams = cast("asyncio.Protocol", writer.transport.get_protocol())
    writer.transport.set_protocol(Splitter(streams, {}))
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    there.send(b"MSG a.b 7\r\n" + b"PING\r\n" * 2000)
    async with asyncio.timeout(10):
        with pytest.raises(ProtocolError):
            await reader.read()
    writer.close()
    there.close()


def test_a_subject_that_is_no_text_harms_nobody() -> None:
    heard, _ = _read([b"MSG a.\xff 7 \xfe 1\r\nx\r\n" + _message(OURS, b"y")])
    assert [(raw.subject, raw.reply, raw.data) for raw in heard] == [
        ("a.\ufffd", "\ufffd", b"x"),
        ("a.b", "", b"y"),
    ]


def test_a_header_block_of_no_bytes_is_no_reply() -> None:
    heard, _ = _read([b"HMSG a.b 7 0 1\r\nx\r\n"])
    assert [(raw.reply, raw.data) for raw in heard] == [("", b"x")]


def test_a_large_message_is_not_copied_with_each_piece_of_it() -> None:
    whole = _message(OURS, b"x" * (8 << 20))
    pieces = [whole[at : at + 1024] for at in range(0, len(whole), 1024)]
    begun = time.process_time()
    heard, _ = _read(pieces)
    assert [len(raw.data) for raw in heard] == [8 << 20]
    assert time.process_time() - begun < 1.5  # some ms; it would be 32 GiB of copies


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"", {}),
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0\r\na: b\r\nTrace: 00-1: x\r\n\r\n", {"a": "b", "Trace": "00-1: x"}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 12\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Stream": "12"},
        ),
        ("NATS/1.0\r\nä:é\r\nno field\r\n\r\n".encode(), {"ä": "é"}),
        (b"NATS/1.0\r\na: \xff\r\n\r\n", {"a": "\ufffd"}),
    ],
)
def test_header_blocks(block: bytes, expected: dict[str, str]) -> None:
    assert parse_headers(block) == expected


def test_a_listener_that_fails_is_told_and_the_next_message_comes(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bytes] = []

    def receive(raw: Raw) -> None:
        heard.append(raw.data)
        if len(heard) == 1:
            raise ValueError("first")

    Splitter(_Streams(), {OURS: receive}).data_received(_message(OURS, b"1") + _message(OURS, b"2"))
    assert heard == [b"1", b"2"]
    assert [record.message for record in caplog.records] == ["a listener on a failed"]
