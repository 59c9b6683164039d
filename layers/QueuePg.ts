// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The work queue in PostgreSQL: each method is one statement, most of them one of the functions of
 * migrations 0002 to 0006. Ids and sizes travel as float8, which the driver reads as numbers: they
 * stay below 2^53, and int8 would come as bigint.
 */
import * as PgTypes from "@effect/sql-pg/PgTypes"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Notices from "effect/Queue"
import * as Result from "effect/Result"
import * as SqlClient from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import { type Admission, Queue } from "../src/services/Queue.ts"
import { named, Postgres, silent, translated } from "./Postgres.ts"
import { clean, cleanOrNull, json } from "./PostgresText.ts"
import * as Rows from "./QueueRows.ts"

/** An array of one known type, whatever is in it: an empty or all-null one has none of its own. */
const arrayOf =
  (oid: number) =>
  (values: ReadonlyArray<unknown>): PgTypes.Parameter =>
    Result.getOrThrow(PgTypes.array(values, oid))
const texts = arrayOf(PgTypes.OID.text)
const ints = arrayOf(PgTypes.OID.int4)
const octets = arrayOf(PgTypes.OID.bytea)
const bigints = arrayOf(PgTypes.OID.int8)
const ids = (numbers: ReadonlyArray<number>): PgTypes.Parameter => bigints(numbers.map(BigInt))

