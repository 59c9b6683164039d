// SPDX-License-Identifier: AGPL-3.0-or-later
/** SMTP sessions on real sockets, from the banner to the row. */
import { assert, describe, it } from "@effect/vitest"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as References from "effect/References"
import { Accounts } from "../../src/services/Accounts.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import type { Admission } from "../../src/services/Queue.ts"
import { selfSigned } from "../../layers/Certificate.ts"
import { client, greeted, makeRecorder, start, startLogged } from "./IngressWorld.ts"
import type { Client, Recorder } from "./IngressWorld.ts"
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"

const text = (octets: Uint8Array) => Buffer.from(octets).toString("latin1")
/** The message as it was sent, without the field we put on top. */
const sent = (row: Admission) =>
  `${text(row.headers).replace(/^Received:.*\r\n(?:\t.*\r\n)*/, "")}\r\n${text(row.body)}`

/** As it goes over the wire (RFC 5321 section 4.5.2). */
const wire = (message: string) => `${message.replace(/^\./gm, "..")}.\r\n`
const hops = (n: number) => `${"Received: from a by b; date\r\n".repeat(n)}\r\nx\r\n.\r\n`

/** A duty and a greeted client; `talk` runs the dialogue. */
const session = <A>(
  talk: (one: Client, recorder: Recorder, port: number) => Promise<A>,
  changes = {}
) =>
  Effect.gen(function* () {
    const recorder = makeRecorder()
    const port = yield* start(recorder, changes)
    const one = yield* greeted(port)
    return yield* Effect.promise(() => talk(one, recorder, port))
  }).pipe(Effect.scoped)

const certificate = Effect.acquireRelease(
  Effect.sync(() => mkdtempSync(join(tmpdir(), "pepsi-tls-"))),
  (directory) => Effect.sync(() => rmSync(directory, { recursive: true }))
).pipe(Effect.flatMap((directory) => selfSigned({ directory, hostname: "mx.ours.example" })))

const tlsSession = <A>(talk: (one: Client, recorder: Recorder) => Promise<A>) =>
  certificate.pipe(
    Effect.flatMap((tls) => session(talk, { tls })),
    Effect.scoped
  )

