-- pre: indexes, and columns with a default.

create index runs_unpruned on runs (ended_at) where ended_at is not null and log_pruned_at is null;
