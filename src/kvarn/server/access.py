"""Who may call, and with whom they share prefixes.

A salt is derived from the API key, so that no caller learns, from an answer or from its timing, what another has sent;
a salt that the client sends narrows that further and can never widen it. `share` gives all keys one salt.
"""

from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from kvarn.errors import KvarnError
from kvarn.server.refusal import Refusal


class Caller(NamedTuple):
    owner: bytes  # names the key in records, without being it
    salt: bytes
    quotes: bool  # whether an explanation may quote the earlier text: it is the caller's own

    def salted(self, own: str | None) -> bytes:
        return self.salt if own is None else _digest(own, self.salt)


class Access:
    def __init__(self, keys: Sequence[str], share: bool = False) -> None:
        if not all(key.strip() and key.isascii() and key.isprintable() for key in keys):
            raise KvarnError("an API key is empty or has characters that a header cannot carry: use plain letters")
        self._owners = [_digest(key) for key in dict.fromkeys(keys)]
        self._share = share

    def caller(self, authorization: str | None) -> Caller:
        if not self._owners:
            return Caller(b"", b"", quotes=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Refusal(401, "give an API key: Authorization: Bearer KEY", code="missing_api_key")
        given = _digest(key.strip())
        known = [owner for owner in self._owners if compare_digest(owner, given)]  # all are compared, whatever matches
        if not known:
            raise Refusal(401, "the API key is not one of this server's", code="invalid_api_key")
        alone = len(self._owners) == 1
        return Caller(given, b"" if self._share else given, quotes=alone or not self._share)


def _digest(text: str, key: bytes = b"kvarn") -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=16).digest()
