// SPDX-License-Identifier: AGPL-3.0-or-later
/** What all rows of a worker share. */
import type * as Cause from "effect/Cause"
import type * as Clock from "effect/Clock"
import type * as Effect from "effect/Effect"
import type * as EffectQueue from "effect/Queue"
import type { Pipeline, Section } from "../../pipeline/Route.ts"
import type * as Stage from "../../pipeline/Stage.ts"
import type { Verdict, WorldFailure } from "../../pipeline/Verdict.ts"
import type * as Wire from "../../pipeline/Wire.ts"
import type { Queue } from "../../services/Queue.ts"
import type { Outbox } from "../Settler.ts"

/** What a worker is started with. */
export interface Assignment {
  readonly section: Section
  readonly pipeline: Pipeline
  readonly allowFusion: boolean
  /** Of this process; the daemon checks that it talks to whom it started. */
  readonly pid: number
  /** Ends when the daemon has no more to order. */
  readonly orders: EffectQueue.Dequeue<Wire.Order, Wire.WireError | Cause.Done>
  readonly say: (report: Wire.Report) => void
}

export type Run = (mail: Stage.WithBody) => Effect.Effect<Verdict, WorldFailure>

/** A stage at work on a row. */
export interface Running {
  readonly since: number
  readonly limitMillis: number
  readonly interrupt: () => void
}

export interface Shop {
  readonly assignment: Assignment
  readonly queue: Queue["Service"]
  readonly clock: Clock.Clock
  readonly outbox: Outbox
  /**
   * The run of a section, made ready at its first use; undefined = not possible in this process.
   */
  readonly runOf: (section: Section) => Effect.Effect<Run | undefined>
  /** By row; who is not here any more has taken too long and settles nothing. */
  readonly running: Map<number, Running>
  /** Closed by a stage that throws: no more rows are begun. */
  readonly door: { open: boolean }
}

/** Rows as they are ordered. */
export type Ordered = ReadonlyArray<(typeof Wire.RunOrder.Type)["rows"][number]>
