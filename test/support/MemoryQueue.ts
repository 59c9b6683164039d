// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The queue in memory, made of the transitions of `Job`: the model the real one is held to, and a
 * fast stand-in where a test is about something else. Time is Effect's clock.
 */
import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as PubSub from "effect/PubSub"
import * as Job from "../../src/pipeline/Job.ts"
import * as Stats from "../../src/pipeline/Stats.ts"
import type { Patch } from "../../src/pipeline/Verdict.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import { type Admission, Queue } from "../../src/services/Queue.ts"
import {
  asJobRow,
  clean,
  newRow,
  refused,
  type Row,
  settleAll,
  type Tables,
  toEntry,
  toListed,
  toLoaded,
  withJob
} from "./MemoryRows.ts"

/** What tests do to a queue from outside: the operator's commands, and a look at the table. */
export class Table extends Context.Service<
  Table,
  {
    /** All rows in id order. */
    readonly rows: Effect.Effect<ReadonlyArray<Row>>
    readonly hold: (token: string) => Effect.Effect<void>
    readonly release: (token: string) => Effect.Effect<void>
    /** Whether the row waited for it. */
    readonly resume: (token: string, ref: string | null) => Effect.Effect<boolean>
    readonly setSettings: (
      address: string,
      settings: { readonly [key: string]: unknown }
    ) => Effect.Effect<void>
  }
>()("pepsi/test/Table") {}

