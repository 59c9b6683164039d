// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Wire from "../../src/pipeline/Wire.ts"

describe("Wire", () => {
  it.prop("an order comes back as it was said", { order: Wire.Order }, ({ order }) => {
    const line = Wire.encode(order)
    assert.isTrue(line.endsWith("\n") && line.indexOf("\n") === line.length - 1)
    // Compared as lines: JSON knows no -0.
    assert.strictEqual(Wire.encode(Result.getOrThrow(Wire.decodeOrder(line))), line)
  })
  it.prop("a report comes back as it was said", { report: Wire.Report }, ({ report }) => {
    const line = Wire.encode(report)
    const heard = Wire.encode(Result.getOrThrow(Wire.decodeReport(line)))
    assert.deepStrictEqual(JSON.parse(heard), JSON.parse(line))
  })
  it.prop("no text makes it throw", { text: Schema.String }, ({ text }) => {
    assert.isTrue(
      Result.isFailure(Wire.decodeReport(text)) && Result.isFailure(Wire.decodeOrder(text))
    )
  })
  it("a line beyond the bound is refused unread and cited in short", () => {
    const refused = Wire.decodeReport("{".repeat(Wire.maxLine + 1))
    assert.strictEqual(Result.isFailure(refused) && refused.failure.line.length, 80)
  })
  it("a full report of a batch stays far below the bound", () => {
    const entry = [2 ** 52, 9, "detect-language", 52_428_800, `u:${"x".repeat(78)}`, 3, 0] as const
    const report: Wire.Report = {
      t: "settled",
      retries: 0,
      fresh: Array.from({ length: 64 }, () => entry),
      rows: Array.from({ length: 64 }, () => ({
        id: 2 ** 52,
        kind: "applied" as const,
        status: "pending",
        entry,
        runs: Array.from({ length: 16 }, () => ["detect-language", "pass", 123456, 1] as const)
      }))
    }
    assert.isBelow(Wire.encode(report).length, Wire.maxLine / 8)
  })
})
