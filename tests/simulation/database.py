"""A model of our Postgres: the statements of `espalier_store`, each as a small function over dictionaries.

The real store functions call these, by the text of their statement: so everything above a statement (what
the parameters are, what becomes of the rows, every act, every step) is the product's own code. Transactions
come one after the other and are atomic (`connections`); the clock is a number that the schedule moves. Not
modelled: locks that wait, and snapshots of statements that began before a lock was had.

`without` takes guards away that live in SQL. Each has a name, and a test shows that its absence is found.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from espalier_protocol.agent import Budgets, Ceilings
from espalier_store import agents, events, fleet, log, messages, runs, subjects, tool_calls, trees

Row: TypeAlias = dict[str, Any]
Guard = Literal[
    "the token of a step",
    "the wake counter at a sleep",
    "the planned state of a call",
    "the cancel flag at a call",
    "the cancel flag at a step",
    "one wake for one row",
    "the token at a release",
]

LIVE: Final = ("running", "sleeping")
RESTS: Final = ("message", "child", "timer")
FOREVER: Final = float("inf")


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Database:
    """The tables, and what outsiders may want to know of how they were written."""

    def __init__(self, without: frozenset[Guard] = frozenset()) -> None:
        self.without = without
        self.now = 1_000_000.0
        self.agents: dict[UUID, Row] = {}
        self.runs: dict[UUID, Row] = {}
        self.messages: dict[UUID, Row] = {}
        self.calls: dict[tuple[UUID, str], Row] = {}
        self.outbox: dict[int, Row] = {}
        self.snapshots: dict[UUID, Row] = {}
        self.brokers: dict[UUID, Row] = {}
        self.approvals: dict[UUID, Row] = {}
        self.journal: dict[UUID, list[tuple[float, str]]] = {}
        self.events: dict[UUID, list[tuple[float, str, str]]] = {}
        self.stale_writes: list[str] = []
        self.roused: list[tuple[UUID, float]] = []
        self.cycles_returned: list[UUID] = []
        self._outbox_id = 0

    # ------------------------------------------------------------ transactions

    def mark(self) -> Callable[[], None]:
        """What puts everything back to how it is now."""
        tables: list[dict[Any, Row]] = [
            self.agents,
            self.runs,
            self.messages,
            self.calls,
            self.outbox,
            self.snapshots,
            self.brokers,
            self.approvals,
        ]
        copies = [{key: dict(row) for key, row in table.items()} for table in tables]
        logs = {run_id: (len(self.journal[run_id]), len(self.events[run_id])) for run_id in self.journal}
        lists: list[list[Any]] = [self.stale_writes, self.roused, self.cycles_returned]
        lengths = [len(each) for each in lists]

        def undo() -> None:
            for table, copy in zip(tables, copies, strict=True):
                table.clear()
                table.update(copy)
            for run_id in list(self.journal):
                if run_id not in logs:
                    del self.journal[run_id], self.events[run_id]
                else:
                    del self.journal[run_id][logs[run_id][0] :], self.events[run_id][logs[run_id][1] :]
            for each, length in zip(lists, lengths, strict=True):
                del each[length:]

        return undo

    def clock(self) -> float:
        """`clock_timestamp()`: no two statements have the same."""
        self.now += 1e-6
        return self.now

    def run(self, statement: str, args: tuple[Any, ...]) -> list[Row]:
        return STATEMENTS[statement](self, *args)

    # ------------------------------------------------------------ what several statements need

    def promise(self, kind: str, **columns: Any) -> int:
        self._outbox_id += 1
        row = {"run_id": None, "from_seq": None, "agent_id": None, "message_id": None, "child_run_id": None}
        self.outbox[self._outbox_id] = {**row, "kind": kind, "created_at": self.now, **columns}
        return self._outbox_id

    def append(self, run: Row, bodies: list[str], types: list[str], payloads: list[str]) -> int | None:
        """`log.APPEND`: entries and events at the end of the run's log, and the promise to publish them."""
        run_id, at = run["id"], self.clock()
        self.journal.setdefault(run_id, []).extend((at, body) for body in bodies)
        told = self.events.setdefault(run_id, [])
        first_seq = len(told) + 1
        told.extend((at, type_, payload) for type_, payload in zip(types, payloads, strict=True))
        return self.promise("publish", run_id=run_id, from_seq=first_seq) if types else None

    def children(self, run_id: UUID) -> list[Row]:
        return [run for run in self.runs.values() if run["parent_id"] == run_id]

    def owed_cycles(self, run: Row) -> bool:
        """`runs.OWED_CYCLES`"""
        mine = {child["id"] for child in self.children(run["id"])}
        return any(each["kind"] == "wake" and each["child_run_id"] in mine for each in self.outbox.values())

    def has_children(self, run: Row) -> bool:
        """`runs.HAS_CHILDREN`"""
        if run["subagents_granted"] == 0:
            return False
        return self.owed_cycles(run) or any(each["state"] in LIVE for each in self.children(run["id"]))

    def unread(self, agent_id: UUID) -> list[Row]:
        return [
            each
            for each in self.messages.values()
            if each["to_agent_id"] == agent_id and each["read_at"] is None
        ]

    def is_for(self, message: Row, run_id: UUID) -> bool:
        """`messages.FOR_THIS_RUN`"""
        addressed = message["to_run_id"]
        return addressed in (None, run_id) or self.runs[addressed]["state"] not in LIVE

    def locked(self, run: Row) -> Row:
        """`runs.LOCKED`"""
        parent = self.runs.get(run["parent_id"])
        leased = run["lease_until"] is not None and run["lease_until"] > self.now
        age_s = self.now - run["created_at"]
        return {**run, "parent_agent_id": parent and parent["agent_id"], "leased": leased, "age_s": age_s}

    def given(self, run: Row) -> Row:
        """`runs.GIVEN`"""
        agent, above, spawners = self.agents[run["agent_id"]], self.runs.get(run["parent_id"]), []
        while above:
            spawners.append(above)
            above = self.runs.get(above["parent_id"])
        overdrawn = any(
            each["cycle_count"] + each["cycles_granted"] + each["cycles_lost"] > each["max_cycles"]
            for each in spawners
        )
        budgets = [self.agents[each["agent_id"]]["budgets"] for each in spawners]
        return {
            **{name: run[name] for name in GIVEN_OF_RUN},
            **{name: agent[name] for name in GIVEN_OF_AGENT},
            "children": self.has_children(run),
            "above": {"overdrawn": overdrawn, "budgets": budgets} if spawners else None,
            "agent_id": agent["id"],
            "root_agent_id": agent["root_id"],
            "attached": [],
            "runner_model": None,
            "provider_id": None,
        }

    def lived(self, run: Row, version: int) -> Row:
        """`runs.LIVED`"""
        shown = self.snapshots.get(run["id"])
        if shown is not None and shown["version"] != version:
            shown = None
        after = shown["entry_no"] if shown else 0
        entries = [body for _, body in self.journal[run["id"]][after:]]
        return {"snapshot": shown and shown["body"], "entries": entries}


