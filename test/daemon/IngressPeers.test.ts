// SPDX-License-Identifier: AGPL-3.0-or-later
/** The ingress with clients that others wrote, and with the real database behind it. */
import { assert, describe, it } from "@effect/vitest"
import { execFile, spawnSync } from "node:child_process"
import { mkdtempSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as References from "effect/References"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as SqlClient from "effect/sql/SqlClient"
import { selfSigned } from "../../layers/Certificate.ts"
import { QueuePg } from "../../layers/QueuePg.ts"
import { SmtpServerNodemailer } from "../../layers/SmtpServerNodemailer.ts"
import * as Ingress from "../../src/daemon/Ingress.ts"
import { Queue } from "../../src/services/Queue.ts"
import * as Database from "../support/Database.ts"
import { accounts, Client, makeRecorder, settings, start } from "./IngressWorld.ts"

const directory = Effect.acquireRelease(
  Effect.sync(() => mkdtempSync(join(tmpdir(), "pepsi-peers-"))),
  (path) => Effect.sync(() => rmSync(path, { recursive: true }))
)

const isMissing = (program: string): boolean =>
  process.env["PEPSI_REQUIRE_PEERS"] !== "1" &&
  spawnSync(program, ["--version"]).error !== undefined

const run = (program: string, args: ReadonlyArray<string>) =>
  Effect.callback<string>((resume) => {
    execFile(program, args, { timeout: 20_000 }, (error, stdout, stderr) =>
      resume(
        error === null
          ? Effect.succeed(stdout + stderr)
          : Effect.die(`${program}: ${error.message} ${stdout}${stderr}`)
      )
    )
  })

describe("peers", () => {
  for (const program of ["swaks", "curl"] as const) {
    it.live.skipIf(isMissing(program))(`${program} hands a message over, with STARTTLS`, () =>
      Effect.gen(function* () {
        const recorder = makeRecorder()
        const path = yield* directory
        const port = yield* start(recorder, {
          tls: yield* selfSigned({ directory: path, hostname: settings.hostname })
        })
        const file = join(path, "message")
        writeFileSync(file, "Subject: from a peer\r\n\r\n.dot\r\n..\r\nend\r\n")
        yield* run(
          program,
          program === "swaks"
            ? [
                "--server",
                `127.0.0.1:${port}`,
                "--tls",
                "--from",
                "s@example.org",
                "--to",
                "dave@ours.example",
                "--data",
                `@${file}`
              ]
            : [
                "--silent",
                "--show-error",
                "--ssl-reqd",
                "--insecure",
                "--url",
                `smtp://127.0.0.1:${port}/c.example`,
                "--mail-from",
                "s@example.org",
                "--mail-rcpt",
                "dave@ours.example",
                "--upload-file",
                file
              ]
        )
        const [row] = recorder.rows()
        assert.strictEqual(Buffer.from(row!.body).toString().trimEnd(), ".dot\r\n..\r\nend")
        assert.strictEqual(row!.state.client?.proto, "ESMTPS")
      }).pipe(Effect.scoped)
    )
  }
})

describe("the database", () => {
  it.live("has what was answered with 250, octet by octet", () =>
    Effect.gen(function* () {
      const queue = QueuePg.pipe(Layer.provide(Database.fresh({ synchronousCommit: true })))
      const context = yield* Layer.build(
        Ingress.layer(settings).pipe(
          Layer.provide([SmtpServerNodemailer, accounts(), SecureRandom.layerWebCrypto]),
          Layer.provideMerge(queue)
        )
      ).pipe(Effect.provideService(References.MinimumLogLevel, "None"))
      yield* Effect.gen(function* () {
        const { listeners } = yield* Ingress.Ingress
        const { list, load } = yield* Queue
        const body = Buffer.from("..\r\n\xff\xfe\r\nx\r\n", "latin1")
        const octets = Buffer.concat([
          Buffer.from(
            'From: "\xe9" <A@Example.org>\r\nSubject: a\xe9=?utf-8?q?=00?=b\r\nMessage-ID: <m@x>\r\n\r\n',
            "latin1"
          ),
          body
        ])
        const talk = async (): Promise<string> => {
          const one = new Client(listeners[0]!.port)
          await one.greet()
          const reply = await one.message(
            Buffer.from(`${octets.toString("latin1").replace(/^\./gm, "..")}.\r\n`, "latin1")
          )
          one.socket.destroy()
          return reply
        }
        const replies = yield* Effect.promise(() => Promise.all(Array.from({ length: 40 }, talk)))
        const tokens = replies.map(
          (reply) => /^250 2\.0\.0 queued as ([0-9a-f]{32})$/.exec(reply)?.[1]
        )
        const rows = yield* list({ after: 0, limit: 100 })
        assert.deepStrictEqual(rows.map(({ token }) => token).toSorted(), tokens.toSorted())
        const [loaded] = yield* load([{ id: rows[0]!.id, rev: 0 }], "full")
        assert.deepStrictEqual(Buffer.from(loaded!.body!), body)
        assert.strictEqual(
          Buffer.from(loaded!.headers!)
            .subarray(-octets.length + body.length + 2)
            .toString("latin1"),
          octets.subarray(0, octets.length - body.length - 2).toString("latin1")
        )
        assert.deepStrictEqual(
          [loaded!.fromHeader, loaded!.subject, loaded!.messageId],
          ["A@example.org", "a\ufffdb", "<m@x>"]
        )
        assert.strictEqual(loaded!.fairKey, "n:127.0.0.0/24")
        assert.strictEqual(loaded!.state.client?.helo, "client.example")
      }).pipe(Effect.provideContext(context))
    }).pipe(Effect.scoped)
  )

  it.live("our own disk damage was answered with 550 and nothing was in the log", () => {
    const lines: Array<string> = []
    const keep = Logger.make<unknown, void>((e) => void lines.push(Logger.formatJson.log(e)))
    return Effect.gen(function* () {
      const context = yield* Layer.build(
        Ingress.layer(settings).pipe(
          Layer.provide([SmtpServerNodemailer, accounts(), SecureRandom.layerWebCrypto]),
          Layer.provideMerge(QueuePg),
          Layer.provideMerge(Database.fresh({ synchronousCommit: true }))
        )
      )
      yield* Effect.gen(function* () {
        const sql = yield* SqlClient.SqlClient
        const { listeners } = yield* Ingress.Ingress
        yield* sql`create function pepsi.damaged() returns trigger language plpgsql as
          'begin raise exception using errcode = ''XX001'', message = new.mail_from; end'`
        yield* sql`create trigger damaged before insert on pepsi.workqueue
          for each row execute function pepsi.damaged()`
        const one = new Client(listeners[0]!.port)
        yield* Effect.addFinalizer(() => Effect.sync(() => one.socket.destroy()))
        yield* Effect.promise(() => one.greet())
        assert.match(
          yield* Effect.promise(() => one.message("Subject: x\r\n\r\nx\r\n.\r\n")),
          /^451 4\.3\.0/
        )
        yield* sql`drop trigger damaged on pepsi.workqueue`
        assert.match(
          yield* Effect.promise(() => one.message("Subject: x\r\n\r\nx\r\n.\r\n")),
          /^250/
        )
      }).pipe(Effect.provideContext(context))
      const told = lines.map((line) => JSON.parse(line)).filter(({ level }) => level === "ERROR")
      assert.strictEqual(told.length, 1)
      assert.strictEqual(told[0].annotations.sqlstate, "XX001")
      assert.match(told[0].annotations.token, /^[0-9a-f]{32}$/)
      assert.notInclude(JSON.stringify(told), "example.org")
    }).pipe(Effect.scoped, Effect.provide(Logger.layer([keep])))
  })
})
