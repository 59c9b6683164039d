// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Nearest from "../../src/config/Nearest.ts"

describe("Nearest.nearest", () => {
  it.each([
    ["KEY_WAI", "KEY_WAIT"],
    ["KYE_WAIT", "KEY_WAIT"],
    ["NXT", "NEXT"],
    ["next", undefined],
    ["PORTS", "PORT"],
    ["COLOUR", undefined]
  ])("takes %s for %s", (word, meant) => {
    assert.strictEqual(Nearest.nearest(word, ["NEXT", "KEY_WAIT", "PORT"]), meant)
  })

  it("has nothing to say without words", () => {
    assert.strictEqual(Nearest.suggestion("X", []), "")
    assert.strictEqual(Nearest.suggestion("PROT", ["PORT"]), "; did you mean PORT?")
  })
})
