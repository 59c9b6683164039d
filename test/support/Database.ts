// SPDX-License-Identifier: AGPL-3.0-or-later
/** A database of its own for a test file: a clone of the migrated template, dropped afterwards. */
import * as PgConnection from "@effect/sql-pg/PgConnection"
import type * as PgClient from "@effect/sql-pg/PgClient"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type * as Scope from "effect/Scope"
import type * as SqlClient from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import { randomBytes } from "node:crypto"
import { inject } from "vitest"
import * as Postgres from "../../layers/Postgres.ts"
import type { Server } from "../../layers/PostgresAddress.ts"
import type { DatabaseError, DatabaseUnfit } from "../../src/services/DatabaseError.ts"
import type { Provided } from "./setup.ts"

/** The database that a test has for itself. */
export class Database extends Context.Service<
  Database,
  {
    readonly server: Server
    /** The same as text for [pepsi-postgres] CONFIG. */
    readonly config: string
  }
>()("pepsi/test/Database") {}

const provided = (): Provided["postgres"] => inject("postgres")

/** Runs one statement in the database all others are made from. */
const administer = (statement: string): Effect.Effect<void, SqlError> =>
  Effect.scoped(
    Effect.gen(function* () {
      const session = yield* PgConnection.make(provided().server)
      yield* session.query(statement, [], false)
    })
  )

export const configOf = (server: Server): string =>
  `host=${server.host} port=${server.port} user=${server.username} dbname=${server.database}`

/** A new clone of `template`. Closing the scope ends whoever is still connected to it. */
const cloneOf = (template: string): Effect.Effect<Server, SqlError, Scope.Scope> =>
  Effect.suspend(() => {
    const { server } = provided()
    const database = `test_${randomBytes(8).toString("hex")}`
    return Effect.acquireRelease(
      Effect.as(administer(`create database ${database} template ${template}`), {
        ...server,
        database
      }),
      () => Effect.orDie(administer(`drop database if exists ${database} with (force)`))
    )
  })

/** A new clone of the migrated database. */
export const clone: Effect.Effect<Server, SqlError, Scope.Scope> = Effect.suspend(() =>
  cloneOf(provided().template)
)

export interface Settings {
  /** The database to clone; that with all migrations unless given. */
  readonly template?: string
  readonly maxConnections?: number
  readonly synchronousCommit?: boolean
}

/** A fresh database with a pool on it. Each layer value made by this is a database of its own. */
export const fresh = (
  settings: Settings = {}
): Layer.Layer<
  Database | Postgres.Postgres | PgClient.PgClient | SqlClient.SqlClient,
  SqlError | DatabaseError | DatabaseUnfit
> =>
  Layer.unwrap(
    Effect.map(settings.template === undefined ? clone : cloneOf(settings.template), (server) =>
      Layer.merge(
        Layer.succeed(Database, { server, config: configOf(server) }),
        Postgres.layer({
          server,
          applicationName: "test",
          maxConnections: settings.maxConnections ?? 8,
          synchronousCommit: settings.synchronousCommit ?? false
        })
      )
    )
  )
