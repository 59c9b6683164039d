// SPDX-License-Identifier: AGPL-3.0-or-later
/** The stages this program has, found by their name in the configuration. */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { Section } from "../pipeline/Route.ts"
import type { Stage, WithBody } from "../pipeline/Stage.ts"
import type { Verdict, WorldFailure } from "../pipeline/Verdict.ts"

/** A service that a stage needs could not be made ready (a key file, a directory). */
export class StageUnavailable extends Schema.TaggedError<StageUnavailable>()("StageUnavailable", {
  section: Schema.String,
  cause: Schema.Defect()
}) {}

export class Stages extends Context.Service<
  Stages,
  {
    /** All names, sorted. */
    readonly names: ReadonlyArray<string>
    /** The stage of that name; its libraries are not loaded by this. */
    readonly find: (name: string) => Effect.Effect<Stage | undefined>
    /** The run of a section with its services made ready, each built once per scope. */
    readonly open: (
      section: Section
    ) => Effect.Effect<
      (mail: WithBody) => Effect.Effect<Verdict, WorldFailure>,
      StageUnavailable,
      Scope.Scope
    >
  }
>()("pepsi/services/Stages") {}
