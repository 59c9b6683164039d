// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as SqlClient from "effect/sql/SqlClient"
import * as Migrations from "../../layers/Migrations.ts"
import * as Postgres from "../../layers/Postgres.ts"
import * as Database from "../support/Database.ts"

/** A database that nobody has migrated. */
const bare = Database.fresh({ template: "template1" })

const applied = Effect.map(Migrations.status, (status) => status.applied.map((m) => m.number))

describe("Migrations", () => {
  it.live("bring an empty database to the newest schema, once", () =>
    Effect.gen(function* () {
      const numbers = (yield* Migrations.all).map((m) => m.number)
      assert.deepEqual(
        numbers,
        numbers.map((_, k) => k + 1)
      )
      const before = yield* Migrations.status
      assert.deepEqual([before.applied, before.missing.map((m) => m.number)], [[], numbers])
      assert.deepEqual(
        (yield* Migrations.migrate).map((m) => m.number),
        numbers
      )
      assert.deepEqual(yield* Migrations.migrate, [])
      assert.deepEqual(yield* applied, numbers)
    }).pipe(Effect.provide(bare))
  )

  it.live("may be run by two processes at once", () =>
    Effect.gen(function* () {
      const { server } = yield* Database.Database
      const pool = Postgres.layer({
        server,
        applicationName: "test",
        maxConnections: 1,
        synchronousCommit: false
      })
      const done = yield* Effect.all(
        [1, 2, 3].map(() =>
          Effect.scoped(Effect.provide(Migrations.migrate, Layer.fresh(pool), { local: true }))
        ),
        { concurrency: 3 }
      )
      const all = yield* Migrations.all
      assert.deepEqual(
        done.map((list) => list.length).toSorted((a, b) => a - b),
        [0, 0, all.length]
      )
    }).pipe(Effect.provide(bare))
  )

  it.live("refuse a database in which a file had another content", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      yield* sql`update pepsi.migration set sha256 = 'other' where number = 1`
      for (const refused of [Effect.flip(Migrations.migrate), Effect.flip(Migrations.status)]) {
        const error = yield* refused
        assert.strictEqual(error._tag === "DatabaseUnfit" ? error.reason : error._tag, "edited")
        assert.include(error.message, "migration 1 (queue)")
      }
    }).pipe(Effect.provide(Database.fresh()))
  )

  it.live("refuse a database that a newer program has migrated", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      yield* sql`insert into pepsi.migration (number, name, sha256) values (9000, 'future', 'x')`
      const error = yield* Effect.flip(Migrations.migrate)
      assert.strictEqual(error._tag === "DatabaseUnfit" ? error.reason : error._tag, "newer")
      assert.include(error.message, "migration 9000 (future)")
    }).pipe(Effect.provide(Database.fresh()))
  )

  it.live("keep nothing of a set in which one fails", () =>
    Effect.gen(function* () {
      const sql = yield* SqlClient.SqlClient
      yield* sql`create schema pepsi`
      yield* sql`create table pepsi.dispatch_stats (in_the_way int)` // migration 6 makes it too
      const error = yield* Effect.flip(Migrations.migrate)
      assert.strictEqual(error._tag === "DatabaseUnfit" ? error.reason : error._tag, "migration")
      assert.include(error.message, "already exists")
      assert.deepEqual(yield* applied, [])
      assert.deepEqual(yield* sql`select to_regclass('pepsi.workqueue') as found`, [
        { found: null }
      ])
    }).pipe(Effect.provide(bare))
  )
})
