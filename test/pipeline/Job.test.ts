// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Schema from "effect/Schema"
import * as Job from "../../src/pipeline/Job.ts"

const row: Job.Row = {
  status: "pending",
  section: "a",
  rev: 3,
  attempts: 2,
  crashes: 1,
  nextInMillis: null,
  parkedReason: null,
  parkedRef: null,
  parkedTo: null,
  lastError: "old"
}
const outcome = (
  verdict: Job.Outcome["verdict"],
  more: Partial<Job.Outcome> = {}
): Job.Outcome => ({
  id: 1,
  rev: 3,
  verdict,
  section: undefined,
  patch: {},
  writes: [],
  children: [],
  emissions: [],
  ...more
})
const park = { reason: "key", ref: "a@b", for: Duration.hours(1), onExpiry: "out" }

describe("Job", () => {
  it("a pass starts anew, but a suspect stays one", () => {
    const next = Job.settle(row, outcome("pass", { section: "b" }))
    assert.deepStrictEqual(next, {
      ...row,
      rev: 4,
      section: "b",
      attempts: 0,
      crashes: 1,
      lastError: null
    })
    assert.strictEqual(
      (Job.settle({ ...row, crashes: 2 }, outcome("pass", { section: "b" })) as Job.Row).crashes,
      1
    )
  })
  it("a wait clears the deaths; its attempts count from the section it waits at", () => {
    const stay = Job.settle(
      row,
      outcome("defer", { error: "4.4.1", after: Duration.minutes(1) })
    ) as Job.Row
    assert.deepStrictEqual(
      [stay.status, stay.attempts, stay.crashes, stay.nextInMillis],
      ["deferred", 3, 0, 60_000]
    )
    const moved = Job.settle(row, outcome("defer", { section: "b" })) as Job.Row
    assert.deepStrictEqual([moved.section, moved.attempts], ["b", 1])
  })
  it("who does not name the present rev changes nothing", () => {
    assert.isUndefined(Job.settle({ ...row, rev: 4 }, outcome("done")))
    assert.isUndefined(Job.settle({ ...row, status: "parked" }, outcome("done")))
  })
  it("progress under a hold is kept, and release finds what the row waits for", () => {
    const held = Job.hold(row)
    assert.strictEqual(held.rev, row.rev)
    const after = (o: Job.Outcome) => Job.release(Job.settle(held, o) as Job.Row)
    assert.strictEqual(after(outcome("pass", { section: "b" })).status, "pending")
    assert.strictEqual(after(outcome("defer")).status, "deferred")
    assert.strictEqual(after(outcome("park", { park })).status, "parked")
    assert.strictEqual(after(outcome("fail", { error: "5.1.1" })).status, "failed")
    assert.strictEqual(Job.release(Job.hold({ ...row, status: "failed" })).status, "failed")
  })
  it("the third death is poison, an expired wait goes where it said", () => {
    const dead = Job.crash(Job.crash(row, "killed"), "killed")
    assert.deepStrictEqual([dead.status, dead.crashes, dead.rev], ["failed", 3, 5])
    const parked = Job.settle(row, outcome("park", { park })) as Job.Row
    assert.deepStrictEqual(
      [Job.expire(parked).section, Job.expire(parked).status],
      ["out", "pending"]
    )
    assert.strictEqual(Job.resume(Job.hold(parked)).status, "held")
  })

  const Event = Schema.Literals([
    "pass",
    "defer",
    "park",
    "fail",
    "crash",
    "hold",
    "release",
    "due",
    "event"
  ])
  it.prop(
    "rev never falls, only a hold keeps it, and no event leaves a row without a status",
    {
      events: Schema.Array(Event)
    },
    ({ events }) => {
      let now = row
      for (const event of events) {
        const before = now
        if (event === "crash")
          now = now.status === "pending" || now.status === "held" ? Job.crash(now, null) : now
        else if (event === "hold") now = Job.hold(now)
        else if (event === "release") now = now.status === "held" ? Job.release(now) : now
        else if (event === "due") now = now.status === "deferred" ? Job.promote(now) : now
        else if (event === "event") now = now.status === "parked" ? Job.resume(now) : now
        else {
          const next = Job.settle(
            now,
            outcome(event, {
              rev: now.rev,
              ...(event === "pass" ? { section: "b" } : {}),
              ...(event === "park" ? { park } : {})
            })
          )
          now = next === undefined || next === "gone" ? now : next
        }
        const changed = JSON.stringify(now) !== JSON.stringify(before)
        assert.isTrue(
          event === "hold" ? now.rev === before.rev : !changed || now.rev === before.rev + 1
        )
        assert.include(["pending", "deferred", "parked", "held", "failed"], now.status)
        assert.isTrue(now.status !== "deferred" || now.nextInMillis !== null)
        assert.isTrue(now.status !== "parked" || now.parkedReason !== null)
      }
    }
  )

  it.prop(
    "pauses grow, stay in their bounds and are spread",
    {
      attempts: Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 1000 })),
      chance: Schema.Finite.check(Schema.isBetween({ minimum: 0, maximum: 1 }))
    },
    ({ attempts, chance }) => {
      const pause = Duration.toMillis(Job.backoff(attempts, chance))
      assert.isAtMost(pause, 4 * 3600e3)
      assert.isAtLeast(pause, 22_500)
      assert.isAtLeast(Duration.toMillis(Job.backoff(attempts + 1, chance)), pause)
    }
  )

  it("a child is named alike each time and unlike its siblings", () => {
    const token = Job.childToken("p", "list", "a@b")
    assert.match(token, /^[0-9a-f]{32}$/)
    assert.strictEqual(Job.childToken("p", "list", "a@b"), token)
    assert.strictEqual(
      new Set([token, Job.childToken("p", "lis", "ta@b"), Job.childToken("p", "list", "a@c")]).size,
      3
    )
  })
})