GIVEN_OF_RUN: Final = (
    "cycles_granted goal inputs max_cycles max_subagents max_tool_calls_per_cycle max_wall_seconds"
).split()
GIVEN_OF_AGENT: Final = (
    "toolset immutable_directives mutable_prompt mutable_prompt_policy budgets metadata"
).split()


def new_agent(agent_id: UUID, owner_id: UUID, ceilings: Ceilings, budgets: Budgets) -> Row:
    return {
        "id": agent_id,
        "owner_id": owner_id,
        "root_id": agent_id,
        "parent_id": None,
        "lifecycle_state": "idle",
        "max_live_runs": 8,
        "ceilings": ceilings.model_dump(),
        "budgets": budgets.model_dump(),
        "toolset": ["espalier.act"],
        "immutable_directives": "",
        "mutable_prompt": "",
        "mutable_prompt_policy": "auto",
        "metadata": {},
        "subject_ids": [],
    }


def new_run(**columns: Any) -> Row:
    return {
        "state": "running",
        "wait_reason": None,
        "parent_id": None,
        "depth": 0,
        "goal": "",
        "inputs": {},
        "subject_ids": [],
        "cycles_given": 0,
        "cycle_count": 0,
        "cycles_granted": 0,
        "cycles_lost": 0,
        "subagents_granted": 0,
        "result": None,
        "ended_at": None,
        "cancel_requested_at": None,
        "lease_token": 0,
        "lease_until": None,
        "expired_claims": 0,
        "wake_seq": 0,
        "wake_seen": 0,
        "next_entry_no": 1,
        "next_seq": 1,
        **columns,
    }


# ---------------------------------------------------------------- log


