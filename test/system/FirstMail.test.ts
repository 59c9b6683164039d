// SPDX-License-Identifier: AGPL-3.0-or-later
/** The first mail: the whole program on real parts, from SMTP to the file in the Maildir. */
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import { execFileSync, spawnSync } from "node:child_process"
import * as fs from "node:fs"
import * as path from "node:path"
import { authenticate } from "mailauth"
import * as PgConnection from "@effect/sql-pg/PgConnection"
import * as EmbeddedPostgres from "../../layers/EmbeddedPostgres.ts"
import { Session } from "../../bench/support.ts"
import { configuration, daemon, list, processesOf, run, until } from "../support/Daemon.ts"
import type { Daemon } from "../support/Daemon.ts"
import * as DnsServer from "../support/DnsServer.ts"
import { keyRecord, sign } from "../support/Mails.ts"

/** The one file in a mailbox, when it is there. */
const delivered = (running: Daemon, mailbox: string): Promise<Buffer> =>
  until(() => list(running.newOf(mailbox))[0]).then((file) => fs.readFileSync(file))

const split = (file: Buffer): { readonly header: string; readonly body: Buffer } => {
  const end = file.indexOf("\n\n")
  return { header: file.subarray(0, end + 1).toString("latin1"), body: file.subarray(end + 2) }
}

const crlf = (file: Buffer): Buffer =>
  Buffer.from(file.toString("latin1").replaceAll("\n", "\r\n"), "latin1")

/** A message of 8-bit octets in lines of 76, as attachments come. */
const large = (bytes: number): Buffer => {
  const line = Buffer.from(Array.from({ length: 76 }, (_, i) => 128 + ((i * 7) % 120)))
  return Buffer.concat(
    Array.from({ length: Math.ceil(bytes / 78) }, () => [line, Buffer.from("\r\n")]).flat()
  )
}

const hasTool = (name: string): boolean => spawnSync("which", [name]).status === 0
/** A peer that is not installed is left out, except where all of them are required. */
const peer = (name: string) =>
  hasTool(name) || process.env["PEPSI_REQUIRE_PEERS"] === "1" ? it.live : it.live.skip

describe("the first mail", () => {
  it.live(
    "a signed mail arrives with dkim=pass, a seal that verifies and its body as it was",
    () =>
      Effect.gen(function* () {
        const zone = { "s._domainkey.signed.example": { TXT: [keyRecord] } }
        const dns = yield* DnsServer.start(zone)
        const running = yield* daemon(configuration({ pepsi: `RESOLVER = ${dns.address}` }))
        const body = Buffer.concat([
          Buffer.from("Caf\xe9, au lait\r\n.\r\n..two dots\r\n", "latin1"),
          large(2000)
        ])
        const mail = Buffer.concat([
          Buffer.from(
            "From: Ann <ann@signed.example>\r\nTo: dave@pepsi.test\r\nSubject: signed\r\n\r\n"
          ),
          body
        ])
        const signed = yield* Effect.promise(() => sign(mail, { domain: "signed.example" }))
        const sent = yield* Effect.promise(() =>
          run(
            [
              "send",
              "--from",
              "ann@signed.example",
              "-c",
              path.join(running.home, "at.conf"),
              "dave@pepsi.test"
            ],
            { input: signed, env: at(running) }
          )
        )
        assert.match(sent.stdout, /^250 2\.0\.0 queued as [0-9a-f]{32}\n$/, sent.stderr)
        const file = yield* Effect.promise(() => delivered(running, "dave"))
        const { body: arrived, header } = split(file)
        assert.match(header, /^Return-Path: <ann@signed\.example>\n/)
        assert.match(
          header,
          /^Authentication-Results: mail\.pepsi\.test;[^]*?\bdkim=pass header\.d=signed\.example/m
        )
        assert.deepStrictEqual(
          arrived,
          Buffer.from(body.toString("latin1").replaceAll("\r\n", "\n"), "latin1")
        )

        // Somebody else verifies the seal, with the key we ask our operator to publish.
        const found = yield* Effect.promise(() =>
          authenticate(crlf(file), {
            ip: "192.0.2.1",
            helo: "x.example",
            sender: "ann@signed.example",
            mta: "checker.example",
            resolver: resolverOf(zone, sealRecord(running)),
            strict: true
          })
        )
        assert.strictEqual(found.arc !== false && found.arc.status.result, "pass")
      }),
    60_000
  )

  it.live(
    "20 MB of 8-bit octets arrive as they were",
    () =>
      Effect.gen(function* () {
        const running = yield* daemon()
        const body = large(20_000_000)
        const session = new Session(running.port)
        yield* Effect.promise(async () => {
          await session.open()
          await session.send(
            "dave@pepsi.test",
            Buffer.concat([
              Buffer.from(
                "From: a@example.org\r\nSubject: large\r\nContent-Transfer-Encoding: 8bit\r\n\r\n"
              ),
              body
            ])
          )
        })
        session.close()
        const { body: arrived } = split(yield* Effect.promise(() => delivered(running, "dave")))
        assert.isTrue(
          arrived.equals(Buffer.from(body.toString("latin1").replaceAll("\r\n", "\n"), "latin1"))
        )
      }),
    60_000
  )

  peer("swaks")(
    "swaks delivers, with and without STARTTLS",
    () =>
      Effect.gen(function* () {
        const running = yield* daemon()
        const server = [
          "--server",
          `127.0.0.1:${running.port}`,
          "--from",
          "a@example.org",
          "--hide-all"
        ]
        execFileSync("swaks", [...server, "--to", "plain@pepsi.test", "--body", "plain"])
        execFileSync("swaks", [...server, "--to", "tls@pepsi.test", "--body", "tls", "--tls"])
        const [plain, tls] = yield* Effect.promise(() =>
          Promise.all([delivered(running, "plain"), delivered(running, "tls")])
        )
        assert.match(split(plain).header, /with ESMTP id/)
        assert.match(split(tls).header, /using TLSv1\.3[^]*with ESMTPS id/)
      }),
    60_000
  )

  peer("curl")(
    "curl delivers",
    () =>
      Effect.gen(function* () {
        const running = yield* daemon()
        execFileSync(
          "curl",
          [
            "-sS",
            `smtp://127.0.0.1:${running.port}/c.example`,
            "--mail-from",
            "a@example.org",
            "--mail-rcpt",
            "dave@pepsi.test",
            "-T",
            "-"
          ],
          { input: "Subject: curl\r\n\r\nfrom curl\r\n" }
        )
        const { body } = split(yield* Effect.promise(() => delivered(running, "dave")))
        assert.strictEqual(body.toString(), "from curl\n")
      }),
    60_000
  )

  it.live(
    "SIGINT ends it with exit code 0 and leaves no process",
    () =>
      Effect.gen(function* () {
        const running = yield* daemon()
        const ended = yield* Effect.promise(() => running.end("SIGINT"))
        assert.strictEqual(ended.code, 0, running.output())
        assert.isBelow(ended.millis, 5000)
        assert.deepStrictEqual(processesOf(running.home), [])
      }),
    60_000
  )

  it.live(
    "the original's INSERT of 5,000 rows drains with nobody notifying",
    () =>
      Effect.gen(function* () {
        const running = yield* daemon()
        const server = yield* EmbeddedPostgres.locate(running.home)
        const remaining = yield* Effect.scoped(
          Effect.gen(function* () {
            const session = yield* PgConnection.make(server!)
            yield* session.query(sample, [], false)
            const left = session.queryValues(
              "select count(*)::int4 from pepsi.workqueue",
              [],
              false
            )
            return yield* left.pipe(
              Effect.map((rows) => rows[0]?.[0]),
              Effect.delay("100 millis"),
              Effect.repeat({ until: (n) => n === 0 })
            )
          })
        )
        assert.strictEqual(remaining, 0)
        assert.strictEqual(list(running.newOf("dave")).length, 5000)
      }),
    120_000
  )
})

