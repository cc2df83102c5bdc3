-- pre: new tables, and columns with a default.

alter table agents add column prompt_no integer not null default 0;
alter table agents add column runner_provider_id uuid;
alter table agents add column runner_model text;
create index agents_by_parent on agents (owner_id, parent_id) where parent_id is not null;
create index agents_by_subject on agents using gin (subject_ids);
create index runs_by_parent on runs (owner_id, parent_id) where parent_id is not null;
create index runs_by_subject on runs using gin (subject_ids);
alter table messages add column subject_ids text[] not null default '{}';
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
    unique (owner_id, name)
);
create index agents_by_provider on agents (owner_id, runner_provider_id) where runner_provider_id is not null;

-- MCP servers that an embedder attached to an agent. sealed_auth is encrypted; slug is the server's part of a
-- tool's name.
create table agent_servers (
    agent_id uuid not null references agents (id),
    slug text not null,
    owner_id uuid not null references owners (id),
    name text not null,
    url text not null,
    sealed_auth bytea,
    place integer not null,
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