def begin_run(db: Database, owner_id: UUID, run_id: UUID, *args: Any) -> list[Row]:
    """`log.BEGIN_RUN`"""
    bodies, types, payloads, agent_id, goal, inputs, subject_ids, *ceilings, live_max = args
    live = [run for run in db.runs.values() if run["agent_id"] == agent_id and run["state"] in LIVE]
    if len(live) >= live_max:
        return []
    cycles, subagents, tool_calls_per_cycle, wall_seconds = ceilings
    born = db.clock()
    run = db.runs[run_id] = new_run(
        id=run_id,
        owner_id=owner_id,
        agent_id=agent_id,
        root_id=run_id,
        goal=goal,
        inputs=inputs,
        subject_ids=subject_ids,
        max_cycles=cycles,
        max_subagents=subagents,
        max_tool_calls_per_cycle=tool_calls_per_cycle,
        max_wall_seconds=wall_seconds,
        created_at=born,
        due_at=born,
        wall_at=born + wall_seconds,
        next_entry_no=1 + len(bodies),
        next_seq=1 + len(types),
        wake_seq=int(any(each["to_run_id"] is None for each in db.unread(agent_id))),
    )
    outbox_id = db.append(run, bodies, types, payloads)
    at = {"created_at": moment(born), "due_at": moment(born), "moment": moment(born)}
    return [{**run, **at, "first_seq": 1, "outbox_id": outbox_id}]


def move_run(db: Database, owner_id: UUID, run_id: UUID, *args: Any) -> list[Row]:
    """`log.MOVE_RUN`"""
    bodies, types, payloads, token, state, wait_reason, on_message, wake_at, wake_in_s, *rest = args
    cycles, wake_seen, progressed, ended, result, release, ttl_s, unless_stopped, *rest = rest
    version, snapshot, call_ids, tools, calls_args, returned, tool_calls_max, doubt_ids, doubts, lost = rest
    run = db.runs.get(run_id)
    if run is None or run["owner_id"] != owner_id:
        return []
    if run["lease_token"] != token:
        if "the token of a step" not in db.without:
            return []
        db.stale_writes.append(f"token {token} wrote over token {run['lease_token']}")
    if run["state"] not in LIVE:
        return []
    cancelled = run["cancel_requested_at"] is not None and "the cancel flag at a step" not in db.without
    in_tree = ended and (run["parent_id"] is not None or run["subagents_granted"] > 0)
    over = run["wall_at"] <= db.now or run["max_tool_calls_per_cycle"] != tool_calls_max
    if unless_stopped and (cancelled or over or in_tree):
        return []
    at = db.clock()
    first_no, first_seq = run["next_entry_no"], run["next_seq"]
    has_children, seen = db.has_children(run), run["wake_seen"] if wake_seen is None else wake_seen
    if state == "sleeping":
        wakes = FOREVER if wake_in_s is None else at + wake_in_s
        wakes = wakes if wake_at is None else wake_at.timestamp()
        newer = on_message and run["wake_seq"] > seen and "the wake counter at a sleep" not in db.without
        run["due_at"] = due_at(
            db, run, at, wakes, newer=newer, alone=wait_reason == "child" and not on_message
        )
    run |= {
        "next_entry_no": first_no + len(bodies),
        "next_seq": first_seq + len(types),
        "state": state,
        "wait_reason": "message" if wait_reason == "child" and not has_children else wait_reason,
        "cycle_count": max(run["cycle_count"], cycles),
        "cycles_lost": max(run["cycles_lost"], lost),
        "wake_seen": seen,
        "expired_claims": 0 if progressed else run["expired_claims"],
        "result": result if ended else run["result"],
        "ended_at": at if ended else None,
        "lease_token": run["lease_token"] + int(release),
        "lease_until": None if release else at + ttl_s,
    }
    outbox_id = db.append(run, bodies, types, payloads)
    wake_id = None
    if ended and (run["wake_seq"] > run["wake_seen"] or db.unread(run["agent_id"])):
        wake_id = db.promise("wake", agent_id=run["agent_id"])
    if snapshot is not None:
        entry_no = first_no - 1 + len(bodies)
        db.snapshots[run_id] = {"version": version, "entry_no": entry_no, "body": snapshot}
    for call_id, tool, call_args in zip(call_ids, tools, calls_args, strict=True):
        assert (run_id, call_id) not in db.calls, "a call is planned once"
        db.calls[run_id, call_id] = new_call(tool, call_args)
    for call_id in returned:
        call = db.calls.get((run_id, call_id))
        if call is not None and call["state"] == "planned":
            call |= {"state": "skipped", "settled_at": at}
    for approval_id, call_id in zip(doubt_ids, doubts, strict=True):
        db.approvals[approval_id] = {"run_id": run_id, "call_id": call_id, "kind": "in_doubt"}
    spawned = run["subagents_granted"] > 0
    moved = {"first_seq": first_seq, "moment": moment(at), "outbox_id": outbox_id}
    return [{**moved, "wake_id": wake_id, "spawned": spawned}]