const make = Effect.gen(function* () {
  const sql = yield* SqlClient.SqlClient
  const postgres = yield* Postgres

  // Its commit waits for the disk whatever the session's default is: a local setting holds until
  // the commit is done, and a volatile subquery is never optimized away.
  const durable = sql.literal(
    "durable as materialized (select set_config('synchronous_commit', 'on', true))"
  )

  // Appends to the table and its partial index on pending; waits for no lock but those of equal
  // tokens. Size and fair key are given, so the trigger is skipped.
  const admit = Effect.fnUntraced(function* (messages: ReadonlyArray<Admission>) {
    const column = <A>(pick: (m: Admission) => A): ReadonlyArray<A> => messages.map(pick)
    const rows = yield* sql<{ id: number; token: string; size: number }>`
        with ${durable}
        insert into pepsi.workqueue (
          token, mail_from, rcpt_to, from_header, subject, message_id, list_id, stage, fair_key,
          state, headers, body, size)
        select m.token, m.mail_from, string_to_array(m.rcpt_to, E'\n'), m.from_header, m.subject,
               m.message_id, m.list_id, m.stage, m.fair_key, m.state::jsonb, m.headers, m.body,
               octet_length(m.headers) + 2 + octet_length(m.body)
          from durable, unnest(
            ${texts(column((m) => clean(m.token)))},
            ${texts(column((m) => clean(m.sender)))},
            ${texts(column((m) => clean(m.recipients.join("\n"))))},
            ${texts(column((m) => cleanOrNull(m.fromHeader)))},
            ${texts(column((m) => cleanOrNull(m.subject)))},
            ${texts(column((m) => cleanOrNull(m.messageId)))},
            ${texts(column((m) => cleanOrNull(m.listId)))},
            ${texts(column((m) => clean(m.section)))},
            ${texts(column((m) => clean(m.fairKey)))},
            ${texts(column((m) => json(m.state)))},
            ${octets(column((m) => m.headers))},
            ${octets(column((m) => m.body))}
          ) as m(token, mail_from, rcpt_to, from_header, subject, message_id, list_id, stage,
                 fair_key, state, headers, body)
        returning id::float8 as id, token, size::float8 as size`
    const byToken = new Map(rows.map((row) => [row.token, row]))
    return messages.map((m) => {
      const row = byToken.get(m.token)!
      const fresh = { rev: 0, attempts: 0, crashes: 0 }
      return Rows.toEntry({ ...row, ...fresh, stage: m.section, fair_key: m.fairKey }, false)
    })
  }, named("Queue.admit"))

  const entryColumns = sql.literal(
    "id::float8 as id, rev, stage, size::float8 as size, fair_key, attempts, crashes"
  )

  // Walks the primary key from `after`; no lock.
  const scan = Effect.fnUntraced(function* (after: number, limit: number) {
    const rows = yield* sql<Rows.EntryRow>`
      select ${entryColumns} from pepsi.ready_scan(${after}::float8::bigint, ${limit})`
    return rows.map((row) => Rows.toEntry(row, true))
  }, named("Queue.scan"))

  // Walks one key of the partial index on pending; no lock.
  const refill: Queue["Service"]["refill"] = Effect.fnUntraced(function* (request) {
    const rows = yield* sql<Rows.EntryRow>`
      select ${entryColumns} from pepsi.ready_refill(
        ${clean(request.fairKey)}, ${request.section}, ${request.after}::float8::bigint,
        ${request.limit})`
    return rows.map((row) => Rows.toEntry(row, true))
  }, named("Queue.refill"))

  // One descent of the primary key per row; no lock. Octets come as far as the level asks.
  const load: Queue["Service"]["load"] = Effect.fnUntraced(function* (rows, wanted) {
    const { level, prefix } = Rows.level(wanted)
    const loaded = yield* sql<Rows.LoadedRow>`
      select i, id::float8 as id, rev, token, mail_from, rcpt_to, from_header, subject, stage,
             state, size::float8 as size, fair_key, hdr_flags, message_id, list_id, received_at,
             attempts, crashes, settings, headers, body
        from pepsi.load(
          ${ids(rows.map((r) => r.id))}, ${ints(rows.map((r) => r.rev))}, ${level}, ${prefix})`
    return loaded.map(Rows.toLoaded)
  }, named("Queue.load"))

  const settledColumns = sql.literal(
    `i, kind, id::float8 as id, rev, stage, status, size::float8 as size, fair_key, attempts,
     crashes`
  )

  // Locks the rows it matches in the order of their ids, then the keys of side writes in theirs.
  const settle: Queue["Service"]["settle"] = Effect.fnUntraced(function* (outcomes, options) {
    const a = Rows.settleArguments(outcomes)
    const call = sql`pepsi.settle(
      ${ids(a.ids)}, ${ints(a.revs)}, ${texts(a.verdicts)}, ${texts(a.stages)}, ${a.states}::jsonb,
      ${a.more}::jsonb, ${octets(a.blobs)})`
    const rows = options.durable
      ? yield* sql<Rows.SettledRow>`with ${durable} select ${settledColumns} from durable, ${call}`
      : yield* sql<Rows.SettledRow>`select ${settledColumns} from ${call}`
    return rows.map(Rows.toSettled)
  }, named("Queue.settle"))

  // One descent of the primary key per row; no lock.
  const revisions = Effect.fnUntraced(function* (of: ReadonlyArray<number>) {
    const rows = yield* sql<{ id: number; rev: number }>`
      select id::float8 as id, rev from pepsi.workqueue where id = any (${ids(of)})`
    return new Map(rows.map(({ id, rev }) => [id, rev]))
  }, named("Queue.revisions"))

  // Locks the rows it matches in the order of their ids.
  const crashed: Queue["Service"]["crashed"] = Effect.fnUntraced(function* (rows, error) {
    return yield* sql<{ id: number; rev: number; crashes: number; status: "pending" | "failed" }>`
      select id::float8 as id, rev, crashes, status
        from pepsi.crash_write(
          ${ids(rows.map((r) => r.id))}, ${ints(rows.map((r) => r.rev))}, ${clean(error)})`
  }, named("Queue.crashed"))

  // Walks the index of due rows; skips what another has locked.
  const promote = Effect.fnUntraced(function* (limit: number) {
    const rows = yield* sql<Rows.EntryRow>`select ${entryColumns} from pepsi.promote_due(${limit})`
    return rows.map((row) => Rows.toEntry(row, false))
  }, named("Queue.promote"))

  // Walks the index of expiries; skips what another has locked.
  const expire = Effect.fnUntraced(function* (limit: number) {
    const rows = yield* sql<Rows.EntryRow>`
      select ${entryColumns} from pepsi.expire_parked(${limit})`
    return rows.map((row) => Rows.toEntry(row, false))
  }, named("Queue.expire"))

  // The first entries of the indexes of due rows and of expiries.
  const nextDue = sql<{ seconds: number | null }>`select pepsi.next_due() as seconds`.pipe(
    Effect.map(([row]) => Option.fromNullishOr(row?.seconds)),
    named("Queue.nextDue")
  )

  // Locks the dispatcher's own row, then the sections' rows in the order of their names.
  const flushStats: Queue["Service"]["flushStats"] = Effect.fnUntraced(function* (
    flushSeq,
    stats,
    dispatcher
  ) {
    const [row] = yield* sql<{ counted: boolean }>`
        select pepsi.flush_stats(
          ${flushSeq}::float8::bigint, ${Rows.toStatsJson(stats)}::jsonb, ${dispatcher}) as counted`
    return row?.counted === true
  }, named("Queue.flushStats"))

  // By the primary key of dispatch_stats.
  const lastFlush = Effect.fnUntraced(function* (dispatcher: string) {
    const [row] = yield* sql<{ seq: number }>`
      select flush_seq::float8 as seq from pepsi.dispatch_stats where dispatcher = ${dispatcher}`
    return row?.seq ?? 0
  }, named("Queue.lastFlush"))

  // A lost notice costs a poll interval, so its commit does not wait for the disk.
  const notify = sql`
    select set_config('synchronous_commit', 'off', true), pg_notify('workqueue', '')`.pipe(
    Effect.asVoid,
    named("Queue.notify")
  )

  // Reads all of pepsi.body; new references only descend from old ones, so it needs no lock.
  const sweepBodies = sql<{ n: number }>`select pepsi.sweep_bodies()::float8 as n`.pipe(
    Effect.map(([row]) => row?.n ?? 0),
    named("Queue.sweepBodies")
  )

  return Queue.of({
    admit,
    scan,
    refill,
    load,
    settle,
    revisions,
    crashed,
    promote,
    expire,
    nextDue,
    flushStats,
    lastFlush,
    notify,
    sweepBodies,
    listen: listen(postgres),
    ...operators(sql)
  })
})

