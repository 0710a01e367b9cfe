"""API keys, and the salts that decide which requests share prefixes.

The salt is derived from the API key. A caller therefore cannot learn from an answer, or from its
response time, what a caller with another key has sent. A salt in the request can restrict sharing, but
never extend it to other keys. `share` gives all keys the same salt.

Without keys all callers share prefixes and records, so no text is quoted unless `quote` allows it. The server's
own page then has a key that the server made (`page_key`): its requests share nothing with those of others, so
it is quoted its own texts.
"""

from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from kvarn.errors import KvarnError
from kvarn.server.refusal import Refusal


class Caller(NamedTuple):
    owner: bytes  # a hash of the key, for records
    salt: bytes
    quotes: bool  # whether explanations may quote an earlier text: only if it is the caller's own
    keeps_text: bool = True  # whether records may quote the caller's text: only if nobody else can read them

    @property
    def name(self) -> str | None:
        """For the log: enough of the hash to tell keys apart."""
        return self.owner.hex()[:8] or None

    def salted(self, request_salt: str | None) -> bytes:
        return self.salt if request_salt is None else _digest(request_salt, self.salt)


class Access:
    def __init__(
        self, keys: Sequence[str], share: bool = False, quote: bool = False, page_key: str | None = None
    ) -> None:
        if not all(key.strip() and key.isascii() and key.isprintable() for key in keys):
            raise KvarnError("an API key is empty or has characters that a header cannot carry: use ASCII letters")
        if keys and quote:
            raise KvarnError("--quote-texts is for a server without API keys; a key is always quoted its own texts")
        self._owners = [_digest(key) for key in dict.fromkeys(keys)]
        self._share = share
        self._quote = quote
        self._page = None if page_key is None else _digest(page_key)

    @property
    def salts(self) -> list[bytes]:
        """Of all callers: what is restored for each of them is found by every request."""
        return [b""] if self._share or not self._owners else self._owners

    def caller(self, authorization: str | None, x_api_key: str | None = None) -> Caller:
        """The key is in either header, or the same key in both."""
        scheme, _, bearer = (authorization or "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", x_api_key or ""]
        digests = [_digest(key.strip()) for key in given if key.strip()]
        if not self._owners:
            return self._without_keys(digests)
        if not digests:
            raise Refusal(401, "give an API key: Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key")
        digest = digests[0]
        if not compare_digest(digest, digests[-1]):
            raise Refusal(401, "Authorization and x-api-key have different keys: give one", code="invalid_api_key")
        matches = [owner for owner in self._owners if compare_digest(owner, digest)]  # compares all, in constant time
        if not matches:
            raise Refusal(401, "the API key is not one of this server's", code="invalid_api_key")
        alone = len(self._owners) == 1
        return Caller(digest, b"" if self._share else digest, quotes=alone or not self._share)

    def _without_keys(self, digests: Sequence[bytes]) -> Caller:
        """Any key is accepted, and only that of the page means something."""
        if self._page is not None and any(compare_digest(self._page, digest) for digest in digests):
            return Caller(self._page, self._page, quotes=True)
        return Caller(b"", b"", quotes=self._quote, keeps_text=self._quote)


def _digest(text: str, key: bytes = b"kvarn") -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=16).digest()
