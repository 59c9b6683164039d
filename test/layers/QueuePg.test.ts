// SPDX-License-Identifier: AGPL-3.0-or-later
/** What only the queue in PostgreSQL has to do; the contract itself is tested in test/contracts. */
import { assert, describe, it, layer } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as SqlClient from "effect/sql/SqlClient"
import { inspect } from "node:util"
import * as EmbeddedPostgres from "../../layers/EmbeddedPostgres.ts"
import * as Migrations from "../../layers/Migrations.ts"
import * as Postgres from "../../layers/Postgres.ts"
import { QueuePg } from "../../layers/QueuePg.ts"
import { clean, json } from "../../layers/PostgresText.ts"
import { Queue } from "../../src/services/Queue.ts"
import { message, newToken, outcome } from "../contracts/Queue.ts"
import * as Database from "../support/Database.ts"
import * as Sql from "../support/Sql.ts"
import * as Temporary from "../support/Temporary.ts"

const loose = { durable: false } as const

describe("text for PostgreSQL", () => {
  it("R14: loses NUL and lone surrogates, and nothing else", () => {
    assert.strictEqual(clean("a\0b\ud800c\u{1F600}"), "ab\ufffdc\u{1F600}")
    assert.strictEqual(
      json({ "k\0": ["\0x", { "\udfff": 1 }, null, "\\u0000", "ü"] }),
      JSON.stringify({ k: ["x", { "\ufffd": 1 }, null, "\\u0000", "ü"] })
    )
  })
})

layer(QueuePg.pipe(Layer.provideMerge(Database.fresh())), { excludeTestServices: true })(
  "QueuePg",
  (it) => {
    it.effect("takes ids beyond 2^31 beside small ones", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const sql = yield* SqlClient.SqlClient
        const [small] = yield* queue.admit([message()])
        yield* sql`alter table pepsi.workqueue alter id restart with 5000000000`
        const [large] = yield* queue.admit([message()])
        assert.strictEqual(large!.id, 5_000_000_000)
        const both = [small!, large!]
        assert.deepEqual(
          (yield* queue.load(both, "metadata")).map((l) => l.id),
          both.map((e) => e.id)
        )
        assert.deepEqual(
          [...(yield* queue.revisions(both.map((e) => e.id))).keys()].toSorted(),
          both.map((e) => e.id)
        )
        assert.deepEqual(
          (yield* queue.scan(4_999_999_999, 9)).map((e) => e.id),
          [5_000_000_000]
        )
        const settled = yield* queue.settle(
          both.map((e) => outcome(e)),
          loose
        )
        assert.deepEqual(
          settled.map((s) => s.kind),
          ["applied", "applied"]
        )
      })
    )

    it.effect("carries 20 MiB of every octet there and back", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const body = Buffer.alloc(20 * 1024 * 1024)
        for (let k = 0; k < body.length; k++) body[k] = (k * 31) & 255
        const [entry] = yield* queue.admit([message({ body })])
        const [loaded] = yield* queue.load([entry!], "full")
        assert.isTrue(body.equals(loaded!.body!))
        const [settled] = yield* queue.settle(
          [
            outcome(entry!, { verdict: "pass", section: "next", patch: { body: body.subarray(1) } })
          ],
          loose
        )
        const [again] = yield* queue.load([settled!.entry!], { prefix: 100 })
        assert.isTrue(body.subarray(1, 101).equals(again!.body!))
      })
    )

    it.effect("a small message that is kept does not keep the large ones of its batch", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const entries = yield* queue.admit([
          message(),
          message({ body: Buffer.alloc(4 * 1024 * 1024) }),
          message({ body: Buffer.alloc(4 * 1024 * 1024) })
        ])
        const loaded = yield* queue.load(entries, "full")
        const small = loaded.find((l) => l.id === entries[0]!.id)!
        for (const octets of [small.headers!, small.body!])
          assert.isBelow(octets.buffer.byteLength, 1024 * 1024 + 1)
      })
    )

    it.effect("R52: hears notices, and says when the session that listens was ended", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const sql = yield* SqlClient.SqlClient
        const next = yield* queue.listen
        yield* queue.notify
        yield* next
        const waiting = yield* Effect.forkScoped(Effect.flip(next))
        yield* sql`
        select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and query ilike 'listen%'`
        const error = yield* Fiber.join(waiting)
        assert.strictEqual(error.reason, "away")
        const again = yield* queue.listen // its own connection, made anew
        yield* queue.notify
        yield* again
      })
    )

    it.effect("R52: listening takes no connection of the pool", () =>
      Effect.gen(function* () {
        const { server } = yield* Database.Database
        const pool = Postgres.layer({
          server,
          applicationName: "one",
          maxConnections: 1,
          synchronousCommit: false
        })
        yield* Effect.gen(function* () {
          const queue = yield* Queue
          const next = yield* queue.listen
          yield* queue.admit([message()])
          yield* queue.notify
          yield* next
        }).pipe(Effect.provide(QueuePg.pipe(Layer.provide(pool)), { local: true }), Effect.scoped)
      })
    )

    it.effect("R53: 20,000 parked rows and a snapshot that is held do not slow a scan down", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const sql = yield* SqlClient.SqlClient
        const holder = yield* Sql.open
        yield* holder.q("begin isolation level repeatable read")
        yield* holder.q("select 1 from pepsi.workqueue limit 1")
        yield* sql`
        insert into pepsi.workqueue (token, mail_from, rcpt_to, headers, body, stage, status, parked_reason)
        select 'parked' || g, 'a@b', '{c@d}', 'A: b', 'x', 'init', 'parked', 'key' from generate_series(1, 20000) g`
        const entries = yield* queue.admit(Array.from({ length: 64 }, () => message()))
        const found = yield* queue.scan(entries[0]!.id - 1, 1000)
        assert.deepEqual(
          found.map((e) => e.id),
          entries.map((e) => e.id)
        )
        const [plan] = yield* sql<{ "QUERY PLAN": string }>`
        explain select id from pepsi.workqueue where status = 'parked' and parked_reason = 'key' and parked_ref = 'x'`
        assert.include(plan!["QUERY PLAN"], "workqueue_parked")
      })
    )

    it.effect("a statement that is refused for its data leaves the pool usable", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        for (let k = 0; k < 20; k++) {
          const token = newToken()
          const error = yield* Effect.flip(queue.admit([message({ token }), message({ token })]))
          assert.deepEqual([error.reason, error.code], ["data", "23505"])
        }
        assert.strictEqual((yield* queue.admit([message()])).length, 1)
      })
    )

    it.effect("R68: an error of the database quotes no mail, however it is printed", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const refused = yield* Effect.flip(
          queue.admit([message({ subject: "SECRET-S", recipients: [] })])
        )
        const [entry] = yield* queue.admit([message()])
        const patch = { subject: "SECRET-T", recipients: [] }
        const settle = queue.settle(
          [outcome(entry!, { verdict: "pass", section: "x", patch })],
          loose
        )
        for (const error of [refused, yield* Effect.flip(settle)]) {
          const printed = inspect(error, { depth: 20 }) + JSON.stringify(error)
          assert.include(printed, "workqueue_rcpt")
          assert.notInclude(printed, "SECRET")
        }
      })
    )

    it.effect("waits in a deferred row are times of the database, whatever our clock says", () =>
      Effect.gen(function* () {
        const queue = yield* Queue
        const [entry] = yield* queue.admit([message()])
        yield* queue.settle(
          [outcome(entry!, { verdict: "defer", after: Duration.minutes(5) })],
          loose
        )
        const sql = yield* SqlClient.SqlClient
        const [row] = yield* sql<{ s: number }>`
        select extract(epoch from next_at - now())::float8 as s from pepsi.workqueue where id = ${entry!.id}::float8::bigint`
        assert.approximately(row!.s, 300, 5)
      })
    )
  }
)

