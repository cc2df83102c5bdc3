-- pre: indexes, and columns with a default.

alter table runs add column log_removed_at timestamptz;
create index runs_unpruned on runs (ended_at) where ended_at is not null and log_pruned_at is null;
create index runs_pruning on runs (log_pruned_at) where log_pruned_at is not null and log_removed_at is null;
