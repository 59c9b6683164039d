// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Schema from "effect/Schema"
import * as Stats from "../../src/pipeline/Stats.ts"

const Run = Schema.Struct({
  section: Schema.Literals(["a", "b"]),
  result: Schema.Literals(["pass", "done", "defer", "park", "fail", "fanout"]),
  micros: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 10_000_000 })),
  fused: Schema.Boolean
})
const sum = (runs: ReadonlyArray<Stats.Run>) =>
  runs.reduce(
    (stats, run) => Stats.add(stats, Stats.inSection(run.section, Stats.ofRun(run))),
    Stats.empty
  )

describe("Stats", () => {
  it.prop(
    "counters merge in any order",
    { a: Schema.Array(Run), b: Schema.Array(Run) },
    ({ a, b }) => {
      assert.deepStrictEqual(Stats.add(sum(a), sum(b)), sum([...a, ...b]))
      const { sections: left } = Stats.add(sum(a), sum(b))
      const { sections: right } = Stats.add(sum(b), sum(a))
      for (const name of ["a", "b"]) assert.deepStrictEqual(left[name], right[name])
      assert.deepStrictEqual(Stats.add(Stats.empty, sum(a)), sum(a))
    }
  )

  it.prop("a tally is the sum of its runs", { runs: Schema.Array(Run) }, ({ runs }) => {
    const tally = new Stats.Tally()
    for (const run of runs) tally.run(run)
    assert.strictEqual(tally.isEmpty, runs.length === 0)
    assert.deepStrictEqual(tally.take(), sum(runs))
    assert.isTrue(Stats.isEmpty(tally.take()))
  })

  it("a bucket holds times below its power of two", () => {
    assert.deepStrictEqual([0, 1, 2, 3, 4, 1000].map(Stats.bucket), [0, 1, 2, 2, 3, 10])
    assert.strictEqual(Stats.quantile([0, 0, 9, 0, 1], 0.5), 4)
    assert.strictEqual(Stats.quantile([0, 0, 9, 0, 1], 0.95), 16)
    assert.strictEqual(Stats.quantile([], 0.5), 0)
  })

  it("looks at the table alone are nothing to write home about", () => {
    const tally = new Stats.Tally()
    tally.dispatch({ polls: 1 })
    assert.deepStrictEqual([tally.isEmpty, tally.isNotable], [false, false])
    tally.dispatch({ messagesProcessed: 1 })
    assert.isTrue(tally.isNotable)
  })
})
