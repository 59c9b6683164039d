// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Ownership of sections by advisory locks of PostgreSQL, which end with their session: OWN and WORK
 * of a section are the pairs (class, hash of its name). Sections whose names hash alike share a
 * lock: their owners then wait for one another, which is slower and never wrong.
 */
import type * as PgConnection from "@effect/sql-pg/PgConnection"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schedule from "effect/Schedule"
import * as SqlClient from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import { Ownership } from "../src/services/Ownership.ts"
import { named, Postgres, silent, sqlState, translated } from "./Postgres.ts"

/** First halves of the locks' keys: "pOWN" and "pWRK" in ASCII, nobody else's in our database. */
const own_ = 0x704f574e
const work_ = 0x7057524b

export interface Options {
  /** How long workers of an earlier owner may take to settle before their sessions are ended. */
  readonly patience: Duration.Input
}

/** The watchdog asks this often and waits this long. */
const heartbeat = Duration.seconds(1)
const heartbeatPatience = Duration.seconds(5)

/** SQLSTATE lock_not_available: `lock_timeout` has passed. */
const lockNotAvailable = "55P03"

const make = Effect.fnUntraced(function* (options: Options) {
  const patience = Duration.fromInputUnsafe(options.patience)
  const postgres = yield* Postgres
  const sql = yield* SqlClient.SqlClient

  // Waits for the lock as long as it takes: the session has no statement timeout.
  const own: Ownership["Service"]["own"] = Effect.fn("OwnershipPg.own")(function* (
    sections,
    owner,
    before
  ) {
    const session = yield* postgres.connect({
      application_name: "pepsi owner",
      statement_timeout: "0"
    })
    // In one order everywhere, so that two owners cannot wait for one another crosswise.
    const sorted = [...sections].toSorted()
    for (const section of sorted) {
      yield* session.query("select pg_advisory_lock($1, hashtext($2))", [own_, section])
    }
    // All of them or none: who is interrupted here still knows what it had.
    const rows = yield* session.queryValues(
      "select s, pepsi.section_take(s, $2)::float8 from unnest($1::text[]) s order by s",
      [sorted, owner]
    )
    const epochs = new Map(rows.map(([section, epoch]) => [String(section), Number(epoch)]))
    for (const section of sorted) {
      // Ours until the session was lost, and nobody's since: its workers are our own.
      const isOurs = before?.get(section) === (epochs.get(section) ?? 0) - 1
      if (!isOurs) yield* outlive(session, section, patience)
    }
    const lost = yield* Deferred.make<void>()
    yield* watchdog(session).pipe(
      Effect.ignore, // whatever it is, the locks cannot be counted on any more
      Effect.andThen(Deferred.succeed(lost, undefined)),
      Effect.forkScoped
    )
    return { epochs, lost: Deferred.await(lost) }
  }, translated("Ownership.own"))

  // Where there is a pool (tests, single duties) the lock has a session of its own.
  const work: Ownership["Service"]["work"] = Effect.fnUntraced(function* (section) {
    if (postgres.session !== undefined) {
      yield* postgres.session.prepare(hold(section))
      return yield* postgres.session.pid
    }
    const session = yield* postgres.connect({ application_name: "pepsi worker" })
    yield* hold(section)(session)
    return session.processId
  }, named("Ownership.work"))

  const backend = (
    postgres.session?.pid ??
    Effect.map(sql<{ pid: number }>`select pg_backend_pid() as pid`, ([row]) => row!.pid)
  ).pipe(named("Ownership.backend"))

  // A pid may belong to another by now: only a session that holds a worker's lock is ended.
  const endBackend = Effect.fnUntraced(function* (pid: number) {
    const rows = yield* sql<{ gone: boolean }>`
      select pg_terminate_backend(a.pid, 5000) as gone
        from pg_stat_activity a
       where a.pid = ${pid} and a.datname = current_database() and a.pid <> pg_backend_pid()
         and exists (
           select from pg_locks l
            where l.pid = a.pid and l.locktype = 'advisory' and l.classid::int8 = ${work_})`
    if (rows.some(({ gone }) => !gone)) return yield* silent
  }, named("Ownership.endBackend"))

  return Ownership.of({ own, work, backend, endBackend })
})

const hold = (section: string) => (session: PgConnection.PgConnection) =>
  Effect.asVoid(session.query("select pg_advisory_lock_shared($1, hashtext($2))", [work_, section]))

/** Fails when the session does not answer. */
const watchdog = (session: PgConnection.PgConnection) =>
  session
    .query("select 1")
    .pipe(Effect.timeout(heartbeatPatience), Effect.repeat(Schedule.spaced(heartbeat)))

/**
 * Takes WORK alone and gives it back, so that every worker of an earlier owner has settled or is
 * gone. Sessions of workers that keep it beyond `patience`, frozen ones, are ended.
 */
const outlive = Effect.fnUntraced(function* (
  session: PgConnection.PgConnection,
  section: string,
  patience: Duration.Duration
) {
  const key = [work_, section]
  const lockTimeout = (millis: number) =>
    session.query("select set_config('lock_timeout', $1, false)", [String(Math.ceil(millis))])
  yield* lockTimeout(Duration.toMillis(patience))
  const alone = session.query("select pg_advisory_lock($1, hashtext($2))", key)
  yield* alone.pipe(
    Effect.catchIf(
      (error) => sqlState(error) === lockNotAvailable,
      () => Effect.andThen(endWorkers(session, section), alone)
    )
  )
  yield* lockTimeout(0)
  yield* session.query("select pg_advisory_unlock($1, hashtext($2))", key)
})

/** Ends all sessions that hold or await WORK of the section. pg_locks has half keys as oids. */
const endWorkers = (
  session: PgConnection.PgConnection,
  section: string
): Effect.Effect<void, SqlError> =>
  Effect.asVoid(
    session.query(
      `select pg_terminate_backend(l.pid, 5000)
       from pg_locks l
      where l.locktype = 'advisory' and l.classid::int8 = $1 and l.objsubid = 2
        and l.objid::int8 = hashtext($2)::int8 & 4294967295
        and l.database = (select d.oid from pg_database d where d.datname = current_database())
        and l.pid <> pg_backend_pid()`,
      [work_, section]
    )
  )

export const layer = (
  options: Options
): Layer.Layer<Ownership, never, Postgres | SqlClient.SqlClient> =>
  Layer.effect(Ownership, make(options))

/** With the patience of a worker's usual TIMEOUT. */
export const OwnershipPg = layer({ patience: "30 seconds" })
