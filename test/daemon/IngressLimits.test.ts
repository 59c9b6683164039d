// SPDX-License-Identifier: AGPL-3.0-or-later
/** What the ingress does not put up with: late, greedy and vanishing clients; and how it stops. */
import { assert, describe, it } from "@effect/vitest"
import { spawn } from "node:child_process"
import { mkdtempSync, rmSync } from "node:fs"
import { createServer } from "node:net"
import type { AddressInfo } from "node:net"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { setFlagsFromString } from "node:v8"
import { runInNewContext } from "node:vm"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Scope from "effect/Scope"
import * as TestClock from "effect/testing/TestClock"
import { selfSigned } from "../../layers/Certificate.ts"
import { Client, client, greeted, limited, makeGate, makeRecorder, start } from "./IngressWorld.ts"

setFlagsFromString("--expose-gc")
const collectGarbage = runInNewContext("gc") as () => void

/** Octets of buffers that somebody still holds. */
const heldBytes = (): number => {
  collectGarbage()
  return process.memoryUsage().arrayBuffers
}

const whole = "Subject: x\r\n\r\nx\r\n.\r\n"

describe("the clock", () => {
  it.effect("ends a session whose command does not get ready, however the octets drip", () =>
    Effect.gen(function* () {
      const one = yield* greeted(yield* start(makeRecorder()))
      for (const octet of "NOOP") {
        one.send(octet)
        yield* TestClock.adjust("70 seconds")
      }
      yield* TestClock.adjust("21 seconds")
      assert.match(yield* Effect.promise(() => one.reply()), /^421 4\.4\.2 mx\.ours\.example/)
      yield* Effect.promise(() => one.closed)
    }).pipe(Effect.scoped)
  )

  it.effect("ends an idle session, not one that goes on", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder())
      const [idle, busy] = [yield* greeted(port), yield* greeted(port)]
      yield* TestClock.adjust("299 seconds")
      assert.match(yield* Effect.promise(() => busy.say("NOOP")), /^250/)
      yield* TestClock.adjust("2 seconds")
      assert.match(yield* Effect.promise(() => idle.reply()), /^421 4\.4\.2/)
      assert.match(yield* Effect.promise(() => busy.say("NOOP")), /^250/)
    }).pipe(Effect.scoped)
  )

  it.effect("ends a handshake that does not go on", () =>
    Effect.gen(function* () {
      const directory = yield* Effect.acquireRelease(
        Effect.sync(() => mkdtempSync(join(tmpdir(), "pepsi-tls-"))),
        (path) => Effect.sync(() => rmSync(path, { recursive: true }))
      )
      const tls = yield* selfSigned({ directory, hostname: "mx.ours.example" })
      const one = yield* greeted(yield* start(makeRecorder(), { tls }))
      assert.match(yield* Effect.promise(() => one.say("STARTTLS")), /^220/)
      yield* TestClock.adjust("31 seconds")
      assert.strictEqual(yield* Effect.promise(() => one.reply()), "closed")
    }).pipe(Effect.scoped)
  )

  it.effect("ends a message that stands still, and nothing is queued", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const one = yield* greeted(yield* start(recorder))
      yield* Effect.promise(() => one.toData())
      one.send("Subject: x\r\n")
      yield* TestClock.adjust("182 seconds")
      yield* TestClock.adjust("181 seconds")
      assert.match(yield* Effect.promise(() => one.reply()), /^421 4\.4\.2/)
      assert.deepStrictEqual(recorder.rows(), [])
    }).pipe(Effect.scoped)
  )

  it.effect("ends a message that comes too slowly, not one that is merely slow", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder())
      const [slow, fair, clock] = [yield* greeted(port), yield* greeted(port), yield* greeted(port)]
      yield* Effect.promise(async () => {
        await slow.toData()
        await fair.toData()
      })
      for (let minute = 0; minute < 3; minute++) {
        slow.send("a drop\r\n")
        fair.send(`${"x".repeat(60)}\r\n`.repeat(600))
        // Round trips on a third session: the server has read what was sent before.
        for (let trip = 0; trip < 5; trip++) yield* Effect.promise(() => clock.say("NOOP"))
        yield* TestClock.adjust("61 seconds")
      }
      assert.match(yield* Effect.promise(() => slow.reply()), /^421 4\.4\.2/)
      fair.send(".\r\n")
      assert.match(yield* Effect.promise(() => fair.reply()), /^250/)
    }).pipe(Effect.scoped)
  )

  it.effect(
    "ends every session after its time, but never one whose message is being committed",
    () =>
      Effect.gen(function* () {
        const recorder = makeRecorder()
        const gate = yield* makeGate
        recorder.recorder.before = () => gate.pass
        const port = yield* start(recorder)
        const [busy, committing] = [yield* greeted(port), yield* greeted(port)]
        yield* Effect.promise(() => committing.toData())
        committing.send(whole)
        yield* gate.reached
        for (let i = 0; i < 31; i++) {
          yield* TestClock.adjust("1 minute")
          if (i < 29) yield* Effect.promise(() => busy.say("NOOP"))
        }
        assert.match(yield* Effect.promise(() => busy.reply()), /^421 4\.4\.2/)
        yield* gate.open
        assert.match(yield* Effect.promise(() => committing.reply()), /^250/)
      }).pipe(Effect.scoped)
  )
})