const make = Effect.gen(function* () {
  let tables: Tables = { rows: new Map(), ledger: new Map(), nextId: 1 }
  const settings = new Map<string, { readonly [key: string]: unknown }>()
  const flushed = new Map<string, { seq: number; stats: Stats.Stats }>()
  const notices = yield* PubSub.unbounded<void>()
  /** Milliseconds with fractions, so that what comes later has a later moment. */
  const clock = Effect.map(Clock.currentTimeNanos, (nanos) => Number(nanos) / 1e6)
  const at = <A>(run: (now: number) => A): Effect.Effect<A> => Effect.map(clock, run)
  const inOrder = () => [...tables.rows.values()].toSorted((a, b) => a.id - b.id)
  const change = (row: Row, job: Job.Row, now: number, more: Partial<Row> = {}): Row => {
    const changed = { ...withJob(row, job, now), ...more }
    tables.rows.set(row.id, changed)
    return changed
  }

  const admit = (messages: ReadonlyArray<Admission>) =>
    Effect.flatMap(clock, (now) => {
      const tokens = [...tables.rows.values()]
        .map((r) => r.token)
        .concat(messages.map((m) => m.token))
      if (new Set(tokens).size < tokens.length) return Effect.fail(refused("Queue.admit", "23505"))
      if (messages.some((m) => m.recipients.length === 0))
        return Effect.fail(refused("Queue.admit", "23514"))
      return Effect.succeed(
        messages.map((m) => {
          const patch: Patch = {
            state: m.state,
            subject: m.subject,
            fromHeader: clean(m.fromHeader)
          }
          const id = tables.nextId++
          const blank = newRow(
            undefined,
            { token: m.token, section: m.section, recipients: m.recipients, patch },
            id,
            now
          )
          const row: Row = {
            ...blank,
            sender: m.sender,
            messageId: clean(m.messageId),
            listId: clean(m.listId),
            fairKey: m.fairKey,
            headers: m.headers,
            body: m.body
          }
          tables.rows.set(id, row)
          return toEntry(row, false)
        })
      )
    })

  const pendingAfter = (after: number) =>
    inOrder().filter((r) => r.status === "pending" && r.id > after)

  const load: Queue["Service"]["load"] = (wanted, level) =>
    Effect.sync(() =>
      wanted.flatMap(({ id, rev }, index) => {
        const row = tables.rows.get(id)
        return row === undefined || row.rev !== rev || row.status !== "pending"
          ? []
          : [toLoaded(row, index, level, settings)]
      })
    )

  const settle: Queue["Service"]["settle"] = (outcomes) =>
    Effect.flatMap(clock, (now) => {
      const copy = {
        rows: new Map(tables.rows),
        ledger: new Map(tables.ledger),
        nextId: tables.nextId
      }
      const result = settleAll(copy, outcomes, now)
      if (result instanceof DatabaseError) return Effect.fail(result)
      tables = copy
      return Effect.succeed(result)
    })

  const crashed: Queue["Service"]["crashed"] = (wanted, error) =>
    at((now) =>
      wanted.flatMap(({ id, rev }) => {
        const row = tables.rows.get(id)
        if (
          row === undefined ||
          row.rev !== rev ||
          (row.status !== "pending" && row.status !== "held")
        )
          return []
        const job = Job.crash(asJobRow(row, now), error)
        const failure = {
          stage: row.section,
          class: "poison",
          status: "5.3.0",
          text: error,
          at: now
        }
        const state = job.crashes >= Job.maxCrashes ? { ...row.state, failure } : row.state
        const changed = change(row, job, now, { state })
        return [{ id, rev: changed.rev, crashes: changed.crashes, status: changed.status }]
      })
    )

  const promote = (limit: number) =>
    at((now) =>
      inOrder()
        .filter((r) => r.status === "deferred" && r.nextAt! <= now)
        .toSorted((a, b) => a.nextAt! - b.nextAt!)
        .slice(0, limit)
        .map((row) => toEntry(change(row, Job.promote(asJobRow(row, now)), now), false))
    )

  const expire = (limit: number) =>
    at((now) =>
      inOrder()
        .filter((r) => r.status === "parked" && r.parkedUntil !== null && r.parkedUntil <= now)
        .toSorted((a, b) => a.parkedUntil! - b.parkedUntil!)
        .slice(0, limit)
        .map((row) =>
          toEntry(
            change(row, Job.expire(asJobRow(row, now)), now, {
              parkedUntil: null,
              state: { ...row.state, park_expired: row.parkedReason! }
            }),
            false
          )
        )
    )

  const nextDue = at((now) => {
    const moments = inOrder().flatMap((r) =>
      r.status === "deferred"
        ? [r.nextAt!]
        : r.status === "parked" && r.parkedUntil !== null
          ? [r.parkedUntil]
          : []
    )
    return moments.length === 0
      ? Option.none()
      : Option.some(Math.max(0, Math.min(...moments) - now) / 1000)
  })

  const flushStats: Queue["Service"]["flushStats"] = (seq, stats, dispatcher) =>
    Effect.suspend(() => {
      const before = flushed.get(dispatcher) ?? { seq: 0, stats: Stats.empty }
      if (before.seq === seq) return Effect.succeed(false)
      if (before.seq !== seq - 1) return Effect.fail(refused("Queue.flushStats", "22023"))
      flushed.set(dispatcher, { seq, stats: Stats.add(before.stats, stats) })
      return Effect.succeed(true)
    })

  const queue = Queue.of({
    admit,
    scan: (after, limit) =>
      Effect.sync(() =>
        pendingAfter(after)
          .slice(0, limit)
          .map((r) => toEntry(r, true))
      ),
    refill: ({ after, fairKey, limit, section }) =>
      Effect.sync(() =>
        pendingAfter(after)
          .filter((r) => r.fairKey === fairKey && r.section === section)
          .slice(0, limit)
          .map((r) => toEntry(r, true))
      ),
    load,
    settle,
    revisions: (of) =>
      Effect.sync(
        () =>
          new Map(
            inOrder()
              .filter((r) => of.includes(r.id))
              .map((r) => [r.id, r.rev])
          )
      ),
    crashed,
    promote,
    expire,
    nextDue,
    flushStats,
    lastFlush: (dispatcher) => Effect.sync(() => flushed.get(dispatcher)?.seq ?? 0),
    notify: Effect.asVoid(PubSub.publish(notices, undefined)),
    listen: Effect.map(PubSub.subscribe(notices), (inbox) => Effect.asVoid(PubSub.takeAll(inbox))),
    sweepBodies: Effect.succeed(0),
    list: ({ after, limit, section, status }) =>
      at((now) =>
        inOrder()
          .filter(
            (r) =>
              r.id > after &&
              (status === undefined || r.status === status) &&
              (section === undefined || r.section === section)
          )
          .slice(0, limit)
          .map((r) => toListed(r, now))
      ),
    show: (token) =>
      at((now) => {
        const found = inOrder().filter((r) => r.token.startsWith(token))
        const row =
          found.find((r) => r.token === token) ?? (found.length === 1 ? found[0] : undefined)
        return row === undefined
          ? Option.none()
          : Option.some({ ...toListed(row, now), headers: row.headers })
      })
  })

  const byToken = (token: string, statuses: ReadonlyArray<Job.Status>): ReadonlyArray<Row> =>
    inOrder().filter((r) => r.token === token && statuses.includes(r.status))
  const table = Table.of({
    rows: Effect.sync(inOrder),
    hold: (token) =>
      at((now) => {
        for (const row of byToken(token, ["pending", "deferred", "parked", "failed"])) {
          change(row, Job.hold(asJobRow(row, now)), now)
        }
      }),
    release: (token) =>
      at((now) => {
        for (const row of byToken(token, ["held"]))
          change(row, Job.release(asJobRow(row, now)), now)
      }),
    resume: (token, ref) =>
      at((now) => {
        const [row] = byToken(token, ["parked", "held"]).filter(
          (r) =>
            r.parkedReason !== null && r.parkedReason !== Job.failedUnderHold && r.parkedRef === ref
        )
        if (row === undefined) return false
        change(row, Job.resume(asJobRow(row, now)), now, { parkedUntil: null })
        return true
      }),
    setSettings: (address, of) => Effect.sync(() => void settings.set(address, of))
  })
  return Context.make(Queue, queue).pipe(Context.add(Table, table))
})

/** An empty queue in memory. */
export const layer: Layer.Layer<Queue | Table> = Layer.effectContext(make)
