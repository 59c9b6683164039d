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
import * as FiberSet from "effect/FiberSet"
import * as EffectQueue from "effect/Queue"
import type { Ready } from "../pipeline/Ready.ts"
import type { Section } from "../pipeline/Route.ts"
import type { Tally } from "../pipeline/Stats.ts"
import * as Wire from "../pipeline/Wire.ts"
import { Ownership } from "../services/Ownership.ts"
import { Queue } from "../services/Queue.ts"
import { Workers } from "../services/Workers.ts"
import type { Worker } from "../services/Workers.ts"
import { bury, part, unloadable } from "./crew/Ending.ts"
import { all, membersOf, now } from "./crew/Hall.ts"
import type { Hall, Listener, Member, Settings } from "./crew/Hall.ts"
import { serve } from "./crew/Handing.ts"

export type { Listener, Settings }

/** The crew as its dispatcher uses it. */
export interface Crew {
  /** Gives waiting rows of a section to its workers, and starts one if that helps. */
  readonly serve: (section: Section) => void
  /** Kills who is silent, lets go who has nothing to do. Once a second. */
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
/** A look that comes so late tells of us, not of the workers: the beats are still to be read. */
const lateMillis = 5000
/** A worker that was let go and has nothing in hand has no reason to stay longer. */
const emptyMillis = 30_000

/** Makes a crew; its workers live in the scope. */
export const make = Effect.fn("Crew.make")(function* (
  settings: Settings,
  lists: { readonly ready: Ready; readonly tally: Tally },
  listener: Listener
) {
  const fibers = yield* FiberSet.make<void, never>()
  const fork = yield* FiberSet.runtime(fibers)()
  const clock = yield* Clock.Clock
  const hall: Hall = {
    settings,
    ...lists,
    listener,
    clock,
    queue: yield* Queue,
    ownership: yield* Ownership,
    workers: yield* Workers,
    members: new Map(),
    pauses: new Map(),
    unloadable: new Map(),
    lastAlone: new Set(),
    fork: (effect) => void fork(effect),
    closed: false,
    inspectedAt: Number(clock.monotonicTimeNanosUnsafe() / 1_000_000n)
  }
  const everyone = (what: (member: Member) => Effect.Effect<void>) =>
    Effect.suspend(() => Effect.forEach(all(hall), what, { discard: true })).pipe(
      Effect.andThen(FiberSet.awaitEmpty(fibers))
    )
  const crew: Crew = {
    serve: (section) => serve(hall, section, recruit),
    inspect: Effect.suspend(() => inspect(hall)),
    workersOf: (section) => membersOf(hall, section).length,
    handsOf: (section) =>
      membersOf(hall, section).reduce((sum, member) => sum + member.hands.size, 0),
    dismiss: Effect.suspend(() => {
      hall.closed = true
      // Who has not finished by then is ended with its scope, and waits for no database.
      return Effect.andThen(
        Effect.timeoutOption(everyone(letGo), settings.grace),
        FiberSet.clear(fibers)
      )
    }),
    abandon: everyone(end)
  }
  return crew
})

/** Starts a worker unless the section has its number, one is starting, or starts fail. */
const recruit = (hall: Hall, section: Section): void => {
  const members = membersOf(hall, section.name)
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
    draining: false,
    dismissed: false,
    heard: now(hall),
    settledAt: 0,
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
      member.settledAt = now(hall)
      for (const { id } of report.rows) letFrom(hall, member, id)
      break
    case "returned":
      for (const id of report.ids) member.hands.delete(id)
      if (report.why === "unloadable") return unloadable(hall, report.ids)
      break
    case "threw":
      // It settles what it has begun and ends; the row stays in hand until its crash is written.
      letFrom(hall, member, report.id)
      member.state = "ending"
      break
  }
  if (member.hands.size === 0) {
    member.alone = false
    member.idleSince = now(hall)
  }
  hall.listener.report(report, member.section.name)
  hall.listener.pump()
}

const letFrom = (hall: Hall, member: Member, id: number): void => {
  member.hands.delete(id)
  hall.unloadable.delete(id)
}

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

/** One look at everybody. */
const inspect = (hall: Hall): Effect.Effect<void> => {
  const late = now(hall) - hall.inspectedAt > lateMillis
  hall.inspectedAt = now(hall)
  if (!late)
    return Effect.forEach(all(hall), (member) => inspectOne(hall, member), { discard: true })
  for (const member of all(hall)) member.heard = now(hall)
  return Effect.void
}

const inspectOne = (hall: Hall, member: Member): Effect.Effect<void> => {
  const { hands, section, state, worker } = member
  if (worker === undefined) return Effect.void
  if (now(hall) - member.heard > Duration.toMillis(silence)) {
    return Effect.andThen(
      Effect.annotateLogs(Effect.logError("a worker is silent and is killed"), {
        section: section.name
      }),
      worker.kill
    )
  }
  const idleMillis = hands.size > 0 ? 0 : now(hall) - member.idleSince
  if (state === "ending") return idleMillis > emptyMillis ? end(member) : Effect.void
  const warm = section.name === hall.settings.head && membersOf(hall, section.name).length === 1
  const idle = state === "open" && idleMillis > Duration.toMillis(hall.settings.idleTimeout)
  return idle && !warm ? letGo(member) : Effect.void
}