describe("numbers", () => {
  it.live(
    "R59: one connection too many reads the whole reply, and there is room again when one leaves",
    () =>
      Effect.gen(function* () {
        const port = yield* start(makeRecorder(), limited({ connections: 2 }))
        const [first] = [yield* greeted(port), yield* greeted(port)]
        const third = yield* client(port)
        yield* Effect.promise(async () => {
          assert.strictEqual(
            await third.reply(),
            "421 4.3.2 mx.ours.example too many connections, try again later"
          )
          assert.strictEqual(await third.reply(), "closed")
          await first.say("QUIT")
          await first.closed
        })
        // The server sees the end a moment after the client does.
        yield* Effect.promise(async () => {
          for (;;) {
            const again = new Client(port)
            const said = await again.reply()
            again.socket.destroy()
            if (said.startsWith("220")) return
          }
        })
      }).pipe(Effect.scoped)
  )

  it.live("one address has its share, unless it is exempt", () =>
    Effect.gen(function* () {
      const few = { connectionsPerSource: 2 }
      const port = yield* start(makeRecorder(), limited({ ...few, exempt: [] }))
      const exempt = yield* start(makeRecorder(), limited(few))
      yield* greeted(port)
      yield* greeted(port)
      const third = yield* client(port)
      assert.match(yield* Effect.promise(() => third.reply()), /^421 4\.7\.0 mx\.ours\.example/)
      for (let i = 0; i < 3; i++) yield* greeted(exempt)
    }).pipe(Effect.scoped)
  )

  it.live("one recipient too many is asked to come in another transaction", () =>
    Effect.gen(function* () {
      const one = yield* greeted(yield* start(makeRecorder(), limited({ recipients: 2 })))
      yield* Effect.promise(async () => {
        await one.say("MAIL FROM:<>")
        for (const name of ["dave", "eve", "eve"])
          assert.match(await one.say(`RCPT TO:<${name}@ours.example>`), /^250/)
        assert.match(await one.say("RCPT TO:<u@ours.example>"), /^452 4\.5\.3/)
        await one.say("DATA")
        one.send(whole)
        assert.match(await one.reply(), /^250/)
      })
    }).pipe(Effect.scoped)
  )

  it.live("ten unknown commands end a session", () =>
    Effect.gen(function* () {
      const one = yield* greeted(yield* start(makeRecorder()))
      one.send("FOO\r\n".repeat(50))
      yield* Effect.promise(async () => {
        for (let i = 0; i < 9; i++) assert.match(await one.reply(), /^500 5\.5\.2/)
        assert.match(await one.reply(), /^421 4\./)
        await one.closed
      })
    }).pipe(Effect.scoped)
  )

  it.live("a client that does not read gets every reply once it does", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder(), limited({ idleCommands: 50_000 }))
      const [mute, other] = [yield* greeted(port), yield* greeted(port)]
      mute.socket.pause()
      mute.send("VRFY x\r\n".repeat(50_000))
      yield* Effect.promise(async () => {
        for (let i = 0; i < 20; i++) assert.match(await other.say("NOOP"), /^250/)
        mute.socket.resume()
        for (let i = 0; i < 50_000; i++) assert.strictEqual((await mute.reply()).slice(0, 3), "252")
      })
    }).pipe(Effect.scoped)
  )

  it.live("a command line without an end is cut off", () =>
    Effect.gen(function* () {
      const one = yield* greeted(yield* start(makeRecorder()))
      one.send("MAIL FROM:<".padEnd(100_000, "a"))
      assert.match(yield* Effect.promise(() => one.reply()), /^421 4\.5\.2/)
      yield* Effect.promise(() => one.closed)
    }).pipe(Effect.scoped)
  )
})

