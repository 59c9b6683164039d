// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Latency on an idle system: single mails of 1 KiB, a new connection each, from connect to the 250
 * and to the file in the Maildir; and, where asked for, a burst behind it. With it what limits the
 * figures: the time the stages took, and database transactions per message.
 */
import * as Effect from "effect/Effect"
import * as fs from "node:fs"
import * as EmbeddedPostgres from "../layers/EmbeddedPostgres.ts"
import * as Postgres from "../layers/Postgres.ts"
import { BenchError, message, server, Session, summarize } from "./support.ts"
import type { Result, Server, Summary } from "./support.ts"

export interface Settings {
  readonly count: number
  /** Messages of the burst; 0 = none. */
  readonly burst: number
  /** Connections of the burst, each kept for its messages. */
  readonly connections: number
}

/** A session writes its transaction counts when it has been idle for ten seconds. */
const statisticsDelay = "11 seconds"

const query = Effect.fnUntraced(
  function* (home: string, text: string) {
    const address = yield* EmbeddedPostgres.locate(home)
    if (address === undefined) return yield* new BenchError({ what: "no database", cause: home })
    const connect = Postgres.connector({
      server: address,
      applicationName: "pepsi bench",
      maxConnections: 1,
      synchronousCommit: true
    })
    const rows = yield* Effect.scoped(
      Effect.flatMap(connect(), (session) => session.queryValues(text, [], false))
    )
    return rows
  },
  Effect.mapError((cause) => new BenchError({ what: "database", cause }))
)

const transactions = (home: string) =>
  query(
    home,
    "select (xact_commit + xact_rollback)::float8 from pg_stat_database where datname = current_database()"
  ).pipe(Effect.map((rows) => Number(rows[0]?.[0])))

/** Mean time of one run of each stage, microseconds. */
const stageTimes = (home: string) =>
  query(
    home,
    "select stage, processed::float8, busy_us::float8 from pepsi.stage_stats order by stage"
  ).pipe(
    Effect.map((rows) =>
      rows.map(([stage, processed, busy]) => ({
        stage: String(stage),
        processed: Number(processed),
        meanMicros: Number(busy) / Math.max(1, Number(processed))
      }))
    )
  )

const attempt = <A>(what: string, run: () => Promise<A>): Effect.Effect<A, BenchError> =>
  Effect.tryPromise({ try: run, catch: (cause) => new BenchError({ what, cause }) })

interface Sample {
  readonly toReply: number
  readonly toFile: number
}

/** Milliseconds between two looks at the Maildir. */
const pollMillis = 1
/** A mail that is not there by then is lost. */
const giveUpMillis = 30_000

const single = async (running: Server, mailbox: string, octets: Buffer): Promise<Sample> => {
  const before = entries(running, mailbox)
  const began = performance.now()
  const session = new Session(running.port)
  await session.open()
  await session.send(`${mailbox}@pepsi.test`, octets)
  const toReply = performance.now() - began
  while (entries(running, mailbox) === before) {
    if (performance.now() - began > giveUpMillis) throw new Error("not delivered within 30 s")
    await new Promise((resolve) => setTimeout(resolve, pollMillis))
  }
  const toFile = performance.now() - began
  session.close()
  return { toReply, toFile }
}

const entries = (running: Server, mailbox: string): number => {
  const directory = running.newOf(mailbox)
  return fs.existsSync(directory) ? fs.readdirSync(directory).length : 0
}

/** Messages from `connections` kept connections, each to its own mailbox of a hundred. */
const burst = async (running: Server, { burst: count, connections }: Settings): Promise<number> => {
  const octets = message(2048, "burst")
  const mailboxes = Array.from({ length: 100 }, (_, i) => `burst${i}`)
  const began = performance.now()
  let next = 0
  await Promise.all(
    Array.from({ length: Math.min(connections, count) }, async () => {
      const session = new Session(running.port)
      await session.open()
      for (let n = next++; n < count; n = next++)
        await session.send(`${mailboxes[n % 100]}@pepsi.test`, octets)
      session.close()
    })
  )
  while (mailboxes.reduce((sum, mailbox) => sum + entries(running, mailbox), 0) < count) {
    if (performance.now() - began > 10 * giveUpMillis)
      throw new Error("burst not delivered within 300 s")
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
  return (performance.now() - began) / 1000
}

/** Transactions of some work per message, those of the same time without it left out. */
const counted = Effect.fnUntraced(function* <A>(
  running: Server,
  messages: number,
  work: Effect.Effect<A, BenchError>
) {
  yield* Effect.sleep(statisticsDelay)
  const start = yield* transactions(running.home)
  yield* Effect.sleep(statisticsDelay)
  const idle = (yield* transactions(running.home)) - start
  const result = yield* work
  yield* Effect.sleep(statisticsDelay)
  const all = (yield* transactions(running.home)) - start - 2 * idle
  return { result, perMessage: all / messages }
})

/** Runs it on a daemon of its own. */
export const latency = Effect.fn("bench.latency")(function* (
  settings: Settings,
  progress: (text: string) => Effect.Effect<void>
) {
  const running = yield* server()
  yield* progress("warming up")
  const octets = message(1024, "latency")
  for (let i = 0; i < 5; i++) yield* attempt("warm-up", () => single(running, "warm", octets))
  yield* progress(`${settings.count} single mails`)
  const singles = yield* counted(
    running,
    settings.count,
    Effect.forEach(
      Array.from({ length: settings.count }),
      () => attempt("latency", () => single(running, "dave", octets)),
      { concurrency: 1 }
    )
  )
  const burstRun =
    settings.burst === 0
      ? undefined
      : yield* Effect.andThen(
          progress(`${settings.burst} mails over ${settings.connections} connections`),
          counted(
            running,
            settings.burst,
            attempt("burst", () => burst(running, settings))
          )
        )
  const stages = yield* stageTimes(running.home)
  return report(settings, {
    toReply: summarize(singles.result.map((sample) => sample.toReply)),
    toFile: summarize(singles.result.map((sample) => sample.toFile)),
    perMessage: singles.perMessage,
    burst: burstRun,
    stages
  })
}, Effect.scoped)

interface Measured {
  readonly toReply: Summary
  readonly toFile: Summary
  readonly perMessage: number
  readonly burst: { readonly result: number; readonly perMessage: number } | undefined
  readonly stages: ReadonlyArray<{
    readonly stage: string
    readonly processed: number
    readonly meanMicros: number
  }>
}

const report = (settings: Settings, measured: Measured): Result => ({
  figures: {
    idle_p50_ms: measured.toFile.median,
    idle_p95_ms: measured.toFile.p95,
    reply_p50_ms: measured.toReply.median,
    idle_tx_per_msg: measured.perMessage,
    stage_sum_ms:
      measured.stages
        .filter(({ processed }) => processed >= settings.count)
        .reduce((sum, { meanMicros }) => sum + meanMicros, 0) / 1000,
    ...(measured.burst === undefined
      ? {}
      : {
          burst_msg_s: settings.burst / measured.burst.result,
          burst_tx_per_msg: measured.burst.perMessage
        })
  },
  rows: [
    { what: "connect to 250", unit: "ms", ...measured.toReply },
    { what: "connect to file", unit: "ms", ...measured.toFile },
    ...measured.stages.map(({ meanMicros, processed, stage }) => ({
      what: `stage ${stage}`,
      unit: "ms",
      runs: processed,
      mean: meanMicros / 1000
    }))
  ]
})
