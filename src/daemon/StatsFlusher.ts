// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Writes the dispatcher's counters: every STATS_INTERVAL, after two seconds of idleness, and when
 * the daemon stops. Each flush has a number that the table remembers, so one whose commit was in
 * doubt is not counted twice.
 */
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Semaphore from "effect/Semaphore"
import { Tally } from "../pipeline/Stats.ts"
import type { Stats } from "../pipeline/Stats.ts"
import { Queue } from "../services/Queue.ts"
import { Statistics } from "../services/Statistics.ts"
import { lasting } from "./Lasting.ts"

/** What a flusher is set up with. */
export interface Settings {
  readonly interval: Duration.Duration
  /** Names the counters of this dispatcher. */
  readonly dispatcher: string
}

/** So long nothing ready and nothing in hand: the burst is over, its figures are wanted. */
const idleMillis = 2000

interface Desk {
  readonly settings: Settings
  readonly queue: Queue["Service"]
  readonly tally: Tally
  busy: boolean
  idleSince: number
  flushedAt: number
  /** Of the flush that is on its way, with what it holds; undefined = the last one is in. */
  pending: { readonly seq: number; readonly stats: Stats } | undefined
  lastSeq: number | undefined
}

/** The counters, and the fiber that writes them; the last flush is in when the scope is closed. */
export const layer = (settings: Settings) =>
  Layer.effect(
    Statistics,
    Effect.gen(function* () {
      const clock = yield* Clock.Clock
      const now = () => Number(clock.monotonicTimeNanosUnsafe() / 1_000_000n)
      const desk: Desk = {
        settings,
        queue: yield* Queue,
        tally: new Tally(),
        busy: false,
        idleSince: now(),
        flushedAt: now(),
        pending: undefined,
        lastSeq: undefined
      }
      const one = yield* Semaphore.make(1)
      const flushOnce = Semaphore.withPermits(one, 1)(Effect.suspend(() => flush(desk, now)))
      const isDone = () => desk.pending === undefined && desk.tally.isEmpty
      // What was counted after a flush that failed is a flush of its own.
      const flushAll = Effect.gen(function* () {
        while (!isDone()) {
          yield* flushOnce
          if (desk.pending !== undefined) yield* Effect.sleep("100 millis")
        }
      })
      yield* Effect.addFinalizer(() => Effect.timeoutOption(flushAll, "5 seconds"))
      const look = Effect.suspend(() => (isTime(desk, now()) ? flushOnce : Effect.void))
      const looking = Effect.forever(Effect.delay(look, Duration.millis(500)))
      yield* Effect.forkScoped(lasting("flushing statistics", looking))
      return Statistics.of({
        tally: desk.tally,
        busy: (isBusy) => {
          if (desk.busy && !isBusy) desk.idleSince = now()
          desk.busy = isBusy
        }
      })
    })
  )

const isTime = (desk: Desk, now: number): boolean => {
  if (desk.tally.isEmpty && desk.pending === undefined) return false
  const idle =
    (desk.tally.isNotable || desk.pending !== undefined) &&
    !desk.busy &&
    now - desk.idleSince >= idleMillis
  return idle || now - desk.flushedAt >= Duration.toMillis(desk.settings.interval)
}

const flush = Effect.fnUntraced(
  function* (desk: Desk, now: () => number) {
    const { dispatcher } = desk.settings
    desk.lastSeq ??= yield* desk.queue.lastFlush(dispatcher)
    if (desk.pending === undefined) {
      if (desk.tally.isEmpty) return
      desk.pending = { seq: desk.lastSeq + 1, stats: desk.tally.take() }
    }
    // The same number with the same sum until it is in: false says that it was in already.
    yield* desk.queue.flushStats(desk.pending.seq, desk.pending.stats, dispatcher)
    desk.lastSeq = desk.pending.seq
    desk.pending = undefined
    desk.flushedAt = now()
  },
  Effect.catchTag("DatabaseError", (error) =>
    Effect.annotateLogs(Effect.logWarning("statistics wait"), { error: error.message })
  )
)
