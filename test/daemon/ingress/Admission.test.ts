// SPDX-License-Identifier: AGPL-3.0-or-later
/** Messages that wait share a commit, and each gets its own answer. */
import { assert, describe, it } from "@effect/vitest"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import * as Scope from "effect/Scope"
import * as Admission from "../../../src/daemon/ingress/Admission.ts"
import type { Entry } from "../../../src/pipeline/Job.ts"
import { DatabaseError } from "../../../src/services/DatabaseError.ts"
import { Queue } from "../../../src/services/Queue.ts"
import type * as QueueService from "../../../src/services/Queue.ts"
import { makeGate, makeRecorder } from "../IngressWorld.ts"

const settings: Admission.Settings = { batchRows: 64, batchBytes: 8 * 1024 * 1024, commits: 1 }

const message = (name: string, bytes = 10): QueueService.Admission => ({
  token: name,
  sender: "",
  recipients: ["u@ours.example"],
  fromHeader: null,
  subject: null,
  messageId: null,
  listId: null,
  headers: Buffer.alloc(0),
  body: Buffer.alloc(bytes),
  section: "init",
  fairKey: "n:x",
  state: {}
})

const error = (reason: DatabaseError["reason"]) =>
  new DatabaseError({ reason, operation: "Queue.admit", cause: "test" })
const names = (batches: ReadonlyArray<ReadonlyArray<QueueService.Admission>>) =>
  batches.map((b) => b.map((m) => m.token))
const spawn = <A, E>(effect: Effect.Effect<A, E>) =>
  Effect.forkChild(effect, { startImmediately: true })