describe("an SMTP session", () => {
  it.live("greets by name, without a product, and offers what it can", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder())
      const one = yield* client(port)
      yield* Effect.promise(async () => {
        assert.strictEqual(await one.reply(), "220 mx.ours.example ESMTP")
        const offer = (await one.say("EHLO client.example")).split("|")
        assert.strictEqual(offer[0], "250-mx.ours.example")
        assert.deepStrictEqual(
          offer
            .slice(1)
            .map((line) => line.slice(4))
            .toSorted(),
          ["8BITMIME", "ENHANCEDSTATUSCODES", "PIPELINING", "SIZE 1048576", "SMTPUTF8"]
        )
      })
    }).pipe(Effect.scoped)
  )

  it.live("does not let a client wait for the banner", () =>
    Effect.gen(function* () {
      const port = yield* start(makeRecorder())
      let least = Infinity
      for (let i = 0; i < 20; i++) {
        const started = process.hrtime.bigint()
        const one = yield* client(port)
        yield* Effect.promise(() => one.reply())
        least = Math.min(least, Number(process.hrtime.bigint() - started) / 1e6)
      }
      assert.isBelow(least, 50, "milliseconds from connect to banner, best of 20")
    }).pipe(Effect.scoped)
  )

  it.live("answers every command with an enhanced code", () =>
    session(async (one) => {
      const said: Array<string> = []
      for (const line of [
        "VRFY dave",
        "EXPN all",
        "HELP",
        "NOOP",
        "RSET",
        "FOO",
        "AUTH PLAIN x",
        "STARTTLS",
        "EHLO",
        "XCLIENT A=b"
      ]) {
        said.push((await one.say(line)).replace(/^(\d{3} \d\.\d\.\d).*/, "$1"))
      }
      assert.deepStrictEqual(said, [
        "252 2.5.2",
        "502 5.5.1",
        "214 2.0.0",
        "250 2.0.0",
        "250 2.0.0",
        "500 5.5.2",
        "500 5.5.2",
        "500 5.5.2",
        "501 5.5.4",
        "500 5.5.2"
      ])
      assert.match(await one.say("QUIT"), /^221 2\.0\.0/)
      assert.strictEqual(await one.reply(), "closed")
    })
  )

  it.live(
    "A-ING-2: a pipelined group is answered in order, for the one recipient that is ours",
    () =>
      session(async (one, recorder) => {
        one.send(
          "MAIL FROM:<s@example.org>\r\nRCPT TO:<dave@ours.example>\r\nRCPT TO:<nobody@ours.example>\r\nRCPT TO:<x@foreign.example>\r\nDATA\r\n"
        )
        const codes: Array<string> = []
        for (let i = 0; i < 5; i++)
          codes.push((await one.reply()).replace(/^(\d{3}(?: \d\.\d\.\d)?).*/, "$1"))
        assert.deepStrictEqual(codes, ["250 2.1.0", "250 2.1.5", "550 5.1.1", "550 5.7.1", "354"])
        one.send("Subject: x\r\n\r\nhello\r\n.\r\n")
        const reply = await one.reply()
        const [row, ...others] = recorder.rows()
        assert.deepStrictEqual(others, [])
        assert.match(row!.token, /^[0-9a-f]{32}$/)
        assert.strictEqual(reply, `250 2.0.0 queued as ${row!.token}`)
        assert.deepStrictEqual(row!.recipients, ["dave@ours.example"])
        assert.strictEqual(row!.sender, "s@example.org")
        assert.include(text(row!.headers), "for <dave@ours.example>;")
        assert.strictEqual(row!.fairKey, "n:127.0.0.0/24")
        assert.deepStrictEqual(
          recorder.announced.map(({ section }) => section),
          ["init"]
        )
      })
  )

  it.live("names no recipient when there are two", () =>
    session(async (one, recorder) => {
      for (const line of [
        "MAIL FROM:<>",
        "RCPT TO:<dave@ours.example>",
        "RCPT TO:<Eve+x@OURS.example>",
        "RCPT TO:<dave@ours.example>"
      ]) {
        assert.match(await one.say(line), /^250/)
      }
      await one.say("DATA")
      one.send("\r\nx\r\n.\r\n")
      assert.match(await one.reply(), /^250/)
      const row = recorder.rows()[0]!
      assert.deepStrictEqual(
        [row.sender, row.recipients],
        ["", ["dave@ours.example", "Eve+x@ours.example"]]
      )
      assert.notInclude(text(row.headers), "for <")
    })
  )

  it.live("R02: a refused group leaves no trace in the next transaction", () =>
    session(async (one, recorder) => {
      one.send(
        "MAIL FROM:<s@example.org>\r\nRCPT TO:<nobody@ours.example>\r\nDATA\r\nRSET\r\n" +
          "MAIL FROM:<s2@example.org>\r\nRCPT TO:<u@ours.example>\r\nDATA\r\n"
      )
      const codes: Array<string> = []
      for (let i = 0; i < 7; i++) codes.push((await one.reply()).slice(0, 3))
      assert.deepStrictEqual(codes, ["250", "550", "554", "250", "250", "250", "354"])
      one.send("Subject: x\r\n\r\nx\r\n.\r\n")
      assert.match(await one.reply(), /^250/)
      assert.deepStrictEqual(
        recorder.rows().map(({ recipients, sender }) => [sender, recipients]),
        [["s2@example.org", ["u@ours.example"]]]
      )
    })
  )

  it.live("forgets the transaction with RSET, EHLO and the end of a message", () =>
    session(async (one) => {
      for (const forget of ["RSET", "EHLO again.example", "HELO again.example"]) {
        await one.toData()
        one.send("x: y\r\n\r\n.\r\n")
        await one.reply()
        assert.match(await one.say("RCPT TO:<dave@ours.example>"), /^503 5\.5\.1/)
        await one.say("MAIL FROM:<s@example.org>")
        await one.say("RCPT TO:<dave@ours.example>")
        assert.match(await one.say(forget), /^250/)
        assert.match(await one.say("DATA"), /^503 5\.5\.1/)
      }
    })
  )

  it.live("takes mail only behind EHLO or HELO, and marks which", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const one = yield* client(yield* start(recorder))
      yield* Effect.promise(async () => {
        await one.reply()
        assert.match(await one.say("MAIL FROM:<>"), /^503 5\.5\.1/)
        await one.say("HELO old.example")
        assert.match(await one.message("x: y\r\n\r\n.\r\n"), /^250/)
        assert.include(text(recorder.rows()[0]!.headers), "with SMTP id")
        assert.strictEqual(recorder.rows()[0]!.state.client?.proto, "SMTP")
      })
    }).pipe(Effect.scoped)
  )

  it.live("R08: a quoted recipient is ours or is not, never cut in two", () =>
    session(async (one, recorder) => {
      await one.say('MAIL FROM:<"a b"@example.com>')
      assert.match(
        await one.say('RCPT TO:<"dave@ours.example> ORCPT=rfc822;x"@foreign.example>'),
        /^550 5\.7\.1/
      )
      assert.match(await one.say('RCPT TO:<"dave@ours.example x"@foreign.example>'), /^550 5\.7\.1/)
      assert.match(await one.say('RCPT TO:<"a b"@ours.example>'), /^250/)
      await one.say("DATA")
      one.send("\r\n.\r\n")
      await one.reply()
      const { recipients, sender } = recorder.rows()[0]!
      assert.deepStrictEqual([sender, recipients], ['"a b"@example.com', ['"a b"@ours.example']])
    })
  )

  it.live("gives the bare postmaster a domain", () =>
    session(async (one, recorder) => {
      await one.say("MAIL FROM:<s@example.org>")
      assert.match(await one.say("RCPT TO:<Postmaster>"), /^250/)
      await one.say("DATA")
      one.send("\r\n.\r\n")
      await one.reply()
      assert.deepStrictEqual(recorder.rows()[0]!.recipients, ["postmaster@ours.example"])
    })
  )

  it.live("A-ING-11 R47: an address beyond ASCII with SMTPUTF8 and not without", () =>
    session(async (one, recorder) => {
      assert.match(await one.say("MAIL FROM:<jörg@ours.example>"), /^550 5\.6\.7/)
      assert.match(await one.say("MAIL FROM:<jörg@ours.example> BODY=8BITMIME SMTPUTF8"), /^250/)
      assert.match(await one.say("RCPT TO:<jörg@ours.example>"), /^250/)
      await one.say("DATA")
      one.send("Subject: grüße\r\n\r\n.\r\n")
      assert.match(await one.reply(), /^250/)
      const row = recorder.rows()[0]!
      assert.strictEqual(row.sender, "jörg@ours.example")
      assert.deepStrictEqual(row.state.env, { body: "8BITMIME", smtputf8: true })
      assert.include(text(row.headers), "with UTF8SMTP id")
      assert.strictEqual(row.subject, "grüße")
    })
  )
})

