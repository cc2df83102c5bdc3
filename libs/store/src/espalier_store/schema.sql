-- The whole database at a glance. The migrations build it; a test proves that both yield the same.
--
-- Habits: every tenant row names its owner and its birth on the database's clock; ids are uuid v7 made by
-- the writing process; nothing cascades; a row that outlives a run holds no foreign key to it.

-- Trigrams, for misspelt words in memory search. It comes with Postgres ("contrib") and needs no superuser.
create extension if not exists pg_trgm;

create table owners (
    id uuid primary key,
    name text not null unique,
    created_at timestamptz not null default clock_timestamp()
);

-- A key is shown once and stored as its SHA-256.
create table keys (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    key_hash bytea not null unique,
    scopes text[] not null,
    created_at timestamptz not null default clock_timestamp(),
    revoked_at timestamptz,
    last_seen_at timestamptz
);

-- An AEP session id is a secret too, so only its SHA-256 is here.
create table sessions (
    session_hash bytea primary key,
    owner_id uuid not null references owners (id),
    protocol_version text not null,
    capabilities text[] not null,
    client_info jsonb not null,
    created_at timestamptz not null default clock_timestamp(),
    last_seen_at timestamptz not null default clock_timestamp()
);

create table agents (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    root_id uuid not null,
    parent_id uuid,
    name text not null,
    immutable_directives text not null,
    mutable_prompt text not null,
    mutable_prompt_policy text not null,
    toolset text[] not null,
    ceilings jsonb not null,
    budgets jsonb not null,
    max_live_runs integer not null,
    subject_ids text[] not null,
    metadata jsonb not null,
    lifecycle_state text not null default 'active',
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    prompt_no integer not null default 0,
    runner_provider_id uuid,
    runner_model text,
    prompt_subject_ids text[] not null default '{}'
);
create index agents_by_age on agents (owner_id, created_at desc, id desc);
create index agents_by_parent on agents (owner_id, parent_id) where parent_id is not null;
create index agents_by_subject on agents using gin (subject_ids);
create index agents_by_prompt_subject on agents using gin (prompt_subject_ids);

-- created_at is the run's start; due_at is never null: the next wake, or the end of max_wall_seconds.
-- cycles_given is what its spawner granted to it, cycles_lost what answers beyond their reservation cost it.
-- lease_until is in no index, so that a renewal stays a heap-only update. From log_pruned_at on nobody is shown the
-- run's log; at log_removed_at the last row of it was gone.
create table runs (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    agent_id uuid not null references agents (id),
    root_id uuid not null,
    parent_id uuid,
    depth integer not null,
    goal text not null,
    inputs jsonb not null,
    subject_ids text[] not null,
    state text not null default 'running',
    wait_reason text,
    due_at timestamptz not null,
    wall_at timestamptz not null,
    next_seq bigint not null default 1,
    next_entry_no bigint not null default 1,
    lease_token bigint not null default 0,
    lease_until timestamptz,
    expired_claims integer not null default 0,
    wake_seq bigint not null default 0,
    wake_seen bigint not null default 0,
    cancel_requested_at timestamptz,
    max_cycles integer not null,
    max_subagents integer not null,
    max_tool_calls_per_cycle integer not null,
    max_wall_seconds integer not null,
    cycles_granted integer not null default 0,
    subagents_granted integer not null default 0,
    cycle_count integer not null default 0,
    result jsonb,
    created_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz,
    log_pruned_at timestamptz,
    cycles_given integer not null default 0,
    cycles_lost integer not null default 0,
    erased_at timestamptz,
    log_removed_at timestamptz,
    check (state in ('running', 'sleeping', 'complete', 'cancelled', 'error')),
    check ((ended_at is null) = (state in ('running', 'sleeping')))
);
create index runs_due on runs (due_at) where state in ('running', 'sleeping');
create index runs_live on runs (owner_id, agent_id) where state in ('running', 'sleeping');
create index runs_cancelling on runs (cancel_requested_at)
    where cancel_requested_at is not null and state in ('running', 'sleeping');
create index runs_by_age on runs (owner_id, agent_id, created_at desc, id desc);
create index runs_by_parent on runs (owner_id, parent_id) where parent_id is not null;
create index runs_by_subject on runs using gin (subject_ids);
create index runs_unpruned on runs (ended_at) where ended_at is not null and log_pruned_at is null;
create index runs_pruning on runs (log_pruned_at) where log_pruned_at is not null and log_removed_at is null;

-- What happened, in the words that deciding reads.
create table journal (
    run_id uuid not null references runs (id),
    entry_no bigint not null,
    owner_id uuid not null,
    body json not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (run_id, entry_no)
);

