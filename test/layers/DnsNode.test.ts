// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as TestClock from "effect/testing/TestClock"
import type * as Scope from "effect/Scope"
import * as DnsCache from "../../layers/DnsCache.ts"
import { DnsNode } from "../../layers/DnsNode.ts"
import type { Options } from "../../layers/DnsNode.ts"
import { Dns, isName } from "../../src/services/Dns.ts"
import type { RecordType } from "../../src/services/Dns.ts"
import * as DnsServer from "../support/DnsServer.ts"
import * as DnsZone from "../support/DnsZone.ts"

const long = "v=DKIM1; p=" + "A".repeat(700)
const zone: DnsZone.Zone = {
  "a.example": {
    A: ["192.0.2.1", "192.0.2.2"],
    AAAA: ["2001:db8::1"],
    MX: ["10 mx1.a.example", "20 mx2.a.example"],
    TXT: ["v=spf1 -all", ["two ", "strings"]]
  },
  "big.example": { TXT: [long, "x".repeat(3000)] },
  "alias.example": { CNAME: ["a.example"] },
  "1.2.0.192.in-addr.arpa": { PTR: ["a.example"] },
  "deep.below.example": { TXT: ["x"] },
  "fail.example": "SERVFAIL",
  "refused.example": "REFUSED",
  "late.example": "TIMEOUT"
}

const ask = (name: string, type: RecordType) => Dns.use((dns) => dns.resolve(name, type))
const sorted = (name: string, type: RecordType) =>
  Effect.map(ask(name, type), (records) => records.toSorted())
const why = (name: string, type: RecordType) =>
  ask(name, type).pipe(
    Effect.flip,
    Effect.map((error) => [error.reason, error.detail])
  )

const real = (
  options?: Omit<Options, "servers">
): Effect.Effect<readonly [Layer.Layer<Dns>, DnsServer.DnsServer], never, Scope.Scope> =>
  Effect.map(DnsServer.start(zone), (server) => [
    DnsNode({ servers: [server.address], ...options }),
    server
  ])

/** What every Dns must do; TIMEOUT is left to those that have a clock of their own. */
const contract = (name: string, provided: Effect.Effect<Layer.Layer<Dns>, never, Scope.Scope>) =>
  describe(name, () => {
    const answers = <A, E>(title: string, effect: Effect.Effect<A, E, Dns>, expected: A) =>
      it.live(title, () =>
        Effect.gen(function* () {
          const layer = yield* provided
          assert.deepStrictEqual(yield* Effect.provide(effect, layer), expected)
        }).pipe(Effect.scoped)
      )
    answers("gives addresses", sorted("A.example", "A"), ["192.0.2.1", "192.0.2.2"])
    answers("gives addresses of IPv6", sorted("a.example.", "AAAA"), ["2001:db8::1"])
    answers("gives exchanges with their preference", sorted("a.example", "MX"), [
      "10 mx1.a.example",
      "20 mx2.a.example"
    ])
    answers("joins the strings of a text", sorted("a.example", "TXT"), [
      "two strings",
      "v=spf1 -all"
    ])
    answers("gives texts that need TCP", sorted("big.example", "TXT"), [long, "x".repeat(3000)])
    answers("gives names of addresses", sorted("1.2.0.192.in-addr.arpa", "PTR"), ["a.example"])
    answers("a character that no resolver sends is no name", why("a+b=c.example", "A"), [
      "absent",
      "name"
    ])
    answers("follows an alias", sorted("alias.example", "A"), ["192.0.2.1", "192.0.2.2"])
    answers("gives an alias itself", sorted("alias.example", "CNAME"), ["a.example"])
    answers("a name that is not there is absent", why("no.example", "A"), ["absent", "nxdomain"])
    answers("a type that is not there is absent", why("a.example", "PTR"), ["absent", "nodata"])
    answers("a name between is there without records", why("below.example", "TXT"), [
      "absent",
      "nodata"
    ])
    answers("a server that fails is trouble", why("fail.example", "TXT"), ["trouble", "server"])
    answers("a server that refuses is trouble", why("refused.example", "TXT"), [
      "trouble",
      "server"
    ])
    answers("what is no name is absent", why(`${"x".repeat(64)}.example`, "A"), ["absent", "name"])
    answers("a control character is no name", why("a\0b.example", "A"), ["absent", "name"])
  })

contract(
  "DnsNode",
  Effect.map(real(), ([layer]) => layer)
)
contract("the DNS of the tests in memory", Effect.succeed(DnsZone.memory(zone)))

