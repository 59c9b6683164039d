// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The queue in PostgreSQL against its model in memory: the same commands, in any order and number,
 * leave equal rows.
 */
import { assert, layer } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import * as SqlClient from "effect/sql/SqlClient"
import { QueuePg } from "../../layers/QueuePg.ts"
import * as Header from "../../src/mail/Header.ts"
import type { NewMessage, Outcome } from "../../src/pipeline/Job.ts"
import type { Patch } from "../../src/pipeline/Verdict.ts"
import * as Writes from "../../src/pipeline/Writes.ts"
import { Queue } from "../../src/services/Queue.ts"
import * as Database from "../support/Database.ts"
import * as MemoryQueue from "../support/MemoryQueue.ts"
import type { Row } from "../support/MemoryRows.ts"
import { TablePg } from "../support/TablePg.ts"
import { message, newToken, outcome } from "./Queue.ts"

const Word = Schema.Literals(["", "a", "bc", "d\0e", "\ud800", "ü"])
const Maybe = <S extends Schema.Top>(schema: S) => Schema.UndefinedOr(schema)
const Section = Schema.Literals(["init", "next", "last"])

const PatchOf = Schema.Struct({
  subject: Maybe(Schema.NullOr(Word)),
  sender: Maybe(Schema.Literals(["", "eve@e.example"])),
  recipients: Maybe(Schema.Literals(["one", "two"])),
  hdrFlags: Maybe(Schema.NullOr(Schema.Literals([0, 5]))),
  settingsFor: Maybe(Schema.NullOr(Schema.Literals(["@", "x@y"]))),
  state: Maybe(Schema.Record(Schema.Literals(["spam", "user", "extra"]), Schema.NullOr(Word))),
  unset: Maybe(Schema.Literals(["spam", "user"])),
  header: Maybe(Word),
  body: Maybe(Word)
})

/** One outcome for one of the rows there are. */
const Settle = Schema.Struct({
  row: Schema.Literals([0, 1, 2, 3]),
  stale: Schema.Literals([false, false, false, true]),
  verdict: Schema.Literals(["pass", "pass", "done", "defer", "defer", "park", "fail", "fanout"]),
  section: Maybe(Section),
  patch: PatchOf,
  error: Maybe(Word),
  late: Schema.Boolean,
  children: Schema.Literals([0, 0, 1, 2]),
  claims: Schema.Literals([0, 0, 1, 2])
})

const Command = Schema.Union([
  Schema.Struct({
    do: Schema.Literal("settle"),
    batch: Schema.Array(Settle).check(Schema.isMaxLength(4))
  }),
  Schema.Struct({
    do: Schema.Literals(["crash", "hold", "release", "resume"]),
    row: Schema.Literals([0, 1, 2, 3])
  }),
  Schema.Struct({ do: Schema.Literals(["promote", "expire"]) })
])
type Command = typeof Command.Type

const patchOf = ({
  body,
  header,
  recipients,
  settingsFor,
  state,
  unset,
  ...rest
}: typeof PatchOf.Type): Patch => {
  const given: { [K in keyof Patch]?: unknown } = {
    ...rest,
    recipients:
      recipients === undefined ? undefined : recipients === "one" ? ["f@f"] : ["f@f", "g@g"],
    settingsFor: typeof settingsFor === "string" ? [settingsFor] : settingsFor,
    state,
    unset: unset === undefined ? undefined : [unset],
    header: header === undefined ? undefined : Header.fromText(`X: ${header.toWellFormed()}\r\n`),
    body: body === undefined ? undefined : Buffer.from(body.toWellFormed())
  }
  return Object.fromEntries(
    Object.entries(given).filter(([, value]) => value !== undefined)
  ) as Patch
}

/** Children and emissions of a step; the number names them alike on both sides. */
const made = (kind: string, count: number, step: number, row: Row): ReadonlyArray<NewMessage> =>
  Array.from({ length: count }, (_, k) => ({
    token: `${kind}-${step}-${k}-${row.token}`,
    section: "next",
    recipients: [`${kind}@k.example`],
    patch:
      kind === "child"
        ? { state: { extra: k } }
        : {
            header: Header.fromText("Y: 1\r\n"),
            body: Buffer.from("b")
          },
    ...(kind === "child" && k === 1 ? { after: Duration.hours(1) } : {}),
    ...(kind === "emit" ? { if: k } : {})
  }))