/** A session that has said nothing for this long is asked whether it is still there. */
const heartbeat = "10 seconds"
const patience = "5 seconds"

/**
 * LISTEN on a session of its own: the pool keeps all of its. A session that was cut off without a
 * word does not answer the heartbeat, and is lost.
 */
const listen = (postgres: Postgres["Service"]): Queue["Service"]["listen"] =>
  Effect.gen(function* () {
    // Pinned: the listener shares its session with the heartbeat.
    const session = yield* Effect.flatMap(postgres.connect(), (one) => one.pin)
    const notices = yield* session.listen("workqueue")
    const alive = session.query("select 1", [], false).pipe(
      Effect.timeoutOrElse({
        duration: patience,
        orElse: () => silent
      })
    )
    const heard = Effect.timeoutOption(Notices.takeAll(notices), heartbeat)
    const next: Effect.Effect<void, SqlError> = Effect.gen(function* () {
      while (Option.isNone(yield* heard)) yield* alive
    })
    return Effect.asVoid(next).pipe(translated("Queue.listen"))
  }).pipe(named("Queue.listen"))

/** What an operator's command reads. */
const operators = (sql: SqlClient.SqlClient): Pick<Queue["Service"], "list" | "show"> => {
  const columns = sql.literal(`
    w.id::float8 as id, w.token, w.stage, w.status, w.mail_from, w.rcpt_to, w.size::float8 as size,
    extract(epoch from now() - w.received_at)::float8 as age, w.attempts, w.crashes,
    extract(epoch from coalesce(w.next_at, w.parked_until) - now())::float8 as due, w.last_error,
    w.parked_reason, w.state - 'client' as state`)

  // Walks the primary key from `after`; no lock.
  const list: Queue["Service"]["list"] = Effect.fnUntraced(function* (request) {
    const status = request.status ?? null
    const section = request.section ?? null
    const rows = yield* sql<Rows.ListedRow>`
      select ${columns}
        from pepsi.workqueue w
       where w.id > ${request.after}::float8::bigint
         and (${status}::text is null or w.status = ${status})
         and (${section}::text is null or w.stage = ${section})
       order by w.id
       limit ${request.limit}`
    return rows.map(Rows.toListed)
  }, named("Queue.list"))

  // A range of the unique index on token, which is in collation "C": a prefix is a range there.
  const show = Effect.fnUntraced(function* (token: string) {
    const rows = yield* sql<Rows.ListedRow & { headers: Uint8Array }>`
      select ${columns}, w.headers
        from pepsi.workqueue w
       where w.token >= ${clean(token)} and w.token < ${clean(token)} || chr(1114111)
       order by w.token
       limit 2`
    const only = rows.length === 1 ? rows[0] : undefined
    const row = rows.find((one) => one.token === token) ?? only
    return row === undefined
      ? Option.none()
      : Option.some({ ...Rows.toListed(row), headers: row.headers })
  }, named("Queue.show"))

  return { list, show }
}

export const QueuePg = Layer.effect(Queue, make)
