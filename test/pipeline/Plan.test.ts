// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import * as Header from "../../src/mail/Header.ts"
import * as Job from "../../src/pipeline/Job.ts"
import * as Plan from "../../src/pipeline/Plan.ts"
import type { Pipeline, Section } from "../../src/pipeline/Route.ts"
import * as Stage from "../../src/pipeline/Stage.ts"
import * as Verdict from "../../src/pipeline/Verdict.ts"
import * as Writes from "../../src/pipeline/Writes.ts"

const stage = (effect: Stage.Effects, fusible = true) =>
  Stage.define({
    name: "x",
    load: "full",
    effect,
    fusible,
    next: "none",
    uses: [],
    settings: {},
    run: () => Effect.succeed(Verdict.pass)
  })

const section = (name: string, next: string | undefined, more: Partial<Section> = {}): Section => ({
  name,
  next,
  origin: { file: "f", line: 1 },
  stage: stage("none"),
  settings: {},
  load: "full",
  failure: undefined,
  parallelism: 1,
  queueLimit: 64,
  fusion: true,
  timeout: Duration.minutes(5),
  synchronousCommit: false,
  user: "",
  dbRole: "",
  targets: [],
  ...more
})

const pipeline = (sections: ReadonlyArray<Section>): Pipeline => ({
  sections: new Map(sections.map((s) => [s.name, s])),
  entries: [sections[0]!.name],
  generation: "g"
})

const die = Effect.die(new Error("not loaded"))
const mail: Stage.WithBody = {
  id: 7,
  rev: 2,
  token: "t",
  sender: "s@x",
  recipients: ["r@y"],
  fromHeader: null,
  subject: null,
  section: "a",
  state: { spam: false, user: "u" },
  sizeBytes: 12,
  hdrFlags: null,
  messageId: null,
  listId: null,
  settings: {},
  receivedAt: DateTime.makeUnsafe(0),
  attempts: 3,
  repeat: false,
  header: Header.fromText("A: b\r\n"),
  body: new Uint8Array(4),
  needHeaders: die,
  needPrefix: () => die,
  needBody: die
}

/**
 * Runs verdicts through Plan until it settles; unfused, each outcome is written and loaded again.
 */
const runAll = (p: Pipeline, fused: boolean, verdicts: ReadonlyArray<Verdict.Verdict>) => {
  let current = mail
  // The row as it was when the present chain began.
  let base = mail
  let chain = Plan.begin(current, p.sections.get("a")!, false)
  const runs: Array<readonly [string, string]> = []
  const emitted: Array<string> = []
  let row: Job.Row = {
    status: "pending",
    section: "a",
    rev: 2,
    attempts: 3,
    crashes: 0,
    nextInMillis: null,
    parkedReason: null,
    parkedRef: null,
    parkedTo: null,
    lastError: null
  }
  for (const verdict of [...verdicts, Verdict.done]) {
    const step = Plan.step(p, fused, chain, { verdict, micros: 5, chance: 0 })
    if (step._tag === "Next") {
      current = Plan.patched(current, verdict.patch, step.chain.section.name)
      chain = step.chain
      continue
    }
    runs.push(...step.runs.map((run) => [run.section, run.result] as const))
    emitted.push(
      ...step.outcome.emissions.map((e) => e.token),
      ...step.outcome.children.map((c) => c.token)
    )
    const next = Job.settle(row, step.outcome)
    assert.isDefined(next)
    if (next === "gone" || next === undefined || next.status !== "pending") {
      return {
        row: typeof next === "string" ? next : { ...next!, rev: 0 },
        runs,
        emitted,
        state: current.state
      }
    }
    row = next
    // What the database gives back: the row as the outcome left it.
    base = {
      ...Plan.patched(base, step.outcome.patch, row.section),
      rev: row.rev,
      attempts: row.attempts
    }
    current = base
    chain = Plan.begin(current, p.sections.get(row.section)!, false)
  }
  return { row, runs, emitted, state: current.state }
}

const Decision = Schema.Struct({
  kind: Schema.Literals(["pass", "pass", "pass", "defer", "park", "fail", "done"]),
  key: Schema.Literals(["spam", "lang", "list"]),
  value: Schema.Literals([1, 2, 3]),
  unset: Schema.Boolean,
  emit: Schema.Boolean
})

const toVerdict = (d: typeof Decision.Type, index: number): Verdict.Verdict => {
  const base =
    d.kind === "pass"
      ? Verdict.pass
      : d.kind === "defer"
        ? Verdict.defer("later")
        : d.kind === "park"
          ? Verdict.park({ reason: "key" })
          : d.kind === "done"
            ? Verdict.done
            : Verdict.fail("policy", "5.7.1", "no")
  const patched = Verdict.withPatch(
    base,
    d.unset ? { unset: [d.key] } : { state: { [d.key]: d.value } }
  )
  const letter = {
    key: String(index),
    to: "a",
    recipients: ["r@y"],
    header: Header.empty,
    body: new Uint8Array(0)
  }
  return d.emit ? Verdict.emit(patched, letter) : patched
}

