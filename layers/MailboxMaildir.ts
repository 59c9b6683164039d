// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Mailboxes as Maildirs (https://cr.yp.to/proto/maildir.html), read unchanged by Dovecot and mutt.
 *
 * tmp/NAME is written and synced, linked to new/NAME, and new/ is synced; nothing is ever put into
 * cur/. The name is made from the message and its recipient alone, so a second delivery of the
 * same meets the first. Writes files below the mailbox only.
 */
import { randomBytes } from "node:crypto"
import * as Fs from "node:fs"
import * as Path from "node:path"
import * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import * as Maildir from "../src/mail/Maildir.ts"
import type { Status } from "../src/mail/Status.ts"
import type { Delivery } from "../src/services/Mailbox.ts"
import { Mailbox, MailboxError } from "../src/services/Mailbox.ts"
import * as Directories from "./Directories.ts"

const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_RDONLY, O_WRONLY } = Fs.constants

/** Octets converted and written at a time: a large message needs no second copy of itself. */
const sliceBytes = 256 * 1024
/** A writer that has not finished by then never will (the Maildir page above). */
const leftoverMillis = 36 * 3_600_000
/** How often one mailbox is looked through for leftovers. */
const sweepMillis = 3_600_000
/** Mailboxes whose last sweep is remembered; forgetting one costs a look into its tmp/. */
const maxRemembered = 10_000

const LF = 10
const MODE_FILE = 0o600
const MODE_DIRECTORY = 0o700

const make = (host: string): Mailbox["Service"] => {
  const hostPart = Maildir.hostPart(host)
  const writer = randomBytes(6).toString("hex")
  const swept = new Map<string, number>()
  const sync = together<void>(syncDirectory)
  const earlier = together(deliveries)
  let written = 0

  /** The Maildir is there and is one; once an hour its leftovers are removed. */
  const prepare = Effect.fnUntraced(function* ({ directory, root }: Delivery) {
    yield* attempt(() => ready(directory, root))
    const now = yield* Clock.currentTimeMillis
    if (now - (swept.get(directory) ?? 0) < sweepMillis) return
    if (swept.size >= maxRemembered) swept.clear()
    swept.set(directory, now)
    yield* attempt(() => sweep(`${directory}/tmp`, now - leftoverMillis))
  })

  /** The message as a file in new/; false = a file of that name is there already. */
  const file = Effect.fnUntraced(function* (delivery: Delivery, temporary: string) {
    const fd = yield* attempt(() => Fs.openSync(temporary, O_WRONLY | O_CREAT | O_EXCL, MODE_FILE))
    const sizes = yield* write(fd, delivery).pipe(
      Effect.tap(syncFile(fd)),
      Effect.ensuring(Effect.sync(() => Fs.closeSync(fd)))
    )
    const name = Maildir.fileName(delivery.name, hostPart, sizes)
    return yield* attempt(() => link(temporary, `${delivery.directory}/new/${name}`))
  })

  // An interrupted delivery would close a file whose sync still runs.
  const deliver = Effect.fnUntraced(function* (delivery: Delivery) {
    yield* prepare(delivery)
    const { directory, name } = delivery
    if (delivery.repeat && (yield* earlier(directory)).has(name)) {
      // Who delivered it may have died before the directories were on disk.
      yield* sync(`${directory}/new`)
      yield* sync(`${directory}/cur`)
      return "was there" as const
    }
    const temporary = `${directory}/tmp/${name}.${writer}Q${written++}`
    const isNew = yield* file(delivery, temporary).pipe(
      Effect.tap(() => sync(`${directory}/new`)),
      Effect.ensuring(Effect.sync(() => remove(temporary)))
    )
    return isNew ? ("delivered" as const) : ("was there" as const)
  }, Effect.uninterruptible)

  return { deliver }
}

/** `host` = the name of this host in file names. */
export const MailboxMaildir = ({ host }: { readonly host: string }): Layer.Layer<Mailbox> =>
  Layer.sync(Mailbox, () => Mailbox.of(make(host)))

type Done<A> = (result: Effect.Effect<A, MailboxError>) => void

/**
 * `work` once for all who wait: the first to ask for a key waits for nobody; who asks while that
 * runs shares the next run, because this one may have begun too early for him.
 */
const together = <A>(
  work: (key: string, done: Done<A>) => void
): ((key: string) => Effect.Effect<A, MailboxError>) => {
  const waiting = new Map<string, Array<Done<A>>>()
  const run = (key: string, group: ReadonlyArray<Done<A>>): void =>
    work(key, (result) => {
      const next = waiting.get(key) ?? []
      if (next.length === 0) waiting.delete(key)
      else {
        waiting.set(key, [])
        run(key, next)
      }
      for (const resume of group) resume(result)
    })
  return (key) =>
    Effect.callback<A, MailboxError>((resume) => {
      const queue = waiting.get(key)
      if (queue !== undefined) queue.push(resume)
      else {
        waiting.set(key, [])
        run(key, [resume])
      }
    })
}

const settled = <A>(error: Error | null, value: A): Effect.Effect<A, MailboxError> =>
  error === null ? Effect.succeed(value) : Effect.fail(trouble(error))

const syncDirectory = (path: string, done: Done<void>): void => {
  const fd = Result.try(() => Fs.openSync(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW))
  if (Result.isFailure(fd)) return done(Effect.fail(trouble(fd.failure)))
  Fs.fsync(fd.success, (error) => {
    Fs.closeSync(fd.success)
    done(settled(error, undefined))
  })
}

const syncFile = (fd: number): Effect.Effect<void, MailboxError> =>
  Effect.callback((resume) => Fs.fsync(fd, (error) => resume(settled(error, undefined))))

