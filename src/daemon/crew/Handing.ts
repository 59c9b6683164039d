// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Handing out: which worker gets which rows, and whether another worker would help.
 *
 * A row with a death runs alone, in a worker that has nothing else; where all are busy one of them
 * is drained for it. Such rows and ordinary ones take turns, so that neither holds up the other.
 */
import type { Waiting } from "../../pipeline/Ready.ts"
import type { Section } from "../../pipeline/Route.ts"
import * as Wire from "../../pipeline/Wire.ts"
import { membersOf, now } from "./Hall.ts"
import type { Hall, Member } from "./Hall.ts"

/** Starts a worker for a section if that is allowed and helps. */
export type Recruit = (hall: Hall, section: Section) => void

/** Gives waiting rows of a section to its workers until there are no more rows or hands. */
export const serve = (hall: Hall, section: Section, recruit: Recruit): void => {
  const suspect = () => serveSuspect(hall, section, recruit)
  const batch = () => serveBatch(hall, section, recruit)
  while (!hall.closed && hall.ready.waiting(section.name) > 0) {
    const given = hall.lastAlone.has(section.name) ? batch() || suspect() : suspect() || batch()
    if (!given) return
  }
}

/** True = given. */
const serveSuspect = (hall: Hall, section: Section, recruit: Recruit): boolean => {
  if (hall.ready.suspects(section.name) === 0) return false
  const open = membersOf(hall, section.name).filter((member) => member.state === "open")
  const idle = open.find((member) => member.hands.size === 0)
  if (idle === undefined) {
    recruit(hall, section)
    drainOne(open)
    return false
  }
  const suspect = hall.ready.takeSuspect(section.name)
  if (suspect === undefined) return false
  idle.alone = true
  idle.draining = false
  hall.lastAlone.add(section.name)
  give(hall, idle, [suspect])
  return true
}

/** The one that is empty soonest gets nothing more until it is. */
const drainOne = (open: ReadonlyArray<Member>): void => {
  if (open.some((member) => member.draining || member.alone)) return
  const [least] = open.toSorted((a, b) => a.hands.size - b.hands.size)
  if (least !== undefined) least.draining = true
}

/**
 * Many small batches cost more than a short wait for the next settle; but who has not settled for
 * so long runs slow rows, and nobody waits for those.
 */
const settlesSoonMillis = 100

/** The fullest batch a worker with room can get. True = given. */
const serveBatch = (hall: Hall, section: Section, recruit: Recruit): boolean => {
  const waiting = hall.ready.waiting(section.name) - hall.ready.suspects(section.name)
  if (waiting <= 0) return false
  const member = roomiest(membersOf(hall, section.name))
  const room = member === undefined ? 0 : roomOf(member)
  const enough = Math.min(waiting, Math.ceil(section.queueLimit / 2))
  if (member === undefined || room < enough) {
    recruit(hall, section)
    const soon = member !== undefined && now(hall) - member.settledAt < settlesSoonMillis
    if (member === undefined || room === 0 || soon) return false
  }
  const { batchBytes, maxInFlightBytes } = hall.settings
  const bytes = Math.min(batchBytes, maxInFlightBytes - hall.ready.bytesInHand)
  if (bytes <= 0 && hall.ready.inHandInAll > 0) return false
  const rows = hall.ready.take(section.name, room, bytes)
  if (rows.length === 0) return false
  hall.lastAlone.delete(section.name)
  give(hall, member, rows)
  return true
}

const roomOf = ({ alone, draining, hands, section, state }: Member): number =>
  state === "open" && !alone && !draining ? section.queueLimit - hands.size : 0

const roomiest = (members: ReadonlyArray<Member>): Member | undefined =>
  members.reduce<Member | undefined>(
    (best, m) => (roomOf(m) > (best === undefined ? 0 : roomOf(best)) ? m : best),
    undefined
  )

const give = (hall: Hall, member: Member, rows: ReadonlyArray<Waiting>): void => {
  const since = now(hall)
  let waitedMillis = 0
  const ordered = rows.map(({ entry, since: offered }) => {
    member.hands.set(entry.id, entry.rev)
    waitedMillis += since - offered
    const flags =
      (entry.repeat ? Wire.flags.repeat : 0) | (entry.crashes > 0 ? Wire.flags.alone : 0)
    return [entry.id, entry.rev, flags] as const
  })
  hall.tally.dispatch({ handedOut: rows.length })
  hall.tally.section(member.section.name, { waitMicros: Math.round(waitedMillis * 1000) })
  member.worker?.send({ t: "run", generation: hall.settings.generation, rows: ordered })
}
