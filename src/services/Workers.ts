// SPDX-License-Identifier: AGPL-3.0-or-later
/** Stage workers as processes that a scope holds. */
import type * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import type * as Queue from "effect/Queue"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { Order, Report, WireError } from "../pipeline/Wire.ts"

/** A worker could not be started. */
export class WorkerStartError extends Schema.TaggedError<WorkerStartError>()("WorkerStartError", {
  section: Schema.String,
  cause: Schema.Defect()
}) {}

/** How a worker ended: an exit code, or the signal that killed it. */
export interface Ended {
  readonly code: number | undefined
  readonly signal: string | undefined
}

/** A started worker. */
export interface Worker {
  readonly pid: number
  /** Puts a line on its standard input; never blocks. */
  readonly send: (order: Order) => void
  /**
   * Its reports, in order; ends with its standard output, fails with a line that is none of ours.
   */
  readonly reports: Queue.Dequeue<Report, WireError | Cause.Done>
  /** No more orders: it finishes and settles what it has begun, then ends. */
  readonly finish: Effect.Effect<void>
  /** Ends it at once. */
  readonly kill: Effect.Effect<void>
  /** Returns when the process is gone. */
  readonly ended: Effect.Effect<Ended>
}

export class Workers extends Context.Service<
  Workers,
  {
    /**
     * Starts a worker for a section. When the scope closes: end of its standard input, SIGTERM
     * after the grace, SIGKILL 10 s later; the scope is closed when the process is gone.
     */
    readonly start: (section: string) => Effect.Effect<Worker, WorkerStartError, Scope.Scope>
  }
>()("pepsi/services/Workers") {}
