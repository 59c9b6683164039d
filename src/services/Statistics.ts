// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The counters of this host's dispatcher, which has them to itself: it counts in memory, and the
 * flusher, the only writer of the statistics tables, takes the sum from time to time.
 */
import * as Context from "effect/Context"
import type * as Stats from "../pipeline/Stats.ts"

export class Statistics extends Context.Service<
  Statistics,
  {
    readonly tally: Stats.Tally
    /**
     * Called by whoever counts, with whether anything is ready or in hand; starts the idle flush.
     */
    readonly busy: (isBusy: boolean) => void
  }
>()("pepsi/services/Statistics") {}
