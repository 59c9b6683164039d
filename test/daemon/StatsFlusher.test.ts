// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import { TestClock } from "effect/testing"
import * as StatsFlusher from "../../src/daemon/StatsFlusher.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import { Queue } from "../../src/services/Queue.ts"
import { Statistics } from "../../src/services/Statistics.ts"
import * as MemoryQueue from "../support/MemoryQueue.ts"

/** A flusher whose flushes fail while `isAway()`; what got in is noted. */
const flusher = (isAway: () => boolean, flushed: Array<number>, interval = Duration.hours(1)) =>
  StatsFlusher.layer({ interval, dispatcher: "test" }).pipe(
    Layer.provide(
      Layer.effect(
        Queue,
        Effect.map(Queue, (real) =>
          Queue.of({
            ...real,
            flushStats: (seq, stats, dispatcher) =>
              Effect.suspend(() => {
                if (isAway()) {
                  const reason = "away" as const
                  return Effect.fail(new DatabaseError({ reason, operation: "test", cause: "" }))
                }
                flushed.push(stats.dispatch.messagesProcessed)
                return real.flushStats(seq, stats, dispatcher)
              })
          })
        )
      )
    ),
    Layer.provide(MemoryQueue.layer)
  )

describe("StatsFlusher", () => {
  it.effect("flushes after two seconds of idleness, and not for looks at the table alone", () => {
    const flushed: Array<number> = []
    return Effect.gen(function* () {
      const { busy, tally } = yield* Statistics
      busy(true)
      tally.dispatch({ messagesProcessed: 1 })
      yield* TestClock.adjust("30 seconds")
      assert.deepStrictEqual(flushed, [])
      busy(false)
      yield* TestClock.adjust("3 seconds")
      assert.deepStrictEqual(flushed, [1])
      tally.dispatch({ polls: 7 })
      yield* TestClock.adjust("30 seconds")
      assert.deepStrictEqual(flushed, [1])
    }).pipe(Effect.provide(flusher(() => false, flushed)))
  })

  it.effect("flushes at its interval while there is work", () => {
    const flushed: Array<number> = []
    return Effect.gen(function* () {
      const { busy, tally } = yield* Statistics
      busy(true)
      for (let i = 0; i < 4; i++) {
        tally.dispatch({ messagesProcessed: 1 })
        yield* TestClock.adjust("5 seconds")
      }
      assert.strictEqual(flushed.length, 2)
    }).pipe(Effect.provide(flusher(() => false, flushed, Duration.seconds(10))))
  })

  it.effect("a clean stop loses no count, also when a flush had failed before", () => {
    const flushed: Array<number> = []
    let away = true
    return Effect.gen(function* () {
      const { tally } = yield* Statistics
      tally.dispatch({ messagesProcessed: 1 })
      yield* TestClock.adjust("20 seconds")
      tally.dispatch({ messagesProcessed: 10 })
      away = false
    }).pipe(
      Effect.provide(flusher(() => away, flushed)),
      Effect.andThen(
        Effect.sync(() =>
          assert.strictEqual(
            flushed.reduce((a, b) => a + b, 0),
            11
          )
        )
      )
    )
  })
})
