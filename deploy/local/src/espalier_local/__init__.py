"""Everything on one machine: embedded servers, all services, the `espalier` command.

This room composes; it decides nothing about agents. Above it stands a person at a terminal, below it every
service and lib. `runtime.py` is the entry for programs (tests, the demo), `command.py` the one for people.
"""
