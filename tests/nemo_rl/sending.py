"""Stands for NeMo RL's functions that send weights to the rollout (utils/packed_tensor.py)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

PLACE = "tests/nemo_rl/sending.py"


def send_weights(weights: Iterator[Any], misdeed: str | None, *, engine: str | None = None) -> int:
    """Sends each weight; after the third one, the rollout or this rank may do something of its own.

    Args:
        weights: Gathered from all ranks while they are sent.
        misdeed: ``silent``: the engine does not answer; ``fails``: it is gone; ``stops``: this rank does nothing more;
            ``dies``: this rank ends;
            ``raises``: this rank has an error of its own.
        engine: The socket of an `Engine`, which answers to each weight; None: nobody is sent anything.
    """
    sent = 0
    with ExitStack() as stack:
        connection = None
        if engine is not None:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(engine)
        for _ in weights:
            sent += 1
            if sent == 3 and misdeed is not None:
                misbehave(misdeed)
            if connection is not None:
                connection.sendall(b"w")
                if not connection.recv(1):
                    raise ConnectionError("the engine has closed the connection")
    return sent


class Engine:
    """The other end."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()

    def receive(self, misdeed: str | None) -> bool:
        """Takes weights until there are no more; after the second one, it may do something of its own."""
        connection, _ = self._listener.accept()
        taken = 0
        with connection:
            while connection.recv(1):
                taken += 1
                if taken == 3 and misdeed is not None:
                    misbehave(misdeed)
                connection.sendall(b"a")
        return taken > 0


def misbehave(misdeed: str) -> None:
    if misdeed == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if misdeed == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if misdeed == "raises":
        raise ValueError("no such expert")
    ours, theirs = socket.socketpair()
    with ours:
        if misdeed == "fails":
            theirs.close()
            raise ConnectionError("the engine has closed the connection")
        ours.recv(1)
