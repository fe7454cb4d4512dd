"""The codec refuses what is not a message; roots and chains are injective; subjects cannot be widened."""

from __future__ import annotations

import re
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.protocol import chain, subjects
from shared.protocol.codec import MESSAGES, decode, decode_as, encode
from shared.protocol.messages import (
    CancelRequest,
    Frame,
    Message,
    NamespaceParts,
    Started,
    pack_tokens,
    unpack_tokens,
)
from tests.golden.protocol.examples import example

NAMES = sorted(MESSAGES)
parts = st.builds(
    NamespaceParts, fingerprint=st.text(), adapter_digest=st.text(), tenant=st.text(), salt=st.text()
)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def messages(name: str) -> st.SearchStrategy[Message]:
    return st.from_type(MESSAGES[name]).filter(lambda one: not re.search(r"\bnan\b", repr(one)))


@pytest.mark.parametrize(
    "name", ["Frame", "Started", "Terminal", "GenerateRequest", "Reserve", "LookupReply"]
)
def test_round_trip(name: str) -> None:
    @given(message=messages(name))
    @settings(deadline=None, max_examples=25)
    def check(message: Message) -> None:
        try:
            data = encode(message)
        except (OverflowError, ValueError):  # an integer beyond 64 bits has no msgpack
            return
        assert decode(data) == message
        assert decode_as(type(message), data) == message

    check()


@given(name=st.sampled_from(NAMES), at=st.integers(0, 10_000), extra=st.binary(min_size=1, max_size=8))
@settings(deadline=None, max_examples=150)
def test_trailing_and_missing_bytes_are_refused(name: str, at: int, extra: bytes) -> None:
    data = encode(example(MESSAGES[name]))
    with pytest.raises(ProtocolError):
        decode(data + extra)
    with pytest.raises(ProtocolError):
        decode(data[: at % len(data)])


@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_foreign_bytes_are_refused_in_our_words(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(name=st.sampled_from(NAMES), at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=200)
def test_a_flipped_bit_gives_another_message_or_a_refusal(name: str, at: int, bit: int) -> None:
    data = bytearray(encode(example(MESSAGES[name])))
    data[at % len(data)] ^= 1 << bit
    try:
        changed = decode(bytes(data))
    except ProtocolError:
        return
    assert changed != example(MESSAGES[name])


@pytest.mark.parametrize("name", NAMES)
def test_another_version_another_name_and_unknown_fields_are_refused(name: str) -> None:
    _, version, body = msgspec.msgpack.decode(encode(example(MESSAGES[name])))
    pack = msgspec.msgpack.encode
    assert decode(pack([name, version, body])) == example(MESSAGES[name])
    for bad in (
        [name, version + 1, body],
        [name, version - 1, body],
        [name.lower(), version, body],
        ["Reply", version, body],
        [name, version, {**body, "surprise": 1}],
        [name, version, dict(list(body.items())[1:])],
        [name, version, body, 1],
        [name, version],
        {"name": name},
    ):
        with pytest.raises(ProtocolError):
            decode(pack(bad))


def test_a_bomb_of_nested_arrays_is_refused() -> None:
    for depth in (100, 10_000, 1_000_000):
        with pytest.raises(ProtocolError):
            decode(b"\x93\xa5Frame\x01" + b"\x91" * depth + b"\x01")


def test_decode_as_names_both_kinds() -> None:
    with pytest.raises(ProtocolError, match=r"CancelRequest.*Frame"):
        decode_as(CancelRequest, encode(example(Frame)))


@given(ids=tokens)
def test_tokens_round_trip(ids: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(ids))) == ids
    assert pack_tokens(ids) == struct.pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_tokens_out_of_range_do_not_wrap(bad: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_tokens(bad)


# ---- namespaces and chains -------------------------------------------------------------------------------------------


def test_fr_80_an_adapter_is_never_a_salt() -> None:
    names = ("fingerprint", "adapter_digest", "tenant", "salt")
    roots = {
        chain.root(NamespaceParts(**{name: "COLLIDE" if name == one else "" for name in names}))
        for one in names
    }
    assert len(roots) == len(names)


@given(one=parts, other=parts)
@settings(deadline=None)
def test_c4_different_namespaces_have_different_roots(one: NamespaceParts, other: NamespaceParts) -> None:
    assert (chain.root(one) == chain.root(other)) == (one == other)


@given(text=st.text(min_size=1), cut=st.integers(0, 20), other_cut=st.integers(0, 20))
def test_c4_moving_a_border_between_parts_changes_the_root(text: str, cut: int, other_cut: int) -> None:
    def split(at: int) -> NamespaceParts:
        return NamespaceParts(fingerprint="f", adapter_digest="", tenant=text[:at], salt=text[at:])

    assert (chain.root(split(cut)) == chain.root(split(other_cut))) == (split(cut) == split(other_cut))


@given(salt=st.text(), tenants=st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_fr_84_a_salt_never_reaches_another_tenant(salt: str, tenants: list[str]) -> None:
    one, other = (
        chain.root(NamespaceParts(fingerprint="f", adapter_digest="", tenant=tenant, salt=salt))
        for tenant in tenants
    )
    assert one != other


@given(ids=tokens, more=tokens)
def test_chain_keys_of_a_prefix_are_a_prefix_of_the_keys(ids: list[int], more: list[int]) -> None:
    keys = chain.chain(b"r" * 32, ids)
    assert len(keys) == len(ids) // chain.GRID
    assert chain.chain(b"r" * 32, ids + more)[: len(keys)] == keys
    assert len(set(keys)) == len(keys)


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=192), at=st.integers(0, 191))
def test_a_changed_token_changes_every_key_from_its_block_on(ids: list[int], at: int) -> None:
    at %= len(ids) - len(ids) % chain.GRID
    changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    before, after = chain.chain(b"", ids), chain.chain(b"", changed)
    assert [one == other for one, other in zip(before, after, strict=True)] == [
        index < at // chain.GRID for index in range(len(before))
    ]


