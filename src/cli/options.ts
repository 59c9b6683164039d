// SPDX-License-Identifier: AGPL-3.0-or-later
/** What several commands share. */
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Flag from "effect/cli/Flag"
import * as Main from "../../layers/Main.ts"
import manifest from "../../package.json" with { type: "json" }
import { Configuration } from "../services/Configuration.ts"

/** Of this program. */
export const version = manifest.version

/** `-c FILE`. */
export const configFile = Flag.String("config").pipe(
  Flag.withAlias("c"),
  Flag.withMetavar("FILE"),
  Flag.withDescription(
    "Configuration file; else pepsi.conf of the user or of the host, else a built-in profile"
  ),
  Flag.optional
)

/** `--json`. */
export const json = Flag.Boolean("json").pipe(
  Flag.withDescription("Print JSON, one value a line"),
  Flag.withDefault(false)
)

/** The configuration a command runs under. */
export const configuration = (file: Option.Option<string>) =>
  Effect.provide(Configuration, Main.configuration(Option.getOrUndefined(file)))