describe("memory", () => {
  it.live(
    "A-ING-10: of a message that is too large nothing is kept while the rest of it is read",
    () =>
      Effect.gen(function* () {
        const one = yield* greeted(yield* start(makeRecorder()))
        yield* Effect.promise(async () => {
          await one.toData()
          const megabyte = Buffer.alloc(1024 * 1024, `${"x".repeat(62)}\r\n`)
          one.send("Subject: x\r\n\r\n")
          const before = heldBytes()
          let most = 0
          for (let i = 0; i < 60; i++) {
            await new Promise<void>((resolve) => one.socket.write(megabyte, () => resolve()))
            if (i % 10 === 9) most = Math.max(most, heldBytes() - before)
          }
          one.send(".\r\n")
          assert.match(await one.reply(), /^552 5\.3\.4/)
          // Segments that are done with are freed a little later than they are given up.
          assert.isBelow(most, 24 * 1024 * 1024, "octets held while 60 MiB went by")
          assert.match(await one.say("NOOP"), /^250/)
        })
      }).pipe(Effect.scoped)
  )

  it.live("is shared: who finds none is asked to come later, and it is given back", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const gate = yield* makeGate
      recorder.recorder.before = () => gate.pass
      const port = yield* start(recorder, limited({ memoryBytes: 9500 }))
      const holder = yield* greeted(port)
      const other = yield* greeted(port)
      yield* Effect.promise(() => holder.toData())
      holder.send(`\r\n${"x".repeat(9000)}\r\n.\r\n`)
      yield* gate.reached
      yield* Effect.promise(async () => {
        assert.match(await other.message(whole), /^452 4\.3\.1/)
        assert.match(await other.say("MAIL FROM:<> SIZE=10000"), /^452 4\.3\.1/)
      })
      yield* gate.open
      yield* Effect.promise(async () => {
        assert.match(await holder.reply(), /^250/)
        assert.match(await other.message(whole), /^250/)
      })
      assert.strictEqual(recorder.rows().length, 2)
    }).pipe(Effect.scoped)
  )
})

const reset = async (one: Client, octets: string): Promise<void> => {
  await one.greet()
  await one.toData()
  one.send(octets)
  await new Promise((resolve) => setImmediate(resolve))
  one.socket.resetAndDestroy()
  await one.closed
}

