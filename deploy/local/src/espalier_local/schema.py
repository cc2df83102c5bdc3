"""The schema's part of a start: migrate, and say in one sentence why not. The work itself is the store's."""

from urllib.parse import urlsplit

from espalier_local.errors import LocalError
from espalier_store.migrate import migrate


async def bring_up_to_date(postgres_url: str) -> None:
    """Migrate the database; safe beside another launcher that does the same."""
    try:
        await migrate(postgres_url)
    except Exception as err:  # the network, asyncpg, SQLAlchemy and alembic each have errors of their own
        raise unreachable(postgres_url, err) from err


def unreachable(postgres_url: str, err: Exception) -> LocalError:
    """One sentence for whatever a database at this address answered; its password stays out."""
    address = urlsplit(postgres_url)
    reason = (str(err) or type(err).__name__).strip().splitlines()[0]
    return LocalError(
        f"The database {address.path.lstrip('/')} on {address.hostname}, port {address.port or 5432},"
        f" cannot be used: {reason.rstrip('.')}."
    )
