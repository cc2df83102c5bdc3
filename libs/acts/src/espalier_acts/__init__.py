"""What can be done: use cases that two processes share.

An act loads what it needs, lets the domain decide, and writes rows, journal, events and outbox on the
caller's transaction. It knows no wire words, opens nothing and commits nothing. What must happen after the
commit (publish, ring) it hands back.
"""
