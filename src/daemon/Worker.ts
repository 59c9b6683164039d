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
import * as Random from "effect/Random"
import * as Scope from "effect/Scope"
import * as Header from "../mail/Header.ts"
import * as Plan from "../pipeline/Plan.ts"
import type { Pipeline, Section } from "../pipeline/Route.ts"
import * as Stage from "../pipeline/Stage.ts"
import { fromFailure } from "../pipeline/Verdict.ts"
import type { Verdict, WorldFailure } from "../pipeline/Verdict.ts"
import * as Wire from "../pipeline/Wire.ts"
import type { DatabaseError } from "../services/DatabaseError.ts"
import { Ownership } from "../services/Ownership.ts"
import { Queue } from "../services/Queue.ts"
import type { Loaded } from "../services/Queue.ts"
import { Stages } from "../services/Stages.ts"
import { settleAll } from "./Settler.ts"
import type { Finished, Outbox } from "./Settler.ts"

/** What a worker is started with. */
export interface Assignment {
  readonly section: Section
  readonly pipeline: Pipeline
  readonly allowFusion: boolean
  /** Of this process; the daemon checks that it talks to whom it started. */
  readonly pid: number
  /** Ends when the daemon has no more to order. */
  readonly orders: EffectQueue.Dequeue<Wire.Order, Wire.WireError | Cause.Done>
  readonly say: (report: Wire.Report) => void
}

/** How often it says that it is alive; a daemon waits six times as long before it kills. */
const beatInterval = "5 seconds"

type Run = (mail: Stage.WithBody) => Effect.Effect<Verdict, WorldFailure>

/** What all rows of a worker share. */
interface Shop {
  readonly assignment: Assignment
  readonly queue: Queue["Service"]
  readonly clock: Clock.Clock
  readonly outbox: Outbox
  /**
   * The run of a section, made ready at its first use; undefined = not possible in this process.
   */
  readonly runOf: (section: Section) => Effect.Effect<Run | undefined>
  /** Closed by a stage that throws: no more rows are begun. */
  readonly door: { open: boolean }
}

