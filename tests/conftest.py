"""What every test shares: the one event loop that the runtime runs on.

Servers, databases and processes are not here: tests/integration and tests/e2e own theirs.
"""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncpg and arq run on asyncio alone. Session-wide, so that fixtures of every scope may be async."""
    return "asyncio"
