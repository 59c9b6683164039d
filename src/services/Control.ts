// SPDX-License-Identifier: AGPL-3.0-or-later
/** What the dispatcher of this host offers to the other parts of the daemon. */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import type { Entry } from "../pipeline/Job.ts"

/** One section as it stands. */
export interface SectionFigures {
  readonly section: string
  readonly ready: number
  readonly inFlight: number
  readonly workers: number
}

export class Control extends Context.Service<
  Control,
  {
    /**
     * Rows that have just been committed as pending; never blocks and never fails. What belongs to
     * a section of another host is left to the scan there.
     */
    readonly admitted: (entries: ReadonlyArray<Entry>) => void
    /** Ids that a worker has in hand. */
    readonly inFlight: Effect.Effect<ReadonlySet<number>>
    readonly figures: Effect.Effect<ReadonlyArray<SectionFigures>>
  }
>()("pepsi/services/Control") {}
