// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import { TestClock } from "effect/testing"
import * as Dispatcher from "../../src/daemon/Dispatcher.ts"
import * as StatsFlusher from "../../src/daemon/StatsFlusher.ts"
import * as Verdict from "../../src/pipeline/Verdict.ts"
import { Control } from "../../src/services/Control.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import { Ownership } from "../../src/services/Ownership.ts"
import { Queue } from "../../src/services/Queue.ts"
import type { Admission } from "../../src/services/Queue.ts"
import { Statistics } from "../../src/services/Statistics.ts"
import * as MemoryQueue from "../support/MemoryQueue.ts"
import { ownership, pipelineOf, stages, workers } from "../support/MemoryWorkers.ts"
import type { Scripted } from "../support/MemoryWorkers.ts"

let tokens = 0
const mail = (more: Partial<Admission> = {}): Admission => ({
  token: (++tokens).toString(16).padStart(32, "0"),
  sender: "s@example.org",
  recipients: ["r@pepsi.test"],
  fromHeader: null,
  subject: null,
  messageId: null,
  listId: null,
  headers: Buffer.from("A: b\r\n"),
  body: Buffer.from("c\r\n"),
  section: "init",
  fairKey: "n:192.0.2.0/24",
  state: {},
  ...more
})

/** A dispatcher over these sections, its workers and a queue in memory. */
const world = (
  sections: ReadonlyArray<Scripted>,
  options: {
    readonly allowFusion?: boolean
    readonly started?: Array<Effect.Effect<void>>
    /** What the queue answers to loads, until the list is empty. */
    readonly loads?: Array<DatabaseError["reason"]>
    /** Other answers of the queue. */
    readonly answers?: (real: Queue["Service"]) => Partial<Queue["Service"]>
    readonly ownership?: Layer.Layer<Ownership>
    /** Instead of a load, or after it. */
    readonly load?: (
      rows: ReadonlyArray<{ readonly id: number }>,
      real: ReturnType<Queue["Service"]["load"]>
    ) => ReturnType<Queue["Service"]["load"]>
  } = {}
) => {
  const pipeline = pipelineOf(sections)
  const queue = Layer.effect(
    Queue,
    Effect.map(Queue, (real) =>
      Queue.of({
        ...real,
        ...options.answers?.(real),
        load: (rows, level) => {
          const reason = options.loads?.shift()
          return reason === undefined
            ? Effect.delay(
                options.load?.(rows, real.load(rows, level)) ?? real.load(rows, level),
                "1 millis"
              )
            : Effect.fail(new DatabaseError({ reason, operation: "Queue.load", cause: undefined }))
        }
      })
    )
  ).pipe(Layer.provideMerge(MemoryQueue.layer))
  return Dispatcher.layer({
    pipeline,
    configuration: "",
    grace: Duration.seconds(10),
    idleTimeout: Duration.seconds(5),
    batchBytes: 32 * 1024 * 1024,
    maxInFlightBytes: 256 * 1024 * 1024,
    pollInterval: Duration.seconds(5),
    fair: true,
    owner: "test"
  }).pipe(
    Layer.provide(workers(pipeline, { allowFusion: options.allowFusion ?? true, ...options })),
    Layer.provideMerge(StatsFlusher.layer({ interval: Duration.hours(1), dispatcher: "main" })),
    Layer.provideMerge(Layer.mergeAll(queue, options.ownership ?? ownership, stages))
  )
}

/** Admits and hands over, as the SMTP server does. */
const admit = Effect.fnUntraced(function* (mails: ReadonlyArray<Admission>) {
  const queue = yield* Queue
  for (let i = 0; i < mails.length; i += 64) {
    const entries = yield* queue.admit(mails.slice(i, i + 64))
    ;(yield* Control).admitted(entries)
  }
})

/** Lets time pass until no row is pending or in hand; a minute is more than anything here takes. */
const settle = Effect.gen(function* () {
  const table = yield* MemoryQueue.Table
  const control = yield* Control
  for (let step = 0; step < 600; step++) {
    yield* TestClock.adjust("100 millis")
    const waits = (yield* table.rows).some((row) => row.status === "pending")
    if (!waits && (yield* control.inFlight).size === 0) return
  }
})

const trouble = (reason: DatabaseError["reason"]) =>
  new DatabaseError({ reason, operation: "test", cause: undefined })

const to = (section: string) => () => Effect.succeed(Verdict.passTo(section))
const end = () => Effect.succeed(Verdict.done)

