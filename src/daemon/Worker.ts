// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A stage worker: loads the rows it is ordered to run, runs each through its section and what may
 * be fused behind it, and settles what comes out.
 *
 * It holds one database session and decides nothing about who runs what. When its orders end it
 * finishes and settles what it has begun, starts nothing more, and returns.
 */
import type * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as FiberSet from "effect/FiberSet"
import * as EffectQueue from "effect/Queue"
import * as Scope from "effect/Scope"
import type { Section } from "../pipeline/Route.ts"
import * as Wire from "../pipeline/Wire.ts"
import { Ownership } from "../services/Ownership.ts"
import { Queue } from "../services/Queue.ts"
import { Stages } from "../services/Stages.ts"
import { settleAll } from "./Settler.ts"
import type { Finished } from "./Settler.ts"
import { endLate, runRow } from "./worker/Chain.ts"
import { load } from "./worker/Loading.ts"
import type { Assignment, Ordered, Run, Shop } from "./worker/Shop.ts"

/** How often it says that it is alive; a daemon waits six times as long before it kills. */
const beatInterval = "5 seconds"

/** Runs until the orders end and everything begun is settled; false = a stage threw. */
export const run = Effect.fn("Worker.run")(function* (assignment: Assignment) {
  const ownership = yield* Ownership
  const backend = yield* ownership.work(assignment.section.name)
  const shop = yield* openShop(assignment)
  const settling = yield* Effect.forkScoped(settleAll(shop.outbox, assignment.say))
  const rows = yield* FiberSet.make<void, never>()
  assignment.say({ t: "ready", version: Wire.version, pid: assignment.pid, backend })
  yield* Effect.forkScoped(beating(backend, assignment.say))
  const watch = Effect.sync(() => endLate(shop))
  yield* Effect.forkScoped(Effect.forever(Effect.delay(watch, "1 second")))
  const work = takeOrders(shop, rows).pipe(
    Effect.andThen(FiberSet.awaitEmpty(rows)),
    Effect.andThen(EffectQueue.end(shop.outbox)),
    Effect.andThen(Fiber.join(settling))
  )
  // Settling ends before the work does only if a statement of ours is wrong; then we end, too.
  yield* Effect.raceFirst(work, Effect.andThen(Fiber.join(settling), Effect.never))
  return shop.door.open
})

/**
 * Says that we are alive, whatever the database does, with the pid of our session as it was last
 * seen: another after the session was lost and made again.
 */
const beating = Effect.fnUntraced(function* (backend: number, say: (report: Wire.Report) => void) {
  const ownership = yield* Ownership
  let last = backend
  const look = Effect.map(ownership.backend, (now) => {
    last = now
  })
  // While the database is away the last one is told.
  yield* Effect.forkScoped(Effect.forever(Effect.delay(Effect.ignore(look), beatInterval)))
  return yield* Effect.forever(
    Effect.delay(
      Effect.sync(() => say({ t: "beat", backend: last })),
      beatInterval
    )
  )
})

const openShop = Effect.fnUntraced(function* (assignment: Assignment) {
  const stages = yield* Stages
  const scope = yield* Effect.scope
  const opened = new Map<string, Run | undefined>()
  const own = yield* stages.open(assignment.section)
  opened.set(assignment.section.name, own)
  const shop: Shop = {
    assignment,
    queue: yield* Queue,
    clock: yield* Clock.Clock,
    // Never more than the rows in hand, which the daemon bounds.
    outbox: yield* EffectQueue.unbounded<Finished, Cause.Done>(),
    runOf: (section) =>
      opened.has(section.name)
        ? Effect.succeed(opened.get(section.name))
        : openBehind(stages, scope, section).pipe(
            Effect.tap((made) => Effect.sync(() => opened.set(section.name, made)))
          ),
    running: new Map(),
    door: { open: true }
  }
  return shop
})

/** A section behind ours whose services cannot be made ready here is left to its own worker. */
const openBehind = (stages: Stages["Service"], scope: Scope.Scope, section: Section) =>
  stages.open(section).pipe(
    Scope.provide(scope),
    Effect.catchTag("StageUnavailable", (error) =>
      Effect.as(
        Effect.annotateLogs(Effect.logWarning("not fused"), {
          section: section.name,
          cause: String(error.cause)
        }),
        undefined
      )
    )
  )

const takeOrders = Effect.fnUntraced(function* (shop: Shop, rows: FiberSet.FiberSet<void, never>) {
  const { assignment } = shop
  while (shop.door.open) {
    const order = yield* EffectQueue.take(assignment.orders).pipe(
      Effect.catchIf(
        (error) => error._tag === "Done",
        () => Effect.undefined
      )
    )
    if (order === undefined) return
    if (order.t !== "run" || order.generation !== assignment.pipeline.generation) {
      return yield* Effect.die(new Error("an order of another configuration"))
    }
    yield* FiberSet.run(rows, runBatch(shop, rows, order.rows))
  }
})

/** Loads a batch with one SELECT and starts each of its rows. */
const runBatch = Effect.fnUntraced(function* (
  shop: Shop,
  rows: FiberSet.FiberSet<void, never>,
  ordered: Ordered
) {
  const loaded = yield* load(shop, ordered)
  for (const row of loaded.rows) {
    const flags = ordered[row.index]![2]
    yield* FiberSet.run(rows, runRow(shop, row, flags))
  }
  const seen = new Set([...loaded.rows.map((row) => row.id), ...loaded.returned])
  const gone = ordered.filter(([id]) => !seen.has(id)).map(([id]) => id)
  if (gone.length > 0) shop.assignment.say({ t: "returned", ids: gone, why: "gone" })
})
