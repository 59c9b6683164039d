// SPDX-License-Identifier: AGPL-3.0-or-later
/** What the dispatcher and operators write: migrations 0004 to 0006. */
import { assert, layer } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as Queue from "effect/Queue"
import * as Database from "../support/Database.ts"
import * as Sql from "../support/Sql.ts"

layer(Database.fresh(), { excludeTestServices: true })("the dispatcher's writes", (it) => {
  it.effect(
    "crash write against a late settle, in both orders; three deaths = failed, poison",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        const other = yield* Sql.open
        const [a, b] = yield* sql.put(2)
        const crash = (ids: ReadonlyArray<bigint>, revs: ReadonlyArray<number>) =>
          sql.q("select * from pepsi.crash_write($1, $2, 'killed')", [ids, revs])

        yield* sql.q("begin") // the crash write first, not committed yet
        assert.strictEqual((yield* crash([a!.id], [0])).length, 1)
        const late = yield* Effect.forkScoped(
          other.settle([
            { ...a!, v: "done" },
            { ...b!, v: "pass", to_stage: "x" }
          ])
        )
        yield* Sql.blocked(sql, other.session)
        yield* sql.q("commit")
        const s = yield* Fiber.join(late)
        assert.deepEqual([s.is("fenced"), s.is("applied")], [[1], [2]])

        yield* other.q("begin") // the late settle first
        yield* other.settle([{ id: a!.id, rev: 1, v: "pass", to_stage: "y" }])
        const crashed = yield* Effect.forkScoped(crash([a!.id, b!.id], [1, 1]))
        yield* Sql.blocked(other, sql.session)
        yield* other.q("commit")
        // Only b may be handed out again.
        assert.deepEqual(yield* Fiber.join(crashed), [
          { id: b!.id, rev: 2, crashes: 1, status: "pending" }
        ])

        assert.deepEqual(yield* crash([b!.id], [2]), [
          { id: b!.id, rev: 3, crashes: 2, status: "pending" }
        ])
        assert.deepEqual(yield* crash([b!.id], [3]), [
          { id: b!.id, rev: 4, crashes: 3, status: "failed" }
        ])
        const { failure } = (yield* sql.row(b!.id))!["state"]
        assert.deepEqual([failure.class, failure.stage], ["poison", "x"])
        assert.deepEqual(yield* crash([b!.id], [4]), [])
      })
  )

  it.effect(
    "R56: moments are the database's own: promotion oldest first and limited, expiry, next due",
    () =>
      Effect.gen(function* () {
        const sql = yield* Sql.empty
        const next = sql.one("select pepsi.next_due()")
        assert.isNull(yield* next)
        const r = yield* sql.put(5)
        yield* sql.settle(
          r.slice(0, 3).map((x, k) => ({ ...x, v: "defer", after: [50, -20, -10][k] }))
        )
        yield* sql.settle(
          r.slice(3).map((x, k) => ({
            ...x,
            v: "park",
            reason: "pay",
            ref: `o${k}`,
            for: k === 1 ? -1 : 30,
            to: "bounce-payment"
          }))
        )
        assert.strictEqual(yield* next, 0)
        const promote = (limit: number) => sql.q("select * from pepsi.promote_due($1)", [limit])
        assert.deepEqual(
          (yield* promote(1)).map((x) => [x["id"], x["rev"], x["attempts"], x["stage"]]),
          [[r[1]!.id, 2, 1, "init"]]
        )
        assert.deepEqual(
          (yield* promote(9)).map((x) => x["id"]),
          [r[2]!.id]
        )
        assert.deepEqual(yield* promote(9), [])
        const expired = yield* sql.q("select * from pepsi.expire_parked(9)")
        assert.deepEqual(
          expired.map((x) => [x["id"], x["stage"], x["rev"]]),
          [[r[4]!.id, "bounce-payment", 2]]
        )
        assert.deepEqual((yield* sql.row(r[4]!.id))!["state"], { park_expired: "pay" })
        const seconds = yield* next
        assert.isTrue(seconds > 20 && seconds <= 30, String(seconds))
      })
  )

  it.effect("resumes only with the expected ref, once, and tells", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const notices = yield* (yield* Sql.open).session.listen("workqueue")
      const [a, b] = yield* sql.put(2)
      const token = (yield* sql.row(a!.id))!["token"]
      yield* sql.settle([
        { ...a!, v: "park", reason: "key", ref: "k1", for: 99 },
        {
          ...b!,
          v: "park",
          reason: "key",
          ref: "k1"
        }
      ])
      const resume = (ref: string | null) =>
        sql.one(`select pepsi.workqueue_resume($1, $2, 'encrypt', '{"x": 1}')`, [token, ref])
      assert.deepEqual(
        [yield* resume("k0"), yield* resume(null), yield* resume("k1"), yield* resume("k1")],
        [0, 0, 1, 0]
      )
      const x = (yield* sql.row(a!.id))!
      assert.deepEqual(
        [x["status"], x["stage"], x["rev"], x["state"], x["parked_reason"], x["parked_until"]],
        ["pending", "encrypt", 2, { x: 1 }, null, null]
      )
      assert.strictEqual(yield* sql.one("select pepsi.workqueue_resume_all('key', 'k1')"), 1)
      yield* sql.q("select pg_notify('workqueue', 'last')") // comes after all others
      const heard = yield* Queue.takeBetween(notices, 2, 9)
      assert.deepEqual(
        heard.map((n) => n.payload),
        ["", "last"]
      )
      assert.deepEqual((yield* sql.settle([{ id: a!.id, rev: 1, v: "done" }])).is("fenced"), [1])
    })
  )

  it.effect("counts a flush of statistics once, refuses a second writer, adds histograms", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const stats = {
        dispatch: { messages_processed: 5, unreported: 1 },
        stages: {
          init: { processed: 5, busy_us: 100, histogram: [0, 2, 3] },
          "a-stage": { processed: 1 }
        }
      }
      const flush = (seq: number) =>
        sql.one("select pepsi.flush_stats($1::int, $2::jsonb)", [seq, JSON.stringify(stats)])
      assert.deepEqual([yield* flush(1), yield* flush(1), yield* flush(1)], [true, false, false])
      assert.deepEqual(
        yield* sql.q(`select stage, processed::int as p, histogram::int[] as h, busy_us::int as b
                        from pepsi.stage_stats order by 1`),
        [
          { stage: "a-stage", p: 1, h: [], b: 0 },
          { stage: "init", p: 5, h: [0, 2, 3], b: 100 }
        ]
      )
      assert.strictEqual(yield* flush(2), true)
      yield* Sql.fails(flush(10), "22023")
      assert.deepEqual(
        yield* sql.q(`select processed::int as p, histogram::int[] as h, busy_us::int as b
                        from pepsi.stage_stats where stage = 'init'`),
        [{ p: 10, h: [0, 4, 6], b: 200 }]
      )
      assert.deepEqual(
        yield* sql.q(
          "select messages_processed::int as m, unreported::int as u from pepsi.dispatch_stats"
        ),
        [{ m: 10, u: 2 }]
      )
    })
  )

  it.effect("counts the owners of a section", () =>
    Effect.gen(function* () {
      const sql = yield* Sql.empty
      const take = (owner: string) => sql.one("select pepsi.section_take('init', $1)::int", [owner])
      assert.deepEqual([yield* take("h1"), yield* take("h2")], [1, 2])
    })
  )
})
