// SPDX-License-Identifier: AGPL-3.0-or-later
/** Handing mail over by SMTP, to our own ingress and to servers that misbehave. */
import { assert, describe, it } from "@effect/vitest"
import { mkdtempSync, rmSync } from "node:fs"
import { createServer } from "node:net"
import type { AddressInfo } from "node:net"
import { tmpdir } from "node:os"
import { join } from "node:path"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { selfSigned } from "../../layers/Certificate.ts"
import { TransportSmtp } from "../../layers/TransportSmtp.ts"
import { Transport } from "../../src/services/Transport.ts"
import type { Outgoing } from "../../src/services/Transport.ts"
import { makeRecorder, start } from "../daemon/IngressWorld.ts"

const submit = (port: number, outgoing: Partial<Outgoing> & { readonly text?: string } = {}) =>
  Transport.pipe(
    Effect.flatMap(({ submit }) =>
      submit({
        sender: "s@example.org",
        recipients: ["dave@ours.example"],
        octets: Buffer.from(outgoing.text ?? "Subject: x\n\nx\n"),
        ...outgoing
      })
    ),
    Effect.provide(
      TransportSmtp({
        host: "127.0.0.1",
        port,
        hostname: "c.example",
        timeout: Duration.seconds(5)
      })
    )
  )

/** A server that answers line by line from a script. */
const fake = (answer: (line: string) => string | undefined) =>
  Effect.acquireRelease(
    Effect.callback<{
      readonly port: number
      readonly seen: Array<string>
      readonly close: () => void
    }>((resume) => {
      const seen: Array<string> = []
      const server = createServer((socket) => {
        socket.on("error", () => undefined)
        socket.write("220 fake.example ESMTP\r\n")
        socket.on("data", (chunk: Buffer) => {
          for (const line of chunk
            .toString()
            .split("\r\n")
            .filter((text) => text !== "")) {
            seen.push(line)
            const reply = answer(line)
            if (reply === undefined) socket.destroy()
            else if (reply !== "") socket.write(reply)
          }
        })
      }).listen(0, "127.0.0.1", () =>
        resume(
          Effect.succeed({
            port: (server.address() as AddressInfo).port,
            seen,
            close: () => void server.close()
          })
        )
      )
    }),
    ({ close }) => Effect.sync(close)
  )

const text = (octets: Uint8Array | undefined) => Buffer.from(octets ?? []).toString("latin1")

describe("TransportSmtp", () => {
  it.live("hands a message over, line ends and dots as they must be", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const port = yield* start(recorder)
      const handed = yield* submit(port, {
        text: "Subject: x\n\n.\n..a\nlast",
        recipients: ["dave@ours.example", "eve@ours.example"]
      })
      assert.match(handed.reply, /^250 2\.0\.0 queued as [0-9a-f]{32}$/)
      assert.deepStrictEqual(
        [handed.accepted, handed.refused],
        [["dave@ours.example", "eve@ours.example"], []]
      )
      assert.strictEqual(text(recorder.rows()[0]?.body), ".\r\n..a\r\nlast\r\n")
    }).pipe(Effect.scoped)
  )

  it.live("uses STARTTLS, 8BITMIME and SMTPUTF8 where they are offered", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const directory = yield* Effect.acquireRelease(
        Effect.sync(() => mkdtempSync(join(tmpdir(), "pepsi-tls-"))),
        (path) => Effect.sync(() => rmSync(path, { recursive: true }))
      )
      const port = yield* start(recorder, {
        tls: yield* selfSigned({ directory, hostname: "mx.ours.example" })
      })
      yield* submit(port, {
        text: "Subject: grüße\n\nä\n",
        sender: "jörg@ours.example",
        recipients: ["jörg@ours.example"]
      })
      const { sender, state } = recorder.rows()[0]!
      assert.strictEqual(sender, "jörg@ours.example")
      assert.deepStrictEqual(state.env, { body: "8BITMIME", smtputf8: true })
      assert.deepStrictEqual([state.client?.proto, state.client?.helo], ["UTF8SMTPS", "c.example"])
    }).pipe(Effect.scoped)
  )

  it.live("tells who was refused, and fails when nobody was accepted", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const port = yield* start(recorder)
      const handed = yield* submit(port, {
        recipients: ["dave@ours.example", "nobody@ours.example"]
      })
      assert.deepStrictEqual(handed.accepted, ["dave@ours.example"])
      assert.deepStrictEqual(
        handed.refused.map(({ recipient }) => recipient),
        ["nobody@ours.example"]
      )
      assert.match(handed.refused[0]!.reply, /^550 5\.1\.1/)
      const error = yield* Effect.flip(submit(port, { recipients: ["x@foreign.example"] }))
      assert.strictEqual(error.status, "5.7.1")
      assert.match(error.reply ?? "", /^550 5\.7\.1/)
      assert.strictEqual(recorder.rows().length, 1)
    }).pipe(Effect.scoped)
  )

  it.live("says with a status that nobody answers, that the server hangs up, or what it said", () =>
    Effect.gen(function* () {
      const gone = yield* Effect.scoped(
        Effect.map(
          fake(() => undefined),
          ({ port }) => port
        )
      )
      const refused = yield* Effect.flip(submit(gone))
      assert.strictEqual(refused.status, "4.4.1")
      assert.match(refused.message, /connection to 127\.0\.0\.1 port \d+: .*ECONNREFUSED/)
      const cut = yield* fake((line) => (line.startsWith("MAIL") ? undefined : "250 ok\r\n"))
      assert.match((yield* Effect.flip(submit(cut.port))).status, /^4\./)
      const busy = yield* fake((line) =>
        line.startsWith("MAIL") ? "451 4.3.2 later\r\n" : "250 ok\r\n"
      )
      const later = yield* Effect.flip(submit(busy.port))
      assert.deepStrictEqual([later.status, later.reply], ["4.3.2", "451 4.3.2 later"])
    }).pipe(Effect.scoped)
  )

  it.live(
    "R47: does not send an address beyond ASCII to a server that did not offer SMTPUTF8",
    () =>
      Effect.gen(function* () {
        const plain = yield* fake(() => "250 ok\r\n")
        const error = yield* Effect.flip(submit(plain.port, { sender: "josé@example.org" }))
        assert.strictEqual(error.status, "5.6.7")
        assert.isFalse(plain.seen.some((line) => line.startsWith("MAIL")))
      }).pipe(Effect.scoped)
  )

  it.live("R67: sends no address that would be a command", () =>
    Effect.gen(function* () {
      const plain = yield* fake(() => "250 ok\r\n")
      for (const bad of ["a@example.org\r\nDATA", "a@example.org>\nRCPT TO:<e@example.org"]) {
        const error = yield* Effect.flip(submit(plain.port, { recipients: [bad] }))
        assert.match(error.status, /^5\./)
      }
      assert.isFalse(plain.seen.some((line) => /^(?:DATA|RCPT)/.test(line)))
    }).pipe(Effect.scoped)
  )

  it.live("R07: forgets what was said in clear behind the answer to STARTTLS", () =>
    Effect.gen(function* () {
      const injecting = yield* fake((line) =>
        line.startsWith("EHLO")
          ? "250-fake.example\r\n250 STARTTLS\r\n"
          : line === "STARTTLS"
            ? "220 go\r\n250-x\r\n250 SMTPUTF8\r\n"
            : undefined
      )
      const error = yield* Effect.flip(submit(injecting.port))
      assert.match(error.status, /^4\./)
      assert.isFalse(injecting.seen.some((line) => line.startsWith("MAIL")))
    }).pipe(Effect.scoped)
  )
})
