"""Pauses between attempts: none while another gateway can be tried at once, then doubling and bounded.

They are spread by chance, which keeps the followers of one gateway from coming back in the same instant after
it died. Which gateway is tried next is not decided here (`gateways`).
"""

import random

from espalier_client.errors import ClientError, is_limit

PAUSE_FIRST_S = 0.1
PAUSE_S_MAX = 5.0


class Pauses:
    """The pauses of one request or stream that has `gateways` to try. `reset` after a success."""

    def __init__(self, gateways: int = 1) -> None:
        self._gateways = gateways
        self.reset()

    def reset(self) -> None:
        self._tried = 0
        self._wish_s = 0.0
        self._ceiling_s = PAUSE_FIRST_S

    def after(self, trouble: ClientError) -> float:
        """Seconds to wait before the next attempt: 0 until each gateway had its turn.

        Then between half the series' value and all of it, and never less than any of them asked for. A caller
        at its limit always waits, because the next gateway is no way round it.
        """
        self._tried += 1
        self._wish_s = max(self._wish_s, trouble.retry_after_s)
        if self._tried < self._gateways and not is_limit(trouble):
            return 0.0
        pause_s = max(self._ceiling_s * random.uniform(0.5, 1.0), self._wish_s)  # noqa: S311 - not a secret
        self._tried, self._wish_s = 0, 0.0
        self._ceiling_s = min(self._ceiling_s * 2, PAUSE_S_MAX)
        return pause_s
