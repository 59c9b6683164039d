// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The workers of a dispatcher: who gets rows, when another is started, what becomes of the rows of
 * one that dies.
 *
 * A member is starting (process launched, no word yet), open (takes rows), or ending (no more
 * orders; it settles what it has begun). A member that dies with rows in hand has its database
 * session ended first, then its rows get a crash written; only rows that this returns are handed
 * out again. A member we end ourselves has not crashed.
 */
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as FiberSet from "effect/FiberSet"
import * as EffectQueue from "effect/Queue"
import type { Entry } from "../pipeline/Job.ts"
import type { Ready, Waiting } from "../pipeline/Ready.ts"
import type { Section } from "../pipeline/Route.ts"
import type { Tally } from "../pipeline/Stats.ts"
import * as Wire from "../pipeline/Wire.ts"
import type { DatabaseError } from "../services/DatabaseError.ts"
import { Ownership } from "../services/Ownership.ts"
import { Queue } from "../services/Queue.ts"
import { Workers } from "../services/Workers.ts"
import type { Ended, Worker } from "../services/Workers.ts"
import { lasting } from "./Lasting.ts"

/** What a crew is set up with. */
export interface Settings {
  readonly generation: string
  /** The configuration a worker runs under, as its first line. */
  readonly configuration: string
  /** What a worker may take to finish what it has begun, when all of them are let go. */
  readonly grace: Duration.Duration
  /** A worker without rows ends after this time. */
  readonly idleTimeout: Duration.Duration
  /** Octets of one batch, unless it is one row. */
  readonly batchBytes: number
  /** Octets in all hands. */
  readonly maxInFlightBytes: number
  /** The section whose last worker stays when idle. */
  readonly head: string
}

interface Member {
  readonly section: Section
  readonly hands: Map<number, { readonly rev: number; readonly since: number }>
  state: "starting" | "open" | "ending"
  worker: Worker | undefined
  backend: number | undefined
  /** It runs a row with a death, and nothing beside it. */
  alone: boolean
  /** Ended by us: not a crash. */
  dismissed: boolean
  heard: number
  idleSince: number
}

/** What the crew tells its dispatcher. */
export interface Listener {
  /** A worker's word on rows; the crew has already let go of them. */
  readonly report: (report: Wire.Report) => void
  /** Rows may wait for a free hand, or hands for rows. */
  readonly pump: () => void
}

/** The crew as its dispatcher uses it. */
export interface Crew {
  /** Gives waiting rows of a section to its workers, and starts one if that helps. */
  readonly serve: (section: Section) => void
  /** Kills who is silent or takes too long, lets go who has nothing to do. Once a second. */
  readonly inspect: Effect.Effect<void>
  readonly workersOf: (section: string) => number
  /** Rows of a section in its workers' hands. */
  readonly handsOf: (section: string) => number
  /** Workers finish what they have begun and end; nothing is handed out any more. */
  readonly dismiss: Effect.Effect<void>
  /** Ends all workers at once; their rows may have been begun. */
  readonly abandon: Effect.Effect<void>
}

/** Silence after which a worker is taken for stuck: six beats. */
const silence = Duration.seconds(30)
/** A program that cannot start is tried again after this, then ever later. */
const firstPause = Duration.millis(500)
const longestPause = Duration.seconds(30)

interface Hall {
  readonly settings: Settings
  readonly ready: Ready
  readonly tally: Tally
  readonly listener: Listener
  readonly clock: Clock.Clock
  readonly queue: Queue["Service"]
  readonly ownership: Ownership["Service"]
  readonly workers: Workers["Service"]
  readonly members: Map<string, Array<Member>>
  /** Sections whose workers do not start, and when to try again. */
  readonly pauses: Map<string, { readonly until: number; readonly pause: Duration.Duration }>
  /** Rows that could not be loaded alone, and how often. */
  readonly unloadable: Map<number, number>
  readonly fork: (effect: Effect.Effect<void>) => void
  closed: boolean
}

