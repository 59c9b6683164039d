// SPDX-License-Identifier: AGPL-3.0-or-later
/** `pepsi db`: the state of the database's schema. */
import * as Console from "effect/Console"
import * as Effect from "effect/Effect"
import * as Command from "effect/cli/Command"
import * as Main from "../../layers/Main.ts"
import { configFile, configuration } from "./options.ts"

const migrate = Command.make(
  "migrate",
  { config: configFile },
  Effect.fn(function* ({ config: file }) {
    const config = yield* configuration(file)
    const applied = yield* Effect.provide(Main.migrate, Main.anyDatabase(config))
    for (const { name, number } of applied) yield* Console.log(`applied ${number} ${name}`)
    if (applied.length === 0) yield* Console.log("nothing to do")
  })
).pipe(
  Command.withDescription("Bring the schema up to what this program needs ('serve' does so itself)")
)

const status = Command.make(
  "status",
  { config: configFile },
  Effect.fn(function* ({ config: file }) {
    const config = yield* configuration(file)
    const { applied, missing } = yield* Effect.provide(
      Main.migrationStatus,
      Main.anyDatabase(config)
    )
    for (const { appliedAt, name, number } of applied) {
      yield* Console.log(`${number} ${name} applied ${appliedAt.toISOString()}`)
    }
    for (const { name, number } of missing) yield* Console.log(`${number} ${name} missing`)
  })
).pipe(Command.withDescription("Which migrations are in the database"))

export const db = Command.make("db").pipe(
  Command.withDescription("The database: migrations"),
  Command.withSubcommands([migrate, status])
)
