// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The dispatcher: owns sections, keeps the ready lists of their rows, hands rows to workers.
 *
 * In the steady state it neither reads nor writes the database: rows come by hand-over from
 * admission and by the reports of workers. Scans of the table find what came any other way (rows
 * made by SQL, a lost report, a lost notification, a crash): after start, on a notification, the
 * recent ids at each POLL_INTERVAL and all of it each minute, because ids commit out of order.
 *
 * owned: handing out · lost: the session with the locks is gone; the workers go on with what they
 * have, nothing is handed out until the locks are ours again. If somebody else had them
 * meanwhile, our workers are ended first.
 */
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as EffectQueue from "effect/Queue"
import type { Entry } from "../pipeline/Job.ts"
import { defaultBounds, Ready } from "../pipeline/Ready.ts"
import type { Pipeline } from "../pipeline/Route.ts"
import type { Tally } from "../pipeline/Stats.ts"
import type * as Wire from "../pipeline/Wire.ts"
import { Control } from "../services/Control.ts"
import type { DatabaseError } from "../services/DatabaseError.ts"
import { Ownership } from "../services/Ownership.ts"
import type { Owned } from "../services/Ownership.ts"
import { Queue } from "../services/Queue.ts"
import { Statistics } from "../services/Statistics.ts"
import * as Crew from "./Crew.ts"
import { lasting } from "./Lasting.ts"

/** What a dispatcher is set up with. */
export interface Settings extends Omit<Crew.Settings, "generation" | "head"> {
  readonly pipeline: Pipeline
  readonly pollInterval: Duration.Duration
  /** Senders take turns; false = in the order of arrival. */
  readonly fair: boolean
  /** What another dispatcher is told who waits for our sections. */
  readonly owner: string
}

/** Rows of one look at the table. */
const page = 1000
/** Rows of one refill of a key: what its list takes. */
const refillRows = 1024
/** All that is pending is read again this often; 10^6 rows take about two seconds. */
const fullScanInterval = Duration.minutes(1)
/** Between two tries to own our sections, while the database is away. */
const ownPause = Duration.millis(200)
/** After a worker was told that the database has no room, or is away. */
const overloadPause = Duration.millis(500)

interface Hall {
  readonly settings: Settings
  readonly ready: Ready
  readonly tally: Tally
  readonly clock: Clock.Clock
  readonly queue: Queue["Service"]
  readonly busy: (isBusy: boolean) => void
  /** Wakes the fiber that looks at the table. */
  readonly wake: (what: Wake) => void
  readonly wanted: Set<Wake>
  /** Sections whose rows came back because of the database, and until when they wait. */
  readonly paused: Map<string, number>
  crew: Crew.Crew
  owned: boolean
  /** Sections that rows wait in and nobody has configured; said at the next full scan. */
  readonly strange: Set<string>
  /** Highest id anybody has shown us, now and at the last two polls. */
  highWater: number
  recent: readonly [number, number]
  nextFullScan: number
  /** When promote has work next; monotonic milliseconds. */
  nextDue: number
}

/** notified: ids above the high water · refill: a cut list runs low · due: a deferred row is due */
type Wake = "notified" | "refill" | "due"

const now = (hall: Hall): number => Number(hall.clock.monotonicTimeNanosUnsafe() / 1_000_000n)

/** The dispatcher as a layer: it runs until the scope closes, and then lets its workers finish. */
export const layer = (settings: Settings) =>
  Layer.effect(
    Control,
    Effect.gen(function* () {
      const hall = yield* open(settings)
      yield* Effect.forkScoped(lasting("owning", owning(hall)))
      yield* Effect.addFinalizer(() =>
        Effect.andThen(
          Effect.sync(() => (hall.owned = false)),
          hall.crew.dismiss
        )
      )
      return Control.of({
        admitted: (entries) => {
          for (const entry of entries) offer(hall, entry)
          pump(hall)
        },
        inFlight: Effect.sync(() => hall.ready.idsInHand()),
        figures: Effect.sync(() => figures(hall))
      })
    })
  )

