"""How the database comes to be: numbered SQL files, each marked `pre` or `post` deploy in its first line.

A file under `versions` gives alembic the order; the SQL beside it is what runs.
"""

from pathlib import Path

from alembic import op


def run_sql(name: str) -> None:
    """Run a file of this folder in the migration's transaction.

    It goes to asyncpg directly, since a prepared statement holds one command only; the statement before it
    makes sure that the transaction has begun.
    """
    script = (Path(__file__).parent / name).read_text()
    bind = op.get_bind()
    bind.exec_driver_sql("select 1")
    raw = bind.connection.dbapi_connection
    assert raw is not None
    raw.run_async(lambda connection: connection.execute(script))