describe("Plan", () => {
  const Fusion = Schema.Array(Schema.Boolean).check(Schema.isMinLength(4), Schema.isMaxLength(4))
  it.prop(
    "a fused run ends in the row, the mail and the counters of separate runs",
    {
      decisions: Schema.Array(Decision).check(Schema.isMaxLength(4)),
      fusion: Fusion
    },
    ({ decisions, fusion }) => {
      const names = ["a", "b", "c", "d", "e"]
      const sections = names.map((name, i) =>
        section(name, names[i + 1] ?? "a", { fusion: fusion[i] ?? true })
      )
      const verdicts = decisions.map(toVerdict)
      assert.deepStrictEqual(
        runAll(pipeline(sections), true, verdicts),
        runAll(pipeline(sections), false, verdicts)
      )
    }
  )

  const abc = [section("a", "b"), section("b", "c"), section("c", undefined)]
  const start = (p: Pipeline) => Plan.begin(mail, p.sections.get("a")!, false)
  const ran = (verdict: Verdict.Verdict) => ({ verdict, micros: 1, chance: 0 })

  it("a chain runs into a stage with an effect and never past it", () => {
    const p = pipeline([
      section("a", "b"),
      section("b", "c", { stage: stage("keyed") }),
      section("c", undefined)
    ])
    const first = Plan.step(p, true, start(p), ran(Verdict.pass))
    assert.strictEqual(first._tag, "Next")
    const second = Plan.step(p, true, (first as { chain: Plan.Chain }).chain, ran(Verdict.pass))
    assert.strictEqual(second._tag, "Settle")
  })

  it("nothing is fused for a row with a death, across privileges, or where a section says no", () => {
    const stops = (p: Pipeline, alone = false) =>
      Plan.step(p, true, Plan.begin(mail, p.sections.get("a")!, alone), ran(Verdict.pass))._tag ===
      "Settle"
    assert.isFalse(stops(pipeline(abc)))
    assert.isTrue(stops(pipeline(abc), true))
    assert.isTrue(stops(pipeline([abc[0]!, section("b", "c", { fusion: false }), abc[2]!])))
    assert.isTrue(stops(pipeline([abc[0]!, section("b", "c", { user: "sign" }), abc[2]!])))
    assert.isTrue(stops(pipeline([abc[0]!, section("b", "c", { dbRole: "r" }), abc[2]!])))
    assert.isTrue(
      stops(pipeline([abc[0]!, section("b", "c", { stage: stage("none", false) }), abc[2]!]))
    )
    assert.strictEqual(
      Plan.step(pipeline(abc), false, start(pipeline(abc)), ran(Verdict.pass))._tag,
      "Settle"
    )
  })

  it("a loop of passes ends at the longest chain", () => {
    const p = pipeline([section("a", "a")])
    let step = Plan.step(p, true, start(p), ran(Verdict.pass))
    let n = 1
    while (step._tag === "Next") {
      step = Plan.step(p, true, step.chain, ran(Verdict.pass))
      n++
    }
    assert.strictEqual(n, Plan.maxChain)
  })

  it("a failure goes to FAILURE with its reason, or waits for the bouncer", () => {
    const fail = ran(Verdict.fail("recipient", "5.1.1", "no such recipient"))
    const bare = Plan.step(pipeline(abc), true, start(pipeline(abc)), fail)
    const p = pipeline([section("a", "b", { failure: "c" }), ...abc.slice(1)])
    const routed = Plan.step(p, true, start(p), fail)
    assert.isTrue(bare._tag === "Settle" && bare.outcome.verdict === "fail")
    assert.isTrue(
      routed._tag === "Settle" &&
        routed.outcome.verdict === "pass" &&
        routed.outcome.section === "c"
    )
    assert.deepInclude(routed._tag === "Settle" ? routed.outcome.patch.state?.failure : {}, {
      stage: "a",
      class: "recipient",
      status: "5.1.1"
    })
  })

  it("a fan-out ends the chain, so that children inherit the message as it was then", () => {
    const child = { key: "r", to: "c", recipients: ["r@y"] }
    const step = Plan.step(
      pipeline(abc),
      true,
      start(pipeline(abc)),
      ran(Verdict.fanout([child], Verdict.pass))
    )
    assert.isTrue(step._tag === "Settle" && step.outcome.verdict === "pass")
    assert.strictEqual(
      step._tag === "Settle" && step.outcome.children[0]?.token,
      Job.childToken("t", "a", "r")
    )
  })

  it("an emission keeps its write when earlier stages of the chain have written too", () => {
    const write = Writes.claimReply("me@y", "s@x", Duration.days(7))
    const letter = {
      key: "k",
      to: "c",
      recipients: ["s@x"],
      header: Header.empty,
      body: new Uint8Array(0)
    }
    const p = pipeline(abc)
    const first = Plan.step(p, true, start(p), ran(Verdict.withWrite(Verdict.pass, write)))
    const chain = (first as { chain: Plan.Chain }).chain
    const second = Plan.step(p, true, chain, ran(Verdict.emitIf(Verdict.done, write, letter)))
    assert.isTrue(second._tag === "Settle" && second.outcome.emissions[0]?.if === 1)
    assert.isTrue(second._tag === "Settle" && second.outcome.writes.length === 2)
  })

  it("the size follows a new header and body", () => {
    const next = Plan.patched(
      mail,
      { header: Header.fromText("A: b\r\nC: d\r\n"), body: new Uint8Array(1) },
      "b"
    )
    assert.strictEqual(next.sizeBytes, 12 + 6 - 3)
  })
})
