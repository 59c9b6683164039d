// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The floor under the queue: a grouped INSERT, a SELECT and a DELETE by id on the same table, bare,
 * and beside them the layer's admit, load and settle. One session, 64 rows at a time, 2 KB mail.
 *
 * `node bench/floors/queue.ts DIRECTORY [npm]`; the directory keeps its cluster for the next run.
 */
import type * as PgConnection from "@effect/sql-pg/PgConnection"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as SqlClient from "effect/sql/SqlClient"
import { randomBytes } from "node:crypto"
import * as fs from "node:fs"
import * as process from "node:process"
import * as EmbeddedPostgres from "../../layers/EmbeddedPostgres.ts"
import * as Migrations from "../../layers/Migrations.ts"
import * as Postgres from "../../layers/Postgres.ts"
import * as PostgresSession from "../../layers/PostgresSession.ts"
import { QueuePg } from "../../layers/QueuePg.ts"
import type { Entry, Outcome } from "../../src/pipeline/Job.ts"
import { type Admission, Queue } from "../../src/services/Queue.ts"

const rounds = 5
const batches = 100
const size = 64

const headers = Buffer.from(`Subject: a message like others\r\nX-Filler: ${"y".repeat(350)}\r\n`)
const body = Buffer.from(`${randomBytes(54).toString("base64")}\r\n`.repeat(28))

const message = (): Admission => ({
  token: randomBytes(16).toString("hex"),
  sender: "ann@a.example",
  recipients: ["bob@b.example"],
  fromHeader: "ann@a.example",
  subject: "a message like others",
  messageId: "<123@a.example>",
  listId: null,
  headers,
  body,
  section: "init",
  fairKey: "d:a.example",
  state: { local_origin: false }
})

const done = ({ id, rev }: Entry): Outcome => ({
  id,
  rev,
  verdict: "done",
  section: undefined,
  patch: {},
  writes: [],
  children: [],
  emissions: []
})

const batch = <A>(make: () => A): ReadonlyArray<A> => Array.from({ length: size }, make)

/** Microseconds of CPU a backend has used (Linux). */
const backendMicros = (pid: number): number =>
  Number(fs.readFileSync(`/proc/${pid}/schedstat`, "utf8").split(" ")[0]) / 1000

interface Figure {
  readonly perSecond: number
  readonly clientMicros: number
  readonly serverMicros: number
}

/** Runs `step` for each batch and says what a row of it cost. */
const measure = Effect.fnUntraced(function* <E>(
  pid: number,
  step: (batchNumber: number) => Effect.Effect<unknown, E>
) {
  const client = process.cpuUsage()
  const server = backendMicros(pid)
  const begin = performance.now()
  for (let k = 0; k < batches; k++) yield* step(k)
  const seconds = (performance.now() - begin) / 1000
  const used = process.cpuUsage(client)
  const rows = batches * size
  return {
    perSecond: rows / seconds,
    clientMicros: (used.user + used.system) / rows,
    serverMicros: (backendMicros(pid) - server) / rows
  } satisfies Figure
})

/** The three statements as bare as they can be. */
const bare = Effect.fnUntraced(function* (session: PgConnection.PgConnection) {
  const ids: Array<ReadonlyArray<unknown>> = []
  const insert = (): Effect.Effect<void, unknown> => {
    const tokens = batch(() => randomBytes(16).toString("hex"))
    return Effect.map(
      session.queryValues(
        `insert into pepsi.workqueue
           (token, mail_from, rcpt_to, headers, body, stage, fair_key, size)
         select t, 'ann@a.example', '{bob@b.example}', h, b, 'init', 'd:a.example', 2400
           from unnest($1::text[], $2::bytea[], $3::bytea[]) m(t, h, b) returning id`,
        [tokens, batch(() => headers), batch(() => body)]
      ),
      (rows) => void ids.push(rows.map(([id]) => id))
    )
  }
  const select = (k: number) =>
    session.query("select id, headers, body from pepsi.workqueue where id = any ($1::bigint[])", [
      ids[k]
    ])
  const remove = (k: number) =>
    session.query("delete from pepsi.workqueue where id = any ($1::bigint[])", [ids[k]])
  const sync = (value: string) =>
    session.query("select set_config('synchronous_commit', $1, false)", [value])
  yield* sync("on")
  const admitted = yield* measure(session.processId, insert)
  yield* sync("off")
  return {
    "bare insert": admitted,
    "bare select": yield* measure(session.processId, select),
    "bare delete": yield* measure(session.processId, remove)
  }
})

const layered = Effect.fnUntraced(function* (queue: Queue["Service"], pid: number) {
  const entries: Array<ReadonlyArray<Entry>> = []
  const admit = () => Effect.map(queue.admit(batch(message)), (list) => void entries.push(list))
  return {
    admit: yield* measure(pid, admit),
    "load full": yield* measure(pid, (k) => queue.load(entries[k]!, "full")),
    "settle done": yield* measure(pid, (k) =>
      queue.settle(entries[k]!.map(done), { durable: false })
    )
  }
})

const median = (figures: ReadonlyArray<Figure>, of: keyof Figure): number =>
  figures.map((figure) => figure[of]).toSorted((a, b) => a - b)[Math.floor(figures.length / 2)]!

const print = (all: ReadonlyMap<string, ReadonlyArray<Figure>>): void => {
  process.stdout.write("                rows/s   client   server  (CPU us per row, medians)\n")
  for (const [name, figures] of all) {
    const [rate, client, server] = (["perSecond", "clientMicros", "serverMicros"] as const).map(
      (of) =>
        median(figures, of)
          .toFixed(of === "perSecond" ? 0 : 1)
          .padStart(8)
    )
    process.stdout.write(`${name.padEnd(14)}${rate} ${client} ${server}\n`)
  }
}

const program = Effect.gen(function* () {
  yield* Migrations.migrate
  const sql = yield* SqlClient.SqlClient
  const queue = yield* Queue
  const session = yield* (yield* Postgres.Postgres).connect()
  const [own] = yield* sql<{ pid: number }>`select pg_backend_pid() as pid`
  const all = new Map<string, Array<Figure>>()
  for (let round = 0; round < rounds; round++) {
    const figures = { ...(yield* bare(session)), ...(yield* layered(queue, own!.pid)) }
    for (const [name, figure] of Object.entries(figures)) {
      all.set(name, [...(all.get(name) ?? []), figure])
    }
  }
  print(all)
})

const [directory, binaries] = process.argv.slice(2)
const Session = Layer.unwrap(
  Effect.map(EmbeddedPostgres.EmbeddedPostgres, ({ server }) =>
    PostgresSession.layer({ server, applicationName: "pepsi bench", synchronousCommit: false })
  )
)
const Server = EmbeddedPostgres.layer({ directory: directory!, hostBinaries: binaries !== "npm" })

await Effect.runPromise(
  Effect.scoped(program).pipe(
    Effect.provide(QueuePg.pipe(Layer.provideMerge(Session), Layer.provide(Server)))
  )
)