describe("a message", () => {
  it.live("R04: arrives octet by octet as it was sent, dots, 8-bit and all, in any segments", () =>
    session(async (one, recorder) => {
      const body = ".\r\n..\r\n.x\r\n\xe9\xff\r\n\r\na.\r\n"
      const whole = `Subject: t\r\nX-8: \xfc\r\n\r\n${body}`
      const octets = Buffer.from(wire(whole), "latin1")
      for (let at = 1; at < octets.length; at += 5) {
        await one.toData()
        one.send(octets.subarray(0, at))
        await new Promise((resolve) => setImmediate(resolve))
        one.send(octets.subarray(at))
        assert.match(await one.reply(), /^250 2\.0\.0 queued/)
      }
      for (const row of recorder.rows()) assert.strictEqual(sent(row), whole)
      assert.isAbove(recorder.rows().length, 5)
    })
  )

  it.live("A-ING-3: a false end is one refusal behind the true end, and no command", () =>
    session(async (one, recorder) => {
      for (const end of ["\n.\n", "\n.\r\n", "\r\n.\n", "\r.\r", "\r\r\n.\r\r\n", "\r\n.\r"]) {
        await one.toData()
        one.send(
          `Subject: 1\r\n\r\na${end}MAIL FROM:<evil@x.example>\r\nRCPT TO:<u@ours.example>\r\nDATA\r\nSubject: 2\r\n\r\nx\r\n.\r\n`
        )
        assert.match(await one.reply(), /^550 5\.5\.2/, JSON.stringify(end))
        // Nothing else was answered in between: the next reply belongs to the next command.
        assert.match(await one.say("VRFY x"), /^252/)
      }
      assert.deepStrictEqual(recorder.rows(), [])
    })
  )

  it.live("R14: NUL is refused in a message; a name that is no UTF-8 is cleaned", () =>
    Effect.gen(function* () {
      const recorder = makeRecorder()
      const one = yield* client(yield* start(recorder))
      yield* Effect.promise(async () => {
        await one.reply()
        one.send(Buffer.from("EHLO a\xffb\r\n", "latin1"))
        assert.match(await one.reply(), /^250/)
        assert.match(await one.message("Subject: a\0b\r\n\r\nx\r\n.\r\n"), /^550 5\.6\.0/)
        assert.match(
          await one.message(
            Buffer.from(
              'From: "\xe9" <a@example.org>\r\nSubject: a\xe9b\r\n\r\n\xff\r\n.\r\n',
              "latin1"
            )
          ),
          /^250/
        )
        const row = recorder.rows()[0]!
        assert.deepStrictEqual([row.fromHeader, row.subject], ["a@example.org", "a\ufffdb"])
        assert.strictEqual(text(row.body), "\xff\r\n")
        assert.strictEqual(row.state.client?.helo, "a\ufffdb")
        assert.include(text(row.headers), "from a?b (unknown [127.0.0.1])")
      })
    }).pipe(Effect.scoped)
  )

  it.live("R67: a client's name with control characters is refused", () =>
    Effect.gen(function* () {
      const one = yield* client(yield* start(makeRecorder()))
      yield* Effect.promise(async () => {
        await one.reply()
        assert.match(await one.say("EHLO a\x1b[31mb"), /^501 5\.5\.4/)
        assert.match(await one.say("EHLO h.example\rRCPT TO:<e@example.org>"), /^501 5\.5\.4/)
      })
    }).pipe(Effect.scoped)
  )

  it.live(
    "R05: of the size limit to the octet is taken, one more is not, and the session goes on",
    () =>
      session(async (one, recorder) => {
        // A third of the lines begin with a dot; an empty header in front.
        const lines = `..23456789012\r\n${"x".repeat(13)}\r\n${"y".repeat(13)}\r\n`.repeat(23_000)
        const whole = `\r\n${lines}${"z".repeat(1024 * 1024 - lines.length - 4)}\r\n`
        assert.strictEqual(whole.length, 1024 * 1024)
        assert.match(await one.message(wire(whole)), /^250/)
        assert.match(await one.message(wire(`${whole}z\r\n`)), /^552 5\.3\.4/)
        assert.match(await one.say("MAIL FROM:<s@example.org> SIZE=60000000"), /^552 5\.3\.4/)
        assert.match(await one.say("MAIL FROM:<s@example.org> SIZE=1000"), /^250/)
        await one.say("RCPT TO:<dave@ours.example>")
        await one.say("DATA")
        one.send(wire(`${whole}z\r\n`))
        assert.match(await one.reply(), /^552 5\.3\.4/)
        assert.match(await one.message("\r\n.\r\n"), /^250/)
        assert.deepStrictEqual(recorder.rows().map(sent), [whole, "\r\n"])
      })
  )

  it.live("A-ING-12: 50 Received fields are a loop, 49 are not", () =>
    session(async (one, recorder) => {
      assert.match(await one.message(hops(50)), /^554 5\.4\.6/)
      assert.match(await one.message(hops(51)), /^554 5\.4\.6/)
      assert.match(await one.message(hops(49)), /^250/)
      assert.strictEqual(recorder.rows().length, 1)
    })
  )

  it.live("refuses a line over 64 KiB, a header over 256 KiB and an mbox line in front", () =>
    session(async (one) => {
      assert.match(await one.message(`\r\n${"x".repeat(64 * 1024)}\r\n.\r\n`), /^250/)
      assert.match(await one.message(`\r\n${"x".repeat(64 * 1024 + 1)}\r\n.\r\n`), /^550 5\.6\.0/)
      assert.match(await one.message(`${"X: y\r\n".repeat(44_000)}\r\n.\r\n`), /^552 5\.3\.4/)
      assert.match(
        await one.message("From s@example.org Mon Nov 30\r\nSubject: x\r\n\r\n.\r\n"),
        /^550 5\.6\.0/
      )
    })
  )

  it.live("R22: two From fields are taken, the first counts, and the header keeps both", () =>
    session(async (one, recorder) => {
      assert.match(
        await one.message("From: ceo@bank.example\r\nFrom: u@a.example\r\n\r\n.\r\n"),
        /^250/
      )
      assert.strictEqual(recorder.rows()[0]!.fromHeader, "ceo@bank.example")
      assert.strictEqual(
        sent(recorder.rows()[0]!),
        "From: ceo@bank.example\r\nFrom: u@a.example\r\n\r\n"
      )
    })
  )
})

