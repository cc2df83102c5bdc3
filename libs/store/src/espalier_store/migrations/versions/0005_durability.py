"""What durability still wanted: ended runs whose log retention has not removed, found by an index."""

from espalier_store.migrations import run_sql

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_sql("0005_durability.sql")
