"""Runs a command with a loopback interface of its own, so that nobody meets its ports by accident.

unshare --net python -m tests.integration.own_network COMMAND ...
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    """Brings the interface up and becomes the command."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
