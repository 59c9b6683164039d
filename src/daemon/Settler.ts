// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The writing half of a worker: outcomes that arrive while one settle is on its way share the
 * next. It owns no row: an outcome is kept until the database has taken or refused it, however
 * long the database is away, because an effect outside may already have happened.
 */
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Cause from "effect/Cause"
import * as EffectQueue from "effect/Queue"
import type { Entry, Outcome } from "../pipeline/Job.ts"
import type { Run } from "../pipeline/Stats.ts"
import type * as Wire from "../pipeline/Wire.ts"
import { DatabaseError } from "../services/DatabaseError.ts"
import { Queue } from "../services/Queue.ts"
import type { Settled } from "../services/Queue.ts"

/** The end of a chain. */
export interface Finished {
  readonly outcome: Outcome
  readonly runs: ReadonlyArray<Run>
  /** Waits for the disk. */
  readonly durable: boolean
  /** Shares its settle with nobody. */
  readonly alone: boolean
}

export type Outbox = EffectQueue.Queue<Finished, Cause.Done>

/** Rows in one settle: the measured best; more only makes a failure dearer. */
const maxRows = 64
/** Octets of new headers and bodies in one settle; the driver's message has 128 MiB. */
const maxBytes = 32 * 1024 * 1024

/** Settles until the outbox has ended and is empty. */
export const settleAll = Effect.fn("Worker.settleAll")(function* (
  outbox: Outbox,
  say: (report: Wire.Report) => void
) {
  const queue = yield* Queue
  while (true) {
    const batch = yield* EffectQueue.takeAll(outbox).pipe(
      Effect.catchIf(
        (error) => error._tag === "Done",
        () => Effect.succeed([])
      )
    )
    if (batch.length === 0) return
    for (const group of groups(batch)) {
      const written = yield* write(
        queue,
        group.map((item) => item.outcome),
        group[0]!.durable
      )
      for (const report of reports(group, written)) say(report)
    }
  }
})

/** Groups that are written together, in order. Pure. */
export const groups = (batch: ReadonlyArray<Finished>): ReadonlyArray<ReadonlyArray<Finished>> => {
  const made: Array<Array<Finished>> = []
  let open: Array<Finished> = []
  let bytes = 0
  for (const item of batch) {
    const more = octets(item.outcome)
    const fits =
      open.length > 0 &&
      open.length < maxRows &&
      bytes + more <= maxBytes &&
      !item.alone &&
      !open[0]!.alone &&
      open[0]!.durable === item.durable
    if (!fits) {
      open = []
      bytes = 0
      made.push(open)
    }
    open.push(item)
    bytes += more
  }
  return made
}

const octets = ({ children, emissions, patch }: Outcome): number =>
  [patch, ...children.map((c) => c.patch), ...emissions.map((e) => e.patch)].reduce(
    (sum, p) => sum + (p.header?.raw.length ?? 0) + (p.body?.length ?? 0),
    0
  )

interface Written {
  readonly rows: ReadonlyArray<Settled>
  readonly retries: number
  /** Outcomes that the table refuses: a fault of their stage. */
  readonly refused: ReadonlyArray<{
    readonly id: number
    readonly section: string
    readonly error: string
  }>
}

/** Writes outcomes until they are in, in whatever number of tries that takes. */
const write = (
  queue: Queue["Service"],
  outcomes: ReadonlyArray<Outcome>,
  durable: boolean,
  conflicted = false
): Effect.Effect<Written> =>
  queue.settle(outcomes, { durable }).pipe(
    Effect.map((rows): Written => ({ rows, retries: 0, refused: [] })),
    // A refusal we do not know is a refusal: the culprit is found by settling one by one.
    Effect.catchDefect((cause) =>
      Effect.andThen(
        Effect.logError("a settle failed", cause),
        Effect.fail(new DatabaseError({ reason: "data", operation: "Queue.settle", cause }))
      )
    ),
    Effect.catchTag("DatabaseError", (error) =>
      again(queue, { outcomes, durable, error, again: conflicted })
    )
  )

interface Trouble {
  readonly outcomes: ReadonlyArray<Outcome>
  readonly durable: boolean
  readonly error: DatabaseError
  /** It was a conflict before. */
  readonly again: boolean
}

const again = Effect.fnUntraced(function* (queue: Queue["Service"], trouble: Trouble) {
  const { durable, error, outcomes } = trouble
  switch (error.reason) {
    case "conflict": {
      // At once the first time: the other has what it wanted. Then it may take a moment.
      if (trouble.again) yield* Effect.sleep(shortPause)
      const written: Written = yield* write(queue, outcomes, durable, true)
      return { ...written, retries: written.retries + 1 }
    }
    case "data":
      return yield* oneByOne(queue, trouble)
    case "overload":
      yield* Effect.sleep(shortPause)
      return yield* write(queue, outcomes, durable)
    case "away":
      return yield* inDoubt(queue, trouble)
  }
})

