// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * What must go on in a daemon although we are wrong: a fiber that dies of a defect dies silently,
 * and with it all the mail that waits for it.
 */
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"

/** Long enough not to fill the log, short enough for mail. */
const pause = Duration.seconds(1)

/** Begins again, a second later and with a line in the log, whenever `work` dies of a defect. */
export const lasting = <A, E, R>(
  name: string,
  work: Effect.Effect<A, E, R>
): Effect.Effect<A, E, R> =>
  Effect.catchDefect(work, (defect) =>
    Effect.logError("a duty of the daemon failed; it begins again", defect).pipe(
      Effect.annotateLogs({ duty: name }),
      Effect.andThen(
        Effect.delay(
          Effect.suspend(() => lasting(name, work)),
          pause
        )
      )
    )
  )
