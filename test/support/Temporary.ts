// SPDX-License-Identifier: AGPL-3.0-or-later
/** Directories for tests, in that of the run, so that none is left behind whatever happens. */
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import * as fs from "node:fs"
import * as path from "node:path"
import { inject } from "vitest"
import type { Provided } from "./setup.ts"

const ofRun = (): Provided["temporary"] => inject("temporary")

/** A new directory of this mode, deleted with the scope. */
export const directory = (name: string, mode = 0o711): Effect.Effect<string, never, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const made = fs.mkdtempSync(path.join(ofRun(), `${name}-`))
      fs.chmodSync(made, mode)
      return made
    }),
    (made) => Effect.sync(() => fs.rmSync(made, { recursive: true, force: true }))
  )
