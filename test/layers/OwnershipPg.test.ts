// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, layer } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Scope from "effect/Scope"
import * as SqlClient from "effect/sql/SqlClient"
import * as OwnershipPg from "../../layers/OwnershipPg.ts"
import * as PostgresSession from "../../layers/PostgresSession.ts"
import { QueuePg } from "../../layers/QueuePg.ts"
import { Ownership } from "../../src/services/Ownership.ts"
import { Queue } from "../../src/services/Queue.ts"
import { message, newToken, outcome } from "../contracts/Queue.ts"
import * as Database from "../support/Database.ts"

const Owner = OwnershipPg.layer({ patience: "200 millis" }).pipe(
  Layer.provideMerge(Database.fresh())
)

/** A worker: one session, its locks and its queue on it. */
const worker = Effect.gen(function* () {
  const { server } = yield* Database.Database
  const name = `worker ${newToken()}`
  const session = PostgresSession.layer({ server, applicationName: name, synchronousCommit: false })
  const context = yield* Layer.build(
    Layer.mergeAll(OwnershipPg.OwnershipPg, QueuePg).pipe(Layer.provideMerge(session))
  )
  return {
    name,
    ownership: Context.get(context, Ownership),
    queue: Context.get(context, Queue),
    sql: Context.get(context, SqlClient.SqlClient)
  }
})

/** Pids that hold a lock of WORK of the section, in shared mode. */
const holders = (section: string) =>
  Effect.gen(function* () {
    const sql = yield* SqlClient.SqlClient
    const rows = yield* sql<{ pid: number }>`
      select l.pid from pg_locks l
       where l.locktype = 'advisory' and l.granted and l.mode = 'ShareLock' and l.objsubid = 2
         and l.objid::int8 = hashtext(${section})::int8 & 4294967295
       order by l.pid`
    return rows.map((row) => row.pid)
  })

const section = (): string => `s${newToken()}`

/** Waits until some session waits for an advisory lock. */
const someoneWaits = Effect.gen(function* () {
  const sql = yield* SqlClient.SqlClient
  yield* sql<{ n: number }>`
    select count(*)::int4 as n from pg_locks where locktype = 'advisory' and not granted
       and database = (select oid from pg_database where datname = current_database())`.pipe(
    Effect.repeat({ until: ([row]) => row!.n > 0 })
  )
})

