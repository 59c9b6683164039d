// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Group admission: messages that wait while a commit is under way share the next one, so the price
 * of waiting for the disk is paid once for all of them; an idle server lets nobody wait.
 */
import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as FiberSet from "effect/FiberSet"
import * as Option from "effect/Option"
import * as Result from "effect/Result"
import type * as Scope from "effect/Scope"
import type { Entry } from "../../pipeline/Job.ts"
import { Control } from "../../services/Control.ts"
import type { DatabaseError } from "../../services/DatabaseError.ts"
import { Queue } from "../../services/Queue.ts"
import type * as QueueService from "../../services/Queue.ts"

export interface Settings {
  /** Messages of one transaction, at most 64. */
  readonly batchRows: number
  /** Octets of one transaction; a single larger message goes alone. */
  readonly batchBytes: number
  /** Transactions at the same time. */
  readonly commits: number
}

export interface Admission {
  /** Returns when the message is on disk. Not interruptible: it may be on disk already. */
  readonly admit: (message: QueueService.Admission) => Effect.Effect<void, DatabaseError>
}

interface Waiting {
  readonly message: QueueService.Admission
  readonly answer: (exit: Exit.Exit<void, DatabaseError>) => void
}

type Commit = (batch: ReadonlyArray<Waiting>) => Effect.Effect<void>

/** Whoever has been given to `admit` when the scope closes is still answered first. */
export const make = Effect.fnUntraced(function* (
  settings: Settings
): Effect.fn.Return<Admission, never, Queue | Scope.Scope> {
  const queue = yield* Queue
  const announce = yield* makeAnnounce
  const run = yield* FiberSet.makeRuntime<never, void, never>()
  const waiting: Array<Waiting> = []
  let committing = 0

  const commit: Commit = Effect.fnUntraced(function* (batch) {
    const admitted = yield* queue
      .admit(batch.map(({ message }) => message))
      .pipe(Effect.retry({ while: ({ reason }) => reason === "conflict", times: 1 }), Effect.exit)
    if (batch.length > 1 && Exit.isFailure(admitted) && isAboutData(admitted.cause)) {
      // One of them was refused by the table; alone, only that one is.
      return yield* Effect.forEach(batch, (one) => commit([one]), { discard: true })
    }
    for (const { answer } of batch) answer(Exit.asVoid(admitted))
    if (Exit.isSuccess(admitted)) announce(admitted.value)
  })

  const commitAll = Effect.gen(function* () {
    while (waiting.length > 0) yield* commit(take(waiting, settings))
  }).pipe(
    Effect.ensuring(
      Effect.sync(() => {
        committing--
      })
    ),
    Effect.uninterruptible
  )

  return {
    admit: (message) =>
      Effect.callback<void, DatabaseError>((resume) => {
        waiting.push({ message, answer: resume })
        if (committing >= settings.commits) return
        committing++
        run(commitAll)
      }).pipe(Effect.uninterruptible)
  }
})

/** What the table checks of what a client has sent; the other checks are about what we make. */
const aboutContent = new Set(["workqueue_rcpt", "workqueue_state"])

/**
 * Whether this message itself is why it was not admitted: a value the database cannot hold (class
 * 22), or one that the table must not hold (check_violation). All else, broken disks, limits,
 * triggers, missing partitions, is ours and mends.
 */
export const isRefusal = ({ code, constraint }: DatabaseError): boolean =>
  code !== undefined &&
  (code.startsWith("22") || (code === "23514" && aboutContent.has(constraint ?? "")))

const isAboutData = (cause: Cause.Cause<DatabaseError>): boolean => {
  const error = Cause.findError(cause)
  return Result.isSuccess(error) && error.success.reason === "data"
}

/** Takes the next batch, at least one message, in the order they came. */
export const take = <A extends { readonly message: QueueService.Admission }>(
  waiting: Array<A>,
  { batchBytes, batchRows }: Pick<Settings, "batchBytes" | "batchRows">
): ReadonlyArray<A> => {
  let bytes = 0
  const fits = waiting.findIndex(({ message: { body, headers } }, i) => {
    bytes += headers.length + body.length
    return i > 0 && (i >= batchRows || bytes > batchBytes)
  })
  return waiting.splice(0, fits === -1 ? waiting.length : fits)
}

/** Tells the dispatcher: directly where it is in this process, else by a notification. */
const makeAnnounce = Effect.gen(function* () {
  const control = yield* Effect.serviceOption(Control)
  if (Option.isSome(control)) return control.value.admitted
  const { notify } = yield* Queue
  const run = yield* FiberSet.makeRuntime<never, void, never>()
  let isNotifying = false
  let isAgain = false
  // One at a time; those that come meanwhile share the next. A lost one costs a poll, no message.
  const notifyAll = Effect.gen(function* () {
    do {
      isAgain = false
      yield* Effect.ignore(notify, { log: "Debug" })
    } while (isAgain)
    isNotifying = false
  })
  return (_entries: ReadonlyArray<Entry>): void => {
    isAgain = true
    if (isNotifying) return
    isNotifying = true
    run(notifyAll)
  }
})
