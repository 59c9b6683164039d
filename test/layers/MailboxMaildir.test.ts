// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as AsyncHooks from "node:async_hooks"
import * as ChildProcess from "node:child_process"
import * as Fs from "node:fs"
import * as Os from "node:os"
import * as Path from "node:path"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as Schema from "effect/Schema"
import * as TestClock from "effect/testing/TestClock"
import type * as Scope from "effect/Scope"
import { MailboxMaildir } from "../../layers/MailboxMaildir.ts"
import type { Delivery } from "../../src/services/Mailbox.ts"
import { Mailbox, MailboxError } from "../../src/services/Mailbox.ts"

const octets = (text: string): Buffer => Buffer.from(text, "latin1")

const message = (root: string, more: Partial<Delivery> = {}): Delivery => ({
  directory: `${root}/mail/ann`,
  root: `${root}/mail`,
  name: "1700000000.T0fR0000000a",
  repeat: false,
  preface: "Return-Path: <s@x>\n",
  header: octets("Subject: a\r\nTo: b@x\r\n"),
  body: octets("one\r\ntwo\r\n"),
  ...more
})

const inHome = <A, E>(
  use: (root: string) => Effect.Effect<A, E, Mailbox | Scope.Scope>
): Effect.Effect<A, E, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.sync(() => Fs.mkdtempSync(Path.join(Os.tmpdir(), "pepsi-maildir-"))),
    (root) => Effect.sync(() => Fs.rmSync(root, { recursive: true, force: true }))
  ).pipe(Effect.flatMap(use), Effect.provide(MailboxMaildir({ host: "mail.example.org" })))

const deliver = (delivery: Delivery) => Mailbox.use((mailbox) => mailbox.deliver(delivery))
const refused = (delivery: Delivery) =>
  deliver(delivery).pipe(
    Effect.flip,
    Effect.map((error) => error.status)
  )
const files = (directory: string): ReadonlyArray<string> => Fs.readdirSync(directory)
const modeOf = (path: string): number => Fs.statSync(path).mode & 0o7777

/** Directories and files of a fresh mailbox as they come out under a umask. */
const underUmask = (umask: number) =>
  inHome((root) =>
    Effect.acquireUseRelease(
      Effect.sync(() => process.umask(umask)),
      () => deliver(message(root)),
      (before) => Effect.sync(() => process.umask(before))
    ).pipe(
      Effect.map(() => {
        const [file = ""] = files(`${root}/mail/ann/new`)
        return ["", "/ann", "/ann/cur", "/ann/new", "/ann/tmp", `/ann/new/${file}`].map((path) =>
          modeOf(`${root}/mail${path}`)
        )
      })
    )
  )

