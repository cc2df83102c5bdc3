"""New ids: the one place where the wall clock and chance meet for a row's key."""

import secrets
import time
from uuid import UUID

from espalier_protocol.ids import RANDOM_BITS, IdSequence

_process_ids = IdSequence()


def new_id() -> UUID:
    """The next id of this process, a uuid v7; call it on the thread of the event loop only."""
    return _process_ids.next(time.time_ns() // 1_000_000, secrets.randbits(RANDOM_BITS))
