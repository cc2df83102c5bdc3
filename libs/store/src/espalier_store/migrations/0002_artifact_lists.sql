-- pre: an index for each way of listing artifacts, and one to find out whether bytes are still needed.
create index artifacts_by_age on artifacts (owner_id, created_at desc, id desc);
create index artifacts_by_agent on artifacts (owner_id, agent_id, created_at desc, id desc);
create index artifacts_by_subject on artifacts (owner_id, subject_id, created_at desc, id desc)
    where subject_id is not null;
create index artifacts_by_bytes on artifacts (owner_id, sha256);
