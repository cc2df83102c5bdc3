-- pre: new tables, and a column that may be empty from now on.

alter table outbox alter column run_id drop not null;
create index outbox_wakes on outbox (created_at) where kind = 'wake';

-- A call that the broker carries out. The row is the fence: only a `planned` one becomes `sent`, once. result is
-- the whole answer of the tool; args and tool are what was asked, and what the broker reads.
create table tool_calls (
    run_id uuid not null references runs (id),
    call_id text not null,
    owner_id uuid not null,
    tool text not null,
    args json not null,
    state text not null default 'planned',
    broker_id uuid,
    sent_at timestamptz,
    deadline_at timestamptz,
    result json,
    settled_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    primary key (run_id, call_id),
    check (state in ('planned', 'sent', 'done', 'failed', 'in_doubt', 'skipped'))
);
create index tool_calls_sent on tool_calls (deadline_at) where state = 'sent';

-- Which brokers live. One that lets its time pass sends nothing more.
create table brokers (
    id uuid primary key,
    alive_until timestamptz not null,
    created_at timestamptz not null default clock_timestamp()
);

-- What a tree of agents remembers. root_id is the agent at its root. value is kept as it was spelled: jsonb would
-- make 309 digits of 1e308, for every reader and for search. No index has the words: one over all owners would make
-- a search pay for what other owners wrote, and a tree is small enough to be read through.
create table memory_records (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    root_id uuid not null references agents (id),
    namespace text not null,
    key text not null,
    value json not null,
    created_by_id uuid not null,
    subject_id text,
    ttl_seconds bigint,
    expires_at timestamptz,
    search tsvector not null generated always as (
        to_tsvector('simple'::regconfig, key)
        || json_to_tsvector('simple'::regconfig, value, '["key", "string", "numeric", "boolean"]')
    ) stored,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    unique (owner_id, root_id, namespace, key)
);
create index memory_by_age on memory_records (owner_id, root_id, namespace, created_at desc, id desc);
create index memory_by_subject on memory_records (owner_id, subject_id) where subject_id is not null;
create index memory_expiring on memory_records (expires_at) where expires_at is not null;

-- What agents of one tree, and their embedder, say to each other. created_at is when it was sent; root_id is
-- the agent at the tree's root. A message with to_run_id is for that run alone.
create table messages (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    root_id uuid not null references agents (id),
    from_agent_id uuid not null,
    to_agent_id uuid not null references agents (id),
    to_run_id uuid,
    sender text not null check (sender in ('agent', 'embedder')),
    body json not null,
    created_at timestamptz not null default clock_timestamp(),
    delivered_at timestamptz,
    read_at timestamptz
);
create index messages_unread on messages (owner_id, to_agent_id, created_at, id) where read_at is null;
create index messages_by_age on messages (owner_id, created_at desc, id desc);
create index messages_by_agent on messages (owner_id, to_agent_id, created_at desc, id desc);
create index messages_by_tree on messages (owner_id, root_id, created_at desc, id desc);