/** Runs until the orders end and everything begun is settled; false = a stage threw. */
export const run = Effect.fn("Worker.run")(function* (assignment: Assignment) {
  const ownership = yield* Ownership
  const backend = yield* ownership.work(assignment.section.name)
  const shop = yield* openShop(assignment)
  const settling = yield* Effect.forkScoped(settleAll(shop.outbox, assignment.say))
  const rows = yield* FiberSet.make<void, never>()
  assignment.say({ t: "ready", version: Wire.version, pid: assignment.pid, backend })
  yield* Effect.forkScoped(beating(backend, assignment.say))
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

type Ordered = ReadonlyArray<(typeof Wire.RunOrder.Type)["rows"][number]>

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

interface Batch {
  readonly rows: ReadonlyArray<Loaded>
  /** Told to the daemon already. */
  readonly returned: ReadonlyArray<number>
}

/** A defect here is a statement of ours that is wrong; no row is to blame for it. */
const load = (shop: Shop, ordered: Ordered): Effect.Effect<Batch> =>
  shop.queue
    .load(
      ordered.map(([id, rev]) => ({ id, rev })),
      shop.assignment.section.load
    )
    .pipe(
      Effect.retry({ times: 1, while: (error) => error.reason === "conflict" }),
      Effect.map((rows): Batch => ({ rows, returned: [] })),
      Effect.catchTag("DatabaseError", (error) => loadFailed(shop, ordered, error)),
      Effect.catchDefect((defect) =>
        Effect.as(Effect.logError("rows cannot be loaded", defect), giveBack(shop, ordered, "away"))
      )
    )

/** Nothing has begun, so the rows go back unharmed. */
const giveBack = (
  shop: Shop,
  ordered: Ordered,
  why: (typeof Wire.ReturnedReport.Type)["why"]
): Batch => {
  const ids = ordered.map(([id]) => id)
  shop.assignment.say({ t: "returned", ids, why })
  return { rows: [], returned: ids }
}

/** The database says no; a row that cannot be loaded alone is named. */
const loadFailed = Effect.fnUntraced(function* (
  shop: Shop,
  ordered: Ordered,
  error: DatabaseError
) {
  if (error.reason === "overload") return giveBack(shop, ordered, "overload")
  if (error.reason !== "data") return giveBack(shop, ordered, "away")
  if (ordered.length === 1) return giveBack(shop, ordered, "unloadable")
  const batches = yield* Effect.forEach(ordered, (row) => load(shop, [row]), { concurrency: 1 })
  return {
    rows: batches.flatMap((batch, index) => batch.rows.map((row) => ({ ...row, index }))),
    returned: batches.flatMap((batch) => batch.returned)
  }
})

/** One row, from its first stage to what is settled. A defect on the way is the row's own. */
const runRow = (shop: Shop, row: Loaded, flags: number): Effect.Effect<void> =>
  runChain(shop, row, flags).pipe(
    Effect.catchDefect((defect) => Effect.sync(() => threw(shop, row.id, defect)))
  )

const runChain = Effect.fnUntraced(function* (shop: Shop, row: Loaded, flags: number) {
  const { allowFusion, pipeline, section: first } = shop.assignment
  let mail = toMail(row, (flags & Wire.flags.repeat) !== 0)
  let have = first.load
  let chain = Plan.begin(mail, first, (flags & Wire.flags.alone) !== 0)
  while (true) {
    const ready = yield* makeReady(shop, chain, mail, have)
    if (ready._tag === "Stop") return finish(shop, chain, Plan.stop(chain))
    if (ready._tag === "Gone")
      return shop.assignment.say({ t: "returned", ids: [row.id], why: "gone" })
    mail = ready.mail
    have = Stage.maxLoad(have, chain.section.load)
    const began = shop.clock.monotonicTimeNanosUnsafe()
    const result = yield* Effect.result(ready.run(withNeeds(shop.queue, mail, have)))
    const micros = Number((shop.clock.monotonicTimeNanosUnsafe() - began) / 1000n)
    const verdict = result._tag === "Success" ? result.success : fromFailure(result.failure)
    const step = Plan.step(pipeline, allowFusion, chain, {
      verdict,
      micros,
      chance: yield* Random.next
    })
    if (step._tag === "Settle") {
      if (step.outcome.verdict === "fail") yield* logFailed(row.id, chain.section, step.outcome)
      return finish(shop, { ...chain, runs: step.runs }, step.outcome, step.once)
    }
    mail = Plan.patched(mail, verdict.patch, step.chain.section.name)
    chain = step.chain
  }
})

/** The status alone: what a stage says beside it may name people. */
const logFailed = (id: number, { name }: Section, { error }: Finished["outcome"]) =>
  Effect.annotateLogs(Effect.logInfo("a message failed"), {
    id,
    section: name,
    status: error?.split(" ")[0]
  })

const finish = (
  shop: Shop,
  { runs, section }: Plan.Chain,
  outcome: Finished["outcome"],
  once = false
): void => {
  EffectQueue.offerUnsafe(shop.outbox, {
    outcome,
    runs,
    durable: once || section.synchronousCommit,
    alone: once
  })
}

/** Nothing is written for the row: it is redone alone, and this worker ends after the others. */
const threw = (shop: Shop, id: number, defect: unknown): void => {
  shop.door.open = false
  shop.assignment.say({
    t: "threw",
    id,
    section: shop.assignment.section.name,
    error: place(defect)
  })
}

/**
 * Where it threw: the name and the first frames, never the text, which may hold parts of a mail.
 */
const place = (error: unknown): string => {
  if (!(error instanceof Error)) return "not an Error"
  const frames = (error.stack ?? "")
    .split("\n")
    .filter((line) => /^\s+at /.test(line))
    .slice(0, 3)
  return [error.name, ...frames.map((line) => line.trim())].join(" ").slice(0, 600)
}

type Readied =
  | { readonly _tag: "Run"; readonly run: Run; readonly mail: Stage.WithBody }
  | { readonly _tag: "Stop" }
  | { readonly _tag: "Gone" }

/**
 * The stage and enough of the message for it. Trouble behind the first stage ends the chain there.
 */
const makeReady = Effect.fnUntraced(function* (
  shop: Shop,
  chain: Plan.Chain,
  mail: Stage.WithBody,
  have: Stage.Load
) {
  const run = yield* shop.runOf(chain.section)
  if (run === undefined) return { _tag: "Stop" } as Readied
  if (Stage.serves(have, chain.section.load)) return { _tag: "Run", run, mail } as Readied
  const more = yield* Effect.result(upgrade(shop.queue, mail, chain.section.load))
  if (more._tag === "Failure") return { _tag: "Stop" } as Readied
  return (
    more.success === undefined ? { _tag: "Gone" } : { _tag: "Run", run, mail: more.success }
  ) as Readied
})

/** The same message with more of it; a header or body that a stage has replaced stays replaced. */
const upgrade = (queue: Queue["Service"], mail: Stage.WithBody, level: Stage.Load) =>
  queue.load([{ id: mail.id, rev: mail.rev }], level).pipe(
    Effect.map(([row]) =>
      row === undefined
        ? undefined
        : {
            ...mail,
            header:
              mail.header === Header.empty && row.headers !== undefined
                ? Header.parse(row.headers)
                : mail.header,
            body: mail.body === noBody && row.body !== undefined ? row.body : mail.body
          }
    )
  )

/** Stands for a body that is not loaded. */
const noBody = new Uint8Array(0)

const toMail = (row: Loaded, repeat: boolean): Stage.WithBody => ({
  ...row,
  repeat,
  header: row.headers === undefined ? Header.empty : Header.parse(row.headers),
  body: row.body ?? noBody,
  needHeaders: unbound,
  needPrefix: () => unbound,
  needBody: unbound
})

/** Replaced before a stage sees the message. */
const unbound = Effect.die(new Error("no message is bound"))

/** The message with its ways to load more of itself. */
const withNeeds = (
  queue: Queue["Service"],
  mail: Stage.WithBody,
  have: Stage.Load
): Stage.WithBody => {
  const need = (level: Stage.Load): Effect.Effect<Stage.WithBody, Stage.LoadFailed> =>
    Stage.serves(have, level)
      ? Effect.succeed(mail)
      : upgrade(queue, mail, level).pipe(
          Effect.mapError((cause) => new Stage.LoadFailed({ cause })),
          Effect.filterOrFail(
            (more) => more !== undefined,
            () => new Stage.LoadFailed({ cause: "the row has changed" })
          )
        )
  return {
    ...mail,
    needHeaders: Effect.suspend(() => need("headers")),
    needPrefix: (bytes) => Effect.suspend(() => need({ prefix: bytes })),
    needBody: Effect.suspend(() => need("full"))
  }
}
