// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * A queued message, its states and every legal transition between them.
 *
 * pending   waits for its section, or runs there (a claim writes nothing)
 * deferred  waits for a moment; becomes pending when it is due
 * parked    waits for an event or its expiry; becomes pending
 * held      an operator keeps it; released into what it waited for
 * failed    waits for the failure-bouncer
 * gone      has left the queue
 *
 * A run ends in an `Outcome`; `settle` says what a row becomes by it, crash, due, expiry, hold,
 * release and resume are the other events. `rev` rises with each of them but hold, and only who
 * names the row's present rev may change it. The database does the same in SQL; the contract
 * suite holds both to one another. Pure.
 */
import { createHash } from "node:crypto"
import * as Duration from "effect/Duration"
import type { State } from "./State.ts"
import type * as Verdict from "./Verdict.ts"
import type { Write } from "./Writes.ts"

export type Status = "pending" | "deferred" | "parked" | "held" | "failed"

/** What a section's owner knows of a waiting row; never an address, a subject or an octet. */
export interface Entry {
  readonly id: number
  readonly rev: number
  readonly section: string
  readonly sizeBytes: number
  readonly fairKey: string
  readonly attempts: number
  readonly crashes: number
  /** It may have been run before. */
  readonly repeat: boolean
}

/** A child or an emission as it is inserted. What is absent comes from the parent. */
export interface NewMessage {
  readonly token: string
  readonly section: string
  readonly recipients: ReadonlyArray<string>
  readonly patch: Verdict.Patch
  readonly after?: Duration.Duration
  /** Emissions only: place of the write that must win. */
  readonly if?: number
}

/** What a run of one row, or of a fused chain, writes. */
export interface Outcome {
  readonly id: number
  readonly rev: number
  readonly verdict: "pass" | "done" | "defer" | "park" | "fail" | "fanout"
  /** The section the row is in now; undefined = this chain did not move it. A pass needs one. */
  readonly section: string | undefined
  readonly patch: Verdict.Patch
  /** `last_error`. */
  readonly error?: string
  readonly after?: Duration.Duration
  readonly park?: {
    readonly reason: string
    readonly ref: string | undefined
    readonly for: Duration.Duration | undefined
    readonly onExpiry: string | undefined
  }
  readonly writes: ReadonlyArray<Write>
  readonly children: ReadonlyArray<NewMessage>
  readonly emissions: ReadonlyArray<NewMessage>
}

/** The state columns of a row. */
export interface Row {
  readonly status: Status
  readonly section: string
  readonly rev: number
  readonly attempts: number
  readonly crashes: number
  readonly nextInMillis: number | null
  readonly parkedReason: string | null
  readonly parkedRef: string | null
  readonly parkedTo: string | null
  readonly lastError: string | null
}

/** A row failed and held at once remembers so in `parked_reason`. */
export const failedUnderHold = ":failed"

/** Deaths after which a row is failed as poison. */
export const maxCrashes = 3

/** What the row becomes; "gone" = it leaves; undefined = fenced: another has changed it. */
export const settle = (row: Row, outcome: Outcome): Row | "gone" | undefined => {
  if (row.rev !== outcome.rev || (row.status !== "pending" && row.status !== "held"))
    return undefined
  if (outcome.verdict === "done" || outcome.verdict === "fanout") return "gone"
  const moved = outcome.section !== undefined
  const waits = outcome.verdict === "defer" || outcome.verdict === "park"
  const held = row.status === "held"
  const passed = outcome.verdict === "pass"
  return {
    rev: row.rev + 1,
    section: outcome.section ?? row.section,
    status:
      held || passed
        ? row.status
        : outcome.verdict === "defer"
          ? "deferred"
          : outcome.verdict === "park"
            ? "parked"
            : "failed",
    attempts: passed ? 0 : (moved ? 0 : row.attempts) + (outcome.verdict === "defer" ? 1 : 0),
    crashes: waits ? 0 : moved ? Math.min(row.crashes, 1) : row.crashes,
    nextInMillis:
      outcome.verdict === "defer" ? Duration.toMillis(outcome.after ?? Duration.minutes(5)) : null,
    parkedReason:
      outcome.verdict === "park"
        ? outcome.park!.reason
        : outcome.verdict === "fail" && held
          ? failedUnderHold
          : null,
    parkedRef: outcome.verdict === "park" ? (outcome.park!.ref ?? null) : null,
    parkedTo: outcome.verdict === "park" ? (outcome.park!.onExpiry ?? null) : null,
    lastError: passed ? (outcome.error ?? null) : (outcome.error ?? row.lastError)
  }
}

/** Its worker died with it. The third death makes it failed. */
export const crash = (row: Row, error: string | null): Row => {
  const poison = row.crashes + 1 >= maxCrashes
  return {
    ...row,
    rev: row.rev + 1,
    crashes: row.crashes + 1,
    lastError: error ?? row.lastError,
    status: row.status === "pending" && poison ? "failed" : row.status,
    parkedReason: row.status === "held" && poison ? failedUnderHold : row.parkedReason
  }
}

/** A deferred row is due. Its attempts stay. */
export const promote = (row: Row): Row => ({
  ...row,
  status: "pending",
  rev: row.rev + 1,
  nextInMillis: null
})

/** A parked row has waited long enough. */
export const expire = (row: Row): Row => ({
  ...resumed(row),
  section: row.parkedTo ?? row.section,
  status: "pending"
})

/** The event a parked row waits for has happened; a held one keeps its hold. */
export const resume = (row: Row): Row => ({
  ...resumed(row),
  status: row.status === "held" ? "held" : "pending"
})

const resumed = (row: Row): Row => ({
  ...row,
  rev: row.rev + 1,
  attempts: 0,
  crashes: 0,
  parkedReason: null,
  parkedRef: null,
  parkedTo: null
})

/** An operator keeps the row; a run in progress may still settle, so rev stays. */
export const hold = (row: Row): Row => ({
  ...row,
  status: "held",
  parkedReason: row.status === "failed" ? failedUnderHold : row.parkedReason
})

/** Back to what the row waited for. */
export const release = (row: Row): Row => ({
  ...row,
  rev: row.rev + 1,
  status:
    row.parkedReason === failedUnderHold
      ? "failed"
      : row.parkedReason !== null
        ? "parked"
        : row.nextInMillis !== null
          ? "deferred"
          : "pending",
  parkedReason: row.parkedReason === failedUnderHold ? null : row.parkedReason
})

const firstPause = Duration.seconds(30)
const longestPause = Duration.hours(4)

/**
 * The pause before try `attempts + 1`: 30 s, doubled each time, at most 4 h, with up to a quarter
 * taken off by `chance` (0 to 1) so that a burst does not come back as a burst
 * (RFC 5321 section 4.5.4.1 asks for growing pauses).
 */
export const backoff = (attempts: number, chance: number): Duration.Duration =>
  Duration.times(
    Duration.min(Duration.times(firstPause, 2 ** Math.min(attempts, 20)), longestPause),
    1 - chance / 4
  )

/**
 * Token of a child or an emission: the same parent, section and key always name the same message,
 * so a repeated fan-out makes no second one.
 */
export const childToken = (parent: string, section: string, key: string): string =>
  createHash("sha256").update(`${parent}\0${section}\0${key}`).digest("hex").slice(0, 32)

/** The part of a state that never reaches an operator's terminal. */
export const withoutClient = (state: State): State =>
  Object.fromEntries(Object.entries(state).filter(([key]) => key !== "client"))
