// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import * as TestClock from "effect/testing/TestClock"
import { AccountsConfig } from "../../layers/AccountsConfig.ts"
import * as Decode from "../../src/config/Decode.ts"
import * as Ini from "../../src/config/Ini.ts"
import * as Header from "../../src/mail/Header.ts"
import * as Job from "../../src/pipeline/Job.ts"
import type * as Stage from "../../src/pipeline/Stage.ts"
import type * as Verdict from "../../src/pipeline/Verdict.ts"
import { Accounts } from "../../src/services/Accounts.ts"
import { DatabaseError } from "../../src/services/DatabaseError.ts"
import branch from "../../stages/if.ts"

const die = Effect.die(new Error("not loaded"))

/** A message at level metadata; its header can be loaded if there is one. */
const message = (more: Partial<Stage.WithBody> = {}): Stage.WithBody => {
  const mail: Stage.WithBody = {
    id: 1,
    rev: 0,
    token: "0f",
    sender: "s@x.example",
    recipients: ["a@ours.example"],
    fromHeader: "s@x.example",
    subject: "Hello",
    section: "route",
    state: {},
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
    needBody: die,
    ...more
  }
  return more.header === undefined ? mail : { ...mail, needHeaders: Effect.succeed(mail) }
}

const read = (lines: ReadonlyArray<string>) => {
  const text = ["[stage-route]", ...lines].join("\n")
  const [section] = Ini.assemble(Ini.parse("pepsi.conf", text).items)
  return Decode.decode(section!, branch.settings, { base: "/", environment: {}, paths: new Map() })
}
const settings = (lines: ReadonlyArray<string>): Stage.Settings => {
  const { problems, values } = read(lines)
  assert.deepStrictEqual(problems, [])
  return values
}

const ours = AccountsConfig({ domains: ["ours.example"], delimiter: "+", localParts: "any" })

/** Counts the questions; nothing else about the accounts is not real. */
const counted = (questions: Array<ReadonlyArray<string>>) =>
  Layer.effect(
    Accounts,
    Effect.map(Accounts, (accounts) =>
      Accounts.of({
        resolve: (addresses) => {
          questions.push(addresses)
          return accounts.resolve(addresses)
        }
      })
    )
  ).pipe(Layer.provide(ours))

const run = (lines: ReadonlyArray<string>, mail: Stage.WithBody, accounts = ours) =>
  branch.run(mail, settings(lines)).pipe(Effect.provide(accounts))

const to = ({ decision }: Verdict.Verdict): string | undefined =>
  decision._tag === "Pass" ? decision.to : decision._tag

const local = ["MODE = recipient", "WHEN_1 = is_local(rcpt) => decrypt", "ELSE = srs"]

/** The children as they are named, and where they go. */
const tokens = ({ children }: Verdict.Verdict) =>
  children.map(({ key, to }) => [to, Job.childToken("0f", "route", key)]).toSorted()