-- What readers are told. payload is the very text that is published.
create table events (
    run_id uuid not null references runs (id),
    seq bigint not null,
    owner_id uuid not null,
    type text not null,
    payload text not null,
    emitted_at timestamptz not null,
    primary key (run_id, seq)
);

-- What still has to happen outside the transaction that wrote it. One fresh row per act: the events of a run
-- from a seq on are to be published, or an agent is to be woken for a message (without one: for any unread one).
create table outbox (
    id bigint generated always as identity primary key,
    owner_id uuid not null,
    kind text not null check (kind in ('publish', 'wake')),
    run_id uuid,
    from_seq bigint,
    agent_id uuid,
    message_id uuid,
    child_run_id uuid,
    created_at timestamptz not null default clock_timestamp()
);
create index outbox_by_age on outbox (created_at);
create index outbox_wakes on outbox (created_at) where kind = 'wake';

create table snapshots (
    run_id uuid primary key references runs (id),
    owner_id uuid not null,
    version integer not null,
    entry_no bigint not null,
    body json not null,
    created_at timestamptz not null default clock_timestamp()
);

-- An artifact outlives its run.
create table artifacts (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    agent_id uuid not null references agents (id),
    run_id uuid not null,
    name text not null,
    mime_type text not null,
    size_bytes bigint not null,
    sha256 text not null,
    subject_id text,
    metadata jsonb not null,
    created_at timestamptz not null default clock_timestamp()
);
create index artifacts_by_run on artifacts (owner_id, run_id, created_at desc, id desc);
create index artifacts_by_age on artifacts (owner_id, created_at desc, id desc);
create index artifacts_by_agent on artifacts (owner_id, agent_id, created_at desc, id desc);
create index artifacts_by_subject on artifacts (owner_id, subject_id, created_at desc, id desc)
    where subject_id is not null;
create index artifacts_by_bytes on artifacts (owner_id, sha256);

create table blobs (
    owner_id uuid not null references owners (id),
    sha256 text not null,
    size_bytes bigint not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (owner_id, sha256)
);

create table blob_chunks (
    owner_id uuid not null,
    sha256 text not null,
    chunk_no integer not null,
    bytes bytea not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (owner_id, sha256, chunk_no),
    foreign key (owner_id, sha256) references blobs (owner_id, sha256)
);
alter table blob_chunks alter column bytes set storage external;

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

-- Which brokers live. One that lets its time pass sends nothing more. listed has the names of its operator's
-- servers, which no server of an embedder may take.
create table brokers (
    id uuid primary key,
    alive_until timestamptz not null,
    created_at timestamptz not null default clock_timestamp(),
    listed text[] not null default '{}'
);

-- What a tree of agents remembers. root_id is the agent at its root. value is kept as it was spelled: jsonb would
-- make 309 digits of 1e308, for every reader. words are the key and all words of the value, as we normalise them: the
-- same in every locale. embedding is what the record means to embedding_model, embedding_signs its first 64 signs.
-- No index has either: one over all owners would make a search pay for what other owners wrote, and a tree is small
-- enough to be read through.
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
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    words text not null default '',
    embedding real[],
    embedding_model text,
    embedding_signs bigint,
    search tsvector not null generated always as (to_tsvector('simple'::regconfig, words)) stored,
    unique (owner_id, root_id, namespace, key),
    check ((embedding is null) = (embedding_model is null))
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
    read_at timestamptz,
    subject_ids text[] not null default '{}'
);
create index messages_unread on messages (owner_id, to_agent_id, created_at, id) where read_at is null;
create index messages_by_age on messages (owner_id, created_at desc, id desc);
create index messages_by_agent on messages (owner_id, to_agent_id, created_at desc, id desc);
create index messages_by_tree on messages (owner_id, root_id, created_at desc, id desc);
create index messages_by_subject on messages using gin (subject_ids);

-- What an agent's mutable prompt has been: one row for each change that took effect. diff is a unified diff.
create table prompt_history (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    agent_id uuid not null references agents (id),
    diff text not null,
    reason text not null,
    approved_by text,
    subject_ids text[] not null default '{}',
    created_at timestamptz not null default clock_timestamp()
);
create index prompt_history_by_age on prompt_history (owner_id, agent_id, created_at, id);
create index prompt_history_by_subject on prompt_history using gin (subject_ids);

