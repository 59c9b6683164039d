// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The stages by their names, each imported at its first use, and run with the services it names:
 * a worker builds the layers its own sections need and no other.
 */
import type * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type { Section } from "../src/pipeline/Route.ts"
import type { Settings, Stage } from "../src/pipeline/Stage.ts"
import { Stages, StageUnavailable } from "../src/services/Stages.ts"

/** The generated index of stages; `R` = the services that all of them together ask. */
export type Registry<R> = { readonly [name: string]: () => Promise<{ readonly default: Stage<R> }> }

/** A layer for each service a stage may ask, by the key of the service. */
export type Services<E> = { readonly [key: string]: Layer.Layer<never, E> }

/** Only names and settings: for whoever reads the configuration and runs no stage. */
export const names = (registry: Registry<unknown>): Layer.Layer<Stages> => layer(registry, {})

/** Stages that can be run. A service is made ready once for all sections of a process. */
export const layer = <R, E>(registry: Registry<R>, services: Services<E>): Layer.Layer<Stages> =>
  Layer.effect(
    Stages,
    Effect.gen(function* () {
      const memo = yield* Layer.makeMemoMap
      return Stages.of({
        names: Object.keys(registry).toSorted(),
        find: (name) => Effect.map(load(registry, name), (stage) => stage),
        open: Effect.fnUntraced(function* (section: Section) {
          const stage = yield* load(registry, section.stage.name)
          if (stage === undefined)
            return yield* unavailable(section, `no stage ${section.stage.name}`)
          const missing = stage.uses.find((key) => services[key] === undefined)
          if (missing !== undefined) return yield* unavailable(section, `no layer for ${missing}`)
          const scope = yield* Effect.scope
          const built = yield* Layer.buildWithMemoMap(
            Layer.mergeAll(Layer.empty, ...stage.uses.map((key) => services[key]!)),
            memo,
            scope
          ).pipe(Effect.mapError((cause) => new StageUnavailable({ section: section.name, cause })))
          // `Stage.define` has checked that `uses` names all that the run asks.
          const context = built as Context.Context<R>
          const settings: Settings = section.settings
          return (mail) => Effect.provideContext(stage.run(mail, settings), context)
        })
      })
    })
  )

const load = <R>(registry: Registry<R>, name: string): Effect.Effect<Stage<R> | undefined> => {
  const open = Object.hasOwn(registry, name) ? registry[name] : undefined
  return open === undefined
    ? Effect.undefined
    : Effect.map(Effect.promise(open), (module) => module.default)
}

const unavailable = (section: Section, why: string) =>
  Effect.fail(new StageUnavailable({ section: section.name, cause: new Error(why) }))
