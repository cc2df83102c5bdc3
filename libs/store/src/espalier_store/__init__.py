"""Postgres, the only truth: the pool, the rows, and every SQL statement of the project.

One file per group of tables; a statement stands right above the function that runs it, and the function
that reads a row turns it into a domain value. Nothing here opens or commits a transaction: the caller does,
at the edge of a request or a step. Every statement carries the owner, except in `fleet`, which looks after
the runs of all owners.

`schema.sql` shows the whole database at a glance; `migrations` is how it comes to be.
"""