/** Makes a crew; its workers live in the scope. */
export const make = Effect.fn("Crew.make")(function* (
  settings: Settings,
  lists: { readonly ready: Ready; readonly tally: Tally },
  listener: Listener
) {
  const fibers = yield* FiberSet.make<void, never>()
  const fork = yield* FiberSet.runtime(fibers)()
  const hall: Hall = {
    settings,
    ...lists,
    listener,
    clock: yield* Clock.Clock,
    queue: yield* Queue,
    ownership: yield* Ownership,
    workers: yield* Workers,
    members: new Map(),
    pauses: new Map(),
    unloadable: new Map(),
    fork: (effect) => void fork(effect),
    closed: false
  }
  const crew: Crew = {
    serve: (section) => serve(hall, section),
    inspect: Effect.suspend(() => inspect(hall)),
    workersOf: (section) => hall.members.get(section)?.length ?? 0,
    handsOf: (section) =>
      (hall.members.get(section) ?? []).reduce((sum, member) => sum + member.hands.size, 0),
    dismiss: Effect.suspend(() => {
      hall.closed = true
      const finished = Effect.andThen(
        Effect.forEach(all(hall), (member) => letGo(member), { discard: true }),
        FiberSet.awaitEmpty(fibers)
      )
      // Who has not finished by then is ended with its scope, and waits for no database.
      return Effect.andThen(Effect.timeoutOption(finished, settings.grace), FiberSet.clear(fibers))
    }),
    abandon: Effect.suspend(() =>
      Effect.andThen(
        Effect.forEach(all(hall), (member) => end(member), { discard: true }),
        FiberSet.awaitEmpty(fibers)
      )
    )
  }
  return crew
})

const all = (hall: Hall): ReadonlyArray<Member> => [...hall.members.values()].flat()

/** Milliseconds of the monotonic clock: a step of the wall clock kills no worker. */
const now = (hall: Hall): number => Number(hall.clock.monotonicTimeNanosUnsafe() / 1_000_000n)

// Handing out

const serve = (hall: Hall, section: Section): void => {
  while (!hall.closed && hall.ready.waiting(section.name) > 0) {
    const members = hall.members.get(section.name) ?? []
    if (!(serveSuspect(hall, section, members) || serveBatch(hall, section, members))) break
  }
}

/** A row with a death goes to a worker that has nothing else. True = given. */
const serveSuspect = (hall: Hall, section: Section, members: ReadonlyArray<Member>): boolean => {
  if (hall.ready.suspects(section.name) === 0) return false
  const idle = members.find((member) => member.state === "open" && member.hands.size === 0)
  if (idle === undefined) {
    recruit(hall, section, members)
    return false
  }
  const suspect = hall.ready.takeSuspect(section.name)
  if (suspect === undefined) return false
  idle.alone = true
  give(hall, idle, [suspect])
  return true
}

/** The fullest batch a worker with room can get. True = given. */
const serveBatch = (hall: Hall, section: Section, members: ReadonlyArray<Member>): boolean => {
  const waiting = hall.ready.waiting(section.name) - hall.ready.suspects(section.name)
  if (waiting <= 0) return false
  const room = (member: Member) =>
    member.state === "open" && !member.alone ? section.queueLimit - member.hands.size : 0
  const member = members.reduce<Member | undefined>(
    (best, m) => (room(m) > (best === undefined ? 0 : room(best)) ? m : best),
    undefined
  )
  // Half a load or all that waits: many small batches cost more than a short wait for the next settle.
  if (member === undefined || room(member) < Math.min(waiting, Math.ceil(section.queueLimit / 2))) {
    recruit(hall, section, members)
    return false
  }
  const bytes = Math.min(
    hall.settings.batchBytes,
    hall.settings.maxInFlightBytes - hall.ready.bytesInHand
  )
  if (bytes <= 0 && hall.ready.inHandInAll > 0) return false
  const rows = hall.ready.take(section.name, room(member), bytes)
  if (rows.length === 0) return false
  give(hall, member, rows)
  return true
}

const give = (hall: Hall, member: Member, rows: ReadonlyArray<Waiting>): void => {
  const since = now(hall)
  let waitedMillis = 0
  const ordered = rows.map(({ entry, since: offered }) => {
    member.hands.set(entry.id, { rev: entry.rev, since })
    waitedMillis += since - offered
    const flags =
      (entry.repeat ? Wire.flags.repeat : 0) | (entry.crashes > 0 ? Wire.flags.alone : 0)
    return [entry.id, entry.rev, flags] as const
  })
  hall.tally.dispatch({ handedOut: rows.length })
  hall.tally.section(member.section.name, { waitMicros: Math.round(waitedMillis * 1000) })
  member.worker?.send({ t: "run", generation: hall.settings.generation, rows: ordered })
}

// Starting

/** Starts a worker unless the section has its number, one is starting, or starts fail. */
const recruit = (hall: Hall, section: Section, members: ReadonlyArray<Member>): void => {
  const pause = hall.pauses.get(section.name)
  const blocked =
    members.length >= section.parallelism || members.some((member) => member.state === "starting")
  if (blocked || hall.closed || (pause !== undefined && pause.until > now(hall))) return
  const member: Member = {
    section,
    hands: new Map(),
    state: "starting",
    worker: undefined,
    backend: undefined,
    alone: false,
    dismissed: false,
    heard: now(hall),
    idleSince: now(hall)
  }
  hall.members.set(section.name, [...members, member])
  hall.fork(employ(hall, member))
}