/** As it stands in the original's performance chapter, with 5,000 rows and our domain. */
const sample = `
INSERT INTO pepsi.workqueue
  (token, mail_from, rcpt_to, from_header, subject, headers, body,
   stage, status, state)
SELECT 'bulk-' || g, 'sender@example.org', ARRAY['dave@pepsi.test'],
       'sender@example.org', 'bulk ' || g,
       convert_to('From: sender@example.org' || E'\\r\\n' || 'X: y' || E'\\r\\n', 'UTF8'),
       convert_to(repeat('filler' || E'\\r\\n', 300), 'UTF8'),
       'init', 'pending', '{"local_origin": false, "spam": false}'::jsonb
FROM generate_series(1, 5000) g`

/** A configuration for commands that shall reach this daemon: it was bound to any free port. */
const at = (running: Daemon): { readonly [name: string]: string } => {
  const text = fs
    .readFileSync(path.join(running.home, "pepsi.conf"), "utf8")
    .replace("PORT = 0", `PORT = ${running.port}`)
  fs.writeFileSync(path.join(running.home, "at.conf"), text)
  return { PEPSI_HOME: running.home }
}

type Records = { readonly [name: string]: { readonly TXT: ReadonlyArray<string> } }

/** The record that the daemon asks its operator to publish. */
const sealRecord = (running: Daemon): Records => {
  const [file = ""] = fs.readdirSync(running.home).filter((name) => name.endsWith(".pem.txt"))
  const line = fs.readFileSync(path.join(running.home, file), "latin1")
  const [, name = ""] = /^(\S+)\. IN TXT/.exec(line) ?? []
  return { [name]: { TXT: [[...line.matchAll(/"([^"]*)"/g)].map(([, part]) => part).join("")] } }
}

const resolverOf =
  (...zones: ReadonlyArray<Records>) =>
  async (name: string, type: string) => {
    const found =
      type === "TXT"
        ? zones.map((zone) => zone[name]).find((entry) => entry !== undefined)
        : undefined
    if (found === undefined) throw Object.assign(new Error("no such name"), { code: "ENOTFOUND" })
    return found.TXT.map((text) => [text])
  }
