"""Messages over the socket of two processes of one machine and one user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from threading import Thread

import pytest

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.local_channel import LocalChannel, LocalListener
from rl_safe_workers.errors import CommunicatorError, foreign_cause
from rl_safe_workers.foreign_errors import ForeignCause

PATIENCE_S, SHORT_S = 60.0, 0.3
NOBODY = 65534
CONNECTED = """
import signal, sys
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.local_channel import LocalChannel
channel = LocalChannel.connect(sys.argv[1], Deadline.after(60.0))
channel.send("here", b"", Deadline.after(60.0))
signal.pause()
"""
"""A process that connects and then does nothing more."""
STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(60)
connection.connect("\\0" + sys.argv[1])
print(connection.recv(10), flush=True)
"""
"""A process of another user that connects, and prints what it gets."""


def _soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


@pytest.fixture
def ends() -> Iterator[tuple[LocalChannel, LocalChannel]]:
    """Both sides of a connection."""
    with LocalListener() as listener:
        one = LocalChannel.connect(listener.address, _soon())
        other = listener.accept(_soon())
    yield one, other
    one.close()
    other.close()


Ends = tuple[LocalChannel, LocalChannel]


def test_messages_arrive_whole_and_in_order_in_both_directions(ends: Ends) -> None:
    contents = [b"", b"\0", b"a\0b", bytes(60_000)]
    for one, other in (ends, ends[::-1]):
        for number, each in enumerate(contents):
            one.send(f"message/{number}", each, _soon())
        assert [other.receive(f"message/{n}", _soon()) for n in range(len(contents))] == contents


def test_a_message_with_another_name_is_an_error_that_names_both(ends: Ends) -> None:
    ends[0].send("read/3", b"", _soon())
    with pytest.raises(CommunicatorError, match="next message is b'read/3' and not 'filled/3'"):
        ends[1].receive("filled/3", _soon())


def test_a_message_that_is_too_long_is_not_sent(ends: Ends) -> None:
    with pytest.raises(ValueError, match="'long' has 65537 bytes"):
        ends[0].send("long", bytes(2**16 + 1 - len("long") - 1), _soon())
    ends[0].send("next", b"", _soon())
    assert ends[1].receive("next", _soon()) == b""


def test_silence_ends_with_the_deadline(ends: Ends) -> None:
    with pytest.raises(CommunicatorError, match="wait timeout after .* waiting for 'never'") as caught:
        ends[0].receive("never", Deadline.after(SHORT_S))
    assert foreign_cause(caught.value) is ForeignCause.TIMEOUT


def test_a_side_that_does_not_read_ends_the_other_s_sends(ends: Ends) -> None:
    def send() -> None:
        while True:
            ends[0].send("unread", bytes(60_000), Deadline.after(SHORT_S))

    with pytest.raises(CommunicatorError, match="wait timeout after .* sending 'unread'"):
        send()


def test_the_end_of_one_side_fails_the_other_at_once(ends: Ends) -> None:
    ends[0].close()
    ends[0].close()
    for call in (lambda: ends[1].receive("never", _soon()), lambda: ends[1].send("never", b"", _soon())):
        with pytest.raises(CommunicatorError, match="the other process has ended or left") as caught:
            call()
        assert foreign_cause(caught.value) is ForeignCause.PEER_LOST


def test_a_killed_process_is_noticed_at_once() -> None:
    with LocalListener() as listener:
        process = subprocess.Popen([sys.executable, "-c", CONNECTED, listener.address])
        try:
            with closing(listener.accept(_soon())) as channel:
                channel.receive("here", _soon())
                Thread(target=process.send_signal, args=(signal.SIGKILL,)).start()
                with pytest.raises(CommunicatorError, match="has ended or left"):
                    channel.receive("never", _soon())
        finally:
            process.kill()
            process.wait()


def test_nobody_connects_in_time() -> None:
    with LocalListener() as listener, pytest.raises(CommunicatorError, match="has not connected within 0.[3-9] s"):
        listener.accept(Deadline.after(SHORT_S))


def test_an_address_without_a_listener_is_refused() -> None:
    with LocalListener() as listener:
        pass
    with pytest.raises(CommunicatorError, match="cannot connect .*Connection refused"):
        LocalChannel.connect(listener.address, _soon())


def test_every_listener_has_an_address_of_its_own() -> None:
    with LocalListener() as one, LocalListener() as other:
        assert one.address != other.address


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_refused_and_our_own_process_gets_in() -> None:
    with LocalListener() as listener:
        stranger = subprocess.Popen(
            [sys.executable, "-c", STRANGER, listener.address, str(NOBODY)], stdout=subprocess.PIPE, text=True
        )
        try:
            with pytest.raises(CommunicatorError, match="has not connected"):
                listener.accept(Deadline.after(5.0))
            # It got the end of the connection, and not a word.
            assert stranger.communicate(timeout=PATIENCE_S)[0] == "b''\n"
        finally:
            stranger.kill()
            stranger.wait()
        with (
            closing(LocalChannel.connect(listener.address, _soon())) as one,
            closing(listener.accept(_soon())) as other,
        ):
            other.send("welcome", b"", _soon())
            assert one.receive("welcome", _soon()) == b""


def test_a_listener_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalListener() as listener:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(CommunicatorError, match=f"a process of user {os.getuid()} listens"):
            LocalChannel.connect(listener.address, _soon())
