-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Settling: what a run of a stage decided is written, with all it brings along, in one call.

-- Who was answered when in whose name (RFC 3834 section 2).
create table pepsi.reply_ledger (
  recipient text collate "C",
  sender    text collate "C",
  at        timestamptz not null default now(),
  primary key (recipient, sender)
) with (fillfactor = 80);

-- Whom an address has written to.
create table pepsi.whitelist (
  address   text collate "C",
  kind      text collate "C",
  peer      text collate "C",
  source    text not null default 'auto',
  created   timestamptz not null default now(),
  last_used timestamptz not null default now(),
  expires   timestamptz,
  primary key (address, kind, peer)
) with (fillfactor = 80);

-- A side write NAME is a function pepsi.write_NAME(p_calls jsonb) returns setof int. p_calls =
-- [{"n": 7, …arguments…}, …], all calls of a settle at once; it returns the n of those that won.
-- Its duties: touch its rows in ascending key order in collation "C" (names are run in ascending
-- order too, so no two settles can deadlock), one row per key (two calls of a batch may have the
-- same one), and no durable times from the caller. A migration adds a write by creating such a
-- function; nothing else changes.

-- {recipient, sender, interval: seconds}; wins at most once per interval.
create function pepsi.write_claim_reply(p_calls jsonb) returns setof int language plpgsql as $$
begin
  return query
  with c as materialized (
    select distinct on (c.recipient collate "C", c.sender collate "C")
           c.n, c.recipient collate "C" as recipient, c.sender collate "C" as sender, c.interval
      from jsonb_to_recordset(p_calls) as c(n int, recipient text, sender text, interval float8)
     order by 2, 3, 1),
  won as (
    insert into pepsi.reply_ledger as l (recipient, sender)
    select c.recipient, c.sender from c order by 1, 2
    on conflict (recipient, sender) do update set at = now()
      where l.at < now() - make_interval(secs => (
        select c.interval from c where c.recipient = l.recipient and c.sender = l.sender))
    returning l.recipient, l.sender)
  select c.n from c join won using (recipient, sender);
end $$;

-- {address, kind, peer, source?, for?: seconds}; wins when it is new.
create function pepsi.write_whitelist_upsert(p_calls jsonb) returns setof int language plpgsql as $$
begin
  return query
  with c as materialized (
    select distinct on (c.address collate "C", c.kind collate "C", c.peer collate "C")
           c.n, c.address collate "C" as address, c.kind collate "C" as kind,
           c.peer collate "C" as peer, coalesce(c.source, 'auto') as source,
           now() + make_interval(secs => c.for) as expires
      from jsonb_to_recordset(p_calls)
        as c(n int, address text, kind text, peer text, source text, "for" float8)
     order by 2, 3, 4, 1),
  x as (
    insert into pepsi.whitelist as t (address, kind, peer, source, expires)
    select c.address, c.kind, c.peer, c.source, c.expires from c order by 1, 2, 3
    on conflict (address, kind, peer) do update set
      last_used = now(),
      expires = case when t.expires is null or excluded.expires is null then null
                     else greatest(t.expires, excluded.expires) end
    returning t.address, t.kind, t.peer, t.xmax = 0 as fresh)
  select c.n from c join x using (address, kind, peer) where x.fresh;
end $$;

-- A row that a settle changed and left in the queue.
create type pepsi.settled as (
  i int, id bigint, rev int, stage text, status text, size bigint, fair_key text, attempts int,
  crashes int);

