// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Rows of the queue in memory and what a settle does to them, by the transitions of `Job`. Pure.
 */
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import { json } from "../../layers/PostgresText.ts"
import * as Job from "../../src/pipeline/Job.ts"
import type { Load } from "../../src/pipeline/Stage.ts"
import type { State } from "../../src/pipeline/State.ts"
import type { Patch } from "../../src/pipeline/Verdict.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import type { Listed, Loaded, Settled } from "../../src/services/Queue.ts"

/** A row of the queue with all its columns; moments are milliseconds of the clock. */
export interface Row extends Omit<Job.Row, "nextInMillis"> {
  readonly id: number
  readonly nextAt: number | null
  readonly parkedUntil: number | null
  readonly token: string
  readonly sender: string
  readonly recipients: ReadonlyArray<string>
  readonly fromHeader: string | null
  readonly subject: string | null
  readonly messageId: string | null
  readonly listId: string | null
  readonly hdrFlags: number | null
  readonly settingsFor: ReadonlyArray<string> | null
  readonly fairKey: string
  readonly headers: Uint8Array
  readonly body: Uint8Array
  readonly state: State
  readonly receivedAt: number
}

export const refused = (operation: string, code: string) =>
  new DatabaseError({ reason: "data", operation, code, cause: undefined })

export const sizeOf = (row: Pick<Row, "headers" | "body">): number =>
  row.headers.length + 2 + row.body.length

export const toEntry = (row: Row, repeat: boolean): Job.Entry => ({
  id: row.id,
  rev: row.rev,
  section: row.section,
  sizeBytes: sizeOf(row),
  fairKey: row.fairKey,
  attempts: row.attempts,
  crashes: row.crashes,
  repeat
})

/** The same cleaning as text columns need: no NUL, no lone surrogates. */
export const clean = <A extends string | null>(text: A): A =>
  (text?.toWellFormed().replaceAll("\0", "") ?? null) as A

const patched = (row: Row, patch: Patch): Row => {
  const state: { [key: string]: unknown } = {
    ...row.state,
    ...(patch.state === undefined ? {} : JSON.parse(json(patch.state)))
  }
  for (const key of patch.unset ?? []) delete state[key]
  const { body, header, state: _, unset: __, ...columns } = patch
  return {
    ...row,
    ...columns,
    subject: columns.subject === undefined ? row.subject : clean(columns.subject),
    state,
    headers: header?.raw ?? row.headers,
    body: body ?? row.body
  }
}

export const asJobRow = (row: Row, now: number): Job.Row => ({
  ...row,
  nextInMillis: row.nextAt === null ? null : row.nextAt - now
})

/** The state columns of `job` on top of `row`. */
export const withJob = (row: Row, job: Job.Row, now: number): Row => {
  const { nextInMillis, ...columns } = job
  return { ...row, ...columns, nextAt: nextInMillis === null ? null : now + nextInMillis }
}

/** Recipient and address keys with their last moment; both writes that migration 0003 has. */
type Ledger = Map<string, number>

/** Whether a write wins; undefined = there is no such write. */
const runWrite = (ledger: Ledger, { args, name }: Job.Outcome["writes"][number], now: number) => {
  const key = JSON.stringify([
    name,
    args["recipient"],
    args["sender"],
    args["address"],
    args["kind"],
    args["peer"]
  ])
  const before = ledger.get(key)
  if (name !== "claim_reply" && name !== "whitelist_upsert") return undefined
  const isWon =
    before === undefined ||
    (name === "claim_reply" && before < now - Number(args["interval"]) * 1000)
  if (isWon) ledger.set(key, now)
  return isWon
}

const bad = (outcome: Job.Outcome): string | undefined =>
  outcome.verdict === "pass" && outcome.section === undefined
    ? "23502"
    : outcome.verdict === "fanout" && outcome.children.length === 0
      ? "22023"
      : outcome.patch.recipients?.length === 0
        ? "23514"
        : undefined

/**
 * Everything a transaction changes; a settle works on a copy and swaps it in when all went well.
 */
export interface Tables {
  readonly rows: Map<number, Row>
  readonly ledger: Ledger
  nextId: number
}

export const newRow = (
  parent: Row | undefined,
  message: Job.NewMessage,
  id: number,
  now: number
): Row => {
  const blank: Omit<Row, "id" | "token"> = {
    status: "pending",
    section: "",
    rev: 0,
    attempts: 0,
    crashes: 0,
    nextAt: null,
    parkedUntil: null,
    parkedReason: null,
    parkedRef: null,
    parkedTo: null,
    lastError: null,
    sender: "",
    recipients: [],
    fromHeader: null,
    subject: null,
    messageId: null,
    listId: null,
    hdrFlags: null,
    settingsFor: null,
    fairKey: ":gen",
    headers: new Uint8Array(0),
    body: new Uint8Array(0),
    state: {},
    receivedAt: now
  }
  const inherited =
    parent === undefined
      ? blank
      : {
          ...blank,
          sender: parent.sender,
          fromHeader: parent.fromHeader,
          subject: parent.subject,
          messageId: parent.messageId,
          listId: parent.listId,
          hdrFlags: parent.hdrFlags,
          fairKey: parent.fairKey,
          headers: parent.headers,
          body: parent.body,
          state: parent.state,
          receivedAt: parent.receivedAt
        }
  return {
    ...patched({ ...inherited, id, token: message.token }, message.patch),
    section: message.section,
    recipients: message.recipients,
    status: message.after === undefined ? "pending" : "deferred",
    nextAt: message.after === undefined ? null : now + Duration.toMillis(message.after)
  }
}