def due_at(db: Database, run: Row, at: float, wakes: float, *, newer: bool, alone: bool) -> float:
    """When a run that goes to sleep is due. `newer`: a wake came that it has not heard; `alone`: it waits for
    what its children have of its headroom.
    """
    if newer or (alone and not db.has_children(run)):
        return at
    if alone and db.owed_cycles(run):
        return float(min(run["wall_at"], at + 1.0))
    return float(min(run["wall_at"], max(wakes, at + 1.0)))


def new_call(tool: str, args: str) -> Row:
    return {
        "tool": tool,
        "args": args,
        "state": "planned",
        "result": None,
        "broker_id": None,
        "sent_at": None,
        "deadline_at": None,
        "settled_at": None,
    }


# ---------------------------------------------------------------- fleet


def claim_run(db: Database, run_id: UUID, ttl_s: float, version: int) -> list[Row]:
    """`fleet.CLAIM_RUN`"""
    run = db.runs.get(run_id)
    if run is None or not is_claimable(db, run):
        return []
    run |= {
        "lease_token": run["lease_token"] + 1,
        "expired_claims": run["expired_claims"] + int(run["lease_until"] is not None),
        "lease_until": db.clock() + ttl_s,
        "state": "running",
        "wait_reason": None,
    }
    return [{**db.locked(run), **db.given(run), **db.lived(run, version)}]


def is_claimable(db: Database, run: Row) -> bool:
    free = run["lease_until"] is None or run["lease_until"] < db.now
    return run["state"] in LIVE and run["due_at"] <= db.now and free


def due_runs(db: Database, limit: int) -> list[Row]:
    """`fleet.DUE_RUNS`"""
    due = sorted((run for run in db.runs.values() if is_claimable(db, run)), key=lambda run: run["due_at"])
    return [{"id": run["id"]} for run in due[:limit]]


def renew_leases(db: Database, run_ids: list[UUID], tokens: list[int], ttl_s: float) -> list[Row]:
    """`fleet.RENEW_LEASES`"""
    mine = [
        db.runs[run_id]
        for run_id, token in zip(run_ids, tokens, strict=True)
        if db.runs[run_id]["lease_token"] == token and db.runs[run_id]["lease_until"] is not None
    ]
    for run in mine:
        run["lease_until"] = db.clock() + ttl_s
    return [{"id": run["id"]} for run in mine]


def held_state(db: Database, run_ids: list[UUID]) -> list[Row]:
    """`fleet.HELD_STATE`"""
    return [
        {
            "id": run_id,
            "lease_token": run["lease_token"],
            "to_stop": run["cancel_requested_at"] is not None or run["wall_at"] <= db.now,
        }
        for run_id in run_ids
        if (run := db.runs[run_id])
    ]


def release_lease(db: Database, run_id: UUID, token: int) -> list[Row]:
    """`fleet.RELEASE_LEASE`"""
    run = db.runs[run_id]
    ours = run["lease_token"] == token or "the token at a release" in db.without
    if ours and run["lease_until"] is not None:
        run |= {"lease_token": run["lease_token"] + 1, "lease_until": None}
    return []


def overdue_cancels(db: Database, after_s: float, limit: int) -> list[Row]:
    """`fleet.OVERDUE_CANCELS`"""
    return [
        {"id": run["id"], "owner_id": run["owner_id"]}
        for run in db.runs.values()
        if run["state"] in LIVE
        and run["cancel_requested_at"] is not None
        and run["cancel_requested_at"] < db.now - after_s
    ][:limit]


def delete_published(db: Database, outbox_ids: list[int]) -> list[Row]:
    """`fleet.DELETE_PUBLISHED`"""
    for outbox_id in outbox_ids:
        db.outbox.pop(outbox_id, None)
    return []


def old_promises(db: Database, kind: str, after_s: float, limit: int) -> list[Row]:
    return [
        {**row, "id": outbox_id, "owner_id": None}
        for outbox_id, row in db.outbox.items()
        if row["kind"] == kind and row["created_at"] < db.now - after_s
    ][:limit]


