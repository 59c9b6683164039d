// SPDX-License-Identifier: AGPL-3.0-or-later
/** The configuration this process runs under: read once, checked as a whole, never half. */
import * as Context from "effect/Context"
import * as Schema from "effect/Schema"
import type * as Config from "../config/Config.ts"
import type * as Decode from "../config/Decode.ts"
import type * as Route from "../pipeline/Route.ts"

/** It cannot be used. Each message is `FILE:LINE: [SECTION] OPTION: …`; there is at least one. */
export class ConfigurationInvalid extends Schema.TaggedError<ConfigurationInvalid>()(
  "ConfigurationInvalid",
  { messages: Schema.NonEmptyArray(Schema.String) }
) {
  override get message(): string {
    return this.messages.join("\n")
  }
}

export class Configuration extends Context.Service<
  Configuration,
  {
    /** `[pepsi]`, by the names of its options. */
    readonly pepsi: Config.Pepsi
    /** `[pepsi-postgres]` */
    readonly postgres: Config.Postgres
    /** `[pepsi-ingress]` */
    readonly ingress: Config.Ingress
    /** `[pepsi-dispatch]` */
    readonly dispatch: Config.Dispatch
    readonly pipeline: Route.Pipeline
    /** 16 hexadecimal digits: equal for equal effective values, wherever they are written. */
    readonly generation: string
    /** What an operator should look at, though it is no error. */
    readonly warnings: ReadonlyArray<string>
    /** Every value in force, with its origin. */
    readonly diagnostics: ReadonlyArray<Decode.Diagnostic>
    /**
     * All of it as one line of JSON, secrets included: a worker makes the same Configuration from
     * it without a file and without its environment. Only for the pipe to a worker.
     */
    readonly text: string
  }
>()("pepsi/services/Configuration") {}