/** One bad row never fails its batch. */
const oneByOne = Effect.fnUntraced(function* (
  queue: Queue["Service"],
  { durable, error, outcomes }: Trouble
) {
  if (outcomes.length === 1) {
    const { id, section } = outcomes[0]!
    yield* Effect.annotateLogs(Effect.logWarning("the table refuses an outcome"), {
      id,
      cause: String(error.cause)
    })
    return { rows: [], retries: 0, refused: [{ id, section: section ?? "", error: error.message }] }
  }
  let all: Written = { rows: [], retries: 0, refused: [] }
  for (const [index, outcome] of outcomes.entries()) {
    const one: Written = yield* write(queue, [outcome], durable)
    all = {
      rows: [...all.rows, ...one.rows.map((row) => ({ ...row, index }))],
      retries: all.retries + one.retries,
      refused: [...all.refused, ...one.refused]
    }
  }
  return all
})

const shortPause = Duration.millis(200)
/** Between two looks at a database that is away. */
const longPause = Duration.seconds(1)

/**
 * The connection was lost with the statement on its way. A row that has its old rev was not
 * written; one that has gone or has a higher rev was, and by us: nobody else may have written it.
 */
const inDoubt = Effect.fnUntraced(function* (
  queue: Queue["Service"],
  { durable, outcomes }: Trouble
) {
  const started = yield* Clock.currentTimeMillis
  const revisions = yield* untilBack(queue.revisions(outcomes.map((o) => o.id)))
  const waited = (yield* Clock.currentTimeMillis) - started
  if (waited > Duration.toMillis(longPause))
    yield* Effect.annotateLogs(Effect.logInfo("database is back"), { waited })
  const undone = outcomes.filter((o) => revisions.get(o.id) === o.rev)
  const redone: Written =
    undone.length === 0
      ? { rows: [], retries: 0, refused: [] }
      : yield* write(queue, undone, durable)
  const place = undone.map((o) => outcomes.indexOf(o))
  return {
    ...redone,
    rows: [
      ...redone.rows.map((row) => ({ ...row, index: place[row.index]! })),
      ...outcomes.flatMap(
        (o, index): ReadonlyArray<Settled> =>
          undone.includes(o)
            ? []
            : [{ index, kind: "applied", id: o.id, entry: undefined, status: statusOf(o) }]
      )
    ]
  }
})

/** As often as it takes. */
const untilBack = <A>(ask: Effect.Effect<A, DatabaseError>): Effect.Effect<A> =>
  Effect.catch(ask, () =>
    Effect.delay(
      Effect.suspend(() => untilBack(ask)),
      longPause
    )
  )

const statusOf = ({ verdict }: Outcome): Settled["status"] =>
  verdict === "pass"
    ? "pending"
    : verdict === "defer"
      ? "deferred"
      : verdict === "park"
        ? "parked"
        : verdict === "fail"
          ? "failed"
          : "gone"

/** New rows of one report: 64 fan-outs to 1,000 members each would not fit on a line. */
const maxFresh = 2000

/** What the daemon is told of a group. Pure. */
const reports = (group: ReadonlyArray<Finished>, written: Written): ReadonlyArray<Wire.Report> => {
  const rows = written.rows.flatMap((settled) => {
    const item = group[settled.index]!
    return settled.kind === "applied" || settled.kind === "fenced"
      ? [settledRow(item, settled)]
      : []
  })
  const fresh = written.rows.flatMap(({ entry, kind, status }) =>
    (kind === "child" || kind === "emission") && status === "pending" && entry !== undefined
      ? [tuple(entry)]
      : []
  )
  const more = Array.from({ length: Math.ceil(fresh.length / maxFresh) - 1 }, (_, i) =>
    fresh.slice((i + 1) * maxFresh, (i + 2) * maxFresh)
  )
  return [
    { t: "settled", rows, fresh: fresh.slice(0, maxFresh), retries: written.retries },
    ...more.map((part): Wire.Report => ({ t: "settled", rows: [], fresh: part, retries: 0 })),
    ...written.refused.map((refused): Wire.Report => ({ t: "threw", ...refused }))
  ]
}

const settledRow = ({ outcome, runs }: Finished, { entry, id, kind, status }: Settled) => ({
  id,
  kind: kind === "fenced" ? ("fenced" as const) : ("applied" as const),
  status: status ?? "",
  ...(entry === undefined || status !== "pending" ? {} : { entry: tuple(entry) }),
  ...(outcome.after === undefined ? {} : { dueSeconds: Duration.toSeconds(outcome.after) }),
  ...(outcome.error === undefined ? {} : { error: outcome.error }),
  runs: runs.map(
    ({ fused, micros, result, section }) => [section, result, micros, fused ? 1 : 0] as const
  )
})

const tuple = (entry: Entry): Wire.EntryTuple => [
  entry.id,
  entry.rev,
  entry.section,
  entry.sizeBytes,
  entry.fairKey,
  entry.attempts,
  entry.crashes
]
