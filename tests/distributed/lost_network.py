"""A process in a network namespace of its own, which loses its network while it waits at a barrier.

    unshare --user --map-root-user --net python tests/distributed/lost_network.py LOST_S

It prints the seconds of the wait after the loss, and the error.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta

from rl_safe_workers.control import connection
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import StoreLostError
from rl_safe_workers.ranks import trainer_ids
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store, serve_store

PATIENCE = timedelta(seconds=60)
SERVES = "serves"


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _serve() -> None:
    store, address, _ = serve_store("127.0.0.1", timeout=PATIENCE)
    _say(f"{address.port} {address.secret.hex()}")
    sys.stdin.read()
    del store


def main() -> None:
    """Serves a store in another process, waits for a rank that never comes, and loses the network."""
    if sys.argv[1] == SERVES:
        _serve()
        return
    connection.LOST_S = int(sys.argv[1])
    _link("up")
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__, SERVES], stdin=pipe, stdout=pipe, text=True)
    try:
        assert server.stdout is not None
        port, secret = server.stdout.readline().split()
        address = StoreAddress(host="127.0.0.1", port=int(port), secret=bytes.fromhex(secret))
        store = connect_store(address, timeout=PATIENCE)
        members = trainer_ids(range(2))
        control = ControlPlane(store, world="training world", rank=1, members=members, secret=address.secret)
        threading.Timer(1, _link, ["down"]).start()
        began_s = time.monotonic() + 1
        try:
            control.barrier("train", Deadline.after(PATIENCE))
        except StoreLostError as error:
            _say(f"{time.monotonic() - began_s:.1f} {error}")
    finally:
        server.kill()


if __name__ == "__main__":
    main()
