// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Stages with options but without work, for tests of what looks at declarations only. They have the
 * shape of arc, if, local, discard, a relay that waits and a forward that hands mail back.
 */
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import * as Option from "../../src/config/Option.ts"
import * as Stage from "../../src/pipeline/Stage.ts"
import * as Verdict from "../../src/pipeline/Verdict.ts"
import { Stages } from "../../src/services/Stages.ts"

const work = {
  load: "metadata",
  effect: "none",
  uses: [],
  run: () => Effect.succeed(Verdict.pass)
} as const

const rule: Option.Option<{ readonly to: string }> = {
  ...Option.custom(
    "a condition, => and a section",
    "size > 10M => large",
    { doc: "A way." },
    (text) => {
      const to = /=>\s*(\S+)$/.exec(text)?.[1]
      return to === undefined ? Result.fail("it has no =>") : Result.succeed({ to })
    }
  ),
  targets: ({ to }: { readonly to: string }) => [to]
}

export const fakes: ReadonlyArray<Stage.Stage> = [
  Stage.define({
    ...work,
    name: "arc",
    next: "required",
    fusible: false,
    settings: { MODE: Option.choice(["verify", "seal", "verify+seal"], { doc: "What to do." }) }
  }),
  Stage.define({
    ...work,
    name: "if",
    next: "none",
    fusible: true,
    loadFor: ({ MODE }) => (MODE === "message" ? "headers" : "metadata"),
    settings: {
      MODE: Option.choice(["message", "recipient"], { doc: "What is judged.", default: "message" }),
      WHEN: Option.numbered(rule, 99),
      ELSE: Option.section({ doc: "Where the rest goes." })
    }
  }),
  Stage.define({
    ...work,
    name: "local",
    next: "none",
    fusible: true,
    settings: { MAILDIR: Option.file({ doc: "Where mail is put." }) }
  }),
  Stage.define({ ...work, name: "discard", next: "none", fusible: true, settings: {} }),
  Stage.define({
    ...work,
    name: "encrypt",
    next: "required",
    fusible: true,
    settings: {
      KEY_WAIT: Option.duration({ doc: "How long a key is waited for.", example: "30 s" }),
      DEMAND_STAGE: Option.optional(Option.section({ doc: "Where demands go." })),
      TOKEN_FILE: { ...Option.text({ doc: "A token." }), secret: true }
    }
  }),
  Stage.define({
    ...work,
    name: "relay",
    next: "none",
    fusible: false,
    waits: true,
    settings: { TIMEOUT: Option.duration({ doc: "Of one message.", default: "20 min" }) }
  }),
  Stage.define({ ...work, name: "pass", next: "required", fusible: true, settings: {} })
]

/** The fakes as the service finds them; nothing can be run. */
export const layer: Layer.Layer<Stages> = Layer.succeed(
  Stages,
  Stages.of({
    names: fakes.map(({ name }) => name).toSorted(),
    find: (name) => Effect.succeed(fakes.find((one) => one.name === name)),
    open: () => Effect.die(new Error("a fake does no work"))
  })
)