describe("trouble of ours", () => {
  for (const [reason, reply] of [
    ["away", "451 4.3.0"],
    ["overload", "451 4.3.2"],
    ["conflict", "451 4.3.0"],
    ["data", "451 4.3.0"]
  ] as const) {
    it.live(`is told as ${reply} when the database says ${reason}, and the session goes on`, () =>
      session(async (one, recorder) => {
        recorder.recorder.before = () =>
          Effect.fail(new DatabaseError({ reason, operation: "Queue.admit", cause: "test" }))
        assert.isTrue((await one.message("\r\n.\r\n")).startsWith(reply))
        recorder.recorder.before = () => Effect.void
        assert.match(await one.message("\r\n.\r\n"), /^250/)
        assert.strictEqual(recorder.rows().length, 1)
      })
    )
  }

  it.live("is not all there is: what the table cannot hold is refused for good", () =>
    session(async (one, recorder) => {
      const shared = { reason: "data", operation: "Queue.admit", cause: "test" } as const
      recorder.recorder.before = () => Effect.fail(new DatabaseError({ ...shared, code: "22021" }))
      assert.match(await one.message("\r\n.\r\n"), /^550 5\.6\.0/)
    })
  )

  it.live("is never a refusal of a recipient", () =>
    Effect.gen(function* () {
      const fails = Layer.succeed(Accounts, {
        resolve: () =>
          Effect.fail(
            new DatabaseError({ reason: "away", operation: "Accounts.resolve", cause: "test" })
          )
      })
      const one = yield* greeted(yield* start(makeRecorder(), {}, fails))
      yield* Effect.promise(async () => {
        await one.say("MAIL FROM:<>")
        assert.match(await one.say("RCPT TO:<dave@ours.example>"), /^451 4\.3\.0/)
        assert.match(await one.say("DATA"), /^554 5\.5\.1/)
      })
    }).pipe(Effect.scoped)
  )
})

