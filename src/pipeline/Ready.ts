// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The ready lists of a dispatcher: which rows wait, which are in a worker's hands, and who is next.
 *
 * Per section there is a list per fair key, first in first out, and the keys take turns, so no
 * sender delays another by more than one round. The lists are a cache of the table: an entry that
 * is refused or lost here costs time, never a message. Nothing in this file waits or writes; it is
 * state changed by plain calls, deterministic for the same calls.
 *
 * An id is in one of two places: waiting (offered, not yet taken) or in hand (taken, not yet
 * settled or returned). While it is in hand no offer of it is believed, because what a scan saw
 * may be older than what the worker is about to write.
 */
import type { Entry } from "./Job.ts"

/** Bounds of the lists; a full list refuses, and is refilled from the table. */
export interface Bounds {
  /** Keys take turns; false = one list for all, in the order of arrival. */
  readonly fair: boolean
  /** Entries of one key in one section: some batches ahead, a few hundred octets each. */
  readonly perKey: number
  /**
   * Entries in all: about 50 MB of memory. A section may have a sixteenth of it whatever the
   * others have, so that one that stands still does not keep mail from the rest.
   */
  readonly total: number
}

export const defaultBounds: Bounds = { fair: true, perKey: 1024, total: 250_000 }

/** Keys refilled at one look: each costs a query. */
const refillsAtOnce = 32

/** A key whose list was cut off: rows behind `after` wait in the table. */
export interface Overflow {
  readonly section: string
  /** Undefined = the one list for all. */
  readonly fairKey: string | undefined
  readonly after: number
  /** Rows its list had refused by then; more at the refill = more wait behind it. */
  readonly refusals: number
}

/** First in, first out; amortised constant time. */
class Fifo {
  #items: Array<Waiting | undefined> = []
  #head = 0
  get length(): number {
    return this.#items.length - this.#head
  }
  push(waiting: Waiting): void {
    this.#items.push(waiting)
  }
  peek(): Waiting | undefined {
    return this.#items[this.#head]
  }
  shift(): Waiting | undefined {
    const first = this.#items[this.#head]
    if (first === undefined) return undefined
    this.#items[this.#head++] = undefined
    if (this.#head > 512 && this.#head * 2 > this.#items.length) {
      this.#items = this.#items.slice(this.#head)
      this.#head = 0
    }
    return first
  }
}

interface KeyList {
  readonly fairKey: string | undefined
  readonly entries: Fifo
  /** In the ring of keys that take turns. */
  queued: boolean
  /** Highest id ever accepted; of a key that was cut off, rows behind it are left to a refill. */
  frontier: number
  /** Rows it has refused. */
  refusals: number
}

interface Lane {
  readonly keys: Map<string | undefined, KeyList>
  /** Keys with entries, in the order of their turns. */
  turns: Array<KeyList>
  turn: number
  waiting: number
  /** Rows with a death: each runs alone. */
  readonly suspects: Fifo
}

/** A row in a list, and since when (milliseconds of whatever clock the caller uses). */
export interface Waiting {
  readonly entry: Entry
  readonly since: number
}

/** Rows of the table behind a point, in id order; `complete` = there are no more. */
export interface Rows {
  readonly entries: ReadonlyArray<Entry>
  readonly complete: boolean
}

/** What became of an offer. */
export type Offered = "added" | "known" | "refused"

export class Ready {
  readonly #bounds: Bounds
  readonly #lanes = new Map<string, Lane>()
  /**
   * Waiting entries by id: the one with the highest rev counts, older ones in a list are skipped.
   */
  readonly #waiting = new Map<number, Entry>()
  readonly #inHand = new Map<number, Entry>()
  readonly #cut = new Map<KeyList, string>()
  #bytesInHand = 0

  constructor(bounds: Bounds = defaultBounds) {
    this.#bounds = bounds
  }