layer(Owner, { excludeTestServices: true })("Ownership", (it) => {
  it.effect(
    "sections have one owner; the next takes over when the first lets go, and counts on",
    () =>
      Effect.gen(function* () {
        const ownership = yield* Ownership
        const [a, b] = [section(), section()]
        const first = yield* Scope.make()
        const owned = yield* Scope.provide(ownership.own([a, b], "one"), first)
        assert.deepEqual(
          [...owned.epochs].toSorted(),
          [
            [a, 1],
            [b, 1]
          ].toSorted()
        )
        const second = yield* Effect.forkScoped(ownership.own([b], "two"))
        yield* someoneWaits
        assert.isUndefined(second.pollUnsafe())
        yield* Scope.close(first, Exit.void)
        assert.deepEqual([...(yield* Fiber.join(second)).epochs], [[b, 2]])
      })
  )

  it.effect("says that the locks are lost when their session is gone", () =>
    Effect.gen(function* () {
      const ownership = yield* Ownership
      const sql = yield* SqlClient.SqlClient
      const name = section()
      const owned = yield* ownership.own([name], "one")
      yield* sql`
        select pg_terminate_backend(pid) from pg_stat_activity
         where application_name = 'pepsi owner' and datname = current_database()`
      yield* owned.lost
      const again = yield* ownership.own([name], "one")
      assert.deepEqual([...again.epochs], [[name, 2]]) // adjacent: nobody had it between
    })
  )

  it.effect("a new owner waits for the workers of the old one", () =>
    Effect.gen(function* () {
      const name = section()
      const scope = yield* Scope.make()
      const old = yield* Scope.provide(worker, scope)
      yield* Scope.provide(old.ownership.work(name), scope)
      const patient = yield* Layer.build(OwnershipPg.layer({ patience: "1 minute" }))
      const taking = yield* Effect.forkScoped(Context.get(patient, Ownership).own([name], "new"))
      yield* someoneWaits
      assert.isUndefined(taking.pollUnsafe())
      yield* Scope.close(scope, Exit.void)
      assert.deepEqual([...(yield* Fiber.join(taking)).epochs], [[name, 1]])
    })
  )

  it.effect("R50: a new owner ends the session of a worker that does not come to an end", () =>
    Effect.gen(function* () {
      const ownership = yield* Ownership
      const name = section()
      const frozen = yield* worker
      const pid = yield* frozen.ownership.work(name)
      assert.deepEqual(yield* holders(name), [pid])
      yield* ownership.own([name], "new")
      assert.deepEqual(yield* holders(name), [])
    })
  )

  it.effect(
    "a worker holds WORK on the one session that its queue uses, and again on the next",
    () =>
      Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const name = section()
        const w = yield* worker
        const first = yield* w.ownership.work(name)
        const backends = sql<{ pid: number }>`
        select pid from pg_stat_activity where application_name = ${w.name}`
        const own = w.sql<{ pid: number }>`select pg_backend_pid() as pid`
        assert.deepEqual(
          [yield* backends, yield* own, yield* w.ownership.backend],
          [[{ pid: first }], [{ pid: first }], first]
        )
        assert.deepEqual(yield* holders(name), [first])

        yield* sql`select pg_terminate_backend(${first}, 5000)`
        // Idle when it was lost: the next statement is made on the next session, and succeeds.
        const [entry] = yield* w.queue
          .admit([message({ section: name })])
          .pipe(Effect.retry({ times: 1 }))
        const second = yield* w.ownership.backend
        assert.notStrictEqual(second, first)
        assert.deepEqual(yield* holders(name), [second])
        const settled = yield* w.queue.settle([outcome(entry!)], { durable: false })
        assert.deepEqual(
          settled.map((s) => s.status),
          ["gone"]
        )
        assert.strictEqual((yield* backends).length, 1)
      })
  )

  it.effect(
    "a worker whose session is lost in the middle of a statement says away, and goes on",
    () =>
      Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const name = section()
        const w = yield* worker
        const pid = yield* w.ownership.work(name)
        const running = yield* Effect.forkScoped(Effect.flip(w.sql`select pg_sleep(60)`))
        yield* sql<{ n: number }>`
        select count(*)::int4 as n from pg_stat_activity where pid = ${pid} and wait_event = 'PgSleep'`.pipe(
          Effect.repeat({ until: ([row]) => row!.n > 0 })
        )
        yield* sql`select pg_terminate_backend(${pid}, 5000)`
        assert.strictEqual((yield* Fiber.join(running))._tag, "SqlError")
        assert.strictEqual((yield* w.queue.admit([message()])).length, 1)
        assert.deepEqual(yield* holders(name), [yield* w.ownership.backend])
      })
  )

  it.effect("ends the backend of a dead worker and of nobody else", () =>
    Effect.gen(function* () {
      const ownership = yield* Ownership
      const sql = yield* SqlClient.SqlClient
      const name = section()
      const w = yield* worker
      const pid = yield* w.ownership.work(name)
      yield* ownership.endBackend(pid)
      assert.deepEqual(yield* sql`select pid from pg_stat_activity where pid = ${pid}`, [])
      yield* ownership.endBackend(pid) // gone already
      const stranger = yield* worker
      const [row] = yield* stranger.sql<{ pid: number }>`select pg_backend_pid() as pid`
      yield* ownership.endBackend(row!.pid) // a number that now belongs to somebody who is no worker
      assert.deepEqual(yield* stranger.sql<{ pid: number }>`select pg_backend_pid() as pid`, [row!])
    })
  )
})
