"""kvarn's own addresses for snapshots: texts that a key keeps in the server's folder."""

from kvarn.server.faults import openai_error
from kvarn.server.protocols.base import Address, Spoken
from kvarn.server.protocols.kept.endpoints import MAKE_FIELDS, delete, listed, load, make, shown

KEPT = Spoken(
    [
        Address("POST", "/kvarn/snapshots", "keep a text and its cells under a name", make, MAKE_FIELDS),
        Address("GET", "/kvarn/snapshots", "the snapshots of this key", listed),
        Address("GET", "/kvarn/snapshots/{id}", "a snapshot of this key", shown),
        Address("DELETE", "/kvarn/snapshots/{id}", "delete a snapshot", delete),
        Address("POST", "/kvarn/snapshots/{id}/load", "restore a snapshot into the cache", load),
    ],
    openai_error,
)