  /** Rows that wait in a section, suspects included. */
  waiting(section: string): number {
    const lane = this.#lanes.get(section)
    return lane === undefined ? 0 : lane.waiting + lane.suspects.length
  }
  /** Rows with a death that wait in a section. */
  suspects(section: string): number {
    return this.#lanes.get(section)?.suspects.length ?? 0
  }
  get waitingInAll(): number {
    return this.#waiting.size
  }
  get inHandInAll(): number {
    return this.#inHand.size
  }
  /** Octets of the messages in hand. */
  get bytesInHand(): number {
    return this.#bytesInHand
  }
  idsInHand(): ReadonlySet<number> {
    return new Set(this.#inHand.keys())
  }

  /** Some key's list was cut off and runs low. */
  get hasOverflow(): boolean {
    for (const [key, section] of this.#cut) if (this.#runsLow(key, section)) return true
    return false
  }
  entryInHand(id: number): Entry | undefined {
    return this.#inHand.get(id)
  }

  /** A row that waits, as somebody has seen it at `now`. */
  offer(entry: Entry, now: number): Offered {
    if (this.#inHand.has(entry.id)) return "known"
    const before = this.#waiting.get(entry.id)
    if (before !== undefined && before.rev >= entry.rev) return "known"
    const lane = this.#lane(entry.section)
    if (entry.crashes > 0) {
      lane.suspects.push({ entry, since: now })
    } else if (!this.#accept(lane, { entry, since: now })) {
      return "refused"
    }
    this.#waiting.set(entry.id, entry)
    return "added"
  }

  /**
   * Takes the next rows of a section, one of each key in turn: at most `rows`, and at most `bytes`
   * octets but always one row if any waits.
   */
  take(section: string, rows: number, bytes: number): ReadonlyArray<Waiting> {
    const taken: Array<Waiting> = []
    const lane = this.#lanes.get(section)
    if (lane === undefined) return taken
    let left = bytes
    while (taken.length < rows && lane.turns.length > lane.turn) {
      const key = lane.turns[lane.turn]!
      const next = key.entries.peek()
      if (next !== undefined && this.#isCurrent(next.entry)) {
        if (taken.length > 0 && next.entry.sizeBytes > left) break
        left -= next.entry.sizeBytes
        taken.push(next)
        this.#hand(next.entry)
      }
      key.entries.shift()
      lane.waiting--
      this.#endTurn(lane, key)
    }
    return taken
  }

  /** Takes one row with a death, to be run alone. */
  takeSuspect(section: string): Waiting | undefined {
    const lane = this.#lanes.get(section)
    for (let next = lane?.suspects.shift(); next !== undefined; next = lane?.suspects.shift()) {
      if (this.#isCurrent(next.entry)) {
        this.#hand(next.entry)
        return next
      }
    }
    return undefined
  }

  /** A row left its worker's hands, settled or not; whoever knows its new rev offers it again. */
  leave(id: number): Entry | undefined {
    const entry = this.#inHand.get(id)
    if (entry !== undefined) {
      this.#inHand.delete(id)
      this.#bytesInHand -= entry.sizeBytes
    }
    return entry
  }

  /** A row comes back unharmed and is next but possibly begun: it counts as a repeat. */
  giveBack(id: number, now: number): void {
    const entry = this.leave(id)
    if (entry !== undefined) this.offer({ ...entry, repeat: true }, now)
  }

  /** Some keys whose list was cut off and runs low; the others have their turn at the next look. */
  overflows(): ReadonlyArray<Overflow> {
    const low: Array<Overflow> = []
    for (const [key, section] of this.#cut) {
      if (low.length >= refillsAtOnce) break
      if (!this.#runsLow(key, section)) continue
      low.push({ section, fairKey: key.fairKey, after: key.frontier, refusals: key.refusals })
    }
    return low
  }

  /** Rows behind what a cut list took; those of other sections are left alone. */
  refill(overflow: Overflow, rows: Rows, now: number): void {
    const { fairKey, refusals, section } = overflow
    const key = this.#lanes.get(section)?.keys.get(fairKey)
    if (key === undefined) return
    // Moved to the end: keys take turns at being refilled, too.
    this.#cut.delete(key)
    for (const entry of rows.entries) {
      if (entry.section !== section) continue
      if (this.offer(entry, now) === "refused") return
      key.frontier = Math.max(key.frontier, entry.id)
    }
    // What was refused while the table was read may not have been in what was read.
    if (!rows.complete || key.refusals > refusals) this.#cut.set(key, section)
    else if (key.entries.length === 0) this.#lanes.get(section)?.keys.delete(fairKey)
  }

  /** Forgets what waits; what is in hand stays there. */
  clear(): void {
    this.#lanes.clear()
    this.#waiting.clear()
    this.#cut.clear()
  }

  #isFull(lane: Lane): boolean {
    const { total } = this.#bounds
    return this.#waiting.size >= total && lane.waiting >= total / 16
  }

  #runsLow(key: KeyList, section: string): boolean {
    const lane = this.#lanes.get(section)
    return (
      key.entries.length <= this.#bounds.perKey / 4 && lane !== undefined && !this.#isFull(lane)
    )
  }

  #isCurrent(entry: Entry): boolean {
    return this.#waiting.get(entry.id)?.rev === entry.rev
  }

  #hand(entry: Entry): void {
    this.#waiting.delete(entry.id)
    this.#inHand.set(entry.id, entry)
    this.#bytesInHand += entry.sizeBytes
  }

  #accept(lane: Lane, waiting: Waiting): boolean {
    const { id, section } = waiting.entry
    const fairKey = this.#bounds.fair ? waiting.entry.fairKey : undefined
    let key = lane.keys.get(fairKey)
    if (key === undefined) {
      key = { fairKey, entries: new Fifo(), queued: false, frontier: 0, refusals: 0 }
      lane.keys.set(fairKey, key)
    }
    const full = key.entries.length >= this.#bounds.perKey || this.#isFull(lane)
    if (full || (this.#cut.has(key) && id > key.frontier)) {
      if (!this.#cut.has(key)) this.#cut.set(key, section)
      key.refusals++
      return false
    }
    key.frontier = Math.max(key.frontier, id)
    key.entries.push(waiting)
    lane.waiting++
    if (!key.queued) {
      key.queued = true
      lane.turns.push(key)
    }
    return true
  }

  /** The key that had its turn goes to the end of the round, or leaves it when it is empty. */
  #endTurn(lane: Lane, key: KeyList): void {
    lane.turn++
    if (key.entries.length > 0) {
      lane.turns.push(key)
    } else {
      key.queued = false
      if (!this.#cut.has(key)) lane.keys.delete(key.fairKey)
    }
    if (lane.turn > 512 && lane.turn * 2 > lane.turns.length) {
      lane.turns = lane.turns.slice(lane.turn)
      lane.turn = 0
    }
  }

  #lane(section: string): Lane {
    let lane = this.#lanes.get(section)
    if (lane === undefined) {
      lane = { keys: new Map(), turns: [], turn: 0, waiting: 0, suspects: new Fifo() }
      this.#lanes.set(section, lane)
    }
    return lane
  }
}
