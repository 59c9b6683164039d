// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A program for tests to kill: keeps an embedded server in the directory it is given, says the pid
 * of the server on one line, and ends with its standard input.
 */
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as process from "node:process"
import * as EmbeddedPostgres from "../../layers/EmbeddedPostgres.ts"

const program = Effect.gen(function* () {
  const server = yield* EmbeddedPostgres.EmbeddedPostgres
  process.stdout.write(`${yield* server.pid}\n`)
  yield* Effect.callback<void>((resume) => {
    process.stdin.resume().once("end", () => resume(Effect.void))
  })
})

const silent = Logger.layer([])
const embedded = EmbeddedPostgres.layer({ directory: process.argv[2]! })
await Effect.runPromise(Effect.provide(program, Layer.provideMerge(embedded, silent)))
