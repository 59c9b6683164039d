// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * discard: ends a message without a word to anybody.
 *
 * Reads nothing and cannot fail; no report is made, whatever the sender asked for (RFC 3461
 * section 4.1). A second run finds no row.
 */
import * as Effect from "effect/Effect"
import * as Option from "../src/config/Option.ts"
import * as Stage from "../src/pipeline/Stage.ts"
import * as Verdict from "../src/pipeline/Verdict.ts"

export default Stage.define({
  name: "discard",
  load: "metadata",
  effect: "none",
  fusible: true,
  next: "none",
  uses: [],
  settings: {
    LOG: Option.yesNo({
      doc: "Whether each discarded message leaves a line with its token and the reason in the log.",
      default: "yes"
    }),
    REASON: Option.optional(Option.text({ doc: "The reason given in that line." }))
  },
  run: (mail, { LOG, REASON }) => (LOG ? Effect.as(note(mail.token, REASON), Verdict.done) : done)
})

const done = Effect.succeed(Verdict.done)

/** The token alone: no address and no subject belongs into the log. */
const note = (token: string, reason: string | undefined): Effect.Effect<void> =>
  Effect.annotateLogs(
    Effect.logInfo("discarded"),
    reason === undefined ? { token } : { token, reason }
  )
