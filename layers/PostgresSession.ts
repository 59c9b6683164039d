// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The one session of a worker, as the SQL client its layers use. When it is lost a new one is made
 * at the next statement, and what was asked to be prepared on each session is done there first.
 */
import * as PgClient from "@effect/sql-pg/PgClient"
import type * as PgConnection from "@effect/sql-pg/PgConnection"
import * as PgPool from "@effect/sql-pg/PgPool"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Reactivity from "effect/reactivity/Reactivity"
import * as SqlClient from "effect/sql/SqlClient"
import type { Connection } from "effect/sql/SqlConnection"
import type { SqlError } from "effect/sql/SqlError"
import type { DatabaseError, DatabaseUnfit } from "../src/services/DatabaseError.ts"
import { clientConfig, connector, type Options, Postgres, probe } from "./Postgres.ts"

type Preparation = (session: PgConnection.PgConnection) => Effect.Effect<void, SqlError>

/** A session as Effect's SQL client wants it. */
const adapt = (session: PgConnection.PgConnection): Connection => {
  const rows = (sql: string, params: ReadonlyArray<unknown>, prepare = true) =>
    Effect.map(session.query(sql, params, prepare), (result) => result.rows)
  return {
    execute: (sql, params) => rows(sql, params),
    executeRaw: (sql, params) => session.query(sql, params),
    executeStream: (sql, params) => session.stream(sql, params),
    executeValues: (sql, params) => session.queryValues(sql, params),
    executeValuesUnprepared: (sql, params) => session.queryValues(sql, params, false),
    executeUnprepared: (sql, params) => rows(sql, params, false)
  }
}

const make = Effect.fnUntraced(function* (options: Omit<Options, "maxConnections">) {
  // A pool of one: it notices a lost session and makes the next, and lends it to one at a time.
  const settings = { ...options, maxConnections: 1 }
  const pool = yield* PgPool.make({ ...clientConfig(settings), idleTimeout: Duration.infinity })
  const preparations: Array<Preparation> = []
  const prepared = new WeakMap<PgConnection.PgConnection, number>()

  /** Runs on `session` what has not been run there yet; nobody else has it meanwhile. */
  const prepare = Effect.fnUntraced(function* (session: PgConnection.PgConnection) {
    for (let k = prepared.get(session) ?? 0; k < preparations.length; k++) {
      yield* preparations[k]!(session)
      prepared.set(session, k + 1)
    }
    return session
  })
  const isReady = (session: PgConnection.PgConnection): boolean =>
    (prepared.get(session) ?? 0) === preparations.length
  const ready = (session: PgConnection.PgConnection) =>
    isReady(session) ? Effect.succeed(session) : prepare(session)

  const client = yield* SqlClient.make({
    acquirer: Effect.map(Effect.flatMap(pool.get, ready), adapt),
    transactionAcquirer: Effect.map(Effect.flatMap(pool.reserve, ready), adapt),
    borrower: (use) =>
      pool.use((session) => Effect.flatMap(ready(session), (one) => use(adapt(one)))),
    compiler: PgClient.makeCompiler(),
    driver: "pg",
    spanAttributes: []
  })
  const session: NonNullable<Postgres["Service"]["session"]> = {
    prepare: (preparation) =>
      Effect.suspend(() => {
        preparations.push(preparation)
        return Effect.asVoid(pool.use(ready))
      }),
    pid: pool.use((one) => Effect.map(ready(one), (same) => same.processId))
  }
  yield* probe(() => pool.get, options.server)
  return Layer.merge(
    Layer.succeed(SqlClient.SqlClient, client),
    Layer.succeed(Postgres, { server: options.server, connect: connector(settings), session })
  )
})

/** The one session of a worker on `options.server`, after that was found fit. */
export const layer = (
  options: Omit<Options, "maxConnections">
): Layer.Layer<Postgres | SqlClient.SqlClient, SqlError | DatabaseError | DatabaseUnfit> =>
  Layer.unwrap(make(options)).pipe(Layer.provide(Reactivity.layer))
