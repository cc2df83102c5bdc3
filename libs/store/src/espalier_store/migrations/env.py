"""Alembic's hook: runs the migrations on the connection that `espalier_store.migrate` opened."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="schema_revision")
with context.begin_transaction():
    context.run_migrations()
