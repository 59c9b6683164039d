// SPDX-License-Identifier: AGPL-3.0-or-later
/** What a crew knows: its settings, its members, and what they have in hand. */
import type * as Clock from "effect/Clock"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import type { Ready } from "../../pipeline/Ready.ts"
import type { Section } from "../../pipeline/Route.ts"
import type { Tally } from "../../pipeline/Stats.ts"
import type * as Wire from "../../pipeline/Wire.ts"
import type { Ownership } from "../../services/Ownership.ts"
import type { Queue } from "../../services/Queue.ts"
import type { Worker, Workers } from "../../services/Workers.ts"

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

/** A worker of a section. */
export interface Member {
  readonly section: Section
  /** Rows it was given and has said nothing of yet: id to rev. */
  readonly hands: Map<number, number>
  state: "starting" | "open" | "ending"
  worker: Worker | undefined
  backend: number | undefined
  /** It runs a row with a death, and nothing beside it. */
  alone: boolean
  /** It gets nothing more until its hands are empty: a row with a death waits for it. */
  draining: boolean
  /** Ended by us: not a crash. */
  dismissed: boolean
  /** When it last said anything, when it last settled, since when it has nothing in hand. */
  heard: number
  settledAt: number
  idleSince: number
}

/** What the crew tells its dispatcher. */
export interface Listener {
  /** A worker's word on rows of a section; the crew has already let go of them. */
  readonly report: (report: Wire.Report, section: string) => void
  /** Rows may wait for a free hand, or hands for rows. */
  readonly pump: () => void
}

export interface Hall {
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
  /** Sections in which a row with a death was the last to be given out. */
  readonly lastAlone: Set<string>
  readonly fork: (effect: Effect.Effect<void>) => void
  closed: boolean
  inspectedAt: number
}

/** Milliseconds of the monotonic clock: a step of the wall clock kills no worker. */
export const now = (hall: Hall): number =>
  Number(hall.clock.monotonicTimeNanosUnsafe() / 1_000_000n)

export const membersOf = (hall: Hall, section: string): ReadonlyArray<Member> =>
  hall.members.get(section) ?? []

export const all = (hall: Hall): ReadonlyArray<Member> => [...hall.members.values()].flat()