const open = Effect.fn("Dispatcher.open")(function* (settings: Settings) {
  const { busy, tally } = yield* Statistics
  const wanted = new Set<Wake>()
  // Rings once however much is wanted meanwhile.
  const bell = yield* EffectQueue.sliding<void>(1)
  const hall: Hall = {
    settings,
    ready: new Ready({ ...defaultBounds, fair: settings.fair }),
    tally,
    clock: yield* Clock.Clock,
    queue: yield* Queue,
    busy,
    wake: (what) => {
      wanted.add(what)
      EffectQueue.offerUnsafe(bell, undefined)
    },
    strange: new Set(),
    wanted,
    paused: new Map(),
    crew: undefined as never,
    owned: false,
    highWater: 0,
    recent: [0, 0],
    nextFullScan: 0,
    nextDue: 0
  }
  hall.crew = yield* Crew.make(
    {
      ...settings,
      generation: settings.pipeline.generation,
      head: settings.pipeline.entries[0] ?? ""
    },
    { ready: hall.ready, tally },
    { report: (report, section) => heard(hall, report, section), pump: () => pump(hall) }
  )
  const waking = Effect.andThen(
    EffectQueue.take(bell),
    Effect.suspend(() => Effect.forEach([...wanted], (wake) => onWake(hall, wake)))
  )
  yield* Effect.forkScoped(lasting("waking", Effect.forever(waking)))
  yield* Effect.forkScoped(lasting("listening", listening(hall)))
  yield* Effect.forkScoped(lasting("ticking", ticking(hall)))
  return hall
})

// Lists

const offer = (hall: Hall, entry: Entry): void => {
  if (entry.id > hall.highWater) hall.highWater = entry.id
  if (hall.settings.pipeline.sections.has(entry.section)) hall.ready.offer(entry, now(hall))
  else hall.strange.add(entry.section)
}

/** Hands out what can be handed out; called whenever rows or hands have become free. */
const pump = (hall: Hall): void => {
  hall.busy(hall.ready.waitingInAll > 0 || hall.ready.inHandInAll > 0)
  if (!hall.owned) return
  for (const section of hall.settings.pipeline.sections.values()) {
    const paused = (hall.paused.get(section.name) ?? 0) > now(hall)
    if (!paused && hall.ready.waiting(section.name) > 0) hall.crew.serve(section)
  }
  if (hall.ready.hasOverflow) hall.wake("refill")
}

const heard = (hall: Hall, report: Wire.Report, section: string): void => {
  if (report.t === "settled") return settled(hall, report)
  if (report.t !== "returned") return
  for (const id of report.ids) {
    if (report.why === "gone") hall.ready.leave(id)
    else hall.ready.giveBack(id, now(hall))
  }
  if (report.why === "overload" || report.why === "away") {
    hall.paused.set(section, now(hall) + Duration.toMillis(overloadPause))
    if (report.why === "overload") hall.tally.dispatch({ overloads: 1 })
  }
}

const settled = (hall: Hall, report: typeof Wire.SettledReport.Type): void => {
  // Of a report that is the rest of another, nobody knows whether its parents were repeats.
  let repeats = report.rows.length === 0
  for (const row of report.rows) {
    const was = hall.ready.leave(row.id)
    // A row that may have been run before may have been so in the next section, too.
    const repeat = was?.repeat ?? true
    repeats ||= repeat
    const last = row.runs.at(-1)
    if (row.kind === "fenced") {
      if (last !== undefined) hall.tally.section(last[0], { fenced: 1 })
      continue
    }
    for (const [section, result, micros, fused] of row.runs) {
      hall.tally.run({ section, result, micros, fused: fused === 1 })
    }
    if (last !== undefined && row.error !== undefined)
      hall.tally.section(last[0], { lastError: row.error })
    if (last?.[1] === "done" && row.status === "gone") hall.tally.dispatch({ messagesProcessed: 1 })
    if (row.entry !== undefined) offer(hall, { ...toEntry(row.entry), repeat })
    if (row.dueSeconds !== undefined) dueIn(hall, row.dueSeconds)
  }
  for (const fresh of report.fresh) offer(hall, { ...toEntry(fresh), repeat: repeats })
  if (report.retries > 0) hall.tally.dispatch({ retries: report.retries })
}