describe("R01: clients that vanish", () => {
  for (const [name, octets] of [
    ["at once", ""],
    ["within the body", `Subject: x\r\n${"y".repeat(100_000)}`]
  ] as const) {
    it.live(`200 of them, ${name}, leave no row and a server that goes on`, () =>
      Effect.gen(function* () {
        const recorder = makeRecorder()
        const port = yield* start(recorder, limited({ memoryBytes: 220 * 128 * 1024 }))
        yield* Effect.promise(() =>
          Promise.all(Array.from({ length: 200 }, () => reset(new Client(port), octets)))
        )
        const after = yield* greeted(port)
        assert.match(yield* Effect.promise(() => after.message(whole)), /^250/)
        assert.strictEqual(recorder.rows().length, 1)
        // All of the memory is back: the largest message there may be still finds room.
        yield* Effect.promise(() =>
          Promise.all(
            Array.from({ length: 24 }, async () => {
              const one = new Client(port)
              await one.greet()
              assert.match(await one.message(`\r\n${"x\r\n".repeat(300_000)}.\r\n`), /^250/)
              one.socket.destroy()
            })
          )
        )
      }).pipe(Effect.scoped)
    )
  }

  it.live(
    "200 of them while the message is being committed: it is queued once, nothing else happens",
    () =>
      Effect.gen(function* () {
        const recorder = makeRecorder()
        const gate = yield* makeGate
        recorder.recorder.before = () => gate.pass
        const port = yield* start(recorder)
        yield* Effect.promise(() =>
          Promise.all(Array.from({ length: 200 }, () => reset(new Client(port), whole)))
        )
        yield* gate.open
        const after = yield* greeted(port)
        assert.match(yield* Effect.promise(() => after.message(whole)), /^250/)
        const tokens = recorder.rows().map(({ token }) => token)
        assert.strictEqual(new Set(tokens).size, tokens.length)
        assert.isAtMost(tokens.length, 201)
      }).pipe(Effect.scoped)
  )
})

describe("listening", () => {
  it.live("says which address and port are taken", () =>
    Effect.gen(function* () {
      const other = createServer().listen(0, "127.0.0.1")
      yield* Effect.promise(() => new Promise((resolve) => other.once("listening", resolve)))
      yield* Effect.addFinalizer(() => Effect.sync(() => other.close()))
      const { port } = other.address() as AddressInfo
      const error = yield* Effect.flip(
        start(makeRecorder(), { listeners: [{ name: "mx", address: "127.0.0.1", port }] })
      )
      assert.deepStrictEqual(
        [error.reason, error.address, error.port],
        ["in use", "127.0.0.1", port]
      )
      assert.strictEqual(error.message, `cannot listen on 127.0.0.1 port ${port}: in use`)
    }).pipe(Effect.scoped)
  )

  it.live("does not keep what it got when another listener fails", () =>
    Effect.gen(function* () {
      const taken = yield* start(makeRecorder())
      const free = createServer().listen(0, "127.0.0.1")
      yield* Effect.promise(() => new Promise((resolve) => free.once("listening", resolve)))
      const { port } = free.address() as AddressInfo
      yield* Effect.promise(() => new Promise((resolve) => free.close(resolve)))
      const listeners = [
        { name: "a", address: "127.0.0.1", port },
        { name: "b", address: "127.0.0.1", port: taken }
      ]
      yield* Effect.scoped(Effect.flip(start(makeRecorder(), { listeners })))
      const again = yield* start(makeRecorder(), { listeners: [listeners[0]!] })
      assert.strictEqual(again, port)
    }).pipe(Effect.scoped)
  )
})