describe("Dispatcher", () => {
  it.effect("what is handed over runs through its path, and the counters are exact", () =>
    Effect.gen(function* () {
      yield* admit(Array.from({ length: 300 }, () => mail()))
      yield* settle
      const { dispatch, sections } = (yield* Statistics).tally.take()
      assert.deepStrictEqual([dispatch.messagesProcessed, dispatch.handedOut], [300, 300])
      assert.deepStrictEqual([sections["init"]?.processed, sections["init"]?.fused], [300, 0])
      assert.deepStrictEqual(
        [sections["end"]?.processed, sections["end"]?.fused, sections["end"]?.done],
        [300, 300, 300]
      )
      assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
    }).pipe(
      Effect.provide(
        world([
          { name: "init", run: to("end") },
          { name: "end", run: end }
        ])
      )
    )
  )

  it.effect(
    "without fusion each stage is a hop of its own, with the same end and the same counters",
    () =>
      Effect.gen(function* () {
        yield* admit(Array.from({ length: 100 }, () => mail()))
        yield* settle
        const { dispatch, sections } = (yield* Statistics).tally.take()
        assert.deepStrictEqual([dispatch.messagesProcessed, dispatch.handedOut], [100, 200])
        assert.deepStrictEqual([sections["end"]?.processed, sections["end"]?.fused], [100, 0])
      }).pipe(
        Effect.provide(
          world(
            [
              { name: "init", run: to("end") },
              { name: "end", run: end }
            ],
            { allowFusion: false }
          )
        )
      )
  )

  it.effect("rows that nobody announces are found by the scan, more than a list holds", () =>
    Effect.gen(function* () {
      const queue = yield* Queue
      for (let i = 0; i < 40; i++) yield* queue.admit(Array.from({ length: 64 }, () => mail()))
      yield* settle
      assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
      assert.strictEqual((yield* Statistics).tally.take().dispatch.messagesProcessed, 2560)
    }).pipe(Effect.provide(world([{ name: "init", run: end }])))
  )

  it.effect(
    "a row on which a stage throws is tried alone, then kept as poison; the others are not harmed",
    () => {
      const runs: Array<string> = []
      const init: Scripted["run"] = ({ sender }) =>
        Effect.suspend(() => {
          runs.push(sender)
          return sender === "poison@x"
            ? Effect.die(new Error("boom"))
            : Effect.succeed(Verdict.done)
        })
      return Effect.gen(function* () {
        yield* admit([...Array.from({ length: 20 }, () => mail()), mail({ sender: "poison@x" })])
        yield* settle
        const rows = yield* (yield* MemoryQueue.Table).rows
        assert.deepStrictEqual(
          rows.map((row) => [row.sender, row.status, row.crashes]),
          [["poison@x", "failed", 3]]
        )
        assert.strictEqual(runs.filter((sender) => sender === "poison@x").length, 3)
        assert.strictEqual((yield* Statistics).tally.take().sections["init"]?.crashes, 3)
      }).pipe(Effect.provide(world([{ name: "init", run: init }])))
    }
  )

  it.effect("one throwing message does not stop a section with one worker", () => {
    const init: Scripted["run"] = ({ sender }) =>
      sender === "poison@x" ? Effect.die(new Error("boom")) : Effect.succeed(Verdict.done)
    return Effect.gen(function* () {
      yield* admit([mail({ sender: "poison@x" })])
      yield* settle
      yield* admit(Array.from({ length: 20 }, () => mail()))
      yield* settle
      const rows = yield* (yield* MemoryQueue.Table).rows
      assert.deepStrictEqual(
        rows.map((row) => [row.sender, row.status]),
        [["poison@x", "failed"]]
      )
    }).pipe(Effect.provide(world([{ name: "init", run: init, parallelism: 1 }])))
  })

  it.effect("a worker that is killed with rows in hand loses none and doubles none", () => {
    const started: Array<Effect.Effect<void>> = []
    let settledBy = 0
    const slow: Scripted["run"] = () =>
      Effect.delay(
        Effect.sync(() => {
          settledBy++
          return Verdict.done
        }),
        "300 millis"
      )
    return Effect.gen(function* () {
      yield* admit(Array.from({ length: 8 }, () => mail()))
      yield* TestClock.adjust("150 millis")
      assert.lengthOf(started, 1)
      yield* started[0]!
      yield* settle
      assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
      const { dispatch, sections } = (yield* Statistics).tally.take()
      assert.deepStrictEqual([dispatch.messagesProcessed, settledBy], [8, 8])
      // All eight were in its hands, so all became suspects and ran alone.
      assert.deepStrictEqual([sections["init"]?.crashes, started.length > 1], [8, true])
    }).pipe(Effect.provide(world([{ name: "init", run: slow }], { started })))
  })

  it.effect("what a stage puts off comes back when it is due, and not before", () => {
    let tries = 0
    const later: Scripted["run"] = () =>
      Effect.sync(() => (++tries === 1 ? Verdict.defer("4.4.1 later", "20 minutes") : Verdict.done))
    return Effect.gen(function* () {
      const table = yield* MemoryQueue.Table
      yield* admit([mail()])
      yield* settle
      const [row] = yield* table.rows
      assert.deepStrictEqual(
        [row?.status, row?.attempts, row?.lastError],
        ["deferred", 1, "4.4.1 later"]
      )
      yield* TestClock.adjust("19 minutes")
      assert.strictEqual(tries, 1)
      yield* TestClock.adjust("2 minutes")
      assert.strictEqual(tries, 2)
      assert.lengthOf(yield* table.rows, 0)
    }).pipe(Effect.provide(world([{ name: "init", run: later }])))
  })

  it.effect("children and the messages a stage sends run as well", () => {
    const split: Scripted["run"] = ({ recipients }) =>
      Effect.succeed(
        Verdict.fanout(
          recipients.map((recipient) => ({ key: recipient, to: "end", recipients: [recipient] }))
        )
      )
    return Effect.gen(function* () {
      yield* admit([mail({ recipients: ["a@x", "b@x", "c@x"] })])
      yield* settle
      assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
      const { dispatch, sections } = (yield* Statistics).tally.take()
      // Only what leaves counts: the three children, not the message they replace.
      assert.deepStrictEqual(
        [dispatch.messagesProcessed, sections["end"]?.done, sections["init"]?.done],
        [3, 3, 1]
      )
    }).pipe(
      Effect.provide(
        world([
          { name: "init", run: split },
          { name: "end", run: end }
        ])
      )
    )
  })

  it.effect("a small sender is served while a large one has thousands waiting", () => {
    const order: Array<string> = []
    const note: Scripted["run"] = ({ sender }) =>
      Effect.sync(() => {
        order.push(sender)
        return Verdict.done
      })
    return Effect.gen(function* () {
      const queue = yield* Queue
      const control = yield* Control
      const big: Array<Admission> = Array.from({ length: 960 }, () =>
        mail({ sender: "big@x", fairKey: "big" })
      )
      const entries = []
      for (let i = 0; i < big.length; i += 64)
        entries.push(...(yield* queue.admit(big.slice(i, i + 64))))
      entries.push(...(yield* queue.admit([mail({ sender: "small@x", fairKey: "small" })])))
      control.admitted(entries)
      yield* settle
      assert.isBelow(order.indexOf("small@x"), 32)
      assert.lengthOf(order, 961)
    }).pipe(Effect.provide(world([{ name: "init", run: note }])))
  })

  for (const reason of ["overload", "away"] as const) {
    it.effect(`rows come back unharmed when the database says ${reason}`, () =>
      Effect.gen(function* () {
        yield* admit(Array.from({ length: 10 }, () => mail()))
        yield* settle
        assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
        const { dispatch, sections } = (yield* Statistics).tally.take()
        assert.deepStrictEqual([dispatch.messagesProcessed, sections["init"]?.crashes], [10, 0])
        assert.strictEqual(dispatch.overloads, reason === "overload" ? 2 : 0)
      }).pipe(Effect.provide(world([{ name: "init", run: end }], { loads: [reason, reason] })))
    )
  }

  it.effect(
    "a row that cannot be loaded by itself is given three tries, then counts as a death",
    () =>
      Effect.gen(function* () {
        yield* admit([mail()])
        yield* settle
        // Two tries in the batch of one, then again: the third makes it a suspect, which then loads.
        assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
        assert.strictEqual((yield* Statistics).tally.take().sections["init"]?.crashes, 1)
      }).pipe(
        Effect.provide(world([{ name: "init", run: end }], { loads: ["data", "data", "data"] }))
      )
  )

  it.effect("a message that takes longer than TIMEOUT is kept as poison in the end", () =>
    Effect.gen(function* () {
      yield* admit([mail(), mail({ sender: "slow@x" })])
      yield* TestClock.adjust("20 minutes")
      const rows = yield* (yield* MemoryQueue.Table).rows
      assert.deepStrictEqual(
        rows.map((row) => [row.sender, row.status, row.crashes]),
        [["slow@x", "failed", 3]]
      )
    }).pipe(
      Effect.provide(
        world([
          {
            name: "init",
            parallelism: 1,
            run: ({ sender }) => (sender === "slow@x" ? Effect.never : Effect.succeed(Verdict.done))
          }
        ])
      )
    )
  )

  it.effect("a database that is away for longer than TIMEOUT repeats no hand-over", () => {
    let away = true
    let runs = 0
    const unless = <A>(answer: Effect.Effect<A, DatabaseError>) =>
      Effect.suspend(() => (away ? Effect.fail(trouble("away")) : answer))
    return Effect.gen(function* () {
      yield* admit([mail()])
      yield* TestClock.adjust("10 minutes")
      away = false
      yield* settle
      assert.lengthOf(yield* (yield* MemoryQueue.Table).rows, 0)
      assert.deepStrictEqual(
        [runs, (yield* Statistics).tally.take().sections["init"]?.crashes],
        [1, 0]
      )
    }).pipe(
      Effect.provide(
        world(
          [{ name: "init", effect: "once", run: () => Effect.sync(() => (runs++, Verdict.done)) }],
          {
            answers: (real) => ({
              settle: (outcomes, options) => unless(real.settle(outcomes, options)),
              revisions: (of) => unless(real.revisions(of))
            })
          }
        )
      )
    )
  })

  it.effect("a row that may have been run before is a repeat in the next section, too", () => {
    const seen: Array<boolean> = []
    const local: Scripted["run"] = ({ repeat }) =>
      Effect.suspend(() => {
        seen.push(repeat)
        return seen.length === 1
          ? Effect.die(new Error("after link"))
          : Effect.succeed(Verdict.done)
      })
    return Effect.gen(function* () {
      yield* TestClock.adjust("1 second")
      yield* admit([mail()])
      yield* settle
      // First fused behind init; then, as a suspect, in a hop of its own.
      assert.deepStrictEqual(seen, [false, true])
    }).pipe(
      Effect.provide(
        world([
          { name: "init", run: to("end") },
          { name: "end", effect: "keyed", run: local }
        ])
      )
    )
  })

  it.effect("slow rows of one sender do not stop free hands", () => {
    let fast = 0
    const run: Scripted["run"] = ({ sender }) =>
      sender === "slow@x"
        ? Effect.delay(Effect.succeed(Verdict.done), "250 seconds")
        : Effect.sync(() => (fast++, Verdict.done))
    return Effect.gen(function* () {
      yield* admit(Array.from({ length: 5 }, () => mail({ sender: "slow@x", fairKey: "slow" })))
      yield* TestClock.adjust("1 second")
      yield* admit(Array.from({ length: 20 }, () => mail({ fairKey: "fast" })))
      yield* TestClock.adjust("20 seconds")
      assert.strictEqual(fast, 20)
      yield* TestClock.adjust("5 minutes") // so that the end has nothing to wait for
    }).pipe(Effect.provide(world([{ name: "init", parallelism: 1, run }])))
  })

  it.effect("a suspect is served while others keep all workers busy", () => {
    let others = 0
    let suspects = 0
    const run: Scripted["run"] = ({ sender }) =>
      Effect.suspend(() => {
        if (sender !== "suspect@x") {
          others++
          return Effect.delay(Effect.succeed(Verdict.done), "900 millis")
        }
        suspects++
        return suspects === 1 ? Effect.die(new Error("once")) : Effect.succeed(Verdict.done)
      })
    return Effect.gen(function* () {
      yield* admit([mail({ sender: "suspect@x", fairKey: "s" })])
      for (let i = 0; i < 60; i++) {
        yield* admit(Array.from({ length: 8 }, () => mail()))
        yield* TestClock.adjust("500 millis")
      }
      assert.strictEqual(suspects, 2)
      assert.isAbove(others, 100)
      yield* TestClock.adjust("1 minute") // so that the end has nothing to wait for
    }).pipe(Effect.provide(world([{ name: "init", parallelism: 1, run }])))
  })

  it.effect("a suspect and an ordinary row start one worker where PARALLELISM is 1", () => {
    const started: Array<Effect.Effect<void>> = []
    return Effect.gen(function* () {
      yield* TestClock.adjust("1 second")
      const [one, two] = yield* (yield* Queue).admit([mail(), mail()])
      ;(yield* Control).admitted([{ ...one!, crashes: 1 }, two!])
      yield* settle
      assert.lengthOf(started, 1)
    }).pipe(Effect.provide(world([{ name: "init", parallelism: 1, run: end }], { started })))
  })

  it.effect("nothing is handed out when the first scan fails and the sections are lost", () => {
    let owns = 0
    let ran = 0
    let fails = true
    const once = Layer.effect(
      Ownership,
      Effect.map(Ownership, (real) =>
        Ownership.of({
          ...real,
          own: (sections, owner) => (++owns === 1 ? real.own(sections, owner) : Effect.never)
        })
      )
    ).pipe(Layer.provide(ownership))
    return Effect.gen(function* () {
      yield* TestClock.adjust("5 seconds")
      yield* admit([mail()])
      yield* settle
      assert.deepStrictEqual([owns, ran], [2, 0])
    }).pipe(
      Effect.provide(
        world([{ name: "init", run: () => Effect.sync(() => (ran++, Verdict.done)) }], {
          ownership: once,
          answers: (real) => ({
            scan: (after, limit) =>
              Effect.suspend(() => {
                const answer = fails ? Effect.fail(trouble("overload")) : real.scan(after, limit)
                fails = false
                return answer
              })
          })
        })
      )
    )
  })

  it.effect("a settle that we do not understand costs its own row and no other", () => {
    const isBad = (outcomes: ReadonlyArray<{ readonly id: number }>) =>
      outcomes.some(({ id }) => id === 2)
    return Effect.gen(function* () {
      yield* admit(Array.from({ length: 4 }, () => mail()))
      yield* settle
      const rows = yield* (yield* MemoryQueue.Table).rows
      assert.deepStrictEqual(
        rows.map((row) => [row.id, row.status]),
        [[2, "failed"]]
      )
      assert.strictEqual((yield* Statistics).tally.take().sections["init"]?.crashes, 3)
    }).pipe(
      Effect.provide(
        world([{ name: "init", run: end }], {
          answers: (real) => ({
            settle: (outcomes, options) =>
              isBad(outcomes) ? Effect.die(new Error("SQLSTATE")) : real.settle(outcomes, options)
          })
        })
      )
    )
  })

  it.effect("a row that cannot be read costs its own tries and no other's", () => {
    const isBad = (rows: ReadonlyArray<{ readonly id: number }>) => rows.some(({ id }) => id === 2)
    return Effect.gen(function* () {
      yield* admit(Array.from({ length: 4 }, () => mail()))
      yield* settle
      const rows = yield* (yield* MemoryQueue.Table).rows
      assert.deepStrictEqual(
        rows.map((row) => [row.id, row.status]),
        [[2, "failed"]]
      )
    }).pipe(
      Effect.provide(
        world([{ name: "init", run: end }], {
          load: (rows, real) => (isBad(rows) ? Effect.die(new Error("infinity")) : real)
        })
      )
    )
  })

  it.effect("a death that cannot be written keeps no row in hand", () =>
    Effect.gen(function* () {
      yield* admit([mail(), mail()])
      yield* TestClock.adjust("8 seconds")
      assert.strictEqual((yield* (yield* Control).inFlight).size, 0)
    }).pipe(
      Effect.provide(
        world([{ name: "init", run: () => Effect.die(new Error("x")) }], {
          answers: () => ({ crashed: () => Effect.fail(trouble("data")) })
        })
      )
    )
  )

  it.effect("idle workers end, but the head of the pipeline keeps one", () => {
    const started: Array<Effect.Effect<void>> = []
    return Effect.gen(function* () {
      const control = yield* Control
      const workersNow = Effect.map(control.figures, (all) => all.map(({ workers: n }) => n))
      yield* admit(Array.from({ length: 60 }, () => mail()))
      yield* settle
      assert.deepStrictEqual(yield* workersNow, [2, 1])
      yield* TestClock.adjust("10 seconds")
      assert.deepStrictEqual(yield* workersNow, [1, 0])
    }).pipe(
      Effect.provide(
        world(
          [
            { name: "init", run: to("end") },
            { name: "end", run: end, fusion: false, queueLimit: 64 }
          ],
          { started }
        )
      )
    )
  })
})