const toEntry = ([
  id,
  rev,
  section,
  sizeBytes,
  fairKey,
  attempts,
  crashes
]: Wire.EntryTuple): Entry => ({
  id,
  rev,
  section,
  sizeBytes,
  fairKey,
  attempts,
  crashes,
  repeat: false
})

const dueIn = (hall: Hall, seconds: number): void => {
  hall.nextDue = Math.min(hall.nextDue, now(hall) + seconds * 1000)
}

const figures = (hall: Hall) =>
  [...hall.settings.pipeline.sections.keys()].map((section) => ({
    section,
    ready: hall.ready.waiting(section),
    inFlight: hall.crew.handsOf(section),
    workers: hall.crew.workersOf(section)
  }))

// Ownership

const owning = Effect.fnUntraced(function* (hall: Hall) {
  const ownership = yield* Ownership
  let epochs: Owned["epochs"] | undefined
  while (true) {
    epochs = yield* Effect.scoped(ownOnce(hall, ownership, epochs)).pipe(
      // Whatever ended it, the locks went with its scope.
      Effect.ensuring(
        Effect.sync(() => {
          hall.owned = false
        })
      ),
      Effect.catchTag("DatabaseError", (error) =>
        Effect.annotateLogs(Effect.logDebug("the sections are not ours yet"), {
          error: error.message
        }).pipe(Effect.delay(ownPause), Effect.as(epochs))
      )
    )
  }
})

/** Takes the sections, hands out until they are lost. */
const ownOnce = Effect.fnUntraced(function* (
  hall: Hall,
  ownership: Ownership["Service"],
  before: Owned["epochs"] | undefined
) {
  const sections = [...hall.settings.pipeline.sections.keys()]
  const owned = yield* ownership.own(sections, hall.settings.owner, before)
  const alien =
    before !== undefined && sections.some((s) => owned.epochs.get(s) !== (before.get(s) ?? 0) + 1)
  if (alien) {
    yield* Effect.logWarning("another dispatcher had our sections; our workers are ended")
    yield* hall.crew.abandon
  }
  hall.ready.clear()
  hall.owned = true
  hall.nextDue = 0
  yield* Effect.annotateLogs(Effect.logDebug("sections are ours"), { sections: sections.length })
  yield* scanAll(hall)
  pump(hall)
  yield* owned.lost
  yield* Effect.logWarning(
    "the session that holds our sections is lost; nothing is handed out until it is back"
  )
  return owned.epochs
})

// The table

/** Reads pending rows with id > `after`, all that the lists take. */
const scan = Effect.fnUntraced(function* (hall: Hall, after: number) {
  let from = after
  while (true) {
    const rows = yield* hall.queue.scan(from, page)
    for (const row of rows) offer(hall, { ...row, repeat: true })
    pump(hall)
    if (rows.length < page) return
    from = rows[rows.length - 1]!.id
    // Other fibers have their turn between two pages.
    yield* Effect.yieldNow
  }
})

const scanAll = (hall: Hall) =>
  Effect.andThen(
    Effect.sync(() => {
      hall.nextFullScan = now(hall) + Duration.toMillis(fullScanInterval)
    }),
    scan(hall, 0)
  )

