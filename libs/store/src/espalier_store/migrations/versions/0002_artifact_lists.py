"""Indexes for listing and deleting artifacts."""

from espalier_store.migrations import run_sql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_sql("0002_artifact_lists.sql")
