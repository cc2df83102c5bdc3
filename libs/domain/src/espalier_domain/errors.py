"""The one tree of expected errors.

    DomainError
    ├── NotFound            no such resource of this owner (a foreign id looks the same)
    ├── InvalidInput        a field that has the right type but not a possible value
    ├── LifecycleConflict   the agent or run is in a state that does not allow the act
    ├── TreeBoundary        an agent that is not in the tree where the act belongs
    ├── SubjectNotFound     no such data subject of this owner
    └── Unavailable         a store is away; the same request may succeed later
        └── Conflicted      two transactions stood in each other's way; nothing was written, try at once

Types carry facts. What becomes of them on the wire is decided in one table at the edge.
`LeaseLost` and `FenceReached` stand apart: they never leave the process that held the lease.
"""


class DomainError(Exception):
    """An expected outcome that a caller can be told about."""


class NotFound(DomainError):
    def __init__(self, resource: str, id_: str) -> None:
        super().__init__(f"There is no {resource} with this id.")
        self.resource = resource
        self.id = id_


class InvalidInput(DomainError):
    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class LifecycleConflict(DomainError):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TreeBoundary(DomainError):
    """`id` is the agent that was named; a foreign one looks like one that nobody has."""

    def __init__(self, reason: str, id_: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.id = id_


class SubjectNotFound(DomainError):
    def __init__(self, subject_id: str) -> None:
        super().__init__("There is no subject with this id.")
        self.id = subject_id


class Unavailable(DomainError):
    def __init__(self, retry_after_ms: int) -> None:
        super().__init__("The runtime cannot do this right now; try again.")
        self.retry_after_ms = retry_after_ms


class Conflicted(Unavailable):
    pass


class LeaseLost(Exception):
    """The run's lease token is no longer ours: whatever was being done must stop without another write."""


class FenceReached(LeaseLost):
    """The lease may still be ours, but that could not be made sure of in time."""