describe("stopping", () => {
  it.live("tells the idle, lets messages finish, waits for commits, takes no one new", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const gate = yield* makeGate
      const scope = yield* Scope.make()
      const port = yield* start(recorder).pipe(Scope.provide(scope))
      const [idle, sending, committing] = [
        yield* greeted(port),
        yield* greeted(port),
        yield* greeted(port)
      ]
      recorder.recorder.before = () => gate.pass
      yield* Effect.promise(() => committing.toData())
      committing.send(whole)
      yield* gate.reached
      yield* Effect.promise(() => sending.toData())
      sending.send("Subject: x\r\n")
      const stopped = yield* Scope.close(scope, Exit.void).pipe(
        Effect.forkChild({ startImmediately: true })
      )
      assert.match(yield* Effect.promise(() => idle.reply()), /^421 4\.3\.2 mx\.ours\.example/)
      const late = yield* client(port)
      assert.strictEqual(yield* Effect.promise(() => late.reply()), "closed")
      sending.send("\r\nx\r\n.\r\n")
      yield* gate.open
      for (const one of [sending, committing]) {
        assert.match(yield* Effect.promise(() => one.reply()), /^250 2\.0\.0 queued/)
        assert.match(yield* Effect.promise(() => one.reply()), /^421 4\.3\.2/)
      }
      yield* Fiber.join(stopped)
      assert.strictEqual(recorder.rows().length, 2)
    }).pipe(Effect.scoped)
  )

  it.live("cuts a message that does not get ready within the grace, and not the commit", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const gate = yield* makeGate
      const scope = yield* Scope.make()
      const port = yield* start(recorder, limited({ stopGrace: Duration.millis(50) })).pipe(
        Scope.provide(scope)
      )
      const [sending, committing] = [yield* greeted(port), yield* greeted(port)]
      recorder.recorder.before = () => gate.pass
      yield* Effect.promise(() => committing.toData())
      committing.send(whole)
      yield* gate.reached
      yield* Effect.promise(() => sending.toData())
      const stopped = yield* Scope.close(scope, Exit.void).pipe(
        Effect.forkChild({ startImmediately: true })
      )
      assert.match(yield* Effect.promise(() => sending.reply()), /^421 4\.3\.2/)
      yield* gate.open
      assert.match(yield* Effect.promise(() => committing.reply()), /^250/)
      yield* Fiber.join(stopped)
      assert.strictEqual(recorder.rows().length, 1)
    }).pipe(Effect.scoped)
  )
})

describe("R59: descriptors that run out", () => {
  it.live("turn new clients away, keep sessions going and recover without a restart", () =>
    Effect.gen(function* () {
      const program = new URL("./IngressProgram.ts", import.meta.url).pathname
      const child = yield* Effect.acquireRelease(
        Effect.sync(() =>
          spawn("bash", ["-c", 'ulimit -n 96; exec "$0" "$1"', process.execPath, program], {
            stdio: ["pipe", "pipe", "inherit"]
          })
        ),
        (started) => Effect.sync(() => started.kill("SIGKILL"))
      )
      const port = Number(
        yield* Effect.promise(
          () =>
            new Promise<string>((resolve) =>
              child.stdout.once("data", (line) => resolve(String(line)))
            )
        )
      )
      const clients = Array.from({ length: 300 }, () => new Client(port))
      yield* Effect.addFinalizer(() =>
        Effect.sync(() => clients.forEach((one) => one.socket.destroy()))
      )
      const said = yield* Effect.promise(() => Promise.all(clients.map((one) => one.reply())))
      const inside = clients.filter((_, i) => said[i]!.startsWith("220"))
      assert.isAtLeast(inside.length, 10)
      assert.isBelow(inside.length, 96)
      for (const reply of said) assert.match(reply, /^220|^421 4\.3\.2|^closed$/)
      for (const one of inside) assert.match(yield* Effect.promise(() => one.say("NOOP")), /^250/)
      const [leaving, staying] = [
        inside.slice(0, inside.length / 2),
        inside.slice(inside.length / 2)
      ]
      for (const one of leaving) yield* Effect.promise(() => one.say("QUIT").then(() => one.closed))
      yield* Effect.promise(async () => {
        for (;;) {
          const again = new Client(port)
          const greeting = await again.reply()
          again.socket.destroy()
          if (greeting.startsWith("220")) return
        }
      })
      for (const one of staying) assert.match(yield* Effect.promise(() => one.say("NOOP")), /^250/)
    }).pipe(Effect.scoped)
  )
})
