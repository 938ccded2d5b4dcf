"""Signs the ranks' messages in the run's store, and refuses messages that no rank of the run has signed.

TCPStore has no password: anyone at its port may write, append to and delete every key. So each message carries an
HMAC-SHA256 over its key and its contents. Keys contain the number of their operation, so nobody can replay a message of
an earlier operation in a later one.
"""

from __future__ import annotations

import hmac
import secrets
import zlib

from rl_safe_workers.errors import CommunicatorError

SECRET_BYTES = 32
LARGEST_BYTES = 256 * 2**20
"""Largest message after decompression: the holdings of a rank with a million pieces has some 100 MB."""
_TAG_CHARS = 64
_COMPRESS_BYTES = 1024
"""Messages from this size on are compressed."""
_PLAIN, _DEFLATED = b"=", b"z"


def new_secret() -> bytes:
    """Returns a secret for one run: `SECRET_BYTES` random bytes."""
    return secrets.token_bytes(SECRET_BYTES)


class Seal:
    """Signs and checks messages with the secret of a run."""

    def __init__(self, secret: bytes) -> None:
        """Takes the secret.

        Raises:
            ValueError: If it does not have `SECRET_BYTES` bytes.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret of a run has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def sign(self, key: str, contents: bytes) -> bytes:
        """Returns the signature of contents under a key: hexadecimal digits."""
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(4, "big") + name + contents, "sha256").hex().encode()

    def is_signed(self, key: str, contents: bytes, signature: bytes) -> bool:
        """Checks a signature in constant time."""
        return hmac.compare_digest(self.sign(key, contents), signature)

    def close(self, key: str, contents: bytes, *, compress: bool = True) -> bytes:
        """Returns a signed message with contents under a key. A compressed message is not text."""
        is_long = compress and len(contents) >= _COMPRESS_BYTES
        body = _DEFLATED + zlib.compress(contents, 1) if is_long else _PLAIN + contents
        return self.sign(key, body) + body

    def open(self, key: str, message: bytes) -> bytes:
        """Checks the signature of a message, and only then decompresses and returns its contents.

        Raises:
            CommunicatorError: If no rank of this run has signed it; names the key.
        """
        body = message[_TAG_CHARS:]
        if not body or not self.is_signed(key, body, message[:_TAG_CHARS]):
            raise CommunicatorError(
                f"key {key!r} of the run's store holds what no rank of this run has signed: another process writes to "
                "the store; end it, or keep others away from the store's port, and start the run again"
            )
        return _inflate(key, body[1:]) if body[:1] == _DEFLATED else body[1:]


def _inflate(key: str, data: bytes) -> bytes:
    engine = zlib.decompressobj()
    contents = engine.decompress(data, LARGEST_BYTES)
    if not engine.eof:
        raise CommunicatorError(f"key {key!r} of the run's store holds a message of more than {LARGEST_BYTES} bytes")
    return contents
