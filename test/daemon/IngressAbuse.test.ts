// SPDX-License-Identifier: AGPL-3.0-or-later
/** What it costs to guess, to babble and to speak out of turn. */
import { assert, describe, it } from "@effect/vitest"
import { networkInterfaces } from "node:os"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as TestClock from "effect/testing/TestClock"
import { Accounts } from "../../src/services/Accounts.ts"
import type { Resolution } from "../../src/services/Accounts.ts"
import {
  Client,
  greeted,
  limited,
  makeGate,
  makeRecorder,
  settings,
  start
} from "./IngressWorld.ts"

const whole = "Subject: x\r\n\r\nx\r\n.\r\n"
const unknown = "RCPT TO:<nobody@ours.example>\r\n"

const replies = async (one: Client, count: number): Promise<ReadonlyArray<string>> => {
  const codes: Array<string> = []
  for (let i = 0; i < count; i++) {
    codes.push((await one.reply()).replace(/^(\d{3} \d\.\d\.\d).*/, "$1"))
  }
  return codes
}

const repeated = (count: number, reply: string) => Array.from({ length: count }, () => reply)

/** An address of this machine that is not the loopback's. */
const ownAddress = Object.values(networkInterfaces())
  .flatMap((addresses) => addresses ?? [])
  .find(({ family, internal }) => family === "IPv4" && !internal)?.address

describe("errors", () => {
  it.effect("81,800 unknown recipients a second on one connection: the third waits 2 seconds", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder(), limited({ exempt: [] }))
      const [one, clock] = [yield* greeted(port), yield* greeted(port)]
      one.send(`MAIL FROM:<>\r\n${unknown.repeat(20)}`)
      const first = yield* Effect.promise(() => replies(one, 3))
      assert.deepStrictEqual(first, ["250 2.1.0", "550 5.1.1", "550 5.1.1"])
      let answered = 0
      const next = one.reply()
      void next.then(() => answered++)
      // Round trips on another session: whatever the server has to say has come.
      const trips = Effect.promise(async () => {
        for (let i = 0; i < 5; i++) await clock.say("NOOP")
      })
      yield* trips
      yield* TestClock.adjust("1900 millis")
      yield* trips
      assert.strictEqual(answered, 0)
      yield* TestClock.adjust("100 millis")
      assert.match(yield* Effect.promise(() => next), /^550 5\.1\.1/)
      for (let i = 4; i <= 15; i++) {
        const later = one.reply()
        yield* trips
        yield* TestClock.adjust("2 seconds")
        assert.match(yield* Effect.promise(() => later), /^550 5\.1\.1/, String(i))
      }
      assert.match(yield* Effect.promise(() => one.reply()), /^421 4\.7\.0 mx\.ours\.example/)
      yield* Effect.promise(() => one.closed)
    }).pipe(Effect.scoped)
  )

  it.effect("networks of ours do not wait, but the fifteenth error is their last too", () =>
    Effect.gen(function* () {
      const one = yield* greeted(yield* start(makeRecorder()))
      one.send(`MAIL FROM:<>\r\n${unknown.repeat(20)}`)
      const said = yield* Effect.promise(() => replies(one, 18))
      const refused = repeated(15, "550 5.1.1")
      assert.deepStrictEqual(said, ["250 2.1.0", ...refused, "421 4.7.0", "closed"])
    }).pipe(Effect.scoped)
  )

  it.effect("a recipient that waits is no reason to end a session for being late", () =>
    Effect.gen(function* () {
      const port = yield* start(
        makeRecorder(),
        limited({ exempt: [], commandTimeout: Duration.seconds(1), unknownRecipients: 0 })
      )
      const one = yield* greeted(port)
      const clock = yield* greeted(port)
      one.send(`MAIL FROM:<>\r\n${unknown}`)
      yield* Effect.promise(async () => {
        await one.reply()
        for (let i = 0; i < 5; i++) await clock.say("NOOP")
      })
      yield* TestClock.adjust("2 seconds")
      assert.match(yield* Effect.promise(() => one.reply()), /^550 5\.1\.1/)
    }).pipe(Effect.scoped)
  )

  it.live("a hundred NOOPs are enough, and a message begins the count anew", () =>
    Effect.gen(function* () {
      const one = yield* greeted(yield* start(makeRecorder()))
      yield* Effect.promise(async () => {
        // EHLO was the first of them.
        for (let round = 0; round < 2; round++) {
          one.send("NOOP\r\nRSET\r\nvrfy x\r\n".repeat(33))
          assert.notInclude(await replies(one, 99), "421 4.7.0")
          assert.match(await one.message(whole), /^250/)
        }
        one.send("NOOP\r\n".repeat(200))
        const said = await replies(one, 116)
        assert.deepStrictEqual(said, [...repeated(114, "250 2.0.0"), "421 4.7.0", "closed"])
      })
    }).pipe(Effect.scoped)
  )

  it.live("who names 200 recipients too many still gets the message to the others", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const one = yield* greeted(yield* start(recorder, limited({ recipients: 1 })))
      one.send(
        `MAIL FROM:<>\r\nRCPT TO:<dave@ours.example>\r\n${"RCPT TO:<eve@ours.example>\r\n".repeat(200)}DATA\r\n`
      )
      yield* Effect.promise(async () => {
        const said = await replies(one, 202)
        assert.deepStrictEqual(said.slice(2), repeated(200, "452 4.5.3"))
        assert.match(await one.reply(), /^354/)
        one.send(whole)
        assert.match(await one.reply(), /^250/)
      })
      assert.deepStrictEqual(recorder.rows()[0]?.recipients, ["dave@ours.example"])
    }).pipe(Effect.scoped)
  )
})