describe("a delivery", () => {
  it.effect("is one file in new/ with its sizes in the name, and nothing in tmp/ and cur/", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        assert.strictEqual(yield* deliver(message(root)), "delivered")
        const text = "Return-Path: <s@x>\nSubject: a\nTo: b@x\n\none\ntwo\n"
        const name = `1700000000.T0fR0000000a.mail.example.org,S=${text.length},W=${text.length + 6}`
        assert.deepStrictEqual(files(`${root}/mail/ann/new`), [name])
        assert.strictEqual(Fs.readFileSync(`${root}/mail/ann/new/${name}`, "latin1"), text)
        assert.strictEqual(Fs.statSync(`${root}/mail/ann/new/${name}`).nlink, 1)
        assert.deepStrictEqual(
          [files(`${root}/mail/ann/tmp`), files(`${root}/mail/ann/cur`)],
          [[], []]
        )
      })
    )
  )

  it.effect("is for its owner alone, whatever the umask", () =>
    Effect.gen(function* () {
      const own = [0o700, 0o700, 0o700, 0o700, 0o700, 0o600]
      assert.deepStrictEqual(yield* underUmask(0), own)
      assert.deepStrictEqual(yield* underUmask(0o077), own)
    })
  )

  const Octets = Schema.Array(Schema.Literals([13, 10, 65, 0, 255]))
  it.effect.prop(
    "has all octets of the message with LF line ends",
    { body: Octets },
    ({ body }) =>
      inHome(
        Effect.fnUntraced(function* (root) {
          yield* deliver(message(root, { header: octets("A: b"), body: Uint8Array.from(body) }))
          const [name = ""] = files(`${root}/mail/ann/new`)
          const text = Fs.readFileSync(`${root}/mail/ann/new/${name}`, "latin1")
          const lines = Buffer.from(body).toString("latin1").replaceAll("\r\n", "\n")
          const wanted = `Return-Path: <s@x>\nA: b\n\n${lines}`
          assert.strictEqual(text, wanted)
          const withCr = text.replaceAll("\n", "\r\n").length
          assert.isTrue(name.endsWith(`,S=${text.length},W=${withCr}`))
        })
      ),
    { arbitrary: { runs: 30 } }
  )

  it.effect("of a large message comes whole through the slices", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        const body = octets(`${"x".repeat(997)}\r\n`.repeat(1500))
        yield* deliver(message(root, { body }))
        const [name = ""] = files(`${root}/mail/ann/new`)
        const text = Fs.readFileSync(`${root}/mail/ann/new/${name}`, "latin1")
        assert.strictEqual(text.length, Number(/S=(\d+)/.exec(name)?.[1]))
        assert.isTrue(text.endsWith(body.toString("latin1").replaceAll("\r\n", "\n")))
      })
    )
  )

  it.effect("of many together shares the syncs of the directory", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        yield* deliver(message(root))
        let requests = 0
        const hook = AsyncHooks.createHook({
          init: (_, type) => {
            if (type === "FSREQCALLBACK") requests++
          }
        }).enable()
        const all = Array.from({ length: 64 }, (_, i) =>
          deliver(message(root, { name: `1700000000.T${i}R1` }))
        )
        const results = yield* Effect.all(all, { concurrency: "unbounded" })
        hook.disable()
        assert.deepStrictEqual(new Set(results), new Set(["delivered"]))
        assert.strictEqual(files(`${root}/mail/ann/new`).length, 65)
        // One sync for each file; the first to finish has a directory sync of his own, most share.
        assert.isAtLeast(requests, 64 + 2)
        assert.isAtMost(requests, 64 + 32)
      })
    )
  )

  it.live("is done whole when its fiber is interrupted", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        const fiber = yield* Effect.forkChild(deliver(message(root)), { startImmediately: true })
        yield* Fiber.interrupt(fiber)
        assert.strictEqual(files(`${root}/mail/ann/new`).length, 1)
        assert.deepStrictEqual(files(`${root}/mail/ann/tmp`), [])
      })
    )
  )
})

/** A program that delivers, says so, and waits to be killed. */
const program = (delivery: string): string => `
  import * as Effect from "effect/Effect"
  import { MailboxMaildir } from "${import.meta.dirname}/../../layers/MailboxMaildir.ts"
  import { Mailbox } from "${import.meta.dirname}/../../src/services/Mailbox.ts"
  const before = process.resourceUsage().maxRSS
  await Effect.runPromise(Mailbox.use((mailbox) => mailbox.deliver(${delivery})).pipe(
    Effect.provide(MailboxMaildir({ host: "mail.example.org" }))))
  console.log(JSON.stringify({ growth: process.resourceUsage().maxRSS - before }))
  setInterval(() => {}, 1000)
`

/** Runs it until it has delivered, then kills it; gives what it said. */
const killed = (delivery: string): Effect.Effect<string> =>
  Effect.callback((resume) => {
    const child = ChildProcess.spawn(
      process.execPath,
      ["--input-type=module", "-e", program(delivery)],
      {
        cwd: Path.join(import.meta.dirname, "../.."),
        stdio: ["ignore", "pipe", "inherit"]
      }
    )
    let said = ""
    child.stdout.on("data", (chunk: Buffer) => {
      said += chunk.toString()
      child.kill("SIGKILL")
    })
    child.on("exit", () => resume(Effect.succeed(said)))
  })

const bufferCode = (part: Uint8Array): string =>
  `Buffer.from(${JSON.stringify(Buffer.from(part).toString("latin1"))}, "latin1")`

const asCode = (delivery: Delivery): string =>
  `{ ...${JSON.stringify({ ...delivery, header: "", body: "" })},
     header: ${bufferCode(delivery.header)}, body: ${bufferCode(delivery.body)} }`