-- One batch, one call, no explicit transaction. Per row i (from 1): p_ids, p_revs the fence;
-- p_verdicts pass | done | defer | park | fail | fanout (= done that must have children); p_stages:
-- the section it now belongs to, NULL = not moved by this chain (a pass needs one); p_states: NULL
-- or a jsonb array aligned with the rows, each null or an object merged into the top of state.
--
-- p_more: entries for the rows that carry more, {"i": n, …}:
--   patch: headers, body (index into p_blobs, from 1), mail_from, rcpt_to, from_header, subject,
--          message_id, list_id, hdr_flags, settings_for (a JSON null clears), unset: [state keys]
--   error (last_error) · after: seconds (defer) · reason, ref, for: seconds, to: section (park)
--   writes: [{"name": …, …arguments…}]
--   children: [{token, stage, rcpt_to, mail_from?, state? (merged), unset?, fresh? (state not
--          inherited), headers?, body?, from_header?, subject?, message_id?, list_id?, hdr_flags?,
--          settings_for?, fair_key?, after?}]; what is absent comes from the parent, patched
--   emit:  [{token, stage, rcpt_to, headers, body, mail_from? '', state?, …, fair_key? ':gen',
--          "if"?: index into writes, from 0}]
--
-- Rows of the result, in no order: applied (status 'gone' = it left; 'held' = an operator held it
-- meanwhile), fenced (nothing of it was done), child and emission (i = the parent; new rows only: a
-- token that exists already is the same message).
--
-- A data error rolls the whole call back: repeat row by row. 40P01, 40001: repeat once as it is.
create function pepsi.settle(
  p_ids bigint[], p_revs int[], p_verdicts text[], p_stages text[] default null,
  p_states jsonb default null, p_more jsonb default null, p_blobs bytea[] default null)
returns table (
  i int, kind text, id bigint, rev int, stage text, status text, size bigint, fair_key text,
  attempts int, crashes int)
language plpgsql rows 64
set enable_seqscan = off set enable_bitmapscan = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  busy int[] := '{}';   -- rows with an entry in p_more
  fx int[];             -- of those, with writes, children or emissions
  open int[] := '{}';   -- of those, matched and locked
  left_ int[] := '{}';  -- applied and gone
  stay pepsi.settled[] := '{}';  -- applied and still there
  part pepsi.settled[];
  won int[] := '{}';    -- writes that won
  got int[];
  n int[];
  wish jsonb;
  wishes int;
  shared bigint;
  r record;