/** Due rows and expired waits become pending, at most so many a time that the lists can take. */
const promote = Effect.fnUntraced(function* (hall: Hall) {
  const rows = [...(yield* hall.queue.promote(page)), ...(yield* hall.queue.expire(page))]
  if (rows.length > 0) hall.tally.dispatch({ promoted: rows.length })
  for (const row of rows) offer(hall, { ...row, repeat: true })
  // Set before it is asked: what is deferred meanwhile makes it earlier again.
  hall.nextDue = Number.POSITIVE_INFINITY
  const due = yield* hall.queue.nextDue
  if (Option.isSome(due)) dueIn(hall, due.value)
  pump(hall)
})

const refill = Effect.fnUntraced(function* (hall: Hall) {
  for (const overflow of hall.ready.overflows()) {
    const { after, fairKey, section } = overflow
    const rows =
      fairKey === undefined
        ? yield* hall.queue.scan(after, refillRows)
        : yield* hall.queue.refill({ section, fairKey, after, limit: refillRows })
    const entries = rows.map((row) => ({ ...row, repeat: true }))
    hall.ready.refill(overflow, { entries, complete: rows.length < refillRows }, now(hall))
  }
  pump(hall)
})

const onWake = (hall: Hall, wake: Wake): Effect.Effect<void> => {
  hall.wanted.delete(wake)
  if (!hall.owned) return Effect.void
  hall.tally.dispatch({ wakeups: 1 })
  return whenAway(looks[wake](hall), wake)
}

const poll = Effect.fnUntraced(function* (hall: Hall) {
  if (!hall.owned) return
  hall.tally.dispatch({ polls: 1 })
  const from = hall.recent[0]
  hall.recent = [hall.recent[1], hall.highWater]
  if (now(hall) < hall.nextFullScan) return yield* scan(hall, from)
  yield* scanAll(hall)
  if (hall.strange.size > 0) yield* warnOf(hall)
  // Rows that other processes deferred or parked are found here, and bodies nobody shares any more.
  yield* promote(hall)
  yield* hall.queue.sweepBodies
})

const warnOf = (hall: Hall): Effect.Effect<void> =>
  Effect.suspend(() => {
    const sections = [...hall.strange].join(" ")
    hall.strange.clear()
    return Effect.annotateLogs(Effect.logWarning("rows wait in sections that are not configured"), {
      sections
    })
  })

/** What each wake is for. */
const looks: { readonly [W in Wake]: (hall: Hall) => Effect.Effect<void, DatabaseError> } = {
  notified: (hall) => scan(hall, hall.highWater),
  refill: (hall) => refill(hall),
  due: (hall) => promote(hall)
}

/** The table could not be read; the next look finds what this one would have. */
const whenAway = (work: Effect.Effect<void, DatabaseError>, what: string): Effect.Effect<void> =>
  Effect.catch(work, (error) =>
    Effect.annotateLogs(Effect.logDebug("the table could not be read"), {
      what,
      error: error.message
    })
  )

const ticking = (hall: Hall) =>
  Effect.all(
    [
      Effect.forever(Effect.delay(whenAway(poll(hall), "poll"), hall.settings.pollInterval)),
      Effect.forever(Effect.delay(tick(hall), "1 second"))
    ],
    { concurrency: 2, discard: true }
  )

const tick = (hall: Hall): Effect.Effect<void> =>
  Effect.andThen(
    hall.crew.inspect,
    Effect.sync(() => {
      pump(hall)
      if (now(hall) >= hall.nextDue) hall.wake("due")
    })
  )

/**
 * Notifications of other processes; whenever the session was lost, one scan for what was missed.
 */
const listening = (hall: Hall): Effect.Effect<never> =>
  Effect.scoped(
    Effect.gen(function* () {
      const next = yield* hall.queue.listen
      while (true) {
        hall.wake("notified")
        yield* next
      }
    })
  ).pipe(
    Effect.catch(() => Effect.sleep("1 second")),
    Effect.forever
  )