def unpublished(db: Database, after_s: float, limit: int) -> list[Row]:
    """`fleet.UNPUBLISHED`"""
    rows = old_promises(db, "publish", after_s, limit)
    return [{**row, "owner_id": db.runs[row["run_id"]]["owner_id"]} for row in rows]


def overdue_wakes(db: Database, after_s: float, limit: int) -> list[Row]:
    """`fleet.OVERDUE_WAKES`"""
    return old_promises(db, "wake", after_s, limit)


def take_wake(db: Database, outbox_id: int) -> list[Row]:
    """`fleet.TAKE_WAKE`"""
    row = db.outbox.get(outbox_id)
    if row is None or row["kind"] != "wake":
        return []
    if "one wake for one row" not in db.without:
        del db.outbox[outbox_id]
    return [{**row, "owner_id": db.agents[row["agent_id"]]["owner_id"]}]


def followed(db: Database, run_ids: list[UUID]) -> list[Row]:
    """`fleet.FOLLOWED`"""
    return [{"id": run_id, "last_seq": db.runs[run_id]["next_seq"] - 1} for run_id in run_ids]


def renew_broker(db: Database, broker_id: UUID, ttl_s: float, _: list[str]) -> list[Row]:
    """`fleet.RENEW_BROKER`"""
    db.brokers[broker_id] = {"alive_until": db.clock() + ttl_s}
    return []


def doubt_overdue(db: Database, grace_s: float, limit: int) -> list[Row]:
    """`fleet.DOUBT_OVERDUE`"""
    overdue = [call for call in db.calls.values() if is_overdue(db, call, grace_s)]
    for call in overdue[:limit]:
        call |= {"state": "in_doubt", "settled_at": db.clock()}
    return []


def is_overdue(db: Database, call: Row, grace_s: float) -> bool:
    return bool(call["state"] == "sent" and call["deadline_at"] < db.now - grace_s)


# ---------------------------------------------------------------- runs


def lock_run(db: Database, owner_id: UUID, run_id: UUID, token: int | None) -> list[Row]:
    """`runs.LOCK_RUN`"""
    run = db.runs.get(run_id)
    if run is None or run["owner_id"] != owner_id:
        return []
    if token not in (None, run["lease_token"]):
        if "the token of a step" not in db.without:
            return []
        db.stale_writes.append(f"token {token} locked under token {run['lease_token']}")
    return [db.locked(run)]