describe("STARTTLS", () => {
  it.live("is offered once, secures the session and is told in the trace", () =>
    tlsSession(async (one, recorder) => {
      assert.include(await one.say("EHLO client.example"), "STARTTLS")
      assert.match(await one.startTls(), /^220 2\.0\.0/)
      assert.match(await one.say("MAIL FROM:<s@example.org>"), /^503 5\.5\.1/)
      assert.notInclude(await one.say("EHLO client.example"), "STARTTLS")
      assert.match(await one.say("STARTTLS"), /^503 5\.5\.1/)
      assert.match(await one.message("\r\n.\r\n"), /^250/)
      const row = recorder.rows()[0]!
      assert.match(
        text(row.headers),
        /\(using TLSv1\.3 with cipher TLS_[A-Z0-9_]+\)\r\n\tby mx\.ours\.example with ESMTPS id/
      )
      assert.strictEqual(row.state.client?.tls?.version, "TLSv1.3")
      assert.strictEqual(row.state.client?.proto, "ESMTPS")
    })
  )

  it.live("R07: who says more in clear behind STARTTLS is shut out, and no handshake begins", () =>
    tlsSession(async (one, recorder) => {
      await one.say("MAIL FROM:<before@example.org>")
      one.send("STARTTLS\r\nEHLO injected.example\r\nMAIL FROM:<inj@example.org>\r\nNOOP\r\n")
      assert.match(await one.reply(), /^554 5\.5\.0/)
      assert.strictEqual(await one.reply(), "closed")
      assert.deepStrictEqual(recorder.rows(), [])
    })
  )

  it.live("R07: what was said in clear before STARTTLS is forgotten", () =>
    tlsSession(async (one, recorder) => {
      await one.say("MAIL FROM:<before@example.org>")
      await one.say("RCPT TO:<dave@ours.example>")
      assert.match(await one.say("STARTTLS"), /^220/)
      await one.secure()
      assert.match(await one.say("RCPT TO:<u@ours.example>"), /^503 5\.5\.1/)
      assert.match(await one.say("DATA"), /^503 5\.5\.1/)
      assert.match(await one.say("EHLO client.example"), /^250/)
      assert.match(await one.say("RCPT TO:<u@ours.example>"), /^503 5\.5\.1/)
      assert.deepStrictEqual(recorder.rows(), [])
    })
  )

  it.live("takes no argument, and a handshake that fails ends only its own connection", () =>
    Effect.gen(function* () {
      const tls = yield* certificate
      const port = yield* start(makeRecorder(), { tls })
      for (let i = 0; i < 20; i++) {
        const one = yield* greeted(port)
        yield* Effect.promise(async () => {
          assert.match(await one.say("STARTTLS now"), /^501 5\.5\.4/)
          await one.say("STARTTLS")
          one.send(i % 2 === 0 ? "this is no handshake\r\n".repeat(20) : "\x16\x03\x01\x02\x00")
          if (i % 2 === 1) one.socket.resetAndDestroy()
          await one.closed
        })
      }
      const after = yield* client(port)
      assert.match(yield* Effect.promise(() => after.reply()), /^220/)
    }).pipe(Effect.scoped)
  )
})

