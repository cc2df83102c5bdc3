"""Pauses between attempts: doubling, bounded, and spread by chance.

The chance keeps the followers of one gateway from coming back in the same instant after it died.
"""

import random

PAUSE_FIRST_S = 0.1
PAUSE_S_MAX = 5.0


class Pauses:
    """The next pause of a series. `reset` after a success."""

    def __init__(self, first_s: float = PAUSE_FIRST_S, most_s: float = PAUSE_S_MAX) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._ceiling_s = first_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Between half the series' value and all of it, never less than the other side asked for."""
        pause_s = self._ceiling_s * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
        self._ceiling_s = min(self._ceiling_s * 2, self._most_s)
        return max(pause_s, at_least_s)

    def reset(self) -> None:
        self._ceiling_s = self._first_s
