// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import { TestClock } from "effect/testing"
import { lasting } from "../../src/daemon/Lasting.ts"

describe("lasting", () => {
  it.effect("begins again after a defect, and keeps results and failures as they are", () =>
    Effect.gen(function* () {
      let times = 0
      const work = Effect.suspend(() =>
        ++times < 3 ? Effect.die(new Error("ours")) : Effect.succeed(times)
      )
      const fiber = yield* Effect.forkChild(lasting("work", work))
      yield* TestClock.adjust("5 seconds")
      assert.strictEqual(yield* Fiber.join(fiber), 3)
      assert.deepStrictEqual(
        yield* Effect.exit(lasting("work", Effect.fail("no"))),
        Exit.fail("no")
      )
    })
  )
})