def test_fr_87_keys_are_the_same_in_every_process() -> None:
    namespace = NamespaceParts(fingerprint="f", adapter_digest="", tenant="t", salt="")
    key = chain.chain(chain.root(namespace), range(64))[0]
    assert key.hex() == "e5082471ea20652b62c06370c97988d1a5018715dfe44e3a7752fff8ab4d79ee"


# ---- subjects --------------------------------------------------------------------------------------------------------


@given(value=st.text(max_size=70))
def test_an_id_is_one_token_or_refused(value: str) -> None:
    safe = 0 < len(value) <= 64 and all(one.isascii() and (one.isalnum() or one in "_-") for one in value)
    for make in (subjects.tokens, subjects.cancel, subjects.heartbeat):
        if safe:
            assert make(value).count(".") == 1
            continue
        with pytest.raises(ProtocolError):
            make(value)


@pytest.mark.parametrize("bad", ["*", ">", "a.b", "a b", "", "a\n", "ä", "a" * 65, "a\r\nPUB x"])
def test_ids_that_would_widen_a_subject_are_refused(bad: str) -> None:
    for make in (subjects.tokens, subjects.cancel, subjects.heartbeat):
        with pytest.raises(ProtocolError):
            make(bad)
    with pytest.raises(ProtocolError):
        subjects.request_to("f" * 64, bad, "t")
    with pytest.raises(ProtocolError):
        subjects.dead("*" if bad == "*" else bad[:16] if len(bad) != 65 else "")


@given(tenant=st.text(), other=st.text())
def test_lanes_are_stable_and_each_tenant_has_its_own(tenant: str, other: str) -> None:
    assert (subjects.lane(tenant) == subjects.lane(other)) == (tenant == other)
    assert subjects.request_shared("f" * 64, "high", tenant).split(".")[3] == subjects.lane(tenant)


def test_lane_of_a_known_tenant_is_the_same_in_every_release() -> None:
    assert subjects.lane("demo") == "2a97516c354b6884"


def test_examples_are_of_their_kind() -> None:
    assert isinstance(example(Started), Started)