describe("the log", () => {
  it.live("R68: holds no address, no subject and no body, whatever goes wrong", () => {
    const lines: Array<string> = []
    const keep = Logger.make<unknown, void>(
      (entry) => void lines.push(Logger.formatJson.log(entry))
    )
    return Effect.gen(function* () {
      const recorder = makeRecorder()
      let fails = true
      recorder.recorder.before = () =>
        fails ? Effect.die(new Error("the queue is broken")) : Effect.void
      const one = yield* greeted(yield* startLogged(recorder))
      yield* Effect.promise(async () => {
        const octets = "Subject: SECRET-S\r\n\r\nSECRET-B\r\n.\r\n"
        assert.match(await one.message(octets), /^451 4\.3\.0/)
        fails = false
        assert.match(await one.message(octets), /^250/)
        await one.say("MAIL FROM:<s@example.org")
        await one.say("AUTH PLAIN AHVzZXIAcGFzcw==")
        await one.toData()
        one.send("Subject: SECRET-S\r\n\r\nSECRET-B")
        one.socket.resetAndDestroy()
        await one.closed
      })
    }).pipe(
      Effect.scoped,
      Effect.provide(Logger.layer([keep])),
      Effect.provideService(References.MinimumLogLevel, "All"),
      Effect.andThen(
        Effect.sync(() => {
          assert.isAbove(lines.length, 1)
          for (const line of lines) assert.notMatch(line, /SECRET|example\.org|dave|AHVz/)
        })
      )
    )
  })

  it.live("an address was told at info for each message that broke off", () =>
    Effect.gen(function* () {
      const told = yield* Deferred.make<string>()
      const keep = Logger.make<unknown, void>((entry) => {
        const line = Logger.formatJson.log(entry)
        if (line.includes("connection lost")) Deferred.doneUnsafe(told, Effect.succeed(line))
      })
      const port = yield* startLogged(makeRecorder()).pipe(
        Effect.provide(Logger.layer([keep])),
        Effect.provideService(References.MinimumLogLevel, "All")
      )
      const one = yield* greeted(port)
      yield* Effect.promise(() => one.toData())
      one.socket.end()
      assert.strictEqual(JSON.parse(yield* Deferred.await(told)).level, "DEBUG")
    }).pipe(Effect.scoped)
  )
})
