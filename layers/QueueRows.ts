// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Between the values of the Queue contract and the arguments and rows of the SQL functions of
 * migrations 0002 to 0006. Pure.
 */
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import type { Entry, NewMessage, Outcome, Status } from "../src/pipeline/Job.ts"
import type { Load } from "../src/pipeline/Stage.ts"
import type { State } from "../src/pipeline/State.ts"
import type * as Stats from "../src/pipeline/Stats.ts"
import type { Patch } from "../src/pipeline/Verdict.ts"
import type { Listed, Loaded, Settled } from "../src/services/Queue.ts"
import { json } from "./PostgresText.ts"

/** A row of ready_scan, ready_refill, promote_due, expire_parked. */
export interface EntryRow {
  readonly id: number
  readonly rev: number
  readonly stage: string
  readonly size: number
  readonly fair_key: string
  readonly attempts: number
  readonly crashes: number
}

export const toEntry = (row: EntryRow, repeat: boolean): Entry => ({
  id: row.id,
  rev: row.rev,
  section: row.stage,
  sizeBytes: row.size,
  fairKey: row.fair_key,
  attempts: row.attempts,
  crashes: row.crashes,
  repeat
})

/** `p_level` and `p_prefix` of pepsi.load. */
export const level = (load: Load): { readonly level: number; readonly prefix: number } =>
  load === "metadata"
    ? { level: 0, prefix: 0 }
    : load === "headers"
      ? { level: 1, prefix: 0 }
      : load === "full"
        ? { level: 3, prefix: 0 }
        : { level: 2, prefix: load.prefix }

export interface LoadedRow {
  readonly i: number
  readonly id: number
  readonly rev: number
  readonly token: string
  readonly mail_from: string
  readonly rcpt_to: ReadonlyArray<string>
  readonly from_header: string | null
  readonly subject: string | null
  readonly stage: string
  readonly state: State
  readonly size: number
  readonly fair_key: string
  readonly hdr_flags: number | null
  readonly message_id: string | null
  readonly list_id: string | null
  readonly received_at: Date
  readonly attempts: number
  readonly crashes: number
  readonly settings: Loaded["settings"] | null
  readonly headers: Uint8Array | null
  readonly body: Uint8Array | null
}

/** Below this a pinned buffer does no harm, even in hundreds. */
const bigBufferBytes = 1024 * 1024

/**
 * The driver gives octets as views into what it read from the socket, which may be a whole batch of
 * 32 MiB. Usually its rows live and die together and a view is free; but a small part that is kept
 * while its neighbours are gone would keep all of it, so that is copied.
 */
const unpinned = (octets: Uint8Array | null): Uint8Array | undefined => {
  if (octets === null) return undefined
  const pinned = octets.buffer.byteLength
  return pinned > bigBufferBytes && octets.byteLength * 4 < pinned ? octets.slice() : octets
}

export const toLoaded = (row: LoadedRow): Loaded => ({
  index: row.i - 1,
  id: row.id,
  rev: row.rev,
  token: row.token,
  sender: row.mail_from,
  recipients: row.rcpt_to,
  fromHeader: row.from_header,
  subject: row.subject,
  section: row.stage,
  state: row.state,
  sizeBytes: row.size,
  fairKey: row.fair_key,
  hdrFlags: row.hdr_flags,
  messageId: row.message_id,
  listId: row.list_id,
  settings: row.settings ?? {},
  receivedAt: DateTime.fromDateUnsafe(row.received_at),
  attempts: row.attempts,
  crashes: row.crashes,
  headers: unpinned(row.headers),
  body: unpinned(row.body)
})

/** The arguments of pepsi.settle. */
export interface SettleArguments {
  readonly ids: ReadonlyArray<number>
  readonly revs: ReadonlyArray<number>
  readonly verdicts: ReadonlyArray<string>
  readonly stages: ReadonlyArray<string | null>
  readonly states: string | null
  readonly more: string | null
  readonly blobs: ReadonlyArray<Uint8Array>
}

type Json = { [key: string]: unknown }

/** Columns a patch may change, and their names in `p_more`. */
const columns: ReadonlyArray<readonly [keyof Patch, string]> = [
  ["sender", "mail_from"],
  ["recipients", "rcpt_to"],
  ["fromHeader", "from_header"],
  ["subject", "subject"],
  ["messageId", "message_id"],
  ["listId", "list_id"],
  ["hdrFlags", "hdr_flags"],
  ["settingsFor", "settings_for"],
  ["unset", "unset"]
]

/** Puts the changed columns into `entry`; octets go into `blobs`, which jsonb cannot hold. */
const addPatch = (entry: Json, patch: Patch, blobs: Array<Uint8Array>): void => {
  for (const [key, column] of columns) if (patch[key] !== undefined) entry[column] = patch[key]
  if (patch.header !== undefined) entry["headers"] = blobs.push(patch.header.raw)
  if (patch.body !== undefined) entry["body"] = blobs.push(patch.body)
}

