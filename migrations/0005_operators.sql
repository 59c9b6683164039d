-- SPDX-License-Identifier: AGPL-3.0-or-later
-- For other processes and for operators: inject, resume, hold, release.

-- A message from SQL. Bare CR and LF become CRLF (RFC 5321 section 2.3.8), NUL is refused. Returns
-- the token.
create function pepsi.workqueue_inject(
  p_mail_from text, p_rcpt_to text[], p_message bytea, p_stage text default 'init',
  p_state jsonb default '{"local_origin": true}', p_token text default null)
returns text language plpgsql as $$
declare
  m text;
  cut int;
  v_token text := coalesce(p_token, replace(gen_random_uuid()::text, '-', ''));
begin
  if position('\x00'::bytea in p_message) > 0 then
    raise exception 'NUL in message' using errcode = '22023';
  end if;
  m := convert_from(p_message, 'LATIN1');  -- octets as characters
  m := replace(replace(replace(m, E'\r\n', E'\n'), E'\r', E'\n'), E'\n', E'\r\n');
  if m = '' or left(m, 2) = E'\r\n' then
    raise exception 'message without headers' using errcode = '22023';
  end if;
  if right(m, 2) <> E'\r\n' then
    m := m || E'\r\n';
  end if;
  cut := strpos(m, E'\r\n\r\n');
  if cut = 0 then
    cut := length(m) - 1;
  end if;
  insert into pepsi.workqueue (token, mail_from, rcpt_to, headers, body, stage, state)
  values (
    v_token, p_mail_from, p_rcpt_to, convert_to(left(m, cut + 1), 'LATIN1'),
    convert_to(substr(m, cut + 4), 'LATIN1'), p_stage, p_state);
  perform pg_notify('workqueue', '');
  return v_token;
end $$;

-- The event a parked row waits for has happened. p_ref must be what the row waits for; 1 = released
-- now, 0 = not (any more) waiting for it. On a row an operator holds the event is recorded and the
-- hold stays.
create function pepsi.workqueue_resume(
  p_token text, p_ref text, p_stage text default null, p_state jsonb default null)
returns int language plpgsql as $$
declare
  n int;
begin
  update pepsi.workqueue set
    rev = rev + 1,
    status = case when status = 'held' then 'held' else 'pending' end,
    stage = coalesce(p_stage, stage), attempts = 0, crashes = 0,
    state = state || coalesce(p_state, '{}'),
    parked_reason = null, parked_ref = null, parked_until = null, parked_to = null
  where token = p_token and status in ('parked', 'held') and parked_reason <> ':failed'
    and parked_ref is not distinct from p_ref;
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('workqueue', '');
  end if;
  return n;
end $$;

-- The same for all rows that wait for one thing (a key). After it the caller sends one NOTIFY.
create function pepsi.workqueue_resume_all(
  p_reason text, p_ref text, p_stage text default null, p_state jsonb default null)
returns int language plpgsql as $$
declare
  n int;
begin
  update pepsi.workqueue w set
    rev = w.rev + 1, status = 'pending', stage = coalesce(p_stage, w.stage),
    attempts = 0, crashes = 0, state = w.state || coalesce(p_state, '{}'),
    parked_reason = null, parked_ref = null, parked_until = null, parked_to = null
  from (
    select q.id from pepsi.workqueue q
     where q.status = 'parked' and q.parked_reason = p_reason and q.parked_ref = p_ref
     order by q.id for update) d
  where w.id = d.id;
  get diagnostics n = row_count;
  return n;
end $$;

-- hold leaves rev alone, so a run in progress can still settle. Under a hold next_at and parked_*
-- keep what the row waits for, and parked_reason ':failed' that it failed.
create function pepsi.workqueue_hold(p_tokens text[]) returns int language plpgsql as $$
declare
  n int;
begin
  update pepsi.workqueue w set
    status = 'held',
    parked_reason = case when w.status = 'failed' then ':failed' else w.parked_reason end
  from (
    select q.id from pepsi.workqueue q
     where q.token = any (p_tokens) and q.status <> 'held'
     order by q.id for update) d
  where w.id = d.id;
  get diagnostics n = row_count;
  return n;
end $$;

-- Puts a held row where it belongs by now.
create function pepsi.workqueue_release(p_tokens text[]) returns int language plpgsql as $$
declare
  n int;
begin
  update pepsi.workqueue w set
    rev = w.rev + 1,
    status = case
      when w.parked_reason = ':failed' then 'failed'
      when w.parked_reason is not null then 'parked'
      when w.next_at is not null then 'deferred'
      else 'pending' end,
    parked_reason = nullif(w.parked_reason, ':failed')
  from (
    select q.id from pepsi.workqueue q
     where q.token = any (p_tokens) and q.status = 'held'
     order by q.id for update) d
  where w.id = d.id;
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('workqueue', '');
  end if;
  return n;
end $$;
