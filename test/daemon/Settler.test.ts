// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import type * as Cause from "effect/Cause"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as EffectQueue from "effect/Queue"
import * as Schema from "effect/Schema"
import { TestClock } from "effect/testing"
import { groups, settleAll } from "../../src/daemon/Settler.ts"
import type { Finished } from "../../src/daemon/Settler.ts"
import type { Outcome } from "../../src/pipeline/Job.ts"
import * as Wire from "../../src/pipeline/Wire.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import { Queue } from "../../src/services/Queue.ts"
import type { Settled } from "../../src/services/Queue.ts"

const outcome = (id: number, more: Partial<Outcome> = {}): Outcome => ({
  id,
  rev: 1,
  verdict: "pass",
  section: "next",
  patch: {},
  writes: [],
  children: [],
  emissions: [],
  ...more
})
const finished = (id: number, more: Partial<Finished> = {}): Finished => ({
  outcome: outcome(id),
  runs: [{ section: "a", result: "pass", micros: 3, fused: false }],
  durable: false,
  alone: false,
  ...more
})
const applied = (o: Outcome, index: number): Settled => ({
  index,
  kind: "applied",
  id: o.id,
  status: "pending",
  entry: {
    id: o.id,
    rev: o.rev + 1,
    section: "next",
    sizeBytes: 1,
    fairKey: "k",
    attempts: 0,
    crashes: 0,
    repeat: false
  }
})
const trouble = (reason: DatabaseError["reason"]) =>
  Effect.fail(new DatabaseError({ reason, operation: "Queue.settle", cause: undefined }))

/** A queue whose settles answer as the script says, and then well. */
const scripted = (
  script: Array<
    (outcomes: ReadonlyArray<Outcome>) => Effect.Effect<ReadonlyArray<Settled>, DatabaseError>
  >,
  revisions: ReadonlyMap<number, number> = new Map()
) => {
  const calls: Array<ReadonlyArray<number>> = []
  const refuse = Effect.die(new Error("not asked for here"))
  const queue = {
    settle: (outcomes: ReadonlyArray<Outcome>) => {
      calls.push(outcomes.map((o) => o.id))
      return (script.shift() ?? ((all) => Effect.succeed(all.map(applied))))(outcomes)
    },
    revisions: () => Effect.succeed(revisions)
  }
  // Settling touches nothing else of the queue: whatever else it asked would end the test.
  const service = new Proxy(queue, {
    get: (target, key) => Reflect.get(target, key) ?? (() => refuse)
  })
  return { calls, service: service as unknown as Queue["Service"] }
}

const run = Effect.fnUntraced(function* (items: ReadonlyArray<Finished>, queue: Queue["Service"]) {
  const outbox = yield* EffectQueue.unbounded<Finished, Cause.Done>()
  const said: Array<Wire.Report> = []
  yield* EffectQueue.offerAll(outbox, items)
  yield* EffectQueue.end(outbox)
  const fiber = yield* Effect.forkChild(
    settleAll(outbox, (report) => said.push(report)).pipe(Effect.provideService(Queue, queue))
  )
  yield* TestClock.adjust("1 minute")
  yield* Fiber.join(fiber)
  return said
})

const settledIds = (said: ReadonlyArray<Wire.Report>) =>
  said.flatMap((report) => (report.t === "settled" ? report.rows.map((row) => row.id) : []))

