// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What a stage may decide about a message, as a value. A stage decides and never acts: patch,
 * writes, children and emissions travel with the decision and are committed with the row in one
 * settle. Pure.
 */
import * as Duration from "effect/Duration"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import type * as Header from "../mail/Header.ts"
import * as Status from "../mail/Status.ts"
import type { State } from "./State.ts"
import type { Write } from "./Writes.ts"

/** What is at fault when a message fails (mail specification 0.2). */
export type FailureClass =
  | "recipient"
  | "policy"
  | "content"
  | "size"
  | "expired"
  | "loop"
  | "config"

/** On to NEXT, or to the section named. */
export interface Pass {
  readonly _tag: "Pass"
  readonly to: string | undefined
}
/** The message leaves the queue. */
export interface Done {
  readonly _tag: "Done"
}
/** Try again later; without `after`, later each time (`Job.backoff`). */
export interface Defer {
  readonly _tag: "Defer"
  readonly reason: string
  readonly after: Duration.Duration | undefined
}
/** Wait for an event named by `reason` and `ref`; on expiry to `onExpiry`, else run again. */
export interface Park {
  readonly _tag: "Park"
  readonly reason: string
  readonly ref: string | undefined
  readonly for: Duration.Duration | undefined
  readonly onExpiry: string | undefined
}
/** The message cannot go on; its section's FAILURE takes it, or the failure-bouncer. */
export interface Fail {
  readonly _tag: "Fail"
  readonly class: FailureClass
  readonly status: Status.Status
  readonly text: string
}
/** The message is replaced by its children. */
export interface Fanout {
  readonly _tag: "Fanout"
}
export type Decision = Pass | Done | Defer | Park | Fail | Fanout

/** Changed columns only: what is absent stays as it is, the body is never rewritten unchanged. */
export interface Patch {
  readonly sender?: string
  readonly recipients?: ReadonlyArray<string>
  readonly fromHeader?: string | null
  readonly subject?: string | null
  readonly messageId?: string | null
  readonly listId?: string | null
  readonly hdrFlags?: number | null
  readonly settingsFor?: ReadonlyArray<string> | null
  /** Merged into the state at its top level. */
  readonly state?: State
  /** State keys to remove, after the merge. */
  readonly unset?: ReadonlyArray<string>
  readonly header?: Header.Header
  readonly body?: Uint8Array
}

/** A copy of the message with other recipients. What `patch` leaves out comes from the parent. */
export interface Child {
  /** Names the child among its siblings; a repeated fan-out gives the same key. */
  readonly key: string
  /** Undefined = NEXT of the section. */
  readonly to: string | undefined
  readonly recipients: ReadonlyArray<string>
  readonly patch?: Patch
  readonly after?: Duration.Duration
}

/** A new message (a report, a reply). Null sender and empty state unless given. */
export interface Emission {
  readonly key: string
  readonly to: string
  readonly sender?: string
  readonly recipients: ReadonlyArray<string>
  readonly fromHeader?: string
  readonly subject?: string
  readonly header: Header.Header
  readonly body: Uint8Array
  readonly state?: State
  /** Sent only if this write, by its place in `writes`, won. */
  readonly if?: number
}

/** A decision with all that is committed with it. */
export interface Verdict {
  readonly decision: Decision
  readonly patch: Patch
  readonly writes: ReadonlyArray<Write>
  readonly children: ReadonlyArray<Child>
  readonly emissions: ReadonlyArray<Emission>
}

const decide = (decision: Decision): Verdict => ({
  decision,
  patch: {},
  writes: [],
  children: [],
  emissions: []
})

/** On to the section's NEXT. */
export const pass: Verdict = decide({ _tag: "Pass", to: undefined })
/** On to a section that the settings name. */
export const passTo = (section: string): Verdict => decide({ _tag: "Pass", to: section })
/** The message leaves the queue. */
export const done: Verdict = decide({ _tag: "Done" })
/** Try again after `after`, or with growing pauses. `reason` is kept in `last_error`. */
export const defer = (reason: string, after?: Duration.Input): Verdict =>
  decide({
    _tag: "Defer",
    reason,
    after: after === undefined ? undefined : Duration.fromInputUnsafe(after)
  })
