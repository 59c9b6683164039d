// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Brings the database to the schema of this program: the files of migrations/, forward only, each
 * once, all that are missing in one transaction. Touches schema pepsi.
 */
import * as Effect from "effect/Effect"
import * as SqlClient from "effect/sql/SqlClient"
import { createHash } from "node:crypto"
import * as fs from "node:fs"
import { type DatabaseError, DatabaseUnfit } from "../src/services/DatabaseError.ts"
import { named, sqlState, translated, withoutContent } from "./Postgres.ts"

export interface Migration {
  readonly number: number
  readonly name: string
  readonly sql: string
  readonly sha256: string
}

export interface Status {
  readonly applied: ReadonlyArray<{
    readonly number: number
    readonly name: string
    readonly appliedAt: Date
  }>
  readonly missing: ReadonlyArray<Migration>
}

/** Beside this file in a bundle, one level up in the source tree. */
export const directory: URL =
  ["./migrations/", "../migrations/"]
    .map((relative) => new URL(relative, import.meta.url))
    .find((url) => fs.existsSync(url)) ?? new URL("../migrations/", import.meta.url)

const read = (name: string): Migration => {
  // A checkout with CRLF line ends is the same migration.
  const sql = fs.readFileSync(new URL(name, directory), "utf8").replaceAll("\r\n", "\n")
  return {
    number: Number(name.slice(0, 4)),
    name: name.slice(5, -".sql".length),
    sql,
    sha256: createHash("sha256").update(sql).digest("hex")
  }
}

/** The migrations of this program, `NNNN_name.sql` in the order of their numbers. */
export const all: Effect.Effect<ReadonlyArray<Migration>> = Effect.sync(() =>
  fs
    .readdirSync(directory)
    .filter((name) => /^\d{4}_.*\.sql$/.test(name))
    .toSorted()
    .map(read)
)

/** "pepsi" in ASCII: nobody else takes this lock. */
const lockKey = 0x7065707369

interface Applied {
  readonly number: number
  readonly name: string
  readonly sha256: string
  readonly applied_at: Date
}

/** What is missing; fails where the database has something else than this program knows. */
const compare = (
  migrations: ReadonlyArray<Migration>,
  applied: ReadonlyArray<Applied>
): Effect.Effect<ReadonlyArray<Migration>, DatabaseUnfit> => {
  for (const row of applied) {
    const ours = migrations.find((m) => m.number === row.number)
    if (ours === undefined) {
      return Effect.fail(
        new DatabaseUnfit({
          reason: "newer",
          detail:
            `the database has migration ${row.number} (${row.name}), which this program does` +
            " not know: a newer pepsi has used it, run that one",
          cause: undefined
        })
      )
    }
    if (ours.sha256 !== row.sha256) {
      return Effect.fail(
        new DatabaseUnfit({
          reason: "edited",
          detail:
            `migration ${row.number} (${row.name}) was applied with another content than it` +
            " has now: migrations are never edited, restore the file or reinstall pepsi",
          cause: undefined
        })
      )
    }
  }
  return Effect.succeed(migrations.filter((m) => !applied.some((row) => row.number === m.number)))
}

const appliedRows = Effect.fnUntraced(function* (sql: SqlClient.SqlClient) {
  const [table] = yield* sql<{ present: boolean }>`
    select to_regclass('pepsi.migration') is not null as present`
  if (table?.present !== true) return []
  return yield* sql<Applied>`
    select number, name, sha256, applied_at from pepsi.migration order by number`
})

/**
 * Runs a file: the driver sends one statement at a time, `execute` takes many and reads each only
 * when those before it are done.
 */
const runner = `
  create function pg_temp.pepsi_run(text) returns void language plpgsql as 'begin execute $1; end'`

const apply = Effect.fnUntraced(function* (sql: SqlClient.SqlClient, migration: Migration) {
  yield* sql`select pg_temp.pepsi_run(${migration.sql})`.pipe(
    Effect.catchIf(
      (error) => !/^(08|57P|53)/.test(sqlState(error) ?? "08"),
      (error) => {
        const cause = withoutContent(error)
        const detail = `migration ${migration.number} (${migration.name}) failed: ${cause.message}`
        return Effect.fail(new DatabaseUnfit({ reason: "migration", detail, cause }))
      }
    )
  )
  yield* sql`
    insert into pepsi.migration (number, name, sha256)
    values (${migration.number}, ${migration.name}, ${migration.sha256})`
})

/**
 * Applies what is missing and says what it was. Two processes may do so at once: the second waits
 * and finds nothing missing. Nothing is kept of a set that fails.
 */
export const migrate: Effect.Effect<
  ReadonlyArray<Migration>,
  DatabaseError | DatabaseUnfit,
  SqlClient.SqlClient
> = Effect.gen(function* () {
  const sql = yield* SqlClient.SqlClient
  const migrations = yield* all
  const missing = yield* sql.withTransaction(
    Effect.gen(function* () {
      // Released with the transaction; a long migration of the other process may take its time.
      yield* sql`set local statement_timeout = 0`
      yield* sql`select pg_advisory_xact_lock(${lockKey})`
      const missing = yield* compare(migrations, yield* appliedRows(sql))
      if (missing.length === 0) return missing
      yield* sql`create schema if not exists pepsi`
      yield* sql`
      create table if not exists pepsi.migration (
        number int primary key, name text not null, sha256 text not null,
        applied_at timestamptz not null default now())`
      yield* sql.unsafe(runner)
      for (const migration of missing) yield* apply(sql, migration)
      yield* sql`drop function pg_temp.pepsi_run(text)`
      return missing
    })
  )
  const last = missing.at(-1)
  if (last !== undefined) {
    yield* Effect.logInfo(`database migrated to ${last.number} (${last.name})`)
  }
  return missing
}).pipe(translated("Migrations.migrate")) // no limit of time: a migration takes as long as it takes

/** What is applied and what is missing; changes nothing. */
export const status: Effect.Effect<Status, DatabaseError | DatabaseUnfit, SqlClient.SqlClient> =
  Effect.gen(function* () {
    const sql = yield* SqlClient.SqlClient
    const rows = yield* appliedRows(sql)
    const missing = yield* compare(yield* all, rows)
    const applied = rows.map(({ applied_at, name, number }) => ({
      number,
      name,
      appliedAt: applied_at
    }))
    return { applied, missing }
  }).pipe(named("Migrations.status"))
