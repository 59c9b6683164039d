// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Schema from "effect/Schema"
import { jsonLine, oneLine, printable } from "../../src/cli/terminal.ts"

describe("terminal", () => {
  it("a title, a C1 sequence and a turned direction stay text", () => {
    assert.strictEqual(printable("a\u001b]0;x\u0007b\u009bc\u202ed\n\te"), "a�]0;x�b�c�d\n\te")
    assert.strictEqual(oneLine("a\nb\tc\r\n"), "a�b�c��")
  })

  it.prop("JSON keeps what it says and steers nothing", { text: Schema.String }, ({ text }) => {
    const hostile = `${text}\u009b\u202e\u0000`
    const line = jsonLine({ hostile })
    assert.strictEqual(oneLine(line), line)
    assert.deepStrictEqual(JSON.parse(line), { hostile })
  })
})