describe("DnsNode", () => {
  it.live("a server that does not answer is trouble within the time of the layer", () =>
    Effect.gen(function* () {
      const [layer] = yield* real({ timeout: Duration.millis(300) })
      const [time, found] = yield* Effect.timed(why("late.example", "TXT")).pipe(
        Effect.provide(layer)
      )
      assert.deepStrictEqual(found, ["trouble", "timeout"])
      assert.isBelow(Duration.toMillis(time), 3_000)
    }).pipe(Effect.scoped)
  )

  it.live("equal questions in flight are asked once", () =>
    Effect.gen(function* () {
      const [layer, server] = yield* real()
      const burst = Array.from({ length: 50 }, () => ask("a.example", "TXT"))
      yield* Effect.all(burst, { concurrency: "unbounded" }).pipe(Effect.provide(layer))
      assert.strictEqual(server.asked.length, 1)
    }).pipe(Effect.scoped)
  )

  it.effect("answers and absences are kept for their time", () =>
    Effect.gen(function* () {
      const [layer, server] = yield* real()
      const count = Effect.gen(function* () {
        yield* ask("a.example", "A")
        yield* why("no.example", "A")
        return server.asked.length
      })
      yield* Effect.gen(function* () {
        assert.strictEqual(yield* count, 2)
        yield* TestClock.adjust("59 seconds")
        assert.strictEqual(yield* count, 2)
        yield* TestClock.adjust("2 seconds") // the TTL of the zone is 60 s
        assert.strictEqual(yield* count, 4)
      }).pipe(Effect.provide(layer))
    }).pipe(Effect.scoped)
  )

  it.live("trouble is asked again, and what has recovered answers (R19)", () =>
    Effect.gen(function* () {
      const [layer, server] = yield* real()
      yield* Effect.gen(function* () {
        yield* why("fail.example", "TXT")
        server.serve({ "fail.example": { TXT: ["back"] } })
        assert.deepStrictEqual(yield* ask("fail.example", "TXT"), ["back"])
      }).pipe(Effect.provide(layer))
    }).pipe(Effect.scoped)
  )

  it.live("one asker that gives up leaves the others their answer", () =>
    Effect.gen(function* () {
      const [layer, server] = yield* real()
      yield* Effect.gen(function* () {
        server.serve({ "slow.example": "TIMEOUT" })
        const short = yield* Effect.forkChild(
          Effect.timeoutOption(ask("slow.example", "TXT"), "20 millis")
        )
        const patient = yield* Effect.forkChild(ask("slow.example", "TXT"))
        assert.strictEqual((yield* Fiber.join(short))._tag, "None")
        server.serve({ "slow.example": { TXT: ["late"] } })
        assert.deepStrictEqual(yield* Fiber.join(patient), ["late"])
      }).pipe(Effect.provide(layer))
    }).pipe(Effect.scoped)
  )
})

describe("DnsCache", () => {
  const answer = (...records: ReadonlyArray<string>): DnsCache.Answer => Exit.succeed(records)

  it("drops what was used longest ago when entries are too many", () => {
    const cache = DnsCache.make({ entries: 2, octets: 1e6 })
    cache.set("a", { answer: answer("1"), until: 10 })
    cache.set("b", { answer: answer("2"), until: 10 })
    assert.isDefined(cache.get("a", 0))
    cache.set("c", { answer: answer("3"), until: 10 })
    assert.isUndefined(cache.get("b", 0))
    assert.isDefined(cache.get("a", 0))
    assert.strictEqual(cache.entries(), 2)
  })

  it("keeps its octets bounded, and counts them down again", () => {
    const cache = DnsCache.make({ entries: 1000, octets: 10_000 })
    for (let i = 0; i < 100; i++)
      cache.set(`name${i}`, { answer: answer("x".repeat(1000)), until: 10 })
    assert.isAtMost(cache.octets(), 10_000)
    assert.isAbove(cache.entries(), 0)
    for (let i = 0; i < 100; i++) cache.get(`name${i}`, 11)
    assert.strictEqual(cache.octets(), 0)
    assert.strictEqual(cache.entries(), 0)
  })
})

describe("isName", () => {
  it("takes names of the DNS only", () => {
    for (const name of [
      "a",
      "a.b.",
      "*.b",
      "a/b",
      "_dmarc.a-b.example",
      "x".repeat(63) + ".example"
    ])
      assert.isTrue(isName(name), name)
    const tooLong = Array.from({ length: 5 }, () => "x".repeat(60)).join(".")
    const odd = ["a b", "a+b", "a\r\nb", "bücher.example", "a\\046b"]
    for (const name of ["", ".", "a..b", ".a", tooLong, ...odd]) {
      assert.isFalse(isName(name), name)
    }
  })
})
