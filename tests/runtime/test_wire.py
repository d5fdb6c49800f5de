"""Messages come out as they went in, and a mailbox keeps their order."""

import dataclasses
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpace.runtime import messages
from dualpace.runtime.channel import Channel, ChannelSize, ring, silence
from dualpace.runtime.process import FrameReader, frame
from dualpace.runtime.wire import Message, decode


def equal(a: Message, b: Message) -> bool:
    return type(a) is type(b) and all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
    )


def tokens_message(ids: list[int]) -> messages.Tokens:
    zeros = np.zeros(len(ids), np.uint8)
    tokens = np.array(ids, np.int32)
    return messages.Tokens(np.array(ids, np.int64), tokens, zeros, zeros, 0.5, len(ids))


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)
def test_round_trip(tokens: list[int], step: int, seconds: float) -> None:
    message = messages.StepDone(step, seconds, -seconds, np.array(tokens, np.int32), 7)
    encoded = message.encode()
    assert len(encoded) == message.nbytes()
    assert equal(decode(encoded), message)


@given(st.text())
def test_text_round_trip(text: str) -> None:
    assert equal(decode(messages.Phase(text).encode()), messages.Phase(text))


def test_decoded_arrays_do_not_look_into_the_buffer() -> None:
    buffer = tokens_message([1, 2, 3]).encode()
    decoded = decode(buffer)
    buffer[8:] = bytes(len(buffer) - 8)
    assert isinstance(decoded, messages.Tokens)
    assert decoded.tokens.tolist() == [1, 2, 3]


def test_a_strided_array_of_another_dtype_is_sent_by_value() -> None:
    every_other = np.arange(6, dtype=np.int64)[::2]
    decoded = decode(messages.StepDone(1, 0.0, 0.0, every_other, 0).encode())
    assert isinstance(decoded, messages.StepDone)
    assert decoded.tokens.tolist() == [0, 2, 4] and decoded.tokens.dtype == np.int32


def test_a_kind_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="kind 10 is taken"):

        class Other(Message, kind=messages.Phase.kind):
            pass


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6), st.data())
def test_frames_survive_any_cut(batches: list[list[int]], data: st.DataObject) -> None:
    stream = b"".join(bytes(frame(tokens_message(ids))) for ids in batches)
    reader, received, at = FrameReader(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        received += reader.feed(stream[at : at + size])
        at += size
    assert [m.tokens.tolist() for m in received if isinstance(m, messages.Tokens)] == batches


@pytest.fixture
def channel():
    channel = Channel.create("test channel", ChannelSize(2, 256, 3, 256))
    yield channel
    channel.close()


def test_a_mailbox_keeps_order_around_its_ring(channel: Channel) -> None:
    for start in range(0, 20, 2):
        for i in (start, start + 1):
            channel.send_down(messages.StepDropped(i))
        assert not channel.down.has_room()
        taken = [m.step for m in channel.down.take() if isinstance(m, messages.StepDropped)]
        assert taken == [start, start + 1]


def test_a_full_mailbox_and_a_message_without_room_are_bugs(channel: Channel) -> None:
    with pytest.raises(AssertionError, match="bytes"):
        channel.down.put(messages.Phase("x" * 1000))
    channel.down.put(messages.Phase("a"))
    channel.down.put(messages.Phase("b"))
    with pytest.raises(AssertionError, match="full"):
        channel.down.put(messages.Phase("c"))


def test_a_reset_mailbox_is_empty(channel: Channel) -> None:
    channel.down.put(messages.Phase("a"))
    channel.down.reset()
    assert list(channel.down.take()) == [] and channel.down.has_room()


def test_rings_add_up_and_one_silence_answers_them(channel: Channel) -> None:
    ring(channel.bell_up)
    ring(channel.bell_up)
    silence(channel.bell_up)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(channel.bell_up)
    silence(channel.bell_up)  # nobody rang: no error, no wait
    ring(channel.bell_up)
    assert os.eventfd_read(channel.bell_up) == 1