/** Applies one outcome to `tables`. */
const settleOne = (
  tables: Tables,
  outcome: Job.Outcome,
  index: number,
  now: number,
  won: ReadonlyArray<boolean>
): ReadonlyArray<Settled> => {
  const row = tables.rows.get(outcome.id)
  const job = row === undefined ? undefined : Job.settle(asJobRow(row, now), outcome)
  if (row === undefined || job === undefined) {
    return [{ index, kind: "fenced", entry: undefined, status: undefined, id: outcome.id }]
  }
  const after = patched(row, outcome.patch)
  const isGone = job === "gone"
  const applied: Row = isGone
    ? after
    : {
        ...withJob(after, job, now),
        parkedUntil:
          outcome.park?.for === undefined ? null : now + Duration.toMillis(outcome.park.for)
      }
  if (isGone) tables.rows.delete(row.id)
  else tables.rows.set(row.id, applied)
  const made: Array<Settled> = []
  const add = (kind: "child" | "emission", message: Job.NewMessage) => {
    if ([...tables.rows.values()].some((other) => other.token === message.token)) return
    const fresh = newRow(kind === "child" ? after : undefined, message, tables.nextId++, now)
    tables.rows.set(fresh.id, fresh)
    made.push({ index, kind, entry: toEntry(fresh, false), status: fresh.status, id: fresh.id })
  }
  for (const child of outcome.children) add("child", child)
  for (const emission of outcome.emissions) {
    if (emission.if === undefined || won[emission.if] === true) add("emission", emission)
  }
  const entry = isGone ? undefined : toEntry(applied, false)
  return [
    { index, kind: "applied", entry, status: isGone ? "gone" : applied.status, id: row.id },
    ...made
  ]
}

const matches = (tables: Tables, outcome: Job.Outcome): boolean => {
  const row = tables.rows.get(outcome.id)
  return (
    row !== undefined &&
    row.rev === outcome.rev &&
    (row.status === "pending" || row.status === "held")
  )
}

/** All outcomes or, for one bad among them, none. */
export const settleAll = (
  tables: Tables,
  outcomes: ReadonlyArray<Job.Outcome>,
  now: number
): ReadonlyArray<Settled> | DatabaseError => {
  const code = outcomes.map(bad).find((c) => c !== undefined)
  if (code !== undefined) return refused("Queue.settle", code)
  const wins = outcomes.map((outcome) =>
    matches(tables, outcome)
      ? outcome.writes.map((write) => runWrite(tables.ledger, write, now))
      : []
  )
  if (wins.some((list) => list.includes(undefined))) return refused("Queue.settle", "42883")
  const tokens = outcomes
    .flatMap((outcome, k) =>
      matches(tables, outcome)
        ? [
            ...outcome.children,
            ...outcome.emissions.filter((e) => e.if === undefined || wins[k]![e.if] === true)
          ]
        : []
    )
    .map((m) => m.token)
  if (new Set(tokens).size < tokens.length) return refused("Queue.settle", "22023")
  return outcomes.flatMap((outcome, k) =>
    settleOne(
      tables,
      outcome,
      k,
      now,
      wins[k]!.map((isWon) => isWon === true)
    )
  )
}

type Settings = Loaded["settings"]

/** The row as a load at this level has it. */
export const toLoaded = (
  row: Row,
  index: number,
  load: Load,
  all: ReadonlyMap<string, Settings[string]>
): Loaded => {
  const keys = row.settingsFor ?? settingsKeys(row.recipients)
  const {
    fairKey,
    fromHeader,
    hdrFlags,
    id,
    listId,
    messageId,
    recipients,
    rev,
    section,
    sender,
    subject,
    token
  } = row
  return {
    index,
    id,
    rev,
    token,
    sender,
    recipients,
    fromHeader,
    subject,
    section,
    fairKey,
    hdrFlags,
    messageId,
    listId,
    state: row.state,
    sizeBytes: sizeOf(row),
    settings: Object.fromEntries([...all].filter(([address]) => keys.includes(address))),
    receivedAt: DateTime.makeUnsafe(row.receivedAt),
    attempts: row.attempts,
    crashes: row.crashes,
    headers: load === "metadata" ? undefined : row.headers,
    body:
      load === "full"
        ? row.body
        : typeof load === "object"
          ? row.body.subarray(0, load.prefix)
          : undefined
  }
}

/** The addresses whose settings apply where settings_for does not say. */
const settingsKeys = (recipients: ReadonlyArray<string>): ReadonlyArray<string> => [
  "@",
  ...recipients
    .map((r) => r.toLowerCase())
    .flatMap((address) => {
      const domain = address.slice(address.lastIndexOf("@"))
      return [domain, address, address.replace(/\+.*(?=@)/, "")]
    })
]

export const toListed = (row: Row, now: number): Listed => {
  const due = row.nextAt ?? row.parkedUntil
  return {
    id: row.id,
    token: row.token,
    section: row.section,
    status: row.status,
    sender: row.sender,
    recipients: row.recipients,
    sizeBytes: sizeOf(row),
    ageSeconds: (now - row.receivedAt) / 1000,
    attempts: row.attempts,
    crashes: row.crashes,
    dueInSeconds: due === null ? null : (due - now) / 1000,
    lastError: row.lastError,
    parkedReason: row.parkedReason,
    state: Job.withoutClient(row.state)
  }
}