const outcomeOf = (wish: typeof Settle.Type, row: Row, step: number): Outcome => {
  const wait = wish.late ? Duration.hours(2) : Duration.zero
  const children = wish.verdict === "fanout" ? Math.max(1, wish.children) : wish.children
  return outcome(
    { id: row.id, rev: wish.stale ? row.rev + 1 : row.rev },
    {
      verdict: wish.verdict,
      section: wish.verdict === "pass" ? (wish.section ?? "next") : wish.section,
      patch: patchOf(wish.patch),
      ...(wish.error === undefined
        ? {}
        : { error: wish.error.toWellFormed().replaceAll("\0", "") }),
      ...(wish.verdict === "defer" ? { after: wait } : {}),
      ...(wish.verdict === "park"
        ? {
            park: {
              reason: "key",
              ref: wish.late ? "k" : undefined,
              for: wait,
              onExpiry: wish.section
            }
          }
        : {}),
      children: made("child", children, step, row),
      emissions: made("emit", wish.claims, step, row),
      writes: Array.from({ length: wish.claims }, (_, k) =>
        Writes.claimReply("me@h", `${k}${row.sender}`, Duration.hours(1))
      )
    }
  )
}

/** Ids follow no order that both sides share; tokens do. */
const byToken = <R extends { readonly token: string }>(rows: ReadonlyArray<R>): ReadonlyArray<R> =>
  [...rows].toSorted((a, b) => (a.token < b.token ? -1 : 1))

type Side = Context.Context<Queue | MemoryQueue.Table>

/** Runs a command on one side; rows are named by their place among those that are there. */
const run = Effect.fnUntraced(function* (side: Side, command: Command, step: number) {
  const queue = Context.get(side, Queue)
  const table = Context.get(side, MemoryQueue.Table)
  const rows = byToken(yield* table.rows)
  const pick = (place: number): Row | undefined => rows[place % rows.length]
  if (rows.length === 0) return []
  if (command.do === "settle") {
    const chosen = new Map(command.batch.map((wish) => [pick(wish.row)!.id, wish]))
    const batch = [...chosen].map(([id, wish]) =>
      outcomeOf(wish, rows.find((r) => r.id === id)!, step)
    )
    const settled = yield* queue.settle(batch, { durable: false })
    return settled
      .map(
        (s) =>
          `${s.index} ${s.kind} ${s.status} ${s.entry?.section} ${s.entry?.attempts} ${s.entry?.crashes}` +
          ` ${s.entry?.rev} ${s.entry?.sizeBytes} ${s.entry?.fairKey}`
      )
      .toSorted()
  }
  if (!("row" in command)) {
    const entries = yield* queue[command.do](1000)
    return entries
      .map((e) => `${e.rev} ${e.section} ${e.attempts} ${e.crashes} ${e.sizeBytes}`)
      .toSorted()
  }
  const row = pick(command.row)!
  if (command.do === "crash")
    return (yield* queue.crashed([row], "killed")).map((c) => [c.rev, c.crashes, c.status])
  if (command.do === "resume") return [yield* table.resume(row.token, row.parkedRef)]
  yield* table[command.do](row.token)
  return []
})

/** Ten minutes are more than a run takes and less than any wait that is not over at once. */
const tenMinutes = (millis: number): number => Math.round(millis / 600_000) + 0 // never -0

/** A row without what must differ: ids and the exact moments. */
const comparable = ({ nextAt, parkedUntil, state, ...row }: Row, now: number) => ({
  ...row,
  id: undefined,
  receivedAt: undefined,
  headers: Buffer.from(row.headers).toString("latin1"),
  body: Buffer.from(row.body).toString("latin1"),
  state: { ...state, failure: state.failure?.class },
  nextAt: nextAt === null ? null : tenMinutes(nextAt - now),
  parkedUntil: parkedUntil === null ? null : tenMinutes(parkedUntil - now)
})

const dump = (side: Side) =>
  Effect.map(Context.get(side, MemoryQueue.Table).rows, (rows) =>
    byToken(rows.map((row) => comparable(row, Date.now())))
  )

const Postgres = Layer.merge(QueuePg, TablePg).pipe(Layer.provideMerge(Database.fresh()))

layer(Postgres, { excludeTestServices: true })("the queue and its model", (it) => {
  it.effect.prop(
    "stay equal under any commands",
    { commands: Schema.Array(Command) },
    ({ commands }) =>
      Effect.gen(function* () {
        const real = yield* Effect.context<Queue | MemoryQueue.Table>()
        const model: Side = yield* Layer.build(Layer.fresh(MemoryQueue.layer))
        const sql = yield* SqlClient.SqlClient
        yield* sql`truncate pepsi.workqueue, pepsi.reply_ledger`
        const messages = Array.from({ length: 4 }, (_, k) =>
          message({ token: newToken(), sender: `s${newToken()}@x${k}` })
        )
        for (const side of [real, model]) yield* Context.get(side, Queue).admit(messages)
        for (const [step, command] of commands.entries()) {
          const [there, here] = [yield* run(real, command, step), yield* run(model, command, step)]
          assert.deepEqual(there, here)
          assert.deepEqual(yield* dump(real), yield* dump(model))
        }
      }),
    { timeout: 60_000, arbitrary: { runs: 80 } }
  )
})