describe("speaking out of turn", () => {
  it.live("a command that ended with a bare LF was obeyed", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const one = yield* greeted(yield* start(recorder))
      one.send("NOOP\r\nMAIL FROM:<>\nNOOP\r\nRSET\n\nNOOP\r\n")
      yield* Effect.promise(async () => {
        const [ok, bare] = ["250 2.0.0", "500 5.5.2"] as const
        assert.deepStrictEqual(await replies(one, 6), [ok, bare, ok, bare, bare, ok])
        assert.match(await one.say("RCPT TO:<dave@ours.example>"), /^503/)
        // CR and LF in two segments are one end of a line.
        one.send("NOOP\r")
        await new Promise((resolve) => setImmediate(resolve))
        one.send("\n")
        assert.match(await one.reply(), /^250/)
        one.send("NOOP")
        await new Promise((resolve) => setImmediate(resolve))
        one.send("\n")
        assert.match(await one.reply(), /^500/)
      })
    }).pipe(Effect.scoped)
  )

  for (const [name, before] of [
    ["at once", ""],
    ["as the last of a hundred commands", "VRFY x\r\n".repeat(97)]
  ] as const) {
    it.live(`a message that did not wait for 354 is not taken, ${name}`, () =>
      Effect.gen(function* () {
        const recorder = makeRecorder()
        const one = yield* greeted(yield* start(recorder))
        const group = "MAIL FROM:<>\r\nRCPT TO:<dave@ours.example>\r\nDATA\r\n"
        one.send(`${before}${group}${whole}`)
        yield* Effect.promise(async () => {
          await replies(one, before.length / 8)
          assert.deepStrictEqual(await replies(one, 4), [
            "250 2.1.0",
            "250 2.1.5",
            "554 5.5.0",
            "closed"
          ])
        })
        assert.deepStrictEqual(recorder.rows(), [])
      }).pipe(Effect.scoped)
    )
  }
})

it.live("a message that comes while a recipient is looked up has not waited for 354 either", () =>
  Effect.gen(function* () {
    const recorder = makeRecorder()
    const gate = yield* makeGate
    const slow = Layer.succeed(Accounts, {
      resolve: () => Effect.as(gate.pass, [{ _tag: "Local", mailbox: "dave" } as Resolution])
    })
    const port = yield* start(recorder, {}, slow)
    const [one, clock] = [yield* greeted(port), yield* greeted(port)]
    one.send("MAIL FROM:<>\r\nRCPT TO:<dave@ours.example>\r\nDATA\r\n")
    yield* gate.reached
    one.send(whole)
    // Round trips on another session: the server has read what was sent before.
    yield* Effect.promise(async () => {
      for (let trip = 0; trip < 5; trip++) await clock.say("NOOP")
    })
    yield* gate.open
    const said = yield* Effect.promise(() => replies(one, 4))
    assert.deepStrictEqual(said, ["250 2.1.0", "250 2.1.5", "554 5.5.0", "closed"])
    assert.deepStrictEqual(recorder.rows(), [])
  }).pipe(Effect.scoped)
)

describe("one source", () => {
  it.live("has room again when one of its connections is gone", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder(), limited({ connectionsPerSource: 1, exempt: [] }))
      const first = yield* greeted(port)
      yield* Effect.promise(async () => {
        await first.say("QUIT")
        await first.closed
        // The server sees the end a moment after the client does.
        for (;;) {
          const again = new Client(port)
          const said = await again.reply()
          again.socket.destroy()
          if (said.startsWith("220")) return
        }
      })
    }).pipe(Effect.scoped)
  )

  it.live("does not get all of the memory, and networks of ours may", () =>
    Effect.gen(function* () {
      const small = { memoryBytes: 40_000, messageBytes: 10_000 }
      for (const [exempt, wanted] of [
        [[], /^452 4\.3\.1/],
        [settings.limits.exempt, /^250/]
      ] as const) {
        const recorder = makeRecorder()
        const gate = yield* makeGate
        recorder.recorder.before = () => gate.pass
        const port = yield* start(recorder, limited({ ...small, exempt }))
        const [holder, other] = [yield* greeted(port), yield* greeted(port)]
        yield* Effect.promise(() => holder.toData())
        holder.send(`\r\n${"x".repeat(9000)}\r\n.\r\n`)
        yield* gate.reached
        assert.match(yield* Effect.promise(() => other.say("MAIL FROM:<> SIZE=5000")), wanted)
        yield* gate.open
        assert.match(yield* Effect.promise(() => holder.reply()), /^250/)
      }
    }).pipe(Effect.scoped)
  )

  it.live.skipIf(ownAddress === undefined)("does not get all of the connections", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder(), {
        ...limited({ connections: 8, connectionsPerSource: 8 }),
        listeners: [{ name: "mx", address: "0.0.0.0", port: 0 }]
      })
      const clients = [1, 2, 3].map(() => new Client(port, ownAddress))
      yield* Effect.addFinalizer(() =>
        Effect.sync(() => clients.forEach((one) => one.socket.destroy()))
      )
      const said = yield* Effect.promise(() => Promise.all(clients.map((one) => one.reply())))
      assert.deepStrictEqual(said.map((reply) => reply.slice(0, 3)).toSorted(), [
        "220",
        "220",
        "421"
      ])
    }).pipe(Effect.scoped)
  )
})