describe("if", () => {
  it.effect("A-IF-1 1M is 1048576 octets", () =>
    Effect.gen(function* () {
      const lines = ["WHEN_1 = size > 1M => block-language", "ELSE = detect-language"]
      const small = yield* run(lines, message({ sizeBytes: 1_048_576 }))
      const large = yield* run(lines, message({ sizeBytes: 1_048_577 }))
      assert.deepStrictEqual([to(small), to(large)], ["detect-language", "block-language"])
    })
  )

  it.effect("A-IF-2 recipients that go different ways become one child for each way", () =>
    Effect.gen(function* () {
      const recipients = ["a@ours.example", "c@x.example", "b@x.example"]
      const verdict = yield* run(local, message({ recipients }))
      assert.strictEqual(verdict.decision._tag, "Fanout")
      assert.deepStrictEqual(verdict.children, [
        { key: "a@ours.example", to: "decrypt", recipients: ["a@ours.example"] },
        { key: "b@x.example\nc@x.example", to: "srs", recipients: ["c@x.example", "b@x.example"] }
      ])
      assert.deepStrictEqual(verdict.patch, {}) // nothing of the message is copied
      const again = yield* run(local, message({ recipients: recipients.toReversed() }))
      assert.deepStrictEqual(tokens(again), tokens(verdict))
    })
  )

  it.effect("recipients that go one way stay together", () =>
    Effect.gen(function* () {
      const one = yield* run(local, message({ recipients: ["a@ours.example", "b+c@OURS.example"] }))
      assert.deepStrictEqual([to(one), one.children], ["decrypt", []])
      assert.strictEqual(to(yield* run(local, message({ recipients: ["a@x", "b@x"] }))), "srs")
    })
  )

  it.effect("A-IF-3 spam that is undecided is not spam", () =>
    Effect.gen(function* () {
      const lines = ["WHEN_1 = state.spam == true => junk", "ELSE = in"]
      assert.strictEqual(to(yield* run(lines, message())), "in")
      assert.strictEqual(to(yield* run(lines, message({ state: { spam: true } }))), "junk")
      const inverse = ["WHEN_1 = not (state.spam == true) => in", "ELSE = junk"]
      assert.strictEqual(to(yield* run(inverse, message())), "in")
    })
  )

  it.effect("A-IF-4 the header is loaded where a condition reads it, and only there", () =>
    Effect.gen(function* () {
      const lines = ['WHEN_1 = header("List-Id") =~ "<x\\\\.ours>" => list', "ELSE = rest"]
      assert.strictEqual(branch.loadFor(settings(lines)), "headers")
      assert.strictEqual(branch.loadFor(settings(local)), "metadata")
      assert.strictEqual(
        to(yield* run(lines, message({ header: Header.fromText("A: b\r\n") }))),
        "rest"
      )
      const listed = message({ header: Header.fromText("List-Id: X <x.ours>\r\n") })
      assert.strictEqual(to(yield* run(lines, listed)), "list")
      assert.strictEqual(
        to(yield* run(["WHEN_1 = subject == 'Hello' => a", "ELSE = b"], message())),
        "a"
      )
    })
  )

  it.effect("A-IF-5 a subject made to hang a pattern takes no time", () =>
    Effect.gen(function* () {
      const lines = ["WHEN_1 = subject =~ '(a+)+$' => a", "ELSE = b"]
      yield* run(lines, message())
      const before = performance.now()
      const verdict = yield* run(lines, message({ subject: "a".repeat(60 * 1024) + "b" }))
      assert.strictEqual(to(verdict), "b")
      assert.isBelow(performance.now() - before, 50)
    })
  )

  it.effect("A-IF-6 a sender below a domain of the list", () =>
    Effect.gen(function* () {
      const lines = ['WHEN_1 = from.domain in [".example.com"] => a', "ELSE = b"]
      assert.strictEqual(to(yield* run(lines, message({ fromHeader: "a@EU.Example.COM" }))), "a")
      assert.strictEqual(to(yield* run(lines, message({ fromHeader: null }))), "b")
    })
  )

  it.effect("asks about all addresses at once, and not at all without need", () =>
    Effect.gen(function* () {
      const questions: Array<ReadonlyArray<string>> = []
      const both = [
        "MODE = recipient",
        "WHEN_1 = is_local(rcpt) and not is_local(mail_from) => in",
        "ELSE = out"
      ]
      const recipients = ["a@ours.example", "b@ours.example", "a@ours.example"]
      assert.strictEqual(to(yield* run(both, message({ recipients }), counted(questions))), "in")
      assert.deepStrictEqual(questions, [["a@ours.example", "b@ours.example", "s@x.example"]])
      yield* run(["WHEN_1 = size > 1 => a", "ELSE = b"], message(), counted(questions))
      yield* run(
        ["WHEN_1 = is_local(mail_from) => a", "ELSE = b"],
        message({ sender: "" }),
        counted(questions)
      )
      assert.strictEqual(questions.length, 1)
    })
  )

  it.effect("fails for a time when the accounts are away", () =>
    Effect.gen(function* () {
      const away = Layer.succeed(
        Accounts,
        Accounts.of({
          resolve: () =>
            Effect.fail(new DatabaseError({ reason: "away", operation: "x", cause: null }))
        })
      )
      const failure = yield* Effect.flip(run(local, message(), away))
      assert.strictEqual(failure.status, "4.3.0")
    })
  )

  it.effect("the age of a message counts from its admission", () =>
    Effect.gen(function* () {
      const lines = ["WHEN_1 = age > 4h => late", "ELSE = b"]
      yield* TestClock.setTime(4 * 3_600_000)
      assert.strictEqual(to(yield* run(lines, message())), "b")
      yield* TestClock.adjust("1 second")
      assert.strictEqual(to(yield* run(lines, message())), "late")
    })
  )

  it.effect("conditions are tried in the order of their numbers", () =>
    Effect.gen(function* () {
      const lines = [
        "WHEN_10 = true => c",
        "WHEN_9 = size > 10 => b",
        "WHEN_1 = size > 1K => a",
        "ELSE = d"
      ]
      assert.strictEqual(to(yield* run(lines, message())), "b")
      assert.strictEqual(to(yield* run(lines, message({ sizeBytes: 1 }))), "c")
    })
  )

  const Sections = Schema.Array(Schema.Literals(["a", "b", "c"])).check(
    Schema.isMinLength(1),
    Schema.isMaxLength(12)
  )
  it.effect.prop("nobody is lost and nobody gets a message twice", { ways: Sections }, ({ ways }) =>
    Effect.gen(function* () {
      const recipients = ways.map((way, i) => `u${i}@${way}.example`)
      const lines = [
        "MODE = recipient",
        "WHEN_1 = rcpt.domain == 'a.example' => a",
        "WHEN_2 = rcpt.domain == 'b.example' => b",
        "ELSE = c"
      ]
      const verdict = yield* run(lines, message({ recipients }))
      const went =
        verdict.children.length === 0
          ? recipients.map((recipient) => [recipient, to(verdict)])
          : verdict.children.flatMap((child) =>
              child.recipients.map((recipient) => [recipient, child.to])
            )
      assert.sameDeepMembers(
        went,
        recipients.map((recipient, i) => [recipient, ways[i]])
      )
      assert.strictEqual(
        new Set(verdict.children.map(({ to }) => to)).size,
        verdict.children.length
      )
      assert.strictEqual(verdict.children.length > 0, new Set(ways).size > 1)
    })
  )

  it("a condition that cannot be read is refused with its line and column", () => {
    const { problems, targets } = read([
      "WHEN_1 = size > 1M => big",
      "WHEN_2 = sise > 1 => b",
      "WHEN_3 = true -> b"
    ])
    const [second, third, missing] = problems.map(Ini.format)
    assert.match(
      second!,
      /^pepsi\.conf:3: \[stage-route\] WHEN_2: .* column 1: expected a value; sise is none of /
    )
    assert.match(
      third!,
      /^pepsi\.conf:4: \[stage-route\] WHEN_3: .* column 6: expected a value or an op/
    )
    assert.match(missing!, /ELSE is missing/)
    assert.deepStrictEqual(
      targets.map(({ option, section }) => [option, section]),
      [["WHEN_1", "big"]]
    )
  })
})