describe("group admission", () => {
  it.effect("commits the first at once, and all that came meanwhile together", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const gate = yield* makeGate
      recorder.recorder.before = (batch) => (batch[0]!.token === "m0" ? gate.pass : Effect.void)
      const { admit } = yield* Admission.make(settings).pipe(Effect.provide(recorder.layer))
      const first = yield* spawn(admit(message("m0")))
      yield* gate.reached
      const others = yield* Effect.forEach(["m1", "m2", "m3"], (name) =>
        spawn(admit(message(name)))
      )
      assert.deepStrictEqual(names(recorder.batches), [])
      yield* gate.open
      yield* Effect.forEach([first, ...others], Fiber.join)
      assert.deepStrictEqual(names(recorder.batches), [["m0"], ["m1", "m2", "m3"]])
      assert.strictEqual(recorder.announced.length, 4)
    }).pipe(Effect.scoped)
  )

  it.effect("does as many commits at the same time as it may", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const both = yield* Deferred.make<void>()
      let inside = 0
      recorder.recorder.before = () =>
        Effect.suspend(() =>
          ++inside === 2 ? Deferred.succeed(both, undefined) : Effect.void
        ).pipe(Effect.andThen(Deferred.await(both)))
      const { admit } = yield* Admission.make({ ...settings, commits: 2 }).pipe(
        Effect.provide(recorder.layer)
      )
      yield* Effect.all(
        [admit(message("a")), Effect.yieldNow.pipe(Effect.andThen(admit(message("b"))))],
        { concurrency: 2 }
      )
      assert.deepStrictEqual(names(recorder.batches).toSorted(), [["a"], ["b"]])
    }).pipe(Effect.scoped)
  )

  it.effect("gives only the culprit of a refused batch an error", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const gate = yield* makeGate
      recorder.recorder.before = (batch) =>
        batch[0]!.token === "m0"
          ? gate.pass
          : batch.some((m) => m.token === "bad")
            ? Effect.fail(error("data"))
            : Effect.void
      const { admit } = yield* Admission.make(settings).pipe(Effect.provide(recorder.layer))
      const first = yield* spawn(admit(message("m0")))
      yield* gate.reached
      const others = yield* Effect.forEach(["m1", "bad", "m3"], (name) =>
        spawn(Effect.result(admit(message(name))))
      )
      yield* gate.open
      yield* Fiber.join(first)
      const results = yield* Effect.forEach(others, Fiber.join)
      assert.deepStrictEqual(
        results.map((result) => result._tag),
        ["Success", "Failure", "Success"]
      )
      assert.deepStrictEqual(names(recorder.batches), [["m0"], ["m1"], ["m3"]])
    }).pipe(Effect.scoped)
  )

  it.effect(
    "tries a conflict once more, and fails for all alike when the database is away or throws",
    () =>
      Effect.gen(function* () {
        const recorder = makeRecorder()
        const { admit } = yield* Admission.make(settings).pipe(Effect.provide(recorder.layer))
        let tries = 0
        recorder.recorder.before = () =>
          ++tries === 1 ? Effect.fail(error("conflict")) : Effect.void
        yield* admit(message("again"))
        recorder.recorder.before = () => Effect.fail(error("away"))
        assert.strictEqual((yield* Effect.flip(admit(message("a")))).reason, "away")
        recorder.recorder.before = () => Effect.die("broken")
        assert.isTrue(Exit.isFailure(yield* Effect.exit(admit(message("b")))))
        recorder.recorder.before = () => Effect.void
        yield* admit(message("c"))
        assert.deepStrictEqual(names(recorder.batches), [["again"], ["c"]])
      }).pipe(Effect.scoped)
  )

  it.effect("answers what was given to it before its scope closes, and cuts no commit", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const gate = yield* makeGate
      recorder.recorder.before = () => gate.pass
      const scope = yield* Scope.make()
      const { admit } = yield* Admission.make(settings).pipe(
        Effect.provide(recorder.layer),
        Scope.provide(scope)
      )
      const waiting = yield* Effect.forEach(["a", "b"], (name) => spawn(admit(message(name))))
      yield* gate.reached
      const closed = yield* spawn(Scope.close(scope, Exit.void))
      yield* gate.open
      yield* Effect.forEach(waiting, Fiber.join)
      yield* Fiber.join(closed)
      assert.deepStrictEqual(names(recorder.batches).flat(), ["a", "b"])
    })
  )

  it.effect(
    "tells by notification where there is no dispatcher, one at a time, and never fails by it",
    () =>
      Effect.gen(function* () {
        let notified = 0
        const told = yield* Deferred.make<void>()
        const entry = { id: 1 } as Entry
        // Admission asks nothing else of a queue; anything else would be undefined and end the test.
        const queue = {
          admit: (messages: ReadonlyArray<QueueService.Admission>) =>
            Effect.succeed(messages.map(() => entry)),
          notify: Effect.suspend(() => {
            notified++
            return Effect.andThen(Deferred.succeed(told, undefined), Effect.fail(error("away")))
          })
        } as unknown as Queue["Service"]
        const { admit } = yield* Admission.make(settings).pipe(
          Effect.provide(Layer.succeed(Queue, queue))
        )
        yield* Effect.forEach(["a", "b", "c"], (name) => admit(message(name)))
        yield* Deferred.await(told)
        assert.isAtLeast(notified, 1)
        assert.isAtMost(notified, 3)
      }).pipe(Effect.scoped)
  )

  it("takes damage of ours for no fault of the message", () => {
    const refuses = (code: string | undefined, constraint?: string) =>
      Admission.isRefusal(
        new DatabaseError({
          reason: "data",
          operation: "Queue.admit",
          code,
          constraint,
          cause: "test"
        })
      )
    for (const code of ["22001", "22021", "22P05"]) assert.isTrue(refuses(code), code)
    assert.isTrue(refuses("23514", "workqueue_rcpt"))
    // A missing partition and a check of the owner's own are check violations too.
    assert.isFalse(refuses("23514"))
    assert.isFalse(refuses("23514", "workqueue_names"))
    for (const code of ["XX001", "XX002", "54000", "42883", "23505", "23503", undefined]) {
      assert.isFalse(refuses(code), code)
    }
  })

  const sizes = Schema.Array(Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 50 })))
  it.prop(
    "batches keep the order, lose nothing and stay in their bounds",
    { sizes },
    ({ sizes }) => {
      const waiting = sizes.map((bytes, i) => ({ message: message(String(i), bytes) }))
      const all: Array<string> = []
      while (waiting.length > 0) {
        const batch = Admission.take(waiting, { batchRows: 5, batchBytes: 60 })
        assert.isAtLeast(batch.length, 1)
        assert.isAtMost(batch.length, 5)
        if (batch.length > 1)
          assert.isAtMost(
            batch.reduce((sum, { message: { body } }) => sum + body.length, 0),
            60
          )
        all.push(...batch.map(({ message: { token } }) => token))
      }
      assert.deepStrictEqual(
        all,
        sizes.map((_, i) => String(i))
      )
    }
  )
})
