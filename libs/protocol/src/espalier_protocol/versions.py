"""The protocol versions this runtime serves, newest first."""

from typing import Final

SERVED_VERSIONS: Final[tuple[str, ...]] = ("aep-2026-04-24",)


def choose_version(requested: list[str]) -> str | None:
    """The client's first choice that is served, or None."""
    return next((version for version in requested if version in SERVED_VERSIONS), None)
