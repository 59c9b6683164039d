-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Reading the queue: ready lists and loads.
--
-- The hot functions are plpgsql, because its plans are cached per session (an SQL function with
-- "set" is planned at each call before PostgreSQL 18). Their plans are pinned, because a generic
-- plan made while the table was empty stays when it is full: seqscan and bitmapscan off; jit off,
-- because the price of a switched-off node (1e10) would start the compiler. And the queue is joined
-- by "w.id = any (array[d.id])", never "w.id = d.id": an equality makes the order of the primary
-- key interesting, and then the planner walks the whole index as the outer side of the join.
-- Written so, the only path is one descent per row, in the order of d.

-- Pending rows in id order. Fewer rows than p_limit = the end was reached.
create function pepsi.ready_scan(p_after bigint, p_limit int)
returns table (
  id bigint, rev int, stage text, size bigint, fair_key text, attempts int, crashes int)
language plpgsql stable rows 1000
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  select w.id, w.rev, w.stage::text, w.size, w.fair_key::text, w.attempts, w.crashes
    from pepsi.workqueue w
   where w.status = 'pending' and w.id > p_after
   order by w.id
   limit p_limit;
end $$;

-- Further rows of one key that overflowed its list.
create function pepsi.ready_refill(p_fair_key text, p_stage text, p_after bigint, p_limit int)
returns table (
  id bigint, rev int, stage text, size bigint, fair_key text, attempts int, crashes int)
language plpgsql stable rows 1000
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  select w.id, w.rev, w.stage::text, w.size, w.fair_key::text, w.attempts, w.crashes
    from pepsi.workqueue w
   where w.status = 'pending'
     -- With "=" the order would fit the primary key as well.
     and (w.fair_key, w.id) > (p_fair_key, p_after) and w.fair_key <= p_fair_key
     and w.stage = p_stage
   order by w.fair_key, w.id
   limit p_limit;
end $$;

-- The addresses whose settings apply when settings_for is NULL: site, domain, address, and the
-- address without its +detail (RFC 5233).
create function pepsi.settings_keys(p_rcpt text[]) returns text[]
language plpgsql immutable parallel safe as $$
declare
  a text;
  d text;
  k text[] := '{@}';
begin
  foreach a in array p_rcpt loop
    a := lower(a);
    d := substring(a from '@[^@]*$');
    k := k || array[coalesce(d, ''), a];
    if strpos(a, '+') > 1 then
      k := k || (split_part(a, '+', 1) || coalesce(d, ''));
    end if;
  end loop;
  return k;
end $$;

-- p_level: 0 metadata, 1 headers, 2 the first p_prefix octets of the body too, 3 all of it.
-- i = position in p_ids, from 1. A row that does not come is gone, held, waiting or fenced: do not
-- run it. settings = {address: settings}, or NULL for none.
create function pepsi.load(
  p_ids bigint[], p_revs int[], p_level int, p_prefix int default 65536)
returns table (
  i int, id bigint, rev int, token text, mail_from text, rcpt_to text[], from_header text,
  subject text, stage text, state jsonb, size bigint, fair_key text, hdr_flags int,
  message_id text, list_id text, settings_for text[], received_at timestamptz, attempts int,
  crashes int, settings jsonb, headers bytea, body bytea)
language plpgsql stable rows 64
set enable_seqscan = off set enable_bitmapscan = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  select d.i::int, w.id, w.rev, w.token::text, w.mail_from, w.rcpt_to, w.from_header, w.subject,
         w.stage::text, w.state, w.size, w.fair_key::text, w.hdr_flags, w.message_id, w.list_id,
         w.settings_for, w.received_at, w.attempts, w.crashes, s.settings,
         case when p_level >= 1 then w.headers end,
         case p_level
           when 3 then
             case when w.body_id is null then w.body
                  else (select b.data from pepsi.body b where b.id = w.body_id) end
           when 2 then
             substring(
               case when w.body_id is null then w.body
                    else (select b.data from pepsi.body b where b.id = w.body_id) end
               from 1 for p_prefix)
         end
    from unnest(p_ids, p_revs) with ordinality as d(id, rev, i)
    join pepsi.workqueue w
      on w.id = any (array[d.id]) and w.rev = d.rev
     -- Not "= 'pending'", which would make the partial index a path.
     and w.status <> all ('{held,deferred,parked,failed}')
    left join lateral (
      select jsonb_object_agg(a.address, a.settings) as settings
        from pepsi.address_settings a
       where a.address = any (
         case when w.settings_for is null then pepsi.settings_keys(w.rcpt_to)
              else w.settings_for end)) s on true;
end $$;

-- A slice of the body, from octet 1, for large mail that is read in pieces.
create function pepsi.slice(p_id bigint, p_from int, p_for int) returns bytea
language sql stable as $$
  select case
    when w.body_id is null then substring(w.body from p_from for p_for)
    else (select substring(b.data from p_from for p_for) from pepsi.body b where b.id = w.body_id)
  end
  from pepsi.workqueue w where w.id = p_id
$$;