describe("Settler", () => {
  it.effect("outcomes that wait together are one settle and one report", () =>
    Effect.gen(function* () {
      const { calls, service } = scripted([])
      const said = yield* run([finished(1), finished(2), finished(3)], service)
      assert.deepStrictEqual(calls, [[1, 2, 3]])
      assert.deepStrictEqual(settledIds(said), [1, 2, 3])
    })
  )

  it.effect("a bad row never fails its batch, and is named as the fault of its stage", () =>
    Effect.gen(function* () {
      const bad = (outcomes: ReadonlyArray<Outcome>) =>
        outcomes.some((o) => o.id === 2) ? trouble("data") : Effect.succeed(outcomes.map(applied))
      const { service } = scripted([bad, bad, bad, bad])
      const said = yield* run([finished(1), finished(2), finished(3)], service)
      assert.deepStrictEqual(settledIds(said), [1, 3])
      assert.deepStrictEqual(
        said.flatMap((r) => (r.t === "threw" ? [r.id] : [])),
        [2]
      )
    })
  )

  it.effect("after a lost connection only what was not written is written again", () =>
    Effect.gen(function* () {
      // 1 was not written, 2 has gone, 3 has moved on.
      const { calls, service } = scripted(
        [() => trouble("away")],
        new Map([
          [1, 1],
          [3, 2]
        ])
      )
      const said = yield* run([finished(1), finished(2), finished(3)], service)
      assert.deepStrictEqual(calls, [[1, 2, 3], [1]])
      assert.sameMembers(settledIds(said), [1, 2, 3])
    })
  )

  it.effect("a deadlock is repeated and counted, a full database is asked again", () =>
    Effect.gen(function* () {
      const { calls, service } = scripted([() => trouble("conflict"), () => trouble("overload")])
      const said = yield* run([finished(1)], service)
      assert.strictEqual(calls.length, 3)
      assert.strictEqual(said[0]?.t === "settled" ? said[0].retries : -1, 1)
    })
  )

  it.effect("more children than a line holds are told in several", () =>
    Effect.gen(function* () {
      const many = (outcomes: ReadonlyArray<Outcome>) =>
        Effect.succeed([
          ...outcomes.map(applied),
          ...Array.from({ length: 4500 }, (_, n) => ({
            ...applied(outcome(n + 10), 0),
            kind: "child" as const
          }))
        ])
      const { service } = scripted([many])
      const said = yield* run([finished(1)], service)
      assert.deepStrictEqual(
        said.map((report) => (report.t === "settled" ? report.fresh.length : -1)),
        [2000, 2000, 500]
      )
      assert.deepStrictEqual(settledIds(said), [1])
      for (const report of said) assert.isBelow(Wire.encode(report).length, Wire.maxLine)
    })
  )

  const Item = Schema.Struct({
    alone: Schema.Boolean,
    durable: Schema.Boolean,
    bytes: Schema.Literals([0, 9e6, 4e7])
  })
  it.prop(
    "groups keep the order, mix no durabilities, and hold their bounds",
    {
      items: Schema.Array(Item).check(Schema.isMaxLength(200))
    },
    ({ items }) => {
      const body = new Uint8Array(4e7)
      const batch = items.map(
        ({ alone, bytes, durable }, id): Finished => ({
          ...finished(id),
          alone,
          durable: durable || alone,
          outcome: outcome(id, { patch: bytes === 0 ? {} : { body: body.subarray(0, bytes) } })
        })
      )
      const made = groups(batch)
      assert.deepStrictEqual(made.flat(), batch)
      for (const group of made) {
        const bytes = group.reduce((sum, item) => sum + (item.outcome.patch.body?.length ?? 0), 0)
        assert.isTrue(group.length === 1 || (group.length <= 64 && bytes <= 32 * 1024 * 1024))
        assert.isTrue(group.length === 1 || group.every((item) => !item.alone))
        assert.strictEqual(new Set(group.map((item) => item.durable)).size, 1)
      }
    }
  )

  it.effect("a pause reaches the dispatcher in seconds", () =>
    Effect.gen(function* () {
      const { service } = scripted([])
      const deferred = outcome(1, { verdict: "defer", after: Duration.minutes(2), error: "4.4.1" })
      const [report] = yield* run([finished(1, { outcome: deferred })], service)
      const row = report?.t === "settled" ? report.rows[0] : undefined
      assert.deepStrictEqual([row?.dueSeconds, row?.error], [120, "4.4.1"])
    })
  )
})