begin
  if not p_verdicts <@ '{pass,done,defer,park,fail,fanout}'
     or cardinality(p_verdicts) <> cardinality(p_ids)
     or cardinality(p_revs) <> cardinality(p_ids) then
    raise exception 'settle: bad arguments' using errcode = '22023';
  end if;

  if p_more is not null then
    select coalesce(array_agg((m->>'i')::int), '{}'),
           array_agg((m->>'i')::int) filter (where m ?| '{writes,children,emit}')
      into busy, fx from jsonb_array_elements(p_more) m;
    if exists (select from jsonb_array_elements(p_more) m
                where jsonb_array_length(m->'children') = 0) then
      raise exception 'settle: fan-out without children' using errcode = '22023';
    end if;
  end if;
  -- The mail would be lost.
  if 'fanout' = any (p_verdicts) and exists (
       select from unnest(p_verdicts) with ordinality v(v, i)
        where v.v = 'fanout' and not exists (
          select from jsonb_array_elements(p_more) m
           where (m->>'i')::int = v.i and m ? 'children')) then
    raise exception 'settle: fan-out without children' using errcode = '22023';
  end if;
  if p_verdicts && '{defer,park,fail}' and exists (
       select from unnest(p_verdicts) with ordinality v(v, i)
        where v.v in ('defer', 'park', 'fail') and v.i <> all (busy)) then
    raise exception 'settle: defer, park and fail need an entry in p_more' using errcode = '22023';
  end if;

  -- 1. Rows with effects: match and lock them in the order of their ids, then their writes by name.
  if fx is not null then
    select coalesce(array_agg(l.i), '{}') into open from (
      select d.i
        from (select x.i, p_ids[x.i] as id, p_revs[x.i] as rev from unnest(fx) x(i) order by 2) d
        join pepsi.workqueue w
          on w.id = any (array[d.id]) and w.rev = d.rev and w.status in ('pending', 'held')
         for update of w) l;
    for r in
      select t.name, jsonb_agg(t.call order by t.n) as calls
        from (select c.c->>'name' as name, c.c || jsonb_build_object('n', a.n) as call, a.n
                from jsonb_array_elements(p_more) m,
                     jsonb_array_elements(m->'writes') with ordinality c(c, k),
                     lateral (select (m->>'i')::int * 256 + c.k - 1 as n) a
               where (m->>'i')::int = any (open)) t
       group by t.name order by t.name collate "C"
    loop
      execute format('select array_agg(n) from pepsi.%I($1) n', 'write_' || r.name)
        into got using r.calls;
      won := won || got;
    end loop;
  end if;

  -- 2. Rows with an entry in p_more: patches and the verdicts that wait. A parent that leaves is
  -- patched as well, because its children inherit.
  if p_more is not null then
    with x as (
      update pepsi.workqueue w set
        rev = w.rev + 1,
        stage = coalesce(d.stage, w.stage),
        status = case
          when w.status = 'held' or d.v = 'pass' then w.status
          when d.v = 'defer' then 'deferred'
          when d.v = 'park' then 'parked'
          when d.v = 'fail' then 'failed'
          else w.status end,
        attempts = case
          when d.v = 'pass' then 0
          else case when d.stage is null then w.attempts else 0 end + (d.v = 'defer')::int end,
        crashes = case
          when d.v in ('defer', 'park') then 0
          when d.stage is null then w.crashes
          else least(w.crashes, 1) end,
        next_at = case when d.v = 'defer' then
          now() + make_interval(secs => coalesce((d.m->>'after')::float8, 300)) end,
        parked_reason = case
          when d.v = 'park' then d.m->>'reason'
          when d.v = 'fail' and w.status = 'held' then ':failed' end,  -- see workqueue_release
        parked_ref = case when d.v = 'park' then d.m->>'ref' end,
        parked_until = case when d.v = 'park' then
          now() + make_interval(secs => (d.m->>'for')::float8) end,
        parked_to = case when d.v = 'park' then d.m->>'to' end,
        last_error = case
          when d.v = 'pass' then d.m->>'error'
          else coalesce(d.m->>'error', w.last_error) end,
        state = case
          when d.patch is null and not d.m ? 'unset' then w.state
          else (w.state || coalesce(d.patch, '{}'))
               - array(select jsonb_array_elements_text(d.m->'unset')) end,
        headers = case when d.h is null then w.headers else p_blobs[d.h] end,
        -- The same TOAST pointer unless it changes: nothing is rewritten.
        body = case when d.b is null then w.body else p_blobs[d.b] end,
        body_id = case when d.b is null then w.body_id end,
        size = case
          when d.h is null and d.b is null then w.size
          else coalesce(octet_length(p_blobs[d.h]), octet_length(w.headers))
               + coalesce(octet_length(p_blobs[d.b]) + 2, w.size - octet_length(w.headers)) end,
        mail_from = case when d.m ? 'mail_from' then d.m->>'mail_from' else w.mail_from end,
        rcpt_to = case when d.m ? 'rcpt_to'
          then array(select jsonb_array_elements_text(d.m->'rcpt_to')) else w.rcpt_to end,
        from_header = case when d.m ? 'from_header' then d.m->>'from_header' else w.from_header end,
        subject = case when d.m ? 'subject' then d.m->>'subject' else w.subject end,
        message_id = case when d.m ? 'message_id' then d.m->>'message_id' else w.message_id end,
        list_id = case when d.m ? 'list_id' then d.m->>'list_id' else w.list_id end,
        hdr_flags = case when d.m ? 'hdr_flags' then (d.m->>'hdr_flags')::int else w.hdr_flags end,
        settings_for = case
          when not d.m ? 'settings_for' then w.settings_for
          when d.m->'settings_for' <> 'null'
            then array(select jsonb_array_elements_text(d.m->'settings_for')) end
      from (
        select m, e.i, p_ids[e.i] as id, p_revs[e.i] as rev, p_verdicts[e.i] as v,
               p_stages[e.i] as stage, nullif(p_states->(e.i - 1), 'null') as patch,
               (m->>'headers')::int as h, (m->>'body')::int as b
          from jsonb_array_elements(p_more) m, lateral (select (m->>'i')::int as i) e
         where p_verdicts[e.i] not in ('done', 'fanout')
            or m ? 'children' and (
                 m ?| '{headers,body,mail_from,from_header,subject,message_id,list_id}'
                 or m ?| '{hdr_flags,settings_for,unset}'
                 or p_states->(e.i - 1) <> 'null')
         order by 3) d
      where w.id = any (array[d.id]) and w.rev = d.rev and w.status in ('pending', 'held')
      returning d.v, (d.i, w.id, w.rev, w.stage, w.status, w.size, w.fair_key, w.attempts,
                      w.crashes)::pepsi.settled as row)
    select array_agg(x.row) into part from x where x.v not in ('done', 'fanout');
    stay := stay || part;
  end if;

  -- 3. Children and emissions, from the parents as they are now.
  if open <> '{}' then
    select jsonb_object_agg(y.c->>'token', jsonb_build_array(y.i, y.kind, y.c)), count(*)
      into wish, wishes
      from (
        select (m->>'i')::int as i, k.kind, k.c
          from jsonb_array_elements(p_more) m, lateral (
            select 'child' as kind, c from jsonb_array_elements(m->'children') c
            union all
            select 'emission', c from jsonb_array_elements(m->'emit') c
             where not c ? 'if' or (m->>'i')::int * 256 + (c->>'if')::int = any (won)) k
         where (m->>'i')::int = any (open)) y;
    if wishes > 0 then
      -- One of them would be lost.
      if (select count(*) from jsonb_object_keys(wish)) <> wishes then
        raise exception 'settle: two new messages with one token' using errcode = '22023';
      end if;
      -- A large body that at least two rows will have moves to pepsi.body once.
      for r in
        select w.id
          from (select (e.value->>0)::int as i, count(*) as heirs
                  from jsonb_each(wish) e
                 where e.value->>1 = 'child' and not e.value->2 ? 'body'
                 group by 1) h
          join pepsi.workqueue w on w.id = any (array[p_ids[h.i]])
         where octet_length(w.body) > 65536
           and h.heirs + (p_verdicts[h.i] not in ('done', 'fanout'))::int > 1
      loop
        insert into pepsi.body (data) select w.body from pepsi.workqueue w where w.id = r.id
          returning id into shared;
        update pepsi.workqueue w set body = null, body_id = shared where w.id = r.id;
      end loop;
      return query
      with x as (
        insert into pepsi.workqueue as q (
          token, mail_from, rcpt_to, from_header, subject, message_id, list_id, hdr_flags,
          settings_for, headers, body, body_id, stage, status, next_at, state, size, fair_key,
          received_at)
        select e.key,
               coalesce(c->>'mail_from', case when k.fresh then '' else p.mail_from end),
               array(select jsonb_array_elements_text(c->'rcpt_to')),
               case when c ? 'from_header' or k.fresh then c->>'from_header' else p.from_header end,
               case when c ? 'subject' or k.fresh then c->>'subject' else p.subject end,
               case when c ? 'message_id' or k.fresh then c->>'message_id' else p.message_id end,
               case when c ? 'list_id' or k.fresh then c->>'list_id' else p.list_id end,
               case when c ? 'hdr_flags' or k.fresh then (c->>'hdr_flags')::int
                    else p.hdr_flags end,
               case when c->'settings_for' <> 'null'
                 then array(select jsonb_array_elements_text(c->'settings_for')) end,
               v.headers, v.body, case when v.body is null and not k.fresh then p.body_id end,
               c->>'stage', case when c ? 'after' then 'deferred' else 'pending' end,
               now() + make_interval(secs => (c->>'after')::float8),
               case when k.fresh or (c->>'fresh')::boolean then coalesce(c->'state', '{}')
                    else (p.state || coalesce(c->'state', '{}'))
                         - array(select jsonb_array_elements_text(c->'unset')) end,
               octet_length(v.headers)
                 + coalesce(octet_length(v.body) + 2, p.size - octet_length(p.headers)),
               coalesce(c->>'fair_key', case when k.fresh then ':gen' else p.fair_key end),
               case when k.fresh then now() else p.received_at end
          from jsonb_each(wish) e
         cross join lateral (
           select e.value->2 as c, e.value->>1 = 'emission' as fresh) k
          join pepsi.workqueue p on p.id = any (array[p_ids[(e.value->>0)::int]])
         cross join lateral (
           select case when c ? 'headers' or k.fresh then p_blobs[(c->>'headers')::int]
                       else p.headers end as headers,
                  case when c ? 'body' or k.fresh then p_blobs[(c->>'body')::int]
                       else p.body end as body) v
         order by e.key collate "C"
        on conflict (token) do nothing
        returning q.token, q.id, q.rev, q.stage, q.status, q.size, q.fair_key)
      select (wish->x.token->>0)::int, wish->x.token->>1, x.id, x.rev, x.stage::text,
             x.status::text, x.size, x.fair_key::text, 0, 0
        from x order by x.id;
    end if;
    with x as (
      delete from pepsi.workqueue w using unnest(open) o(i)
       where w.id = any (array[p_ids[o.i]]) and p_verdicts[o.i] in ('done', 'fanout')
      returning o.i)
    select array_agg(x.i) into n from x;
    left_ := left_ || n;
  end if;

  -- 4. The plain rest.
  if 'pass' = any (p_verdicts) then
    with x as (
      update pepsi.workqueue w set
        rev = w.rev + 1, stage = d.stage, attempts = 0, crashes = least(w.crashes, 1),
        last_error = null,
        state = case when d.patch is null then w.state else w.state || d.patch end
      from (
        select u.id, u.rev, u.stage, u.i::int as i,
               nullif(p_states->(u.i::int - 1), 'null') as patch
          from unnest(p_ids, p_revs, p_verdicts, p_stages)
            with ordinality u(id, rev, v, stage, i)
         where u.v = 'pass' and u.i <> all (busy)
         order by u.id) d
      where w.id = any (array[d.id]) and w.rev = d.rev and w.status in ('pending', 'held')
      returning (d.i, w.id, w.rev, w.stage, w.status, w.size, w.fair_key, w.attempts,
                 w.crashes)::pepsi.settled as row)
    select array_agg(x.row) into part from x;
    stay := stay || part;
  end if;
  if 'done' = any (p_verdicts) then
    with x as (
      delete from pepsi.workqueue w
       using (
         select u.id, u.rev, u.i
           from unnest(p_ids, p_revs, p_verdicts) with ordinality u(id, rev, v, i)
          where u.v = 'done' and u.i <> all (fx) is not false
          order by u.id) d
       where w.id = any (array[d.id]) and w.rev = d.rev and w.status in ('pending', 'held')
      returning d.i)
    select array_agg(x.i) into n from x;
    left_ := left_ || n;
  end if;

  if stay <> '{}' then
    return query
    select h.i, 'applied', h.id, h.rev, h.stage, h.status, h.size, h.fair_key, h.attempts, h.crashes
      from unnest(stay) h;
  end if;
  if left_ <> '{}' then
    return query
    select l.i, 'applied', p_ids[l.i], null::int, null::text, 'gone', null::bigint, null::text,
           null::int, null::int
      from unnest(left_) l(i);
  end if;
  if cardinality(stay) + cardinality(left_) < cardinality(p_ids) then
    return query
    select d.i::int, 'fenced', d.id, null::int, null::text, null::text, null::bigint, null::text,
           null::int, null::int
      from unnest(p_ids) with ordinality d(id, i)
     where d.i <> all (left_ || array(select h.i from unnest(stay) h));
  end if;
end $$;