describe("the same delivery again", () => {
  it.effect("A-LOC-2 changes nothing after a kill between delivery and commit", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        assert.include(yield* killed(asCode(message(root))), "growth")
        const before = files(`${root}/mail/ann/new`)
        assert.strictEqual(before.length, 1)
        assert.strictEqual(yield* deliver(message(root, { repeat: true })), "was there")
        // Another run of the stages before may have made another header of it.
        assert.strictEqual(
          yield* deliver(message(root, { repeat: true, header: octets("X: y\r\n") })),
          "was there"
        )
        assert.deepStrictEqual(files(`${root}/mail/ann/new`), before)
      })
    )
  )

  it.effect("A-LOC-3 changes nothing when a reader has moved it to cur/", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        yield* deliver(message(root))
        const [name = ""] = files(`${root}/mail/ann/new`)
        Fs.renameSync(`${root}/mail/ann/new/${name}`, `${root}/mail/ann/cur/${name}:2,S`)
        assert.strictEqual(yield* deliver(message(root, { repeat: true })), "was there")
        assert.deepStrictEqual(files(`${root}/mail/ann/new`), [])
        assert.deepStrictEqual(files(`${root}/mail/ann/cur`), [`${name}:2,S`])
        // Others of the same message are not taken for it.
        assert.strictEqual(
          yield* deliver(message(root, { repeat: true, name: "1700000000.T0fR0000000b" })),
          "delivered"
        )
      })
    )
  )

  it.effect("meets its own file in new/ without looking for it", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        yield* deliver(message(root))
        const [name = ""] = files(`${root}/mail/ann/new`)
        const before = Fs.statSync(`${root}/mail/ann/new/${name}`).ino
        assert.strictEqual(yield* deliver(message(root)), "was there")
        assert.deepStrictEqual(files(`${root}/mail/ann/new`), [name])
        assert.strictEqual(Fs.statSync(`${root}/mail/ann/new/${name}`).ino, before)
        assert.deepStrictEqual(files(`${root}/mail/ann/tmp`), [])
      })
    )
  )

  it.effect("of many at once ends in one file each", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        const all = Array.from({ length: 60 }, (_, i) =>
          deliver(message(root, { name: `1700000000.T${i % 20}R1`, repeat: i % 2 === 0 }))
        )
        const results = yield* Effect.all(all, { concurrency: "unbounded" })
        assert.strictEqual(files(`${root}/mail/ann/new`).length, 20)
        assert.strictEqual(results.filter((result) => result === "delivered").length, 20)
      })
    )
  )
})

/** The largest file this process may write. */
const limit = (bytes: string) =>
  Effect.sync(() => {
    const args = ["--pid", String(process.pid), `--fsize=${bytes}:`]
    assert.strictEqual(ChildProcess.spawnSync("prlimit", args).status, 0)
  })