/** A server that flushes nothing by itself, and a session that does not wait for the disk. */
const lazyServer = Effect.gen(function* () {
  const directory = yield* Temporary.directory("lazy")
  const embedded = yield* Layer.build(EmbeddedPostgres.layer({ directory }))
  return yield* Effect.map(EmbeddedPostgres.EmbeddedPostgres, ({ server }) => server).pipe(
    Effect.provide(embedded)
  )
})

describe("durability", () => {
  it.live(
    "admission and durable settles are on disk when they return, in a session that waits for nothing",
    () =>
      Effect.gen(function* () {
        const server = yield* lazyServer
        const pool = Postgres.layer({
          server,
          applicationName: "test",
          maxConnections: 1,
          synchronousCommit: false
        })
        yield* Effect.gen(function* () {
          yield* Migrations.migrate
          const sql = yield* SqlClient.SqlClient
          const queue = yield* Queue
          yield* sql`alter system set wal_writer_delay = '10s'`
          yield* sql`alter system set wal_writer_flush_after = '1GB'`
          yield* sql`alter system set autovacuum = off`
          yield* sql`select pg_reload_conf()`
          yield* sql`create table waste (x int)`
          const onDisk = Effect.map(
            sql<{ yes: boolean }>`
            select pg_current_wal_flush_lsn() >= i.lsn as yes from (select pg_current_wal_insert_lsn() as lsn offset 0) i`,
            ([row]) => row!.yes
          )
          /**
           * Whether the log is on disk after `write`; background writes may blur one round of ten.
           */
          const rounds = <E, R>(write: Effect.Effect<unknown, E, R>) =>
            Effect.map(
              Effect.all(Array.from({ length: 10 }, () => Effect.andThen(write, onDisk))),
              (list) => list.filter((yes) => yes).length
            )
          assert.isAtMost(yield* rounds(sql`insert into waste values (1)`), 3) // this session waits for nothing
          assert.isAtLeast(yield* rounds(Effect.suspend(() => queue.admit([message()]))), 9)
          const entries = yield* queue.admit(Array.from({ length: 20 }, () => message()))
          let next = 0
          const settle = (durable: boolean) =>
            Effect.suspend(() =>
              queue.settle([outcome(entries[next++]!, { verdict: "pass", section: "x" })], {
                durable
              })
            )
          assert.isAtMost(yield* rounds(settle(false)), 3)
          assert.isAtLeast(yield* rounds(settle(true)), 9)
        }).pipe(Effect.provide(QueuePg.pipe(Layer.provideMerge(pool))))
      }),
    60_000
  )
})
