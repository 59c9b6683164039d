// SPDX-License-Identifier: AGPL-3.0-or-later
/** The look at the table and the operator's commands of `MemoryQueue.Table`, on PostgreSQL. */
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as SqlClient from "effect/sql/SqlClient"
import { Table } from "./MemoryQueue.ts"
import type { Row } from "./MemoryRows.ts"

interface TableRow extends Omit<Row, "nextAt" | "parkedUntil" | "receivedAt"> {
  readonly nextAt: Date | null
  readonly parkedUntil: Date | null
  readonly receivedAt: Date
}

const moment = (date: Date | null): number | null => (date === null ? null : date.getTime())

const make = Effect.gen(function* () {
  const sql = yield* SqlClient.SqlClient
  const rows = sql<TableRow>`
    select w.id::float8 as id, w.rev, w.status, w.stage as section, w.attempts, w.crashes,
           w.parked_reason as "parkedReason", w.parked_ref as "parkedRef", w.parked_to as "parkedTo",
           w.last_error as "lastError", w.next_at as "nextAt", w.parked_until as "parkedUntil", w.token,
           w.mail_from as sender, w.rcpt_to as recipients, w.from_header as "fromHeader", w.subject,
           w.message_id as "messageId", w.list_id as "listId", w.hdr_flags as "hdrFlags",
           w.settings_for as "settingsFor", w.fair_key as "fairKey", w.headers,
           coalesce(w.body, b.data) as body, w.state, w.received_at as "receivedAt"
      from pepsi.workqueue w left join pepsi.body b on b.id = w.body_id
     order by w.id`.pipe(
    Effect.map((found) =>
      found.map(
        (row): Row => ({
          ...row,
          nextAt: moment(row.nextAt),
          parkedUntil: moment(row.parkedUntil),
          receivedAt: row.receivedAt.getTime()
        })
      )
    ),
    Effect.orDie
  )
  return Table.of({
    rows,
    hold: (token) =>
      Effect.orDie(Effect.asVoid(sql`select pepsi.workqueue_hold(array[${token}]::text[])`)),
    release: (token) =>
      Effect.orDie(Effect.asVoid(sql`select pepsi.workqueue_release(array[${token}]::text[])`)),
    resume: (token, ref) =>
      Effect.orDie(
        Effect.map(
          sql<{ n: number }>`select pepsi.workqueue_resume(${token}, ${ref}) as n`,
          ([row]) => row?.n === 1
        )
      ),
    setSettings: (address, settings) =>
      Effect.orDie(
        Effect.asVoid(sql`
        insert into pepsi.address_settings (address, settings) values (${address}, ${JSON.stringify(settings)}::jsonb)`)
      )
  })
})

export const TablePg = Layer.effect(Table, make)