/** The deliveries that are in new/ or cur/; in this order, because readers move them that way. */
const deliveries = (directory: string, done: Done<ReadonlySet<string>>): void =>
  Fs.readdir(`${directory}/new`, (error, fresh) => {
    if (error !== null) return done(Effect.fail(trouble(error)))
    Fs.readdir(`${directory}/cur`, (error, seen = []) =>
      done(settled(error, new Set([...fresh, ...seen].map(Maildir.deliveryOf))))
    )
  })

/**
 * Writes the message in slices; gives what the file name tells of it. Between two slices others
 * have their turn, so that a large message to many mailboxes holds nobody up.
 */
const write = Effect.fnUntraced(function* (fd: number, { body, header, preface }: Delivery) {
  const isWhole = header.length === 0 || header.at(-1) === LF // a header from SQL may not be
  const parts = [Buffer.from(preface), header, Buffer.from(isWhole ? "\n" : "\n\n"), body]
  const octets = parts.reduce((n, part) => n + part.length, 0)
  const slice = Buffer.allocUnsafe(Math.min(octets, sliceBytes))
  const sizes = { octets: 0, lines: 0 }
  const where = { from: 0, at: 0 }
  for (const part of parts) {
    where.from = 0
    while (where.from < part.length) {
      Maildir.convert(part, slice, where, sizes)
      if (where.at < slice.length) continue
      yield* attempt(() => writeFully(fd, slice))
      where.at = 0
      yield* Effect.yieldNow
    }
  }
  yield* attempt(() => writeFully(fd, slice.subarray(0, where.at)))
  return sizes satisfies Maildir.Sizes
})

/** A disk that fills takes a part first and says so at the next write. */
const writeFully = (fd: number, octets: Uint8Array): void => {
  let at = 0
  while (at < octets.length) at += Fs.writeSync(fd, octets, at)
}

/** link(2) never takes the place of a file, as rename(2) would. False = the name is taken. */
const link = (temporary: string, path: string): boolean => {
  const linked = Result.try(() => Fs.linkSync(temporary, path))
  if (Result.isSuccess(linked)) return true
  const code = (linked.failure as NodeJS.ErrnoException).code ?? ""
  if (code === "EEXIST" || (linkless.includes(code) && Fs.existsSync(path))) return false
  if (!linkless.includes(code)) throw linked.failure
  Fs.renameSync(temporary, path)
  return true
}

/** What file systems say that have no hard links. */
const linkless = ["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"]

const directories = ["", "/cur", "/new", "/tmp"]

/** Makes the Maildir where there is none; throws where there is something else. */
const ready = (directory: string, root: string): void => {
  for (const sub of directories) {
    const path = directory + sub
    const found = Fs.lstatSync(path, { throwIfNoEntry: false })
    if (found === undefined) create(path, directory, root)
    else if (!found.isDirectory()) throw refusal(found.isSymbolicLink() ? "ELOOP" : "ENOTDIR", path)
  }
}

const refusal = (code: string, path: string): Error => {
  const error = new Error(`${code}: a Maildir must be a directory of its own, ${path}`)
  return Object.assign(error, { code, syscall: "lstat" })
}

const create = (path: string, directory: string, root: string): void => {
  if (path === directory) {
    makeDirectory(root)
    Fs.statSync(Path.dirname(directory)) // a home that is not mounted is not made
  }
  makeDirectory(path)
}

/** Makes a directory and those missing above it, for us alone, and on disk. */
const makeDirectory = (path: string): void => {
  const first = Directories.make(path, MODE_DIRECTORY)
  if (first === undefined) return
  for (let at = Path.resolve(path); at.length >= first.length; at = Path.dirname(at)) {
    const fd = Fs.openSync(Path.dirname(at), O_RDONLY | O_DIRECTORY)
    Fs.fsyncSync(fd)
    Fs.closeSync(fd)
  }
}

/** A file that cannot be removed is left to a later sweep. */
const remove = (path: string): unknown => Result.try(() => Fs.unlinkSync(path))

const sweep = (path: string, beforeMillis: number): void => {
  for (const name of Fs.readdirSync(path)) {
    const found = Fs.lstatSync(`${path}/${name}`, { throwIfNoEntry: false })
    if (found?.isFile() === true && found.mtimeMs < beforeMillis) remove(`${path}/${name}`)
  }
}

const attempt = <A>(work: () => A): Effect.Effect<A, MailboxError> =>
  Effect.try({ try: work, catch: trouble })

const statuses: { readonly [code: string]: Status } = {
  ENOSPC: "4.3.1",
  EFBIG: "4.3.1",
  EDQUOT: "4.2.2",
  EACCES: "4.2.1",
  EPERM: "4.2.1",
  EROFS: "4.2.1",
  ENOENT: "4.2.1",
  ESTALE: "4.2.1",
  ENOTDIR: "4.3.5",
  ELOOP: "4.3.5",
  ENAMETOOLONG: "4.3.5",
  EMFILE: "4.3.2",
  ENFILE: "4.3.2",
  ENOMEM: "4.3.2",
  EAGAIN: "4.3.2"
}

/** Mailboxes come back: every trouble with one is for a time. Its path stays in the cause. */
const trouble = (cause: unknown): MailboxError => {
  const { code = "EIO", syscall = "" }: NodeJS.ErrnoException =
    cause instanceof Error ? cause : new Error("unknown")
  const detail = `mailbox: ${code} at ${syscall}`
  return new MailboxError({ status: statuses[code] ?? "4.3.0", detail, cause })
}
