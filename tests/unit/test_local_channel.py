"""Messages over the socket of two processes of one machine and one user."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Thread, Timer

import pytest

from rl_safe_workers.control import local_channel
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.local_channel import Greeting, LocalChannel, LocalListener
from rl_safe_workers.errors import CommunicatorError, foreign_cause
from rl_safe_workers.foreign_errors import ForeignCause

PATIENCE_S, SHORT_S = 60.0, 0.3
NOBODY = 65534
ONE, OTHER = Greeting(ours=b"one", theirs=b"other"), Greeting(ours=b"other", theirs=b"one")
CONNECTED = """
import os, signal, sys, time
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.local_channel import Greeting, LocalChannel
channel = LocalChannel.connect(sys.argv[1], Greeting(b"one", b"other"), Deadline.after(60.0))
if len(sys.argv) > 2 and os.fork() == 0:
    time.sleep(float(sys.argv[2]))
    os._exit(0)
channel.send("here", b"", Deadline.after(60.0))
signal.pause()
"""
"""A process that connects and then does nothing more. Its child lives for so many seconds, if a number is given."""
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


def _connect_both(listener: LocalListener) -> tuple[LocalChannel, LocalChannel]:
    """Connects two sides in this process. Each waits for the other's greeting."""
    with ThreadPoolExecutor() as pool:
        connecting = pool.submit(LocalChannel.connect, listener.address, ONE, _soon())
        other = listener.accept(OTHER, _soon())
        return connecting.result(), other


@pytest.fixture
def ends() -> Iterator[tuple[LocalChannel, LocalChannel]]:
    """Both sides of a connection."""
    with LocalListener() as listener:
        one, other = _connect_both(listener)
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


def test_a_side_that_waits_learns_of_a_close_though_a_child_of_the_other_lives(ends: Ends) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE_S,))
    child.start()
    try:
        Timer(SHORT_S, ends[0].close).start()
        with pytest.raises(CommunicatorError, match="has ended or left"):
            ends[1].receive("never", Deadline.after(PATIENCE_S / 2))
    finally:
        child.kill()
        child.join()


def test_a_close_by_another_thread_ends_a_wait(ends: Ends) -> None:
    Timer(SHORT_S, ends[0].close).start()
    with pytest.raises(CommunicatorError, match="has ended or left|Bad file descriptor"):
        ends[0].receive("never", Deadline.after(PATIENCE_S / 2))


def test_a_child_leaves_the_connection_of_its_parent_open(ends: Ends) -> None:
    child = multiprocessing.get_context("fork").Process(target=ends[0].close)
    child.start()
    child.join()
    ends[0].send("still here", b"", _soon())
    assert ends[1].receive("still here", _soon()) == b""


@pytest.mark.parametrize("children", [[], [str(PATIENCE_S)]], ids=["alone", "with_a_child_that_lives"])
def test_a_killed_process_is_noticed_at_once(children: list[str]) -> None:
    with LocalListener() as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", CONNECTED, listener.address, *children], start_new_session=True
        )
        try:
            with closing(listener.accept(OTHER, _soon())) as channel:
                channel.receive("here", _soon())
                Thread(target=process.send_signal, args=(signal.SIGKILL,)).start()
                with pytest.raises(CommunicatorError, match="has ended or left"):
                    channel.receive("never", Deadline.after(PATIENCE_S / 2))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_nobody_connects_in_time() -> None:
    with LocalListener() as listener, pytest.raises(CommunicatorError, match="has not connected within 0.[3-9] s"):
        listener.accept(OTHER, Deadline.after(SHORT_S))


def test_an_address_without_a_listener_is_refused() -> None:
    with LocalListener() as listener:
        pass
    with pytest.raises(CommunicatorError, match="cannot connect .*Connection refused"):
        LocalChannel.connect(listener.address, ONE, _soon())


def test_a_process_without_the_right_greeting_is_refused_and_the_right_one_gets_in() -> None:
    with LocalListener() as listener, ThreadPoolExecutor() as pool:
        accepting = pool.submit(listener.accept, OTHER, _soon())
        with pytest.raises(CommunicatorError, match="listens where one of this run should"):
            LocalChannel.connect(listener.address, Greeting(ours=b"wrong", theirs=b"wrong"), _soon())
        with closing(LocalChannel.connect(listener.address, ONE, _soon())), closing(accepting.result()):
            pass


def test_a_silent_process_delays_a_connection_and_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_channel, "_GREETING_S", SHORT_S)
    with LocalListener() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{listener.address}")
        started_s = time.monotonic()
        one, other = _connect_both(listener)
        with closing(one), closing(other):
            assert time.monotonic() - started_s > SHORT_S * 0.9
        # It got the end of the connection, and not our greeting.
        assert silent.recv(100) == b""


def test_a_crowd_at_the_listener_delays_a_connection_and_does_not_end_it() -> None:
    with LocalListener() as listener, ExitStack() as crowd, ThreadPoolExecutor() as pool:
        strangers: list[socket.socket] = []
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                stranger = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stranger.settimeout(SHORT_S)
                stranger.connect(f"\0{listener.address}")
                strangers.append(stranger)
        connecting = pool.submit(LocalChannel.connect, listener.address, ONE, _soon())
        time.sleep(SHORT_S)
        assert not connecting.done()
        for stranger in strangers:
            stranger.close()
        with closing(listener.accept(OTHER, _soon())), closing(connecting.result()):
            pass


def test_a_channel_that_is_closed_here_is_no_loss_of_the_other_side(ends: Ends) -> None:
    ends[0].close()
    for call in (lambda: ends[0].receive("never", _soon()), lambda: ends[0].send("never", b"", _soon())):
        with pytest.raises(CommunicatorError, match="Bad file descriptor") as caught:
            call()
        assert foreign_cause(caught.value) is ForeignCause.UNKNOWN


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
                listener.accept(OTHER, Deadline.after(5.0))
            # It got the end of the connection, and not a word.
            assert stranger.communicate(timeout=PATIENCE_S)[0] == "b''\n"
        finally:
            stranger.kill()
            stranger.wait()
        one, other = _connect_both(listener)
        with closing(one), closing(other):
            other.send("welcome", b"", _soon())
            assert one.receive("welcome", _soon()) == b""


def test_a_listener_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalListener() as listener:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(CommunicatorError, match=f"a process of user {os.getuid()} listens"):
            LocalChannel.connect(listener.address, ONE, _soon())
