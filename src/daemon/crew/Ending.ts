// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What becomes of rows whose worker ended or could not run them: they come back, or get a crash
 * written. The dead worker's database session is ended first, so that nothing of it can commit any
 * more; only rows that the crash write returns are handed out again.
 */
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Entry } from "../../pipeline/Job.ts"
import type { DatabaseError } from "../../services/DatabaseError.ts"
import type { Ended } from "../../services/Workers.ts"
import { lasting } from "../Lasting.ts"
import { membersOf, now } from "./Hall.ts"
import type { Hall, Member } from "./Hall.ts"

/** A program that cannot start is tried again after this, then ever later. */
const firstPause = Duration.millis(500)
const longestPause = Duration.seconds(30)

/** Exit codes of a worker that has settled what it had begun (sysexits EX_OK, EX_TEMPFAIL). */
const orderly = (ended: Ended): boolean => ended.code === 0 || ended.code === 75

/** A member is gone: what it still had in hand comes back, or is written as a crash. */
export const part = Effect.fnUntraced(function* (
  hall: Hall,
  member: Member,
  exit: Exit.Exit<Ended, unknown>
) {
  const section = member.section.name
  hall.members.set(
    section,
    membersOf(hall, section).filter((other) => other !== member)
  )
  if (member.state === "starting" && !member.dismissed) yield* pauseStarts(hall, section, exit)
  if (member.backend !== undefined) {
    // It names no row, so there is nothing the database could refuse.
    yield* Effect.ignore(untilDone(hall.ownership.endBackend(member.backend)))
  }
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

/** Three failed loads of a row by itself count as a death: it is too large or broken. */
export const unloadable = (hall: Hall, ids: ReadonlyArray<number>): void => {
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

/** Writes a crash for rows and hands out again those that this returns. */
export const bury = Effect.fnUntraced(function* (
  hall: Hall,
  ids: ReadonlyArray<number>,
  error: string
) {
  const rows = ids.flatMap((id) => {
    const entry = hall.ready.entryInHand(id)
    return entry === undefined ? [] : [entry]
  })
  yield* buryAll(hall, rows, error)
  hall.listener.pump()
})

const buryAll = (hall: Hall, rows: ReadonlyArray<Entry>, error: string): Effect.Effect<void> =>
  untilDone(
    hall.queue.crashed(
      rows.map(({ id, rev }) => ({ id, rev })),
      error
    )
  ).pipe(
    Effect.flatMap((written) =>
      Effect.forEach(rows, (entry) => buried(hall, entry, written, error), { discard: true })
    ),
    // One row that the table refuses never keeps the others in hand.
    Effect.catch((refused) =>
      rows.length > 1
        ? Effect.forEach(rows, (row) => buryAll(hall, [row], error), { discard: true })
        : letLie(hall, rows, refused)
    )
  )

type Written = Effect.Success<ReturnType<Hall["queue"]["crashed"]>>

const buried = (hall: Hall, entry: Entry, written: Written, error: string): Effect.Effect<void> => {
  hall.ready.leave(entry.id)
  const row = written.find((w) => w.id === entry.id)
  if (row === undefined) {
    hall.tally.dispatch({ unreported: 1 })
    return Effect.void
  }
  hall.tally.section(entry.section, { crashes: 1, lastError: error })
  if (row.status === "pending") {
    hall.ready.offer({ ...entry, rev: row.rev, crashes: row.crashes, repeat: true }, now(hall))
  }
  return row.status === "failed" ? poisoned(entry) : Effect.void
}

/** For whoever looks at the log at night: it will not be tried again by itself. */
const poisoned = ({ id, section }: Entry) =>
  Effect.annotateLogs(Effect.logError("a message has cost its last worker and is kept as failed"), {
    id,
    section
  })

/** The next full scan finds it again; till then it costs nobody a worker. */
const letLie = (hall: Hall, rows: ReadonlyArray<Entry>, refused: DatabaseError) =>
  Effect.suspend(() => {
    for (const { id } of rows) hall.ready.leave(id)
    return Effect.annotateLogs(Effect.logError("the death of a worker cannot be written"), {
      ids: rows.map(({ id }) => id).join(" "),
      error: refused.message
    })
  })

/** The database may be away; it is asked until it is back. Fails only if it refuses the values. */
const untilDone = <A>(effect: Effect.Effect<A, DatabaseError>): Effect.Effect<A, DatabaseError> =>
  Effect.catchIf(
    lasting("crew", effect),
    ({ reason }) => reason !== "data",
    () =>
      Effect.delay(
        Effect.suspend(() => untilDone(effect)),
        "1 second"
      )
  )
