// SPDX-License-Identifier: AGPL-3.0-or-later
/** An ingress as a process of its own, for tests that starve or kill it; writes its port. */
import * as Effect from "effect/Effect"
import { limited, makeRecorder, start } from "./IngressWorld.ts"

await Effect.runPromise(
  Effect.gen(function* () {
    const port = yield* start(makeRecorder(), limited({ connections: 64 }))
    process.stdout.write(`${port}\n`)
    // The end of standard input is the end of the test.
    yield* Effect.promise(
      () => new Promise((resolve) => process.stdin.once("end", resolve).resume())
    )
  }).pipe(Effect.scoped)
)