def facts(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`runs.FACTS`"""
    return [db.given(db.runs[run_id])]


def load_run(db: Database, _: UUID, run_id: UUID, version: int) -> list[Row]:
    """`runs.LOAD_RUN`"""
    run = db.runs[run_id]
    return [{**db.given(run), **db.lived(run, version)}]


def request_cancel(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`runs.REQUEST_CANCEL`"""
    run = db.runs[run_id]
    if run["state"] in LIVE:
        run["cancel_requested_at"] = run["cancel_requested_at"] or db.clock()
    return []


def wake_run(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`runs.WAKE_RUN`"""
    run, at = db.runs[run_id], db.clock()
    if run["state"] == "sleeping":
        run |= {"state": "running", "wait_reason": None, "due_at": at, "lease_token": run["lease_token"] + 1}
        db.roused.append((run_id, at))
    return []


# ---------------------------------------------------------------- trees


def get_spawner(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`trees.GET_SPAWNER`"""
    run = db.runs[run_id]
    return [
        {
            "depth": run["depth"],
            "immutable_directives": db.agents[run["agent_id"]]["immutable_directives"],
            "cycles": run["max_cycles"] - run["cycle_count"] - run["cycles_granted"] - run["cycles_lost"],
            "subagents": run["max_subagents"] - run["subagents_granted"],
            "wall_seconds": int(run["wall_at"] - db.now),
            "tool_calls_per_cycle": run["max_tool_calls_per_cycle"],
        }
    ]


def spawn(db: Database, owner_id: UUID, spawner_id: UUID, *args: Any) -> list[Row]:
    """`trees.SPAWN`"""
    bodies, types, payloads, run_id, agent_id, name, directives, prompt, policy, toolset, *rest = args
    ceilings, budgets, metadata, cycles, subagents, tool_calls_max, wall_seconds, depth_max, goal = rest
    run, born = db.runs[spawner_id], db.clock()
    left = run["max_cycles"] - run["cycle_count"] - run["cycles_granted"] - run["cycles_lost"]
    fits = (
        cycles <= left
        and subagents < run["max_subagents"] - run["subagents_granted"]
        and tool_calls_max <= run["max_tool_calls_per_cycle"]
        and born + wall_seconds <= run["wall_at"]
        and run["depth"] < depth_max
    )
    goes_on = run["state"] == "running" and run["cancel_requested_at"] is None
    if not (goes_on and fits):
        return []
    run["cycles_granted"] += cycles
    run["subagents_granted"] += 1 + subagents
    above = db.agents[run["agent_id"]]
    db.agents[agent_id] = {
        **above,
        "id": agent_id,
        "parent_id": above["id"],
        "name": name,
        "immutable_directives": directives,
        "mutable_prompt": prompt,
        "mutable_prompt_policy": policy,
        "toolset": toolset,
        "ceilings": ceilings,
        "budgets": budgets,
        "metadata": metadata,
    }
    child = db.runs[run_id] = new_run(
        id=run_id,
        owner_id=owner_id,
        agent_id=agent_id,
        root_id=run["root_id"],
        parent_id=run["id"],
        depth=run["depth"] + 1,
        goal=goal,
        cycles_given=cycles,
        max_cycles=cycles,
        max_subagents=subagents,
        max_tool_calls_per_cycle=tool_calls_max,
        max_wall_seconds=wall_seconds,
        created_at=born,
        due_at=born,
        wall_at=min(run["wall_at"], born + wall_seconds),
        next_entry_no=1 + len(bodies),
        next_seq=1 + len(types),
    )
    outbox_id = db.append(child, bodies, types, payloads)
    return [{"first_seq": 1, "moment": moment(born), "outbox_id": outbox_id}]


def tell_spawner(db: Database, owner_id: UUID, child_id: UUID, message_id: UUID, body: str) -> list[Row]:
    """`trees.TELL_SPAWNER`"""
    child = db.runs[child_id]
    spawner = db.runs[child["parent_id"]]
    db.messages[message_id] = new_message(
        db,
        message_id,
        owner_id,
        root_id=db.agents[child["agent_id"]]["root_id"],
        from_agent_id=child["agent_id"],
        to_agent_id=spawner["agent_id"],
        to_run_id=spawner["id"],
        sender="agent",
        body=body,
    )
    told = {"agent_id": spawner["agent_id"], "message_id": message_id, "child_run_id": child_id}
    return [{"id": db.promise("wake", **told)}]


def stop_descendants(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`trees.STOP_DESCENDANTS`"""
    below, stopped = [run_id], []
    for above in below:
        below += [child["id"] for child in db.children(above)]
    for run in (db.runs[each] for each in below[1:]):
        if run["state"] not in LIVE:
            continue
        leased = run["lease_until"] is not None and run["lease_until"] > db.now
        run["cancel_requested_at"] = run["cancel_requested_at"] or db.clock()
        if not leased:
            run["due_at"] = min(run["due_at"], db.clock())
        stopped.append({"id": run["id"], "leased": leased})
    return stopped


def return_cycles(db: Database, _: UUID, run_id: UUID, child_id: UUID) -> list[Row]:
    """`trees.RETURN_CYCLES`"""
    run, child = db.runs[run_id], db.runs[child_id]
    if child["parent_id"] == run_id:
        used = child["cycle_count"] + child["cycles_granted"] + child["cycles_lost"]
        run["cycles_granted"] -= child["cycles_given"] - used
        db.cycles_returned.append(child_id)
    return []


# ---------------------------------------------------------------- tool calls


def send_call(db: Database, _: UUID, run_id: UUID, call_id: str, *args: Any) -> list[Row]:
    """`tool_calls.SEND_CALL`"""
    token, broker_id, deadline_s = args
    run, call = db.runs[run_id], db.calls[run_id, call_id]
    leased = run["lease_until"] is not None and run["lease_until"] > db.now
    holds = run["lease_token"] == token and run["state"] == "running" and leased
    goes_on = run["cancel_requested_at"] is None or "the cancel flag at a call" in db.without
    unsent = call["state"] == "planned" or "the planned state of a call" in db.without
    if not (holds and goes_on and unsent and run["wall_at"] > db.now):
        return []
    at = db.clock()
    call |= {"state": "sent", "broker_id": broker_id, "sent_at": at, "deadline_at": at + deadline_s}
    of_run = {name: run[name] for name in ("agent_id", "root_id", "subject_ids")}
    return [{**call, **of_run, "has_servers": False}]


def settle_call(db: Database, _: UUID, run_id: UUID, call_id: str, *args: Any) -> list[Row]:
    """`tool_calls.SETTLE_CALL`: a row stands for the count that the command's tag tells."""
    broker_id, state, result = args
    call = db.calls[run_id, call_id]
    if call["state"] != "sent" or call["broker_id"] != broker_id:
        return []
    call |= {"state": state, "result": result, "settled_at": db.clock()}
    return [call]


def get_calls(db: Database, _: UUID, run_id: UUID, call_ids: list[str], grace_s: float) -> list[Row]:
    """`tool_calls.GET_CALLS`"""
    rows = []
    for call_id in call_ids:
        call = db.calls.get((run_id, call_id))
        if call is None:
            continue
        broker = db.brokers.get(call["broker_id"])
        alive_until: float | None = broker["alive_until"] if broker else None
        silent = alive_until is None or alive_until < db.now
        columns = {"call_id": call_id, "alive_until": alive_until, "broker_silent": silent}
        rows.append({**call, **columns, "overdue": is_overdue(db, call, grace_s)})
    return rows


def doubt_call(db: Database, _: UUID, run_id: UUID, call_id: str, *args: Any) -> list[Row]:
    """`tool_calls.DOUBT_CALL`"""
    alive_until, grace_s = args
    call = db.calls[run_id, call_id]
    broker = db.brokers.get(call["broker_id"])
    said: float | None = broker["alive_until"] if broker else None
    lives = said is not None and (said != alive_until or said > db.now)
    if call["state"] == "sent" and (is_overdue(db, call, grace_s) or not lives):
        call |= {"state": "in_doubt", "settled_at": db.clock()}
    return []


# ---------------------------------------------------------------- messages and agents


def new_message(db: Database, message_id: UUID, owner_id: UUID, **columns: Any) -> Row:
    return {
        "id": message_id,
        "owner_id": owner_id,
        "to_run_id": None,
        "subject_ids": [],
        "created_at": moment(db.clock()),
        "delivered_at": None,
        "read_at": None,
        **columns,
    }


def insert_message(db: Database, owner_id: UUID, message_id: UUID, *args: Any) -> list[Row]:
    """`messages.INSERT_MESSAGE`"""
    root_id, from_agent_id, to_agent_id, sender, body, unread_max, _ = args
    if len(db.unread(to_agent_id)) >= unread_max:
        return []
    columns = {"root_id": root_id, "from_agent_id": from_agent_id, "to_agent_id": to_agent_id}
    row = new_message(db, message_id, owner_id, sender=sender, body=body, **columns)
    db.messages[message_id] = row
    return [{**row, "wake_id": db.promise("wake", agent_id=to_agent_id, message_id=message_id)}]


def take_unread(db: Database, _: UUID, agent_id: UUID, run_id: UUID, *args: Any) -> list[Row]:
    """`messages.TAKE_UNREAD`; what is sent here is never too large."""
    count_max, _bytes_max = args
    mine = [each for each in db.unread(agent_id) if db.is_for(each, run_id)]
    for message in mine[:count_max]:
        message |= {"delivered_at": db.now, "read_at": db.clock()}
    return [{**message, "more": len(mine) > count_max} for message in mine[:count_max]]


def pick_run(db: Database, _: UUID, agent_id: UUID, message_id: UUID | None) -> list[Row]:
    """`messages.PICK_RUN`"""
    message = db.messages.get(message_id) if message_id else None
    addressed = message and message["to_run_id"]
    live = [run for run in db.runs.values() if run["agent_id"] == agent_id and run["state"] in LIVE]
    rank = {reason: place for place, reason in enumerate(RESTS)}
    newest_first = reversed(live)
    best = sorted(newest_first, key=lambda run: (run["id"] != addressed, rank.get(run["wait_reason"], 4)))
    return [{"id": best[0]["id"]}] if best else []


def lock_picked(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`messages.LOCK_PICKED`"""
    return [{}] if db.runs[run_id]["state"] in LIVE else []


def nothing(_: Database, *_args: Any) -> list[Row]:
    """A statement that only waits for others, or finds nothing here."""
    return []


def still_unread(db: Database, _: UUID, agent_id: UUID, run_id: UUID, message_id: UUID | None) -> list[Row]:
    """`messages.STILL_UNREAD`"""
    mine = [each for each in db.unread(agent_id) if db.is_for(each, run_id)]
    return [{"exists": any(message_id in (None, each["id"]) for each in mine)}]


def raise_wake(db: Database, _: UUID, run_id: UUID) -> list[Row]:
    """`messages.RAISE_WAKE`"""
    run, at = db.runs[run_id], db.clock()
    at_rest = run["state"] == "sleeping" and run["wait_reason"] in RESTS
    run["wake_seq"] += 1
    run["lease_token"] += int(at_rest)
    run["due_at"] = min(run["due_at"], at) if at_rest else run["due_at"]
    db.roused.append((run_id, at))
    return [{"at_rest": at_rest}]


def agent_row(db: Database, _: UUID, agent_id: UUID) -> list[Row]:
    """`agents.LOCK_AGENT` and `messages.RECIPIENT`"""
    return [db.agents[agent_id]] if agent_id in db.agents else []


def no_subjects(_: Database, *_args: Any) -> list[Row]:
    """`subjects.SUBJECTS_OF_RUN` and `SUBJECTS_OF_AGENT`: nobody here is about anybody."""
    return [{"subject_ids": []}]


# ---------------------------------------------------------------- events


def events_after(db: Database, _: UUID, run_id: UUID, seq: int, limit: int, _bytes: int) -> list[Row]:
    """`events.EVENTS_AFTER`"""
    page = enumerate(db.events[run_id][seq : seq + limit], start=seq + 1)
    return [
        {"seq": place, "type": type_, "payload": payload, "emitted_at": moment(at)}
        for place, (at, type_, payload) in page
    ]


def open_log(db: Database, owner_id: UUID, run_id: UUID, seq: int, limit: int, bytes_max: int) -> list[Row]:
    """`events.OPEN_LOG`"""
    run = db.runs[run_id]
    log_row = {"last_seq": run["next_seq"] - 1, "ended": run["ended_at"] is not None, "pruned": False}
    page = events_after(db, owner_id, run_id, seq, limit, bytes_max)
    return [{**log_row, **event} for event in page or [{"seq": None}]]


STATEMENTS: Final[Mapping[str, Callable[..., list[Row]]]] = {
    log.BEGIN_RUN: begin_run,
    log.MOVE_RUN: move_run,
    fleet.CLAIM_RUN: claim_run,
    fleet.DUE_RUNS: due_runs,
    fleet.RENEW_LEASES: renew_leases,
    fleet.HELD_STATE: held_state,
    fleet.RELEASE_LEASE: release_lease,
    fleet.OVERDUE_CANCELS: overdue_cancels,
    fleet.DELETE_PUBLISHED: delete_published,
    fleet.UNPUBLISHED: unpublished,
    fleet.OVERDUE_WAKES: overdue_wakes,
    fleet.TAKE_WAKE: take_wake,
    fleet.FOLLOWED: followed,
    fleet.RENEW_BROKER: renew_broker,
    fleet.DOUBT_OVERDUE: doubt_overdue,
    fleet.FORGET_BROKERS: nothing,
    runs.LOCK_RUN: lock_run,
    runs.FACTS: facts,
    runs.LOAD_RUN: load_run,
    runs.REQUEST_CANCEL: request_cancel,
    runs.WAKE_RUN: wake_run,
    trees.GET_SPAWNER: get_spawner,
    trees.SPAWN: spawn,
    trees.TELL_SPAWNER: tell_spawner,
    trees.STOP_DESCENDANTS: stop_descendants,
    trees.RETURN_CYCLES: return_cycles,
    tool_calls.SEND_CALL: send_call,
    tool_calls.SETTLE_CALL: settle_call,
    tool_calls.GET_CALLS: get_calls,
    tool_calls.DOUBT_CALL: doubt_call,
    messages.RECIPIENT: agent_row,
    messages.INSERT_MESSAGE: insert_message,
    messages.TAKE_UNREAD: take_unread,
    messages.PICK_RUN: pick_run,
    messages.LOCK_PICKED: lock_picked,
    messages.AWAIT_NEW_RUNS: nothing,
    messages.STILL_UNREAD: still_unread,
    messages.RAISE_WAKE: raise_wake,
    agents.LOCK_AGENT: agent_row,
    events.EVENTS_AFTER: events_after,
    events.OPEN_LOG: open_log,
    subjects.SUBJECTS_OF_RUN: no_subjects,
    subjects.SUBJECTS_OF_AGENT: no_subjects,
}
"""Each statement that the simulated code runs, and its model."""
