"""How many calls a key may make: a bucket per key, in this process, that refills by the clock.

Each gateway counts for itself, so that a call waits for nobody: with three gateways a key has three buckets.
Nothing is stored and nothing awaited, which is why looking and taking are one moment. How many streams may
be open is `stream_limits`' business. Above: `auth`, which takes a call as soon as it knows the caller.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from uuid import UUID

import structlog

from espalier_gateway.errors import WireError, rate_limited

BUCKETS_MAX: Final = 10_000
LOOKED_AT_MAX: Final = 16
LOG_EVERY_S: Final = 1.0
ROUNDING_S: Final = 1e-6
"""What sums of float seconds may be off by: whoever waited as long as told must not miss by that."""

Clock = Callable[[], float]
log = structlog.get_logger(__name__)


class RefusalLog:
    """Tells the log which keys meet their limits: a line per key and LOG_EVERY_S, however often one does.

    A log must not grow with a flood. At most BUCKETS_MAX keys are kept in mind.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until: OrderedDict[UUID, float] = OrderedDict()

    def note(self, key_id: UUID, limit: str) -> None:
        now = self._clock()
        if now < self._quiet_until.get(key_id, 0.0):
            return
        self._quiet_until[key_id] = now + LOG_EVERY_S
        self._quiet_until.move_to_end(key_id)
        if len(self._quiet_until) > BUCKETS_MAX:
            self._quiet_until.popitem(last=False)
        log.warning("limit.reached", key_id=str(key_id), limit=limit)


class RateLimit:
    """`rate` calls per second and key, and up to `burst` at once after a rest.

    A bucket is one number, the moment when it will be full again: each call moves it on by 1/rate seconds,
    to at most burst/rate seconds ahead. A moment that has passed says as much as no bucket at all.
    """

    def __init__(self, rate: float, burst: int, refusals: RefusalLog, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._call_s = 1 / rate
        self._ahead_s_max = burst / rate + ROUNDING_S
        self._refusals = refusals
        self._clock = clock
        self._full_at: OrderedDict[UUID, float] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        """Buckets in memory."""
        return len(self._full_at)

    def take(self, key_id: UUID, calls: int = 1) -> None:
        """Count these calls, all or none; more than a whole bucket are counted as a whole bucket.

        Raises WireError, with a wait after which the same calls pass if the key makes no others meanwhile.
        """
        now = self._clock()
        full_at = max(self._full_at.get(key_id, 0.0), now) + min(calls, self._burst) * self._call_s
        over_s = full_at - now - self._ahead_s_max
        if over_s > 0:
            self._refusals.note(key_id, "rpc_rate")
            raise self._refusal(over_s)
        self._full_at[key_id] = full_at
        self._full_at.move_to_end(key_id)
        if len(self._full_at) > BUCKETS_MAX:
            self._forget_one(now)

    def _refusal(self, over_s: float) -> WireError:
        after_ms = math.ceil((over_s + ROUNDING_S / 2) * 1000)
        message = (
            f"The key has used up its calls, which are {self._rate:g} per second and {self._burst} at once; "
            f"nothing was done, try again in {after_ms} ms."
        )
        return rate_limited("rpc_rate", message, after_ms)

    def _forget_one(self, now: float) -> None:
        """A full bucket among those that were unused for longest, else the very longest unused one.

        What is lost with a bucket that was not full is a debt of at most one burst.
        """
        victim = next(iter(self._full_at))
        for place, (key_id, full_at) in enumerate(self._full_at.items()):
            if full_at <= now:
                victim = key_id
            if full_at <= now or place == LOOKED_AT_MAX:
                break
        del self._full_at[victim]
