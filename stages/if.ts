// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * if: sends a message on by what it is, without touching it.
 *
 * Reads the row, and the header only where a condition asks for it. In recipient mode, recipients
 * that go different ways are parted into children, one for each way. A second run decides alike
 * and makes the same children.
 */
import * as Array from "effect/Array"
import * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Option from "../src/config/Option.ts"
import * as Expression from "../src/pipeline/Expression.ts"
import * as Stage from "../src/pipeline/Stage.ts"
import * as Verdict from "../src/pipeline/Verdict.ts"
import { Accounts } from "../src/services/Accounts.ts"
import type { DatabaseError } from "../src/services/DatabaseError.ts"

const when: Option.Option<Expression.Rule> = {
  ...Option.custom(
    "a condition, => and a section",
    "size > 10M => large",
    { doc: "A condition and the section that takes what it holds for; the first to hold decides." },
    Expression.rule
  ),
  targets: (rule: Expression.Rule) => [rule.section]
}

export default Stage.define({
  name: "if",
  load: "metadata",
  loadFor: ({ WHEN }) => (readsHeader(WHEN) ? "headers" : "metadata"),
  effect: "none",
  fusible: true,
  next: "none",
  uses: [Accounts],
  settings: {
    MODE: Option.choice(["message", "recipient"], {
      doc: "Whether the message is judged as a whole or for each recipient.",
      default: "message"
    }),
    WHEN: Option.numbered(when, 99),
    ELSE: Option.section({ doc: "The section that takes what no condition holds for." })
  },
  run: Effect.fnUntraced(function* (mail, { ELSE, MODE, WHEN }) {
    const header = readsHeader(WHEN) ? (yield* mail.needHeaders).header : undefined
    const isLocal = yield* localOf(mail, WHEN)
    const facts = { mail, header, isLocal, nowMillis: yield* Clock.currentTimeMillis }
    const ways = { rules: WHEN, otherwise: ELSE }
    const judged = MODE === "recipient" ? mail.recipients : [null]
    const { exhausted, sections } = Expression.decide(ways, facts, judged)
    if (exhausted) yield* warn(mail.token)
    if (MODE === "recipient") return parted(mail.recipients, sections)
    return Verdict.passTo(sections[0] ?? ELSE)
  })
})

const warn = (token: string): Effect.Effect<void> =>
  Effect.annotateLogs(Effect.logWarning("too many steps, so ELSE"), { token })

const readsHeader = (rules: ReadonlyArray<Expression.Rule>): boolean =>
  rules.some(({ condition }) => condition.needsHeaders)

/** Asks once which addresses of the message are ours, if a condition wants to know. */
const localOf = (
  mail: Stage.Metadata,
  rules: ReadonlyArray<Expression.Rule>
): Effect.Effect<(address: string) => boolean, DatabaseError, Accounts> => {
  const asks = new Set(rules.flatMap(({ condition }) => [...condition.asks]))
  const asked = new Set(asks.has("rcpt") ? mail.recipients : [])
  if (asks.has("mail_from")) asked.add(mail.sender)
  if (asks.has("from") && mail.fromHeader !== null) asked.add(mail.fromHeader)
  asked.delete("") // the null sender is nobody's address
  return asked.size === 0 ? nobody : resolved([...asked])
}

const nobody = Effect.succeed(() => false)

/** Addresses of one question; more are possible only when the sender is asked about as well. */
const maxAsked = 1000

const resolved = Effect.fnUntraced(function* (addresses: ReadonlyArray<string>) {
  const accounts = yield* Accounts
  const questions = Array.chunksOf(addresses, maxAsked)
  const found = (yield* Effect.forEach(questions, accounts.resolve)).flat()
  const ours = new Set(addresses.filter((_, i) => found[i]?._tag === "Local"))
  return (address: string) => ours.has(address)
})

/** One way for all: on it; several: a child for each, named by its recipients. */
const parted = (
  recipients: ReadonlyArray<string>,
  sections: ReadonlyArray<string>
): Verdict.Verdict => {
  const ways = Map.groupBy(recipients.keys(), (i) => sections[i]!)
  if (ways.size === 1) return Verdict.passTo(sections[0]!)
  return Verdict.fanout(
    [...ways].map(([to, places]) => {
      const group = places.map((i) => recipients[i]!)
      return { key: group.toSorted().join("\n"), to, recipients: group }
    })
  )
}
