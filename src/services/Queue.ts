// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The work queue: the one table all mail waits in. Who may run a row is decided elsewhere (the
 * owner of its section keeps that in memory); here rows are admitted, read, loaded and settled.
 */
import * as Context from "effect/Context"
import type * as DateTime from "effect/DateTime"
import type * as Effect from "effect/Effect"
import type * as Option from "effect/Option"
import type * as Scope from "effect/Scope"
import type { Entry, Outcome, Status } from "../pipeline/Job.ts"
import type { Load } from "../pipeline/Stage.ts"
import type { State } from "../pipeline/State.ts"
import type * as Stats from "../pipeline/Stats.ts"
import type { DatabaseError } from "./DatabaseError.ts"

/** A message to admit. */
export interface Admission {
  /** 32 lower-case hexadecimal digits. */
  readonly token: string
  readonly sender: string
  /** 1 to 1,000 addresses without control characters. */
  readonly recipients: ReadonlyArray<string>
  readonly fromHeader: string | null
  readonly subject: string | null
  readonly messageId: string | null
  readonly listId: string | null
  /** CRLF lines without the empty line. */
  readonly headers: Uint8Array
  readonly body: Uint8Array
  readonly section: string
  readonly fairKey: string
  readonly state: State
}

/** A row as it is loaded for a run; `headers` and `body` as the level asked has them. */
export interface Loaded {
  /** Place in the request, from 0. */
  readonly index: number
  readonly id: number
  readonly rev: number
  readonly token: string
  readonly sender: string
  readonly recipients: ReadonlyArray<string>
  readonly fromHeader: string | null
  readonly subject: string | null
  readonly section: string
  readonly state: State
  readonly sizeBytes: number
  readonly fairKey: string
  readonly hdrFlags: number | null
  readonly messageId: string | null
  readonly listId: string | null
  readonly settings: { readonly [address: string]: { readonly [key: string]: unknown } }
  readonly receivedAt: DateTime.Utc
  readonly attempts: number
  readonly crashes: number
  readonly headers: Uint8Array | undefined
  readonly body: Uint8Array | undefined
}

/** What became of an outcome, or a row that a settle made. */
export interface Settled {
  /** Place of the outcome in the request, from 0; of a new row: that of its parent. */
  readonly index: number
  readonly kind: "applied" | "fenced" | "child" | "emission"
  /** Undefined only with kind fenced or status gone. */
  readonly entry: Entry | undefined
  readonly status: Status | "gone" | undefined
  /** The id of the row, also where there is no entry. */
  readonly id: number
}

/** A row as an operator sees it. */
export interface Listed {
  readonly id: number
  readonly token: string
  readonly section: string
  readonly status: Status
  readonly sender: string
  readonly recipients: ReadonlyArray<string>
  readonly sizeBytes: number
  readonly ageSeconds: number
  readonly attempts: number
  readonly crashes: number
  readonly dueInSeconds: number | null
  readonly lastError: string | null
  readonly parkedReason: string | null
  readonly state: State
}

export class Queue extends Context.Service<
  Queue,
  {
    /**
     * Inserts all of `messages` (1 to 64) in one durable transaction; when this returns they are on
     * disk. The entries come in the order of the messages. Fails whole; `data` = one of the
     * messages was refused by the table.
     */
    readonly admit: (
      messages: ReadonlyArray<Admission>
    ) => Effect.Effect<ReadonlyArray<Entry>, DatabaseError>

    /** Pending rows with id > `after` in id order; fewer than `limit` = the end was reached. */
    readonly scan: (
      after: number,
      limit: number
    ) => Effect.Effect<ReadonlyArray<Entry>, DatabaseError>

    /** Further pending rows of one fair key in one section, with id > `after`, in id order. */
    readonly refill: (request: {
      readonly fairKey: string
      readonly section: string
      readonly after: number
      readonly limit: number
    }) => Effect.Effect<ReadonlyArray<Entry>, DatabaseError>

    /**
     * Loads rows by (id, rev). A row that does not come is gone, held, waiting or changed by
     * another: it must not be run.
     */
    readonly load: (
      rows: ReadonlyArray<{ readonly id: number; readonly rev: number }>,
      level: Load
    ) => Effect.Effect<ReadonlyArray<Loaded>, DatabaseError>

    /**
     * Writes outcomes in one statement: all that still match (id, rev) are applied with their
     * writes, children and emissions, the others are fenced. `data` = nothing was written because
     * of one of them: settle them one by one. `durable` waits for the disk.
     */
    readonly settle: (
      outcomes: ReadonlyArray<Outcome>,
      options: { readonly durable: boolean }
    ) => Effect.Effect<ReadonlyArray<Settled>, DatabaseError>

    /** The present rev of each row that still exists; for a settle in doubt. */
    readonly revisions: (
      ids: ReadonlyArray<number>
    ) => Effect.Effect<ReadonlyMap<number, number>, DatabaseError>

    /**
     * Their worker died. Returns those that may be handed out again, and as `failed` the poisoned.
     */
    readonly crashed: (
      rows: ReadonlyArray<{ readonly id: number; readonly rev: number }>,
      error: string
    ) => Effect.Effect<
      ReadonlyArray<{
        readonly id: number
        readonly rev: number
        readonly crashes: number
        readonly status: Status
      }>,
      DatabaseError
    >

    /** Makes due rows pending, the oldest first; rows of all sections. */
    readonly promote: (limit: number) => Effect.Effect<ReadonlyArray<Entry>, DatabaseError>
    /** Makes parked rows pending whose time is over; rows of all sections. */
    readonly expire: (limit: number) => Effect.Effect<ReadonlyArray<Entry>, DatabaseError>
    /** Seconds until the next row is due or expires, by the database's clock; 0 = now. */
    readonly nextDue: Effect.Effect<Option.Option<number>, DatabaseError>

    /** Adds statistics; false = the flush with this number is in already. */
    readonly flushStats: (
      flushSeq: number,
      stats: Stats.Stats,
      dispatcher: string
    ) => Effect.Effect<boolean, DatabaseError>
    /** Number of the last flush of this dispatcher that is in; 0 = none. */
    readonly lastFlush: (dispatcher: string) => Effect.Effect<number, DatabaseError>

    /** Tells dispatchers that are not reached directly that there are new rows. */
    readonly notify: Effect.Effect<void, DatabaseError>
    /**
     * Listens on a session of its own until the scope closes. The effect given waits for the next
     * notification and fails when that session is lost; what was notified meanwhile is lost with
     * it.
     */
    readonly listen: Effect.Effect<Effect.Effect<void, DatabaseError>, DatabaseError, Scope.Scope>
    /** Deletes shared bodies that no row refers to any more; says how many. */
    readonly sweepBodies: Effect.Effect<number, DatabaseError>

    /** For operators: rows in id order with id > `after`. */
    readonly list: (request: {
      readonly status?: Status | undefined
      readonly section?: string | undefined
      readonly after: number
      readonly limit: number
    }) => Effect.Effect<ReadonlyArray<Listed>, DatabaseError>
    /**
     * For operators: one row with its header, by token or by a beginning of it that is unambiguous.
     */
    readonly show: (
      token: string
    ) => Effect.Effect<Option.Option<Listed & { readonly headers: Uint8Array }>, DatabaseError>
  }
>()("pepsi/services/Queue") {}
