"""Tool calls and brokers, memory, messages."""

from espalier_store.migrations import run_sql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_sql("0003_tools_memory_messages.sql")
