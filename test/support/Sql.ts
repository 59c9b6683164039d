// SPDX-License-Identifier: AGPL-3.0-or-later
/** Plain SQL for tests of the migrations: one session, rows put in, settles called by hand. */
import type * as PgConnection from "@effect/sql-pg/PgConnection"
import * as Effect from "effect/Effect"
import * as Result from "effect/Result"
import type { SqlError } from "effect/sql/SqlError"
import * as assert from "node:assert/strict"
import { createHash } from "node:crypto"
import * as Postgres from "../../layers/Postgres.ts"

export type Row = { readonly [column: string]: any }
export type Session = PgConnection.PgConnection

/** A row to settle by hand, with whatever else its entry in `p_more` has. */
export interface Wish {
  readonly id: bigint
  readonly rev: number
  readonly v: string
  readonly to_stage?: string
  readonly state?: unknown
  readonly [more: string]: unknown
}

const plain = new Set(["id", "rev", "v", "to_stage", "state"])

const moreOf = (list: ReadonlyArray<Wish>) =>
  list.flatMap((wish, k) => {
    const entries = Object.entries(wish).filter(([name]) => !plain.has(name))
    const needed = entries.length > 0 || !["pass", "done"].includes(wish.v)
    return needed ? [{ i: k + 1, ...Object.fromEntries(entries) }] : []
  })

/** What a settle returned, by the place in the batch. */
export class Settled {
  readonly rows: ReadonlyArray<Row>
  constructor(rows: ReadonlyArray<Row>) {
    this.rows = [...rows].toSorted((a, b) => a["i"] - b["i"])
  }
  of(kind: string): ReadonlyArray<Row> {
    return this.rows.filter((row) => row["kind"] === kind)
  }
  /** Places in the batch of the rows of this kind. */
  is(kind: string): ReadonlyArray<number> {
    return this.of(kind).map((row) => row["i"])
  }
}

export interface Sql {
  readonly session: Session
  readonly q: (
    text: string,
    params?: ReadonlyArray<unknown>
  ) => Effect.Effect<ReadonlyArray<Row>, SqlError>
  /** The first column of the first row. */
  readonly one: (text: string, params?: ReadonlyArray<unknown>) => Effect.Effect<any, SqlError>
  readonly settle: (
    list: ReadonlyArray<Wish>,
    blobs?: ReadonlyArray<Uint8Array>
  ) => Effect.Effect<Settled, SqlError>
  readonly row: (id: bigint) => Effect.Effect<Row | undefined, SqlError>
  readonly count: (where?: string) => Effect.Effect<number, SqlError>
  /** `n` rows from n senders of one domain. */
  readonly put: (
    n: number,
    options?: { readonly body?: Uint8Array; readonly stage?: string; readonly state?: unknown }
  ) => Effect.Effect<ReadonlyArray<{ readonly id: bigint; readonly rev: number }>, SqlError>
}

export const on = (session: Session): Sql => {
  const q: Sql["q"] = (text, params = []) =>
    Effect.map(session.query(text, params), (result) => result.rows)
  const one: Sql["one"] = (text, params) =>
    Effect.map(q(text, params), ([row]) => Object.values(row ?? {})[0])
  return {
    session,
    q,
    one,
    settle: (list, blobs) => {
      const more = moreOf(list)
      return Effect.map(
        q(
          "select * from pepsi.settle($1::bigint[], $2::int[], $3::text[], $4::text[], $5::jsonb, $6::jsonb, $7::bytea[])",
          [
            list.map((w) => w.id),
            list.map((w) => w.rev),
            list.map((w) => w.v),
            list.some((w) => w.to_stage !== undefined) ? list.map((w) => w.to_stage ?? null) : null,
            list.some((w) => w.state !== undefined)
              ? JSON.stringify(list.map((w) => w.state ?? null))
              : null,
            more.length > 0 ? JSON.stringify(more) : null,
            blobs ?? null
          ]
        ),
        (rows) => new Settled(rows)
      )
    },
    row: (id) => Effect.map(q("select * from pepsi.workqueue where id = $1", [id]), ([row]) => row),
    count: (where = "true") => one(`select count(*)::int4 from pepsi.workqueue where ${where}`),
    put: (n, options = {}) =>
      q(
        `insert into pepsi.workqueue (token, mail_from, rcpt_to, headers, body, stage, state, size, fair_key)
         select 't' || gen_random_uuid(), 'x' || g || '@a.example', '{r@h.example}', 'A: b\\015\\012', $2, $3,
                $4::jsonb, null, null
           from generate_series(1, $1::int) g returning id, rev`,
        [
          n,
          options.body ?? Buffer.from("body\r\n"),
          options.stage ?? "init",
          JSON.stringify(options.state ?? {})
        ]
      ) as ReturnType<Sql["put"]>
  }
}

/** A session of its own until the scope closes. */
export const open = Effect.gen(function* () {
  const postgres = yield* Postgres.Postgres
  return on(yield* postgres.connect())
})

/** A session on an empty queue. */
export const empty = Effect.gen(function* () {
  const sql = yield* open
  yield* sql.q(
    "truncate pepsi.workqueue, pepsi.body, pepsi.reply_ledger, pepsi.whitelist, pepsi.stage_stats"
  )
  return sql
})

/** Waits until the session waits for a lock. */
export const blocked = (watcher: Sql, session: Session): Effect.Effect<void, SqlError> =>
  watcher
    .one("select wait_event_type from pg_stat_activity where pid = $1", [session.processId])
    .pipe(Effect.repeat({ until: (type) => type === "Lock" }), Effect.asVoid)

/** Token of a child as the program makes it, in short. */
export const childToken = (parent: string, stage: string, key: string): string =>
  createHash("sha256")
    .update(parent + stage + key)
    .digest("hex")
    .slice(0, 32)

/** The statement is refused with this SQLSTATE. */
export const fails = <A>(effect: Effect.Effect<A, SqlError>, code: string): Effect.Effect<void> =>
  Effect.map(Effect.result(effect), (result) => {
    assert.equal(Result.isFailure(result) ? Postgres.sqlState(result.failure) : "no error", code)
  })