/** Wait for the event (`reason`, `ref`). */
export const park = (options: {
  readonly reason: string
  readonly ref?: string
  readonly for?: Duration.Input
  readonly onExpiry?: string
}): Verdict =>
  decide({
    _tag: "Park",
    reason: options.reason,
    ref: options.ref,
    for: options.for === undefined ? undefined : Duration.fromInputUnsafe(options.for),
    onExpiry: options.onExpiry
  })
/** The message cannot go on. */
export const fail = (failureClass: FailureClass, status: Status.Status, text: string): Verdict =>
  decide({ _tag: "Fail", class: failureClass, status, text })
/** Replaced by `children` (at least one); with `keep`, the message itself goes on as that says. */
export const fanout = (children: ReadonlyArray<Child>, keep?: Verdict): Verdict => ({
  ...(keep ?? decide({ _tag: "Fanout" })),
  children
})

/** The same decision with `patch` on top of the patch it had; later values win, states merge. */
export const withPatch: {
  (patch: Patch): (self: Verdict) => Verdict
  (self: Verdict, patch: Patch): Verdict
} = dual(
  2,
  (self: Verdict, patch: Patch): Verdict => ({ ...self, patch: mergePatch(self.patch, patch) })
)

/** One more message to send with this verdict. */
export const emit: {
  (emission: Emission): (self: Verdict) => Verdict
  (self: Verdict, emission: Emission): Verdict
} = dual(
  2,
  (self: Verdict, emission: Emission): Verdict => ({
    ...self,
    emissions: [...self.emissions, emission]
  })
)

/** One more message, sent only if `write` wins when the verdict is settled. */
export const emitIf: {
  (write: Write, emission: Emission): (self: Verdict) => Verdict
  (self: Verdict, write: Write, emission: Emission): Verdict
} = dual(
  3,
  (self: Verdict, write: Write, emission: Emission): Verdict => ({
    ...self,
    writes: [...self.writes, write],
    emissions: [...self.emissions, { ...emission, if: self.writes.length }]
  })
)

/** One more side write. */
export const withWrite: {
  (write: Write): (self: Verdict) => Verdict
  (self: Verdict, write: Write): Verdict
} = dual(
  2,
  (self: Verdict, write: Write): Verdict => ({ ...self, writes: [...self.writes, write] })
)

/** `later` on top of `earlier`. A key that is set again is no longer unset, and the reverse. */
export const mergePatch = (earlier: Patch, later: Patch): Patch => {
  const merged: { -readonly [K in keyof Patch]: Patch[K] } = { ...earlier, ...later }
  const unset = new Set([...(earlier.unset ?? []), ...(later.unset ?? [])])
  if (later.state !== undefined) {
    merged.state = { ...earlier.state, ...later.state }
    for (const key of Object.keys(later.state))
      if (!(later.unset ?? []).includes(key)) unset.delete(key)
  }
  if (unset.size > 0) merged.unset = [...unset]
  else delete merged.unset
  return merged
}

/** A failure of the world: what every error a stage may fail with carries. */
export interface WorldFailure {
  readonly status: Status.Status
  readonly message: string
}

const classOf = (status: Status.Status): FailureClass =>
  status.startsWith("5.1")
    ? "recipient"
    : status.startsWith("5.2")
      ? "size"
      : status.startsWith("5.6")
        ? "content"
        : status.startsWith("5.7")
          ? "policy"
          : status === "5.4.6"
            ? "loop"
            : "config"

/** The one place where trouble of the world becomes a verdict: its status alone decides. */
export const fromFailure = (failure: WorldFailure): Verdict =>
  Status.isTransient(failure.status)
    ? defer(`${failure.status} ${failure.message}`)
    : fail(classOf(failure.status), failure.status, Status.text(failure.status))

/** The section a decision moves the message to, if it moves it. */
export const target = (decision: Decision, next: string | undefined): Option.Option<string> =>
  decision._tag === "Pass" ? Option.fromNullishOr(decision.to ?? next) : Option.none()
