// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Workers as fibers of the test's own process: the real Worker under the real wire messages, with
 * stages that are plain functions. Whatever ends a process (a kill, a throw) ends the fiber.
 */
import * as Cause from "effect/Cause"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as EffectQueue from "effect/Queue"
import * as Duration from "effect/Duration"
import * as Worker from "../../src/daemon/Worker.ts"
import type { Pipeline, Section } from "../../src/pipeline/Route.ts"
import * as Stage from "../../src/pipeline/Stage.ts"
import type { Verdict, WorldFailure } from "../../src/pipeline/Verdict.ts"
import type * as Wire from "../../src/pipeline/Wire.ts"
import { Ownership } from "../../src/services/Ownership.ts"
import type { Owned } from "../../src/services/Ownership.ts"
import { Queue } from "../../src/services/Queue.ts"
import { Stages } from "../../src/services/Stages.ts"
import { Workers } from "../../src/services/Workers.ts"
import type { Ended } from "../../src/services/Workers.ts"

/** What a stage of a test does. */
export type Run = (mail: Stage.WithBody) => Effect.Effect<Verdict, WorldFailure>

/** A section of a test with its run. */
export interface Scripted extends Partial<Omit<Section, "name" | "stage">> {
  readonly name: string
  readonly effect?: Stage.Effects
  readonly run: Run
}

/** The pipeline of these sections; the first is the head. */
export const pipelineOf = (sections: ReadonlyArray<Scripted>): Pipeline => ({
  entries: [sections[0]!.name],
  generation: "test",
  sections: new Map(
    sections.map(({ effect = "none", name, run, ...more }) => [
      name,
      {
        name,
        origin: { file: "test", line: 1 },
        stage: Stage.define({
          name,
          load: "full",
          effect,
          fusible: true,
          next: "none",
          uses: [],
          settings: {},
          run
        }),
        settings: {},
        load: "full",
        next: undefined,
        failure: undefined,
        parallelism: 2,
        queueLimit: 8,
        fusion: true,
        timeout: Duration.minutes(5),
        synchronousCommit: false,
        user: "",
        dbRole: "",
        targets: [],
        ...more
      }
    ])
  )
})

/** Stages that need no service. */
export const stages: Layer.Layer<Stages> = Layer.succeed(
  Stages,
  Stages.of({
    names: [],
    find: () => Effect.undefined,
    open: (section) => Effect.succeed((mail) => section.stage.run(mail, {}) as ReturnType<Run>)
  })
)

/** Nobody else wants our sections. */
export const ownership: Layer.Layer<Ownership> = Layer.succeed(
  Ownership,
  Ownership.of({
    own: (sections) =>
      Effect.succeed<Owned>({
        epochs: new Map(sections.map((section) => [section, 1])),
        lost: Effect.never
      }),
    work: () => Effect.succeed(1),
    backend: Effect.succeed(1),
    endBackend: () => Effect.void
  })
)

/** How a fiber ended, as a process would have. */
const endOf = (exit: Exit.Exit<boolean, unknown>): Ended =>
  Exit.isSuccess(exit)
    ? { code: exit.value ? 0 : 75, signal: undefined }
    : Cause.hasInterruptsOnly(exit.cause)
      ? { code: undefined, signal: "SIGKILL" }
      : { code: 1, signal: undefined }

/** Workers of a pipeline; `started` has the kill of each that was started, in order. */
export const workers = (
  pipeline: Pipeline,
  options: { readonly allowFusion: boolean; readonly started?: Array<Effect.Effect<void>> }
) =>
  Layer.effect(
    Workers,
    Effect.gen(function* () {
      const context = yield* Effect.context<Queue | Ownership | Stages>()
      return Workers.of({
        start: Effect.fnUntraced(function* (name) {
          const orders = yield* EffectQueue.unbounded<Wire.Order, Wire.WireError | Cause.Done>()
          const reports = yield* EffectQueue.unbounded<Wire.Report, Wire.WireError | Cause.Done>()
          const ended = yield* Deferred.make<Ended>()
          const run = Worker.run({
            section: pipeline.sections.get(name)!,
            pipeline,
            allowFusion: options.allowFusion,
            pid: 1,
            orders,
            say: (report) => void EffectQueue.offerUnsafe(reports, report)
          }).pipe(Effect.scoped, Effect.provideContext(context))
          const fiber = yield* Effect.forkScoped(
            Effect.onExit(run, (exit) =>
              Effect.andThen(EffectQueue.end(reports), Deferred.succeed(ended, endOf(exit)))
            )
          )
          const kill = Fiber.interrupt(fiber)
          options.started?.push(kill)
          return {
            pid: 1,
            send: (order: Wire.Order) => {
              if (order.t === "run") EffectQueue.offerUnsafe(orders, order)
            },
            reports,
            finish: Effect.asVoid(EffectQueue.end(orders)),
            kill,
            ended: Deferred.await(ended)
          }
        })
      })
    })
  )
