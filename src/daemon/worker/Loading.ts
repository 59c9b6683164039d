// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The reading half of a worker: a batch with one SELECT, and more of a message when a stage behind
 * the first needs it. Nothing has begun when a load fails, so the rows go back unharmed; a row that
 * cannot be loaded by itself, while others can, is named.
 */
import * as Effect from "effect/Effect"
import * as Header from "../../mail/Header.ts"
import * as Stage from "../../pipeline/Stage.ts"
import type { Patch } from "../../pipeline/Verdict.ts"
import type * as Wire from "../../pipeline/Wire.ts"
import type { DatabaseError } from "../../services/DatabaseError.ts"
import type { Loaded, Queue } from "../../services/Queue.ts"
import type { Ordered, Shop } from "./Shop.ts"

export interface Batch {
  readonly rows: ReadonlyArray<Loaded>
  /** Told to the daemon already. */
  readonly returned: ReadonlyArray<number>
}

/** A batch; what could not be loaded has been given back. */
export const load = (shop: Shop, ordered: Ordered): Effect.Effect<Batch> =>
  shop.queue
    .load(
      ordered.map(([id, rev]) => ({ id, rev })),
      shop.assignment.section.load
    )
    .pipe(
      Effect.retry({ times: 1, while: (error) => error.reason === "conflict" }),
      Effect.map((rows): Batch => ({ rows, returned: [] })),
      Effect.catchTag("DatabaseError", (error) => loadFailed(shop, ordered, error)),
      // A statement of ours that is wrong, or a row with a value that we cannot read.
      Effect.catchDefect((defect) =>
        Effect.andThen(Effect.logError("rows cannot be loaded", defect), oneByOne(shop, ordered))
      )
    )

const loadFailed = Effect.fnUntraced(function* (
  shop: Shop,
  ordered: Ordered,
  error: DatabaseError
) {
  if (error.reason === "overload") return giveBack(shop, ordered, "overload")
  if (error.reason === "data") return yield* oneByOne(shop, ordered)
  // A row larger than the driver takes costs the session, and looks like a database that is away.
  const answers = yield* Effect.exit(shop.queue.revisions([]))
  return answers._tag === "Success"
    ? yield* oneByOne(shop, ordered)
    : giveBack(shop, ordered, "away")
})

const oneByOne = Effect.fnUntraced(function* (shop: Shop, ordered: Ordered) {
  if (ordered.length === 1) return giveBack(shop, ordered, "unloadable")
  const batches = yield* Effect.forEach(ordered, (row) => load(shop, [row]), { concurrency: 1 })
  return {
    rows: batches.flatMap((batch, index) => batch.rows.map((row) => ({ ...row, index }))),
    returned: batches.flatMap((batch) => batch.returned)
  } satisfies Batch
})

const giveBack = (
  shop: Shop,
  ordered: Ordered,
  why: (typeof Wire.ReturnedReport.Type)["why"]
): Batch => {
  const ids = ordered.map(([id]) => id)
  shop.assignment.say({ t: "returned", ids, why })
  return { rows: [], returned: ids }
}

/** The same message with more of it; a header or body that a stage has replaced stays replaced. */
export const upgrade = (
  queue: Queue["Service"],
  mail: Stage.WithBody,
  patch: Patch,
  level: Stage.Load
) =>
  queue.load([{ id: mail.id, rev: mail.rev }], level).pipe(
    Effect.map(([row]) =>
      row === undefined
        ? undefined
        : {
            ...mail,
            header:
              patch.header === undefined && row.headers !== undefined
                ? Header.parse(row.headers)
                : mail.header,
            body: patch.body === undefined && row.body !== undefined ? row.body : mail.body
          }
    )
  )

/** Stands for a body that is not loaded. */
const noBody = new Uint8Array(0)

/** A row as its first stage sees it; `withNeeds` gives it its ways to load more. */
export const toMail = (row: Loaded, repeat: boolean): Stage.WithBody => ({
  ...row,
  repeat,
  header: row.headers === undefined ? Header.empty : Header.parse(row.headers),
  body: row.body ?? noBody,
  needHeaders: unbound,
  needPrefix: () => unbound,
  needBody: unbound
})

/** Replaced before a stage sees the message. */
const unbound = Effect.die(new Error("no message is bound"))

/** How much of a message is here, and what stages have changed of it. */
export interface Held {
  readonly have: Stage.Load
  readonly patch: Patch
}

/** The message with its ways to load more of itself. */
export const withNeeds = (
  queue: Queue["Service"],
  mail: Stage.WithBody,
  { have, patch }: Held
): Stage.WithBody => {
  const need = (level: Stage.Load): Effect.Effect<Stage.WithBody, Stage.LoadFailed> =>
    Stage.serves(have, level)
      ? Effect.succeed(mail)
      : upgrade(queue, mail, patch, level).pipe(
          Effect.mapError((cause) => new Stage.LoadFailed({ cause })),
          Effect.filterOrFail(
            (more) => more !== undefined,
            () => new Stage.LoadFailed({ cause: "the row has changed" })
          )
        )
  return {
    ...mail,
    needHeaders: Effect.suspend(() => need("headers")),
    needPrefix: (bytes) => Effect.suspend(() => need({ prefix: bytes })),
    needBody: Effect.suspend(() => need("full"))
  }
}
