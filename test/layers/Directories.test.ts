// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "vitest"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"
import * as Directories from "../../layers/Directories.ts"

describe("Directories", () => {
  it("makes what is missing, says what was the highest, and finds it the second time", () => {
    const base = fs.mkdtempSync(path.join(os.tmpdir(), "pepsi-directories-"))
    const wanted = path.join(base, "a", "b", "c")
    assert.strictEqual(Directories.make(wanted, 0o700), path.join(base, "a"))
    assert.strictEqual(fs.statSync(wanted).mode & 0o777, 0o700)
    assert.isUndefined(Directories.make(wanted, 0o700))
    fs.rmSync(base, { recursive: true })
  })

  it("a file in the way, and a place where nothing can be made, are errors and no endless loop", () => {
    assert.throws(() => Directories.make("/etc/passwd/a/b", 0o700))
    assert.throws(() => Directories.make("/proc/nowhere/a", 0o700), /ENOENT/)
  })
})