-- A change that waits for a person. base_no is the agent's prompt_no that it was made against.
create table prompt_changes (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    agent_id uuid not null references agents (id),
    run_id uuid,
    base_no integer not null,
    proposal text not null,
    diff text not null,
    reason text not null,
    subject_ids text[] not null default '{}',
    state text not null default 'pending' check (state in ('pending', 'applied', 'rejected')),
    created_at timestamptz not null default clock_timestamp(),
    resolved_at timestamptz
);
create index prompt_changes_pending on prompt_changes (owner_id, agent_id, created_at, id) where state = 'pending';
create index prompt_changes_by_subject on prompt_changes using gin (subject_ids);

-- What waits for a person's word, whatever it is about: a call (call_id) or a change of a prompt (change_id).
create table approvals (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    agent_id uuid not null references agents (id),
    run_id uuid,
    kind text not null check (kind in ('tool_call', 'in_doubt', 'prompt_change')),
    call_id text,
    change_id uuid,
    resolution text,
    comment text,
    resolved_by text,
    created_at timestamptz not null default clock_timestamp(),
    resolved_at timestamptz,
    check ((resolution is null) = (resolved_at is null))
);
create index approvals_open on approvals (owner_id, created_at desc, id desc) where resolved_at is null;
create index approvals_by_agent on approvals (owner_id, agent_id, created_at desc, id desc);

-- The first answer to a create that named a key, kept for a day. answer is null while the first is under way.
create table idempotency (
    owner_id uuid not null references owners (id),
    method text not null,
    key text not null,
    params_hash bytea not null,
    answer text,
    created_at timestamptz not null default clock_timestamp(),
    primary key (owner_id, method, key)
);
create index idempotency_by_age on idempotency (created_at);
-- An answer begins with the id of what was created: for finding it again when that is erased.
create index idempotency_by_answer on idempotency (owner_id, left(answer, 38));

-- Model providers that an owner brings. sealed_key is the encrypted API key.
create table providers (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    name text not null,
    kind text not null check (kind in ('openai_compat', 'anthropic', 'gemini')),
    base_url text,
    default_model text,
    sealed_key bytea not null,
    key_hint text not null,
    last_tested_at timestamptz,
    last_test_status text,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    unique (owner_id, name),
    unique (owner_id, id)
);

-- A test of a provider that somebody waits for: a worker takes it and asks the model. outcome is ok, or a kind
-- of fault with one sentence.
create table provider_probes (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    provider_id uuid not null references providers (id),
    state text not null default 'asked' check (state in ('asked', 'taken', 'done')),
    outcome text,
    message text,
    created_at timestamptz not null default clock_timestamp(),
    done_at timestamptz,
    check ((state = 'done') = (outcome is not null))
);
create index provider_probes_by_provider on provider_probes (owner_id, provider_id);
create index provider_probes_asked on provider_probes (created_at) where state = 'asked';
create index agents_by_provider on agents (owner_id, runner_provider_id) where runner_provider_id is not null;
-- Whatever happens at the same time, no agent is bound to a provider that is gone, or to another owner's.
alter table agents add constraint agents_provider foreign key (owner_id, runner_provider_id)
    references providers (owner_id, id);

-- MCP servers that an embedder attached to an agent. sealed_auth is encrypted; slug is the server's part of a
-- tool's name. An inherited one came from the parent: of its tools the agent has what its toolset names.
create table agent_servers (
    agent_id uuid not null references agents (id),
    slug text not null,
    owner_id uuid not null references owners (id),
    name text not null,
    url text not null,
    sealed_auth bytea,
    place integer not null,
    inherited boolean not null default false,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    primary key (agent_id, slug),
    unique (agent_id, name)
);

-- Persons whose data we hold. An erased one refuses to be tagged again by what was under way.
create table subjects (
    owner_id uuid not null references owners (id),
    id text not null,
    metadata jsonb not null default '{}',
    legal_hold boolean not null default false,
    erased_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    primary key (owner_id, id)
);

-- Each erasure of a subject, also one that a legal hold stopped. performed_at is null while it is under way: it goes
-- on when it is asked for again.
create table erasures (
    id uuid primary key,
    owner_id uuid not null references owners (id),
    subject_id text not null,
    mode text not null check (mode in ('hard_delete', 'redact')),
    created_at timestamptz not null default clock_timestamp(),
    performed_at timestamptz
);
create unique index erasures_open on erasures (owner_id, subject_id) where performed_at is null;

-- What an erasure did: wire ids, and nothing of what was there.
create table erased_records (
    erasure_id uuid not null references erasures (id),
    owner_id uuid not null,
    action text not null check (action in ('deleted', 'redacted', 'stripped', 'retained')),
    kind text not null,
    record_id text not null,
    reason text,
    created_at timestamptz not null default clock_timestamp(),
    primary key (erasure_id, kind, record_id)
);
