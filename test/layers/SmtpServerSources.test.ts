// SPDX-License-Identifier: AGPL-3.0-or-later
/** What one source may hold. */
import { assert, describe, it } from "@effect/vitest"
import * as Sources from "../../layers/SmtpServerSources.ts"
import { limited } from "../daemon/IngressWorld.ts"

const make = (changes: Parameters<typeof limited>[0]) => Sources.make(limited(changes).limits)

/** How many of the addresses get in, one after another. */
const entered = (sources: Sources.Sources, ips: ReadonlyArray<string>): number =>
  ips.filter((ip) => sources.enter(ip) !== undefined).length

const times = (n: number, ip: (i: number) => string) => Array.from({ length: n }, (_, i) => ip(i))

describe("connections of one source", () => {
  it("one host with many IPv6 addresses had as many connections as it liked", () => {
    const sources = make({ connections: 256, connectionsPerSource: 8 })
    const hex = (i: number) => (i + 1).toString(16)
    assert.strictEqual(
      entered(
        sources,
        times(300, (i) => `2001:db8:1:2:${hex(i)}::1`)
      ),
      8
    )
    assert.strictEqual(
      entered(
        sources,
        times(300, (i) => `fe80::${hex(i)}%eth${i}`)
      ),
      8
    )
    assert.strictEqual(
      entered(
        sources,
        times(50, (i) => `2001:db8:1:${hex(i + 2)}::1`)
      ),
      50
    )
    assert.strictEqual(
      entered(
        sources,
        times(9, () => "::ffff:192.0.2.1")
      ),
      8
    )
    assert.strictEqual(entered(sources, ["192.0.2.1", "192.0.2.2"]), 1)
  })

  it("are at most a quarter of all, but for this host and for networks of ours", () => {
    const sources = make({
      connections: 40,
      connectionsPerSource: 100,
      exempt: ["198.51.100.0/24"]
    })
    for (const [ip, most] of [
      ["192.0.2.1", 10],
      ["198.51.100.1", 300],
      ["127.0.0.1", 100],
      ["::1", 100]
    ] as const) {
      assert.strictEqual(
        entered(
          sources,
          times(300, () => ip)
        ),
        most,
        ip
      )
    }
  })

  it("are one at least, and there is room again when one leaves", () => {
    const sources = make({ connections: 2 })
    const share = sources.enter("192.0.2.1")
    assert.isUndefined(sources.enter("192.0.2.1"))
    share!.leave()
    assert.isDefined(sources.enter("192.0.2.1"))
  })
})

describe("memory of one source", () => {
  const limits = { memoryBytes: 1000, messageBytes: 100, exempt: ["198.51.100.0/24"] }

  it("one source could have all of it", () => {
    const sources = make(limits)
    const budget = (ip: string) => sources.enter(ip)!.budget
    const [first, second] = [budget("2001:db8::1"), budget("2001:db8::2")]
    assert.isTrue(first.reserve(200))
    assert.isFalse(second.reserve(51))
    assert.strictEqual(second.freeBytes(), 50)
    assert.isTrue(second.reserve(50))
    assert.isTrue(budget("192.0.2.1").reserve(250))
    assert.isTrue(budget("198.51.100.1").reserve(500))
    // Now there is none for anybody.
    assert.isFalse(budget("192.0.2.2").reserve(1))
    first.release(200)
    assert.isTrue(second.reserve(200))
  })

  it("is counted as long as it is held, also when the connection is gone", () => {
    const sources = make(limits)
    const left = sources.enter("192.0.2.1")!
    assert.isTrue(left.budget.reserve(200))
    left.leave()
    const next = sources.enter("192.0.2.1")!
    assert.strictEqual(next.budget.freeBytes(), 50)
    left.budget.release(200)
    assert.strictEqual(next.budget.freeBytes(), 250)
  })

  it("holds a message of the size that is announced", () => {
    const { budget } = make({ ...limits, messageBytes: 700 }).enter("192.0.2.1")!
    assert.isTrue(budget.reserve(700))
  })
})