/** A member's whole life. */
const employ = (hall: Hall, member: Member): Effect.Effect<void> =>
  Effect.scoped(
    Effect.gen(function* () {
      const worker = yield* hall.workers.start(member.section.name)
      member.worker = worker
      worker.send({
        t: "setup",
        version: Wire.version,
        generation: hall.settings.generation,
        section: member.section.name,
        configuration: hall.settings.configuration
      })
      // Let go of before it was there.
      if (member.state === "ending") yield* worker.finish
      yield* hear(hall, member, worker)
      return yield* worker.ended
    })
  ).pipe(
    Effect.exit,
    Effect.flatMap((exit) => part(hall, member, exit)),
    Effect.ensuring(Effect.sync(() => hall.listener.pump()))
  )

/** Reads a worker's reports until there are no more. */
const hear = Effect.fnUntraced(function* (hall: Hall, member: Member, worker: Worker) {
  while (true) {
    const report = yield* EffectQueue.take(worker.reports).pipe(
      Effect.catchIf(
        (error) => error._tag === "Done",
        () => Effect.undefined
      ),
      Effect.catchTag("WireError", (error) =>
        Effect.andThen(
          Effect.annotateLogs(Effect.logError("a worker talks nonsense"), {
            section: member.section.name,
            line: error.line
          }),
          Effect.as(worker.kill, undefined)
        )
      )
    )
    if (report === undefined) return
    heard(hall, member, report)
    if (report.t === "threw") yield* retire(hall, worker, report)
  }
})

/** A stage threw on a row: the row is a suspect now, and its worker ends after the others. */
const retire = (hall: Hall, worker: Worker, { error, id, section }: typeof Wire.ThrewReport.Type) =>
  Effect.logError("a stage threw").pipe(
    Effect.annotateLogs({ section, id, error }),
    Effect.andThen(worker.finish),
    Effect.andThen(Effect.sync(() => hall.fork(bury(hall, [id], error))))
  )

const heard = (hall: Hall, member: Member, report: Wire.Report): void => {
  member.heard = now(hall)
  switch (report.t) {
    case "ready":
      member.backend = report.backend
      member.state = member.state === "starting" ? "open" : member.state
      hall.pauses.delete(member.section.name)
      break
    case "beat":
      member.backend = report.backend
      return
    case "settled":
      for (const row of report.rows) {
        letFrom(member, row.id)
        hall.unloadable.delete(row.id)
      }
      break
    case "returned":
      for (const id of report.ids) letFrom(member, id)
      if (report.why === "unloadable") return unloadable(hall, report.ids)
      break
    case "threw":
      // It settles what it has begun and ends; the row stays in hand until its crash is written.
      letFrom(member, report.id)
      member.state = "ending"
      break
  }
  if (member.hands.size === 0) {
    member.alone = false
    member.idleSince = now(hall)
  }
  hall.listener.report(report)
  hall.listener.pump()
}

const letFrom = (member: Member, id: number): void => void member.hands.delete(id)

/** Three failed loads of a row by itself count as a death: it is too large or broken. */
const unloadable = (hall: Hall, ids: ReadonlyArray<number>): void => {
  for (const id of ids) {
    const times = (hall.unloadable.get(id) ?? 0) + 1
    if (times < 3) {
      hall.unloadable.set(id, times)
      hall.ready.giveBack(id, now(hall))
    } else {
      hall.unloadable.delete(id)
      hall.fork(bury(hall, [id], "could not be loaded"))
    }
  }
  hall.listener.pump()
}

// Ending

/** Exit codes of a worker that has settled what it had begun (sysexits EX_OK, EX_TEMPFAIL). */
const orderly = (ended: Ended): boolean => ended.code === 0 || ended.code === 75

