-- SPDX-License-Identifier: AGPL-3.0-or-later
-- What the dispatcher writes: deaths, moments that have come, and who owns a section.
--
-- Plans are pinned as in 0002_load.sql.

-- A worker died with these in hand (its backend was ended first). Only what is returned may be
-- handed out again; the others the dead worker had settled. The p_max-th death: failed, as poison.
create function pepsi.crash_write(
  p_ids bigint[], p_revs int[], p_error text default null, p_max int default 3)
returns table (id bigint, rev int, crashes int, status text)
language plpgsql rows 64
set enable_seqscan = off set enable_bitmapscan = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
  update pepsi.workqueue w set
    rev = w.rev + 1,
    crashes = w.crashes + 1,
    last_error = coalesce(p_error, w.last_error),
    status = case
      when w.status = 'pending' and w.crashes + 1 >= p_max then 'failed' else w.status end,
    parked_reason = case
      when w.status = 'held' and w.crashes + 1 >= p_max then ':failed' else w.parked_reason end,
    state = case
      when w.crashes + 1 >= p_max then w.state || jsonb_build_object('failure', jsonb_build_object(
        'stage', w.stage, 'class', 'poison', 'status', '5.3.0', 'text', coalesce(p_error, ''),
        'at', now()))
      else w.state end
  from (select u.id, u.rev from unnest(p_ids, p_revs) u(id, rev) order by 1) d
  where w.id = any (array[d.id]) and w.rev = d.rev and w.status in ('pending', 'held')
  returning w.id, w.rev, w.crashes, w.status::text;
end $$;

-- Due rows become pending, the oldest first; rows of all sections.
create function pepsi.promote_due(p_limit int)
returns table (
  id bigint, rev int, stage text, size bigint, fair_key text, attempts int, crashes int)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
  update pepsi.workqueue w set status = 'pending', next_at = null, rev = w.rev + 1
   where w.id = any (array(
     select q.id from pepsi.workqueue q
      where q.status = 'deferred' and q.next_at <= now()
      order by q.next_at limit p_limit
        for update skip locked))
  returning w.id, w.rev, w.stage::text, w.size, w.fair_key::text, w.attempts, w.crashes;
end $$;

-- Parked rows whose time is over become pending, in their expiry section; rows of all sections.
create function pepsi.expire_parked(p_limit int)
returns table (
  id bigint, rev int, stage text, size bigint, fair_key text, attempts int, crashes int)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
  update pepsi.workqueue w set
    status = 'pending', rev = w.rev + 1, stage = coalesce(w.parked_to, w.stage),
    attempts = 0, crashes = 0,
    state = w.state || jsonb_build_object('park_expired', w.parked_reason),
    parked_reason = null, parked_ref = null, parked_until = null, parked_to = null
   where w.id = any (array(
     select q.id from pepsi.workqueue q
      where q.status = 'parked' and q.parked_until <= now()
      order by q.parked_until limit p_limit
        for update skip locked))
  returning w.id, w.rev, w.stage::text, w.size, w.fair_key::text, w.attempts, w.crashes;
end $$;

-- Seconds until the next of either is due, by this clock; 0 = now, NULL = nothing waits.
create function pepsi.next_due() returns float8
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off
as $$
begin
  return (
    -- Not greatest(0, secs): that is 0 for NULL.
    select case when t.secs > 0 then t.secs when t.secs <= 0 then 0 end
      from (
        select extract(epoch from least(
          (select w.next_at from pepsi.workqueue w
            where w.status = 'deferred' order by w.next_at limit 1),
          (select w.parked_until from pepsi.workqueue w
            where w.status = 'parked' and w.parked_until is not null
            order by w.parked_until limit 1)
        ) - clock_timestamp()) as secs) t);
end $$;

-- After the OWN lock was taken. Returns the new epoch.
create function pepsi.section_take(p_section text, p_owner text) returns bigint language sql as $$
  insert into pepsi.section_owner as o (section, owner) values (p_section, p_owner)
  on conflict (section) do update set epoch = o.epoch + 1, owner = p_owner, since = now()
  returning epoch
$$;

-- Shared bodies that no row refers to any more.
create function pepsi.sweep_bodies() returns bigint language sql as $$
  with x as (
    delete from pepsi.body b
     where not exists (select from pepsi.workqueue w where w.body_id = b.id)
    returning 1)
  select count(*) from x
$$;
