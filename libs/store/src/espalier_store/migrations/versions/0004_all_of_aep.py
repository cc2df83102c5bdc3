"""What the rest of AEP keeps: prompts, approvals, providers, servers, subjects, first answers."""

from espalier_store.migrations import run_sql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    run_sql("0004_all_of_aep.sql")