/** A member is gone: what it still had in hand comes back, or is written as a crash. */
const part = Effect.fnUntraced(function* (
  hall: Hall,
  member: Member,
  exit: Exit.Exit<Ended, unknown>
) {
  const section = member.section.name
  hall.members.set(
    section,
    (hall.members.get(section) ?? []).filter((other) => other !== member)
  )
  if (member.state === "starting" && !member.dismissed) yield* pauseStarts(hall, section, exit)
  if (member.backend !== undefined) yield* endBackend(hall, member.backend)
  const ids = [...member.hands.keys()]
  if (ids.length === 0) return
  if (member.dismissed || (Exit.isSuccess(exit) && orderly(exit.value))) {
    for (const id of ids) hall.ready.giveBack(id, now(hall))
    return
  }
  const how = Exit.isSuccess(exit)
    ? (exit.value.signal ?? `exit code ${exit.value.code}`)
    : "failure"
  yield* Effect.annotateLogs(Effect.logWarning("a worker died"), { section, how, rows: ids.length })
  yield* bury(hall, ids, `worker died: ${how}`)
})

const pauseStarts = (
  hall: Hall,
  section: string,
  exit: Exit.Exit<Ended, unknown>
): Effect.Effect<void> => {
  const before = hall.pauses.get(section)?.pause
  const pause =
    before === undefined ? firstPause : Duration.min(Duration.times(before, 2), longestPause)
  hall.pauses.set(section, { until: now(hall) + Duration.toMillis(pause), pause })
  return Effect.annotateLogs(Effect.logError("a worker does not start"), {
    section,
    code: Exit.isSuccess(exit) ? (exit.value.code ?? exit.value.signal) : String(exit.cause),
    againIn: Duration.format(pause)
  })
}

/** A session that outlives its worker might still commit. */
const endBackend = (hall: Hall, backend: number): Effect.Effect<void> =>
  untilDone(hall.ownership.endBackend(backend))

/** Writes a crash for rows and hands out again those that this returns. */
const bury = Effect.fnUntraced(function* (hall: Hall, ids: ReadonlyArray<number>, error: string) {
  const rows = ids.flatMap((id) => {
    const entry = hall.ready.entryInHand(id)
    return entry === undefined ? [] : [entry]
  })
  const written = yield* untilDone(
    hall.queue.crashed(
      rows.map(({ id, rev }) => ({ id, rev })),
      error
    )
  )
  for (const entry of rows) {
    hall.ready.leave(entry.id)
    const row = written.find((w) => w.id === entry.id)
    hall.tally.section(entry.section, row === undefined ? {} : { crashes: 1, lastError: error })
    if (row === undefined) hall.tally.dispatch({ unreported: 1 })
    if (row?.status === "failed") yield* poisoned(entry)
    if (row?.status === "pending") {
      hall.ready.offer({ ...entry, rev: row.rev, crashes: row.crashes, repeat: true }, now(hall))
    }
  }
  hall.listener.pump()
})

/** For whoever looks at the log at night: it will not be tried again by itself. */
const poisoned = ({ id, section }: Entry) =>
  Effect.annotateLogs(Effect.logError("a message has cost its last worker and is kept as failed"), {
    id,
    section
  })

/** The database may be away; the rows stay in hand until it is back. */
const untilDone = <A>(effect: Effect.Effect<A, DatabaseError>): Effect.Effect<A> =>
  Effect.catch(lasting("crew", effect), () =>
    Effect.delay(
      Effect.suspend(() => untilDone(effect)),
      "1 second"
    )
  )

const letGo = (member: Member): Effect.Effect<void> =>
  Effect.suspend(() => {
    member.state = "ending"
    member.dismissed = true
    return member.worker?.finish ?? Effect.void
  })

const end = (member: Member): Effect.Effect<void> =>
  Effect.suspend(() => {
    member.state = "ending"
    member.dismissed = true
    return member.worker?.kill ?? Effect.void
  })

// Watching

const inspect = (hall: Hall): Effect.Effect<void> =>
  Effect.forEach(all(hall), (member) => inspectOne(hall, member), { discard: true })

const inspectOne = (hall: Hall, member: Member): Effect.Effect<void> => {
  const time = now(hall)
  const { section, worker } = member
  if (worker === undefined) return Effect.void
  const why =
    time - member.heard > Duration.toMillis(silence)
      ? "no sign of life for 30 s"
      : [...member.hands.values()].some(
            ({ since }) => time - since > Duration.toMillis(section.timeout)
          )
        ? "a message took longer than TIMEOUT"
        : undefined
  if (why !== undefined) {
    return Effect.andThen(
      Effect.annotateLogs(Effect.logError("a worker is killed"), { section: section.name, why }),
      worker.kill
    )
  }
  const idle =
    member.state === "open" &&
    member.hands.size === 0 &&
    time - member.idleSince > Duration.toMillis(hall.settings.idleTimeout)
  const warm = section.name === hall.settings.head && hall.members.get(section.name)?.length === 1
  return idle && !warm ? letGo(member) : Effect.void
}
