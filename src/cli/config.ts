// SPDX-License-Identifier: AGPL-3.0-or-later
/** `pepsi config`: what the configuration is, and whether it is right. */
import * as Console from "effect/Console"
import * as Effect from "effect/Effect"
import * as Command from "effect/cli/Command"
import * as Flag from "effect/cli/Flag"
import * as Report from "../config/Report.ts"
import { configFile, configuration } from "./options.ts"

const print = (lines: ReadonlyArray<string>) =>
  Effect.forEach(lines, (line) => Console.log(line), { discard: true })

const check = Command.make("check", { config: configFile }, ({ config }) =>
  Effect.flatMap(configuration(config), (found) => print(Report.check(found)))
).pipe(
  Command.withDescription(
    "Check everything and say what the wiring amounts to; exit code 78 if it is wrong"
  )
)

const show = Command.make(
  "show",
  {
    config: configFile,
    diagnostics: Flag.Boolean("diagnostics").pipe(
      Flag.withDescription("Say where each value comes from"),
      Flag.withDefault(false)
    )
  },
  ({ config, diagnostics }) =>
    Effect.flatMap(configuration(config), (found) =>
      print((diagnostics ? Report.diagnose : Report.show)(found))
    )
).pipe(Command.withDescription("Print every value in force as a file that means the same"))

export const config = Command.make("config").pipe(
  Command.withDescription("Show or check the configuration"),
  Command.withSubcommands([check, show])
)