describe("a mailbox that cannot take mail", () => {
  it.effect("A-LOC-6 is not followed to where a symbolic link leads", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        Fs.mkdirSync(`${root}/etc`)
        Fs.mkdirSync(`${root}/mail`)
        Fs.symlinkSync(`${root}/etc`, `${root}/mail/ann`)
        assert.strictEqual(yield* refused(message(root)), "4.3.5")
        assert.deepStrictEqual(files(`${root}/etc`), [])
        for (const sub of ["cur", "new", "tmp"]) {
          const directory = `${root}/mail/${sub}-box`
          yield* deliver(message(root, { directory }))
          Fs.renameSync(`${directory}/${sub}`, `${directory}/away`)
          Fs.symlinkSync(`${root}/etc`, `${directory}/${sub}`)
          assert.strictEqual(
            yield* refused(message(root, { directory, name: "1.T1R1" })),
            "4.3.5",
            sub
          )
        }
        assert.deepStrictEqual(files(`${root}/etc`), [])
      })
    )
  )

  it.effect("is told apart by its status, without its name in the text", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        Fs.mkdirSync(`${root}/mail`)
        Fs.writeFileSync(`${root}/mail/ann`, "")
        const error = yield* Effect.flip(deliver(message(root)))
        assert.instanceOf(error, MailboxError)
        assert.deepStrictEqual(
          [error.status, error.message],
          ["4.3.5", "mailbox: ENOTDIR at lstat"]
        )
        // A home that is not there (not mounted) is not made.
        const away = message(root, { directory: `${root}/home/ann/Maildir`, root: `${root}/home` })
        assert.strictEqual(yield* refused(away), "4.2.1")
        assert.deepStrictEqual(files(`${root}/home`), [])
        Fs.mkdirSync(`${root}/home/ann`)
        assert.strictEqual(yield* deliver(away), "delivered")
      })
    )
  )

  const mounts =
    process.getuid?.() === 0 &&
    ChildProcess.spawnSync("unshare", ["-m", "mount", "-t", "tmpfs", "none", "/mnt"]).status === 0

  it.effect.skipIf(!mounts)("A-LOC-4 is full: nothing is left behind, and later it goes", () =>
    inHome((root) => {
      const mount = (...args: ReadonlyArray<string>) =>
        Effect.sync(() =>
          assert.strictEqual(ChildProcess.spawnSync("mount", [...args, root]).status, 0)
        )
      const body = octets("x".repeat(700_000))
      return Effect.acquireUseRelease(
        mount("-t", "tmpfs", "-o", "size=1m", "none"),
        Effect.fnUntraced(function* () {
          yield* deliver(message(root, { body }))
          assert.strictEqual(yield* refused(message(root, { body, name: "1.T1R1" })), "4.3.1")
          assert.deepStrictEqual(files(`${root}/mail/ann/tmp`), [])
          const [first] = files(`${root}/mail/ann/new`)
          Fs.unlinkSync(`${root}/mail/ann/new/${first}`)
          assert.strictEqual(yield* deliver(message(root, { body, name: "1.T1R1" })), "delivered")
          yield* mount("-o", "remount,ro")
          assert.strictEqual(yield* refused(message(root, { name: "1.T2R1" })), "4.2.1")
        }),
        () => Effect.sync(() => ChildProcess.spawnSync("umount", [root]))
      )
    })
  )

  const limits = ChildProcess.spawnSync("prlimit", ["--version"]).status === 0

  it.effect.skipIf(!limits)("A-LOC-4 has a limit: nothing is left behind, and later it goes", () =>
    inHome((root) => {
      const large = message(root, { body: octets("x".repeat(700_000)) })
      return Effect.acquireUseRelease(
        limit("600000"),
        Effect.fnUntraced(function* () {
          assert.strictEqual(yield* refused(large), "4.3.1")
          assert.deepStrictEqual(
            [files(`${root}/mail/ann/tmp`), files(`${root}/mail/ann/new`)],
            [[], []]
          )
          yield* limit("unlimited")
          assert.strictEqual(yield* deliver(large), "delivered")
        }),
        () => limit("unlimited")
      )
    })
  )
})

describe("a mailbox in use", () => {
  it.effect("loses what writers left in tmp/ 36 hours ago, looked for once an hour", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        const now = Date.now()
        yield* TestClock.setTime(now)
        yield* deliver(message(root))
        const tmp = `${root}/mail/ann/tmp`
        const leave = (name: string, hours: number): void => {
          Fs.writeFileSync(`${tmp}/${name}`, "")
          Fs.utimesSync(`${tmp}/${name}`, now / 1000 - hours * 3600, now / 1000 - hours * 3600)
        }
        leave("old", 37)
        leave("young", 30)
        yield* deliver(message(root, { name: "1.T1R1" }))
        assert.sameMembers([...files(tmp)], ["old", "young"])
        yield* TestClock.adjust("61 minutes")
        yield* deliver(message(root, { name: "1.T2R1" }))
        assert.deepStrictEqual(files(tmp), ["young"])
      })
    )
  )

  it.effect("A-LOC-7 takes 20 MiB in less memory than three times that", () =>
    inHome(
      Effect.fnUntraced(function* (root) {
        const mebibytes = 20
        const code = asCode(message(root, { body: octets("BODY") })).replace(
          /Buffer\.from\("BODY", "latin1"\)/,
          `Buffer.alloc(${mebibytes} * 1024 * 1024, "line of text\\r\\n")`
        )
        const said = yield* killed(code)
        const { growth } = JSON.parse(said) as { readonly growth: number }
        const [name = ""] = files(`${root}/mail/ann/new`)
        assert.isAbove(Fs.statSync(`${root}/mail/ann/new/${name}`).size, 18 * 1024 * 1024)
        assert.isBelow(growth, 3 * mebibytes * 1024)
      })
    )
  )
})
