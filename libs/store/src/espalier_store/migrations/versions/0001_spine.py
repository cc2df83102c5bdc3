"""The first tables."""

from espalier_store.migrations import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_sql("0001_spine.sql")
