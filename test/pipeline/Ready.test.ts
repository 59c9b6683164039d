// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Schema from "effect/Schema"
import type { Entry } from "../../src/pipeline/Job.ts"
import { Ready } from "../../src/pipeline/Ready.ts"

const entry = (id: number, more: Partial<Entry> = {}): Entry => ({
  id,
  rev: 0,
  section: "init",
  sizeBytes: 100,
  fairKey: "k",
  attempts: 0,
  crashes: 0,
  repeat: false,
  ...more
})
const ids = (taken: ReadonlyArray<{ readonly entry: Entry }>) => taken.map((w) => w.entry.id)

describe("Ready", () => {
  it("keys take turns, rows of a key stay in order", () => {
    const ready = new Ready()
    for (let id = 1; id <= 6; id++) ready.offer(entry(id, { fairKey: "big" }), 0)
    ready.offer(entry(7, { fairKey: "small" }), 0)
    assert.deepStrictEqual(ids(ready.take("init", 4, 1e9)), [1, 7, 2, 3])
    assert.deepStrictEqual(ids(ready.take("init", 4, 1e9)), [4, 5, 6])
  })

  it("a small sender's first row comes within one round however much others have", () => {
    const ready = new Ready({ fair: true, perKey: 10, total: 1000 })
    for (let id = 1; id <= 100; id++) ready.offer(entry(id, { fairKey: "big" }), 0)
    for (let n = 0; n < 20; n++) ready.offer(entry(1000 + n, { fairKey: `s${n}` }), 0)
    assert.includeMembers(
      ids(ready.take("init", 21, 1e9)),
      Array.from({ length: 20 }, (_, n) => 1000 + n)
    )
  })

  it("without fairness rows come in the order of their arrival", () => {
    const ready = new Ready({ fair: false, perKey: 100, total: 100 })
    for (let id = 1; id <= 6; id++) ready.offer(entry(id, { fairKey: id < 5 ? "big" : "small" }), 0)
    assert.deepStrictEqual(ids(ready.take("init", 6, 1e9)), [1, 2, 3, 4, 5, 6])
  })

  it("a batch ends at its octets but always has one row", () => {
    const ready = new Ready()
    ready.offer(entry(1, { sizeBytes: 500 }), 0)
    ready.offer(entry(2, { sizeBytes: 500 }), 0)
    assert.deepStrictEqual(ids(ready.take("init", 10, 100)), [1])
    assert.strictEqual(ready.bytesInHand, 500)
    assert.deepStrictEqual(ids(ready.take("init", 10, 499)), [2])
  })

  it("what is in hand is not believed from a scan, a higher rev replaces a waiting one", () => {
    const ready = new Ready()
    assert.strictEqual(ready.offer(entry(1), 0), "added")
    assert.strictEqual(ready.offer(entry(1), 0), "known")
    assert.strictEqual(ready.offer(entry(1, { rev: 1, section: "next" }), 0), "added")
    assert.deepStrictEqual(ids(ready.take("init", 10, 1e9)), [])
    assert.deepStrictEqual(ids(ready.take("next", 10, 1e9)), [1])
    assert.strictEqual(ready.offer(entry(1, { rev: 9 }), 0), "known")
    ready.leave(1)
    assert.strictEqual(ready.offer(entry(1, { rev: 2 }), 0), "added")
  })

  it("a row that comes back counts as a repeat", () => {
    const ready = new Ready()
    ready.offer(entry(1), 0)
    ready.take("init", 1, 1e9)
    ready.giveBack(1, 5)
    const [again] = ready.take("init", 1, 1e9)
    assert.deepStrictEqual([again?.entry.repeat, again?.since], [true, 5])
  })

  it("suspects wait apart and come one by one", () => {
    const ready = new Ready()
    ready.offer(entry(1, { crashes: 1 }), 0)
    ready.offer(entry(2), 0)
    assert.deepStrictEqual(ids(ready.take("init", 10, 1e9)), [2])
    assert.strictEqual(ready.takeSuspect("init")?.entry.id, 1)
    assert.isUndefined(ready.takeSuspect("init"))
  })

  it("a list that was cut off is refilled behind what it took, in order and once", () => {
    const ready = new Ready({ fair: true, perKey: 8, total: 100 })
    for (let id = 1; id <= 30; id++) ready.offer(entry(id), 0)
    const seen: Array<number> = []
    for (let round = 0; round < 10; round++) {
      seen.push(...ids(ready.take("init", 4, 1e9)))
      for (const overflow of ready.overflows()) {
        const rows = Array.from({ length: 30 }, (_, n) => entry(n + 1))
          .filter((e) => e.id > overflow.after)
          .slice(0, 5)
        ready.refill(overflow, { entries: rows, complete: rows.length < 5 }, 0)
      }
    }
    assert.deepStrictEqual(
      seen,
      Array.from({ length: 30 }, (_, n) => n + 1)
    )
    assert.isFalse(ready.hasOverflow)
  })

  it("what is refused while a refill reads the table is not forgotten", () => {
    const ready = new Ready({ fair: true, perKey: 4, total: 1000 })
    for (let id = 1; id <= 6; id++) ready.offer(entry(id), 0)
    ready.take("init", 4, 1e9)
    const [overflow] = ready.overflows()
    assert.strictEqual(ready.offer(entry(7), 0), "refused")
    ready.refill(overflow!, { entries: [entry(5), entry(6)], complete: true }, 0)
    ready.take("init", 4, 1e9)
    assert.deepInclude(ready.overflows()[0], { fairKey: "k", after: 6 })
  })

  it("a section that stands still leaves room for the others", () => {
    const ready = new Ready({ fair: true, perKey: 100, total: 1600 })
    for (let id = 1; id <= 2000; id++) {
      ready.offer(entry(id, { section: "relay", fairKey: `k${id % 40}` }), 0)
    }
    assert.strictEqual(ready.waitingInAll, 1600)
    assert.isFalse(ready.hasOverflow)
    assert.strictEqual(ready.offer(entry(5000), 0), "added")
    assert.deepStrictEqual(ids(ready.take("init", 1, 1e9)), [5000])
  })

  it("one list for all is refilled past rows of other sections, which are left alone", () => {
    const ready = new Ready({ fair: false, perKey: 4, total: 1000 })
    for (let id = 1; id <= 5; id++) ready.offer(entry(id, { section: "b" }), 0)
    ready.take("b", 4, 1e9)
    const [overflow] = ready.overflows()
    const rows = [entry(10, { section: "a" }), entry(11, { section: "b" })]
    ready.refill(overflow!, { entries: rows, complete: false }, 0)
    assert.deepStrictEqual([ready.waiting("a"), ready.waiting("b")], [0, 1])
    assert.isTrue(ready.hasOverflow)
  })

  const Op = Schema.Struct({
    op: Schema.Literals(["offer", "take", "leave", "giveBack", "suspect"]),
    id: Schema.Int.check(Schema.isBetween({ minimum: 1, maximum: 12 })),
    rev: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 3 })),
    key: Schema.Literals(["a", "b", "c"]),
    crashes: Schema.Literals([0, 0, 0, 1])
  })
  it.prop(
    "no row is in two hands, none is lost while the bounds hold",
    { ops: Schema.Array(Op) },
    ({ ops }) => {
      const ready = new Ready({ fair: true, perKey: 100, total: 1000 })
      const inHand = new Set<number>()
      const waiting = new Map<number, number>()
      const took = (id: number, rev: number) => {
        assert.isFalse(inHand.has(id))
        assert.strictEqual(waiting.get(id), rev)
        waiting.delete(id)
        inHand.add(id)
      }
      for (const { crashes, id, key, op, rev } of ops) {
        if (op === "offer") {
          const offered = ready.offer(entry(id, { rev, fairKey: key, crashes }), 0)
          const fresh = !inHand.has(id) && (waiting.get(id) ?? -1) < rev
          assert.strictEqual(offered, fresh ? "added" : "known")
          if (fresh) waiting.set(id, rev)
        } else if (op === "take") {
          for (const { entry: e } of ready.take("init", 2, 1e9)) took(e.id, e.rev)
        } else if (op === "suspect") {
          const suspect = ready.takeSuspect("init")
          if (suspect !== undefined) took(suspect.entry.id, suspect.entry.rev)
        } else if (op === "leave") {
          assert.strictEqual(ready.leave(id) !== undefined, inHand.delete(id))
        } else if (inHand.delete(id)) {
          waiting.set(id, ready.entryInHand(id)!.rev)
          ready.giveBack(id, 0)
        }
        assert.strictEqual(ready.waitingInAll, waiting.size)
        assert.strictEqual(ready.inHandInAll, inHand.size)
      }
      while (true) {
        const rest = [...ready.take("init", 50, 1e9)]
        const suspect = ready.takeSuspect("init")
        if (suspect !== undefined) rest.push(suspect)
        for (const { entry: e } of rest) took(e.id, e.rev)
        if (rest.length === 0) break
      }
      assert.strictEqual(waiting.size, 0)
    }
  )
})
