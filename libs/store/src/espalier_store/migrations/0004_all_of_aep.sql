-- pre: new tables, and columns with a default.

alter table agents add column prompt_no integer not null default 0;
alter table agents add column runner_provider_id uuid;
alter table agents add column runner_model text;
alter table agents add column prompt_subject_ids text[] not null default '{}';
create index agents_by_parent on agents (owner_id, parent_id) where parent_id is not null;
create index agents_by_subject on agents using gin (subject_ids);
create index agents_by_prompt_subject on agents using gin (prompt_subject_ids);
alter table runs add column cycles_given integer not null default 0;
alter table runs add column cycles_lost integer not null default 0;
create index runs_by_parent on runs (owner_id, parent_id) where parent_id is not null;
create index runs_by_subject on runs using gin (subject_ids);
alter table runs add column erased_at timestamptz;
alter table messages add column subject_ids text[] not null default '{}';
create index messages_by_subject on messages using gin (subject_ids);
alter table brokers add column listed text[] not null default '{}';

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

-- Memory is searched by words that we normalise, and by meaning. Trigrams come with Postgres and need no superuser.
do $$
begin
    if not exists (select from pg_available_extensions where name = 'pg_trgm') then
        raise exception 'This Postgres has no extension pg_trgm, which memory search needs.'
            using hint = 'Install the server''s contrib modules, then migrate again.';
    end if;
end $$;
create extension if not exists pg_trgm;
alter table memory_records drop column search;
alter table memory_records add column words text not null default '';
alter table memory_records add column embedding real[];
alter table memory_records add column embedding_model text;
alter table memory_records add column embedding_signs bigint;
alter table memory_records add check ((embedding is null) = (embedding_model is null));
-- What is there already is normalised as far as SQL can; the next write of a key normalises it wholly.
update memory_records
set words = ' ' || btrim(left(regexp_replace(lower(key || ' ' || value::text), '[^[:alnum:]]+', ' ', 'g'), 75000))
    || ' ';
alter table memory_records add column search tsvector not null
    generated always as (to_tsvector('simple'::regconfig, words)) stored;
