// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Every mail that was acknowledged is delivered once, whoever is killed at whatever moment: a
 * worker, the daemon, the database server, all of them at once. A reader moves and deletes mail
 * meanwhile. PEPSI_KILL_SEEDS and PEPSI_KILL_MAILS make it a long run.
 */
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as fs from "node:fs"
import * as path from "node:path"
import { message, Session } from "../../bench/support.ts"
import {
  configuration,
  directory,
  familyOf,
  list,
  processesOf,
  run,
  start,
  until
} from "../support/Daemon.ts"
import type { Daemon } from "../support/Daemon.ts"

const seeds = Number(process.env["PEPSI_KILL_SEEDS"] ?? "8")
const mailsPerRound = Number(process.env["PEPSI_KILL_MAILS"] ?? "70")
const connections = 8

/** Numbers from 0 to 1 from a seed (mulberry32). */
const random = (seed: number) => () => {
  seed = (seed + 0x6d2b79f5) | 0
  let t = Math.imul(seed ^ (seed >>> 15), 1 | seed)
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296
}

/** What became of each mail, by its subject. */
interface Ledger {
  readonly acknowledged: Set<string>
  /** How often the reader has deleted it. */
  readonly deleted: Map<string, number>
}

const count = (counts: Map<string, number>, file: string): void => {
  const subject = /^Subject: (.*)$/m.exec(fs.readFileSync(file, "latin1"))?.[1] ?? file
  counts.set(subject, (counts.get(subject) ?? 0) + 1)
}

/** A mailbox and a reader of it: sees new mail, moves some to cur/, deletes some that is settled. */
class Reader {
  /**
   * Mail from before this time is off the queue for good. What is deleted earlier may be delivered
   * again after a crash of the database: the footnote of the guarantee.
   */
  settledBefore = 0
  readonly #maildir: string
  readonly #ledger: Ledger
  readonly #chance: () => number
  #timer: NodeJS.Timeout | undefined

  constructor(home: string, ledger: Ledger, chance: () => number) {
    this.#maildir = path.join(home, "mail", "dave")
    this.#ledger = ledger
    this.#chance = chance
  }

  start(): void {
    this.#timer = setInterval(() => this.#look(), 25)
  }

  stop(): void {
    clearInterval(this.#timer)
  }

  #look(): void {
    for (const file of list(path.join(this.#maildir, "new"))) {
      if (this.#chance() < 0.2)
        fs.renameSync(file, path.join(this.#maildir, "cur", `${path.basename(file)}:2,S`))
    }
    for (const file of list(path.join(this.#maildir, "cur"))) {
      if (this.#chance() < 0.05 && fs.statSync(file).mtimeMs < this.settledBefore) {
        count(this.#ledger.deleted, file)
        fs.rmSync(file)
      }
    }
  }
}

/** Mails of one round: how many are to be acknowledged, and by what server. */
interface Round {
  readonly name: string
  readonly goal: number
  port: number | undefined
  sent: number
  acknowledged: number
}

/** Sends over some connections until the goal is reached; a connection that breaks is made anew. */
const sendAll = async (round: Round, ledger: Ledger): Promise<void> => {
  await Promise.all(
    Array.from({ length: connections }, async () => {
      let session: Session | undefined
      while (round.acknowledged < round.goal) {
        // Without a 250 a mail may be there or not, but never twice: each try is a mail of its own.
        const subject = `${round.name}-${round.sent++}`
        try {
          if (session === undefined) {
            session = new Session(round.port ?? 0)
            await session.open()
          }
          await session.send("dave@pepsi.test", message(1500, subject))
          ledger.acknowledged.add(subject)
          round.acknowledged++
        } catch {
          session?.close()
          session = undefined
          await new Promise((resolve) => setTimeout(resolve, 20))
        }
      }
      session?.close()
    })
  )
}

const kinds = ["worker", "daemon", "postmaster", "everything"] as const

const kill = (daemon: Daemon, kind: (typeof kinds)[number], chance: () => number): void => {
  const workers = daemon.workers()
  const victims =
    kind === "worker"
      ? workers.filter((_, i) => i === Math.floor(chance() * workers.length))
      : kind === "daemon"
        ? [daemon.pid]
        : kind === "postmaster"
          ? [daemon.postmaster()]
          : [...familyOf(daemon.pid), ...familyOf(daemon.postmaster())]
  for (const pid of victims) {
    try {
      process.kill(pid, "SIGKILL")
    } catch (error) {
      // It may have ended by itself in this instant.
      assert.strictEqual((error as NodeJS.ErrnoException).code, "ESRCH")
    }
  }
}

/** Waits until no message is in the queue. */
const emptied = async (home: string): Promise<void> => {
  const args = ["queue", "list", "--json", "-c", path.join(home, "pepsi.conf")]
  while ((await run(args, { env: { PEPSI_HOME: home } })).stdout !== "") {
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}

describe("killed at any moment", () => {
  it.live.each(kinds)(
    "%s: what was acknowledged is delivered exactly once",
    (kind) =>
      Effect.gen(function* () {
        const home = yield* directory
        fs.writeFileSync(path.join(home, "pepsi.conf"), configuration())
        yield* Effect.promise(() => rounds(home, kind))
      }).pipe(Effect.scoped),
    60_000 + seeds * (6000 + mailsPerRound * 20)
  )
})

const rounds = async (home: string, kind: (typeof kinds)[number]): Promise<void> => {
  const ledger: Ledger = { acknowledged: new Set(), deleted: new Map() }
  const chance = random(kinds.indexOf(kind) + 1)
  let daemon: Daemon | undefined = await start(home)
  const reader = new Reader(home, ledger, chance)
  reader.start()
  try {
    for (let seed = 0; seed < seeds; seed++) {
      const round: Round = {
        name: `${kind}-${seed}`,
        goal: mailsPerRound,
        port: daemon.port,
        sent: 0,
        acknowledged: 0
      }
      const moment = Math.floor(chance() * mailsPerRound)
      const sending = sendAll(round, ledger)
      await until(() => round.acknowledged >= moment)
      await new Promise((resolve) => setTimeout(resolve, chance() * 60))
      const dies = kind === "daemon" || kind === "everything"
      kill(daemon, kind, chance)
      if (dies) {
        await daemon.end("SIGKILL")
        daemon = await start(home)
        round.port = daemon.port
      }
      await sending
      if (seed % 4 === 3) {
        await emptied(home)
        const now = Date.now()
        // Its commit waits for the disk, and so for all commits before it.
        await sendAll({ ...round, name: `${round.name}-last`, goal: 1, acknowledged: 0 }, ledger)
        reader.settledBefore = now
      }
    }
    await emptied(home)
  } finally {
    reader.stop()
    await daemon?.end("SIGTERM")
  }
  const found = new Map(ledger.deleted)
  for (const folder of ["new", "cur"]) {
    for (const file of list(path.join(home, "mail", "dave", folder))) count(found, file)
  }
  const lost = [...ledger.acknowledged].filter((subject) => !found.has(subject))
  const doubled = [...found].filter(([, times]) => times > 1).map(([subject]) => subject)
  assert.deepStrictEqual({ lost, doubled }, { lost: [], doubled: [] })
  if (seeds > 4) assert.isAbove(ledger.deleted.size, 0)
  assert.isAtLeast(ledger.acknowledged.size, seeds * mailsPerRound)
  assert.deepStrictEqual(processesOf(home), [])
}