const toNewMessage = (message: NewMessage, blobs: Array<Uint8Array>): Json => {
  const entry: Json = { token: message.token, stage: message.section }
  addPatch(entry, message.patch, blobs)
  entry["rcpt_to"] = message.recipients
  if (message.patch.state !== undefined) entry["state"] = message.patch.state
  if (message.after !== undefined) entry["after"] = Duration.toSeconds(message.after)
  if (message.if !== undefined) entry["if"] = message.if
  return entry
}

/** The entry of an outcome in `p_more`; only `i` in it = the outcome is plain. */
const toMore = (outcome: Outcome, i: number, blobs: Array<Uint8Array>): Json => {
  const entry: Json = { i }
  addPatch(entry, outcome.patch, blobs)
  if (outcome.error !== undefined) entry["error"] = outcome.error
  if (outcome.after !== undefined) entry["after"] = Duration.toSeconds(outcome.after)
  if (outcome.park !== undefined) {
    entry["reason"] = outcome.park.reason
    entry["ref"] = outcome.park.ref
    entry["to"] = outcome.park.onExpiry
    if (outcome.park.for !== undefined) entry["for"] = Duration.toSeconds(outcome.park.for)
  }
  const { children, emissions, writes } = outcome
  if (writes.length > 0) entry["writes"] = writes.map(({ args, name }) => ({ ...args, name }))
  if (children.length > 0) entry["children"] = children.map((c) => toNewMessage(c, blobs))
  if (emissions.length > 0) entry["emit"] = emissions.map((e) => toNewMessage(e, blobs))
  return entry
}

const needsEntry = ({ verdict }: Outcome, entry: Json): boolean =>
  (verdict !== "pass" && verdict !== "done") || Object.keys(entry).length > 1

export const settleArguments = (outcomes: ReadonlyArray<Outcome>): SettleArguments => {
  const blobs: Array<Uint8Array> = []
  const more: Array<Json> = []
  for (let k = 0; k < outcomes.length; k++) {
    const entry = toMore(outcomes[k]!, k + 1, blobs)
    if (needsEntry(outcomes[k]!, entry)) more.push(entry)
  }
  return {
    ids: outcomes.map((o) => o.id),
    revs: outcomes.map((o) => o.rev),
    verdicts: outcomes.map((o) => o.verdict),
    stages: outcomes.map((o) => o.section ?? null),
    states: outcomes.some((o) => o.patch.state !== undefined)
      ? json(outcomes.map((o) => o.patch.state ?? null))
      : null,
    more: more.length > 0 ? json(more) : null,
    blobs
  }
}

export interface SettledRow {
  readonly i: number
  readonly kind: Settled["kind"]
  readonly id: number
  readonly rev: number | null
  readonly stage: string | null
  readonly status: Status | "gone" | null
  readonly size: number | null
  readonly fair_key: string | null
  readonly attempts: number | null
  readonly crashes: number | null
}

export const toSettled = (row: SettledRow): Settled => ({
  index: row.i - 1,
  kind: row.kind,
  id: row.id,
  status: row.status ?? undefined,
  // A rev comes with all the other columns.
  entry: row.rev === null ? undefined : toEntry(row as EntryRow, false)
})

export interface ListedRow {
  readonly id: number
  readonly token: string
  readonly stage: string
  readonly status: Status
  readonly mail_from: string
  readonly rcpt_to: ReadonlyArray<string>
  readonly size: number
  readonly age: number
  readonly attempts: number
  readonly crashes: number
  readonly due: number | null
  readonly last_error: string | null
  readonly parked_reason: string | null
  readonly state: State
}

export const toListed = (row: ListedRow): Listed => ({
  id: row.id,
  token: row.token,
  section: row.stage,
  status: row.status,
  sender: row.mail_from,
  recipients: row.rcpt_to,
  sizeBytes: row.size,
  ageSeconds: row.age,
  attempts: row.attempts,
  crashes: row.crashes,
  dueInSeconds: row.due,
  lastError: row.last_error,
  parkedReason: row.parked_reason,
  state: row.state
})

const section = (stats: Stats.SectionStats): Json => ({
  processed: stats.processed,
  done: stats.done,
  deferred: stats.deferred,
  parked: stats.parked,
  failed: stats.failed,
  crashes: stats.crashes,
  fenced: stats.fenced,
  overloads: stats.overloads,
  fused: stats.fused,
  busy_us: Math.round(stats.busyMicros),
  wait_us: Math.round(stats.waitMicros),
  histogram: stats.histogram,
  last_error: stats.lastError
})

/** `p_stats` of pepsi.flush_stats. */
export const toStatsJson = ({ dispatch, sections }: Stats.Stats): string =>
  json({
    dispatch: {
      messages_processed: dispatch.messagesProcessed,
      handed_out: dispatch.handedOut,
      wakeups: dispatch.wakeups,
      polls: dispatch.polls,
      promoted: dispatch.promoted,
      overloads: dispatch.overloads,
      unreported: dispatch.unreported,
      retries: dispatch.retries
    },
    stages: Object.fromEntries(
      Object.entries(sections).map(([name, stats]) => [name, section(stats)])
    )
  })
