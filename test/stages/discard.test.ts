// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Logger from "effect/Logger"
import * as Result from "effect/Result"
import * as Header from "../../src/mail/Header.ts"
import * as Job from "../../src/pipeline/Job.ts"
import * as Plan from "../../src/pipeline/Plan.ts"
import type { Pipeline, Section } from "../../src/pipeline/Route.ts"
import type * as Stage from "../../src/pipeline/Stage.ts"
import * as Verdict from "../../src/pipeline/Verdict.ts"
import branch from "../../stages/if.ts"
import discard from "../../stages/discard.ts"

const die = Effect.die(new Error("not loaded"))
const mail: Stage.WithBody = {
  id: 1,
  rev: 0,
  token: "0f",
  sender: "SECRET-S@x.example",
  recipients: ["SECRET-R@ours.example"],
  fromHeader: null,
  subject: "SECRET",
  section: "discard",
  state: { env: { notify: "FAILURE" } as never },
  sizeBytes: 100,
  hdrFlags: null,
  messageId: null,
  listId: null,
  settings: {},
  receivedAt: DateTime.makeUnsafe(0),
  attempts: 0,
  repeat: false,
  header: Header.empty,
  body: new Uint8Array(0),
  needHeaders: die,
  needPrefix: () => die,
  needBody: die
}

/** The verdict, and the lines that were logged. */
const run = (settings: Stage.Settings) => {
  const lines: Array<string> = []
  const logger = Logger.make((entry) => void lines.push(Logger.formatJson.log(entry)))
  return discard.run(mail, settings).pipe(
    Effect.provide(Logger.layer([logger])),
    Effect.map((verdict) => ({ verdict, lines }))
  )
}

const section = (name: string, stage: Stage.Stage): Section => ({
  name,
  stage,
  next: undefined,
  failure: undefined,
  origin: { file: "f", line: 1 },
  settings: {},
  load: "metadata",
  parallelism: 1,
  queueLimit: 64,
  fusion: true,
  timeout: Duration.minutes(5),
  synchronousCommit: false,
  user: "",
  dbRole: "",
  targets: []
})

describe("discard", () => {
  it.effect("A-DIS-1 the row leaves and is counted once", () =>
    Effect.gen(function* () {
      const { verdict } = yield* run({ LOG: false, REASON: undefined })
      const pipeline: Pipeline = { sections: new Map(), entries: [], generation: "g" }
      const chain = Plan.begin(mail, section("discard", discard), false)
      const step = Plan.step(pipeline, true, chain, { verdict, micros: 1, chance: 0 })
      assert.strictEqual(step._tag, "Settle")
      if (step._tag !== "Settle") return
      assert.deepStrictEqual(
        step.runs.map(({ result, section }) => [section, result]),
        [["discard", "done"]]
      )
      const row: Job.Row = {
        status: "pending",
        section: "discard",
        rev: 0,
        attempts: 0,
        crashes: 0,
        nextInMillis: null,
        parkedReason: null,
        parkedRef: null,
        parkedTo: null,
        lastError: null
      }
      assert.strictEqual(Job.settle(row, step.outcome), "gone")
    })
  )

  it.effect("A-DIS-2 no report is made, whatever the sender asked for", () =>
    Effect.gen(function* () {
      const { verdict } = yield* run({ LOG: true, REASON: "test" })
      assert.deepStrictEqual(verdict, Verdict.done)
      assert.deepStrictEqual([verdict.children, verdict.emissions, verdict.writes], [[], [], []])
    })
  )

  it.effect("A-DIS-3 fused behind an if it is one settle with two runs", () =>
    Effect.gen(function* () {
      const sections = [section("route", branch), section("discard", discard)]
      const pipeline: Pipeline = {
        sections: new Map(sections.map((s) => [s.name, s])),
        entries: ["route"],
        generation: "g"
      }
      const first = Plan.step(pipeline, true, Plan.begin(mail, sections[0]!, false), {
        verdict: Verdict.passTo("discard"),
        micros: 1,
        chance: 0
      })
      assert.strictEqual(first._tag, "Next")
      if (first._tag !== "Next") return
      const { verdict } = yield* run({ LOG: false, REASON: undefined })
      const last = Plan.step(pipeline, true, first.chain, { verdict, micros: 1, chance: 0 })
      if (last._tag !== "Settle") return assert.fail("it went on")
      assert.strictEqual(last.outcome.verdict, "done")
      assert.deepStrictEqual(
        last.runs.map(({ fused, result, section }) => [section, result, fused]),
        [
          ["route", "pass", false],
          ["discard", "done", true]
        ]
      )
    })
  )

  it.effect("R68: the log has token and reason, and nothing of the message", () =>
    Effect.gen(function* () {
      const { lines } = yield* run({ LOG: true, REASON: "newsletter" })
      assert.strictEqual(lines.length, 1)
      assert.include(lines[0], '"0f"')
      assert.include(lines[0], "newsletter")
      assert.notInclude(lines[0], "SECRET")
      assert.deepStrictEqual((yield* run({ LOG: false, REASON: "newsletter" })).lines, [])
    })
  )

  it("reads its options", () => {
    assert.isTrue(discard.settings["LOG"]?.default === "yes")
    assert.deepStrictEqual(discard.settings["REASON"]?.read(""), Result.succeed(undefined))
  })
})
