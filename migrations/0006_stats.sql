-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Statistics, written by flush_stats() only.

create table pepsi.stage_stats (
  stage      text collate "C" primary key,
  processed  bigint not null default 0,       -- runs, fused ones included
  done       bigint not null default 0,
  deferred   bigint not null default 0,
  parked     bigint not null default 0,
  failed     bigint not null default 0,
  crashes    bigint not null default 0,
  fenced     bigint not null default 0,
  overloads  bigint not null default 0,
  fused      bigint not null default 0,       -- part of processed
  busy_us    bigint not null default 0,
  wait_us    bigint not null default 0,
  histogram  bigint[] not null default '{}',  -- run times; bucket i: below 2^i microseconds
  last_error text,
  updated_at timestamptz not null default now()
) with (fillfactor = 50);

create table pepsi.dispatch_stats (
  dispatcher         text collate "C" primary key default 'main',  -- one writer each
  flush_seq          bigint not null default 0,  -- the last flush that is in
  messages_processed bigint not null default 0,  -- rows that left the queue
  handed_out         bigint not null default 0,
  wakeups            bigint not null default 0,
  polls              bigint not null default 0,
  promoted           bigint not null default 0,
  overloads          bigint not null default 0,
  unreported         bigint not null default 0,  -- settled, but the report was lost with its worker
  retries            bigint not null default 0,  -- settles repeated after 40P01, 40001
  updated_at         timestamptz not null default now()
) with (fillfactor = 50);

-- true = counted now, false = this flush_seq was in already, error = somebody else writes too.
-- p_stats = {"dispatch": {column: increment}, "stages": {name: {column: increment, "histogram":
-- [increments], "last_error": text}}}.
create function pepsi.flush_stats(
  p_flush_seq bigint, p_stats jsonb, p_dispatcher text default 'main')
returns boolean language plpgsql as $$
declare
  d record;
  seen bigint;
begin
  insert into pepsi.dispatch_stats (dispatcher) values (p_dispatcher) on conflict do nothing;
  select t.flush_seq into seen from pepsi.dispatch_stats t
   where t.dispatcher = p_dispatcher for update;
  if seen = p_flush_seq then
    return false;
  end if;
  if seen <> p_flush_seq - 1 then
    raise exception 'flush_stats: expected flush %, got %: another writer', seen + 1, p_flush_seq
      using errcode = '22023';
  end if;
  select * into d from jsonb_populate_record(null::pepsi.dispatch_stats, p_stats->'dispatch');
  update pepsi.dispatch_stats t set
    flush_seq = p_flush_seq,
    updated_at = now(),
    messages_processed = t.messages_processed + coalesce(d.messages_processed, 0),
    handed_out = t.handed_out + coalesce(d.handed_out, 0),
    wakeups = t.wakeups + coalesce(d.wakeups, 0),
    polls = t.polls + coalesce(d.polls, 0),
    promoted = t.promoted + coalesce(d.promoted, 0),
    overloads = t.overloads + coalesce(d.overloads, 0),
    unreported = t.unreported + coalesce(d.unreported, 0),
    retries = t.retries + coalesce(d.retries, 0)
  where t.dispatcher = p_dispatcher;
  insert into pepsi.stage_stats as t (
    stage, processed, done, deferred, parked, failed, crashes, fenced, overloads, fused, busy_us,
    wait_us, histogram, last_error)
  select e.key, coalesce(r.processed, 0), coalesce(r.done, 0), coalesce(r.deferred, 0),
         coalesce(r.parked, 0), coalesce(r.failed, 0), coalesce(r.crashes, 0),
         coalesce(r.fenced, 0), coalesce(r.overloads, 0), coalesce(r.fused, 0),
         coalesce(r.busy_us, 0), coalesce(r.wait_us, 0), coalesce(r.histogram, '{}'), r.last_error
    from jsonb_each(p_stats->'stages') e,
         jsonb_populate_record(null::pepsi.stage_stats, e.value) as r
   order by e.key collate "C"
  on conflict (stage) do update set
    updated_at = now(),
    processed = t.processed + excluded.processed,
    done = t.done + excluded.done,
    deferred = t.deferred + excluded.deferred,
    parked = t.parked + excluded.parked,
    failed = t.failed + excluded.failed,
    crashes = t.crashes + excluded.crashes,
    fenced = t.fenced + excluded.fenced,
    overloads = t.overloads + excluded.overloads,
    fused = t.fused + excluded.fused,
    busy_us = t.busy_us + excluded.busy_us,
    wait_us = t.wait_us + excluded.wait_us,
    last_error = coalesce(excluded.last_error, t.last_error),
    histogram = array(
      select coalesce(a, 0) + coalesce(b, 0)
        from unnest(t.histogram, excluded.histogram) with ordinality h(a, b, k)
       order by k);
  return true;
end $$;
