// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The floor under grouped Maildir delivery: the system calls alone, and beside it the layer.
 *
 * Both write 2.5 KB files in groups that begin together. `node bench/floors/maildir.ts DIRECTORY`.
 * Mailboxes are made anew for each run and left where they are: on ext4 without a journal, creating
 * files is several times slower for minutes after many were deleted.
 */
import * as Fs from "node:fs"
import * as Effect from "effect/Effect"
import { MailboxMaildir } from "../../layers/MailboxMaildir.ts"
import * as Maildir from "../../src/mail/Maildir.ts"
import { Mailbox } from "../../src/services/Mailbox.ts"

const rounds = 5
const messagesPerRound = 1280

/** One group delivered; `from` is the number of its first message. */
type Group = (from: number, size: number) => Effect.Effect<unknown>

const header = Buffer.from("X-Header: a value of the usual length, more or less\r\n".repeat(8))
const body = Buffer.from(`${"x".repeat(70)}\r\n`.repeat(29))
const token = (n: number): string => n.toString(16).padStart(32, "0")

const sync = (fd: number): Effect.Effect<void> =>
  Effect.callback((resume) => Fs.fsync(fd, () => resume(Effect.void)))

const bare = (root: string): Group => {
  for (const sub of ["new", "tmp"]) Fs.mkdirSync(`${root}/${sub}`, { recursive: true })
  const directory = Fs.openSync(`${root}/new`, "r")
  const octets = Buffer.concat([header, Buffer.from("\n"), body])
  return Effect.fnUntraced(function* (from, size) {
    const files = Array.from({ length: size }, (_, i) => {
      const name = `1700000000.T${token(from + i)}R00000000.host`
      const fd = Fs.openSync(`${root}/tmp/${name}`, "wx", 0o600)
      Fs.writeSync(fd, octets)
      return { fd, name }
    })
    yield* Effect.forEach(files, ({ fd }) => sync(fd), { concurrency: "unbounded", discard: true })
    for (const { fd, name } of files) {
      Fs.closeSync(fd)
      Fs.linkSync(`${root}/tmp/${name}`, `${root}/new/${name}`)
    }
    yield* sync(directory)
    for (const { name } of files) Fs.unlinkSync(`${root}/tmp/${name}`)
  })
}

const layered = (mailbox: Mailbox["Service"], root: string, boxes: number): Group =>
  Effect.fnUntraced(function* (from, size) {
    const deliver = (i: number) =>
      mailbox.deliver({
        directory: `${root}/box${(from + i) % boxes}`,
        root,
        name: Maildir.deliveryName(1_700_000_000, token(from + i), "ann@example.org"),
        repeat: false,
        preface: "Return-Path: <bob@example.net>\nDelivered-To: ann@example.org\n",
        header,
        body
      })
    const group = Array.from({ length: size }, (_, i) => deliver(i))
    return yield* Effect.orDie(Effect.all(group, { concurrency: "unbounded", discard: true }))
  })

const median = (of: ReadonlyArray<number>): string =>
  of.toSorted((a, b) => a - b)[rounds >> 1]!.toFixed(0)

/** Messages per second and CPU of this process per message, the median of the rounds. */
const measure = Effect.fnUntraced(function* (name: string, size: number, group: Group) {
  const rates: Array<number> = []
  const micros: Array<number> = []
  let sent = 0
  for (let round = 0; round <= rounds; round++) {
    const first = sent
    const cpu = process.cpuUsage()
    const before = process.hrtime.bigint()
    for (; sent - first < messagesPerRound; sent += size) yield* group(sent, size)
    const seconds = Number(process.hrtime.bigint() - before) / 1e9
    const { system, user } = process.cpuUsage(cpu)
    if (round === 0) continue // compilation and cold caches
    rates.push((sent - first) / seconds)
    micros.push((user + system) / (sent - first))
  }
  process.stdout.write(`${name}, group of ${size}: ${median(rates)}/s, ${median(micros)} us CPU\n`)
})

const main = Effect.gen(function* () {
  const root = Fs.mkdtempSync(`${process.argv[2] ?? "."}/maildir-`)
  const mailbox = yield* Mailbox
  yield* measure("system calls, 1 mailbox", 64, bare(`${root}/bare`))
  yield* measure("layer, 1 mailbox", 64, layered(mailbox, `${root}/one`, 1))
  yield* measure("layer, 64 mailboxes", 64, layered(mailbox, `${root}/many`, 64))
  yield* measure("layer, 1 mailbox", 1, layered(mailbox, `${root}/single`, 1))
})

await Effect.runPromise(main.pipe(Effect.provide(MailboxMaildir({ host: "mail.example.org" }))))
