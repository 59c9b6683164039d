// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The language of `if`: small typed conditions on a message, compiled once to closures.
 *
 * Evaluating never fails and does no I/O. What is missing and what does not fit its operator is
 * null; null compared with anything is false, but for `== null` and `!= null`. What costs more
 * than a step is paid before it is done; a condition that has used its steps holds for nothing.
 * Pure: the time, the accounts and the header are handed in.
 */
import { createHash } from "node:crypto"
import * as DateTime from "effect/DateTime"
import * as Result from "effect/Result"
import * as Address from "../mail/Address.ts"
import * as EncodedWord from "../mail/EncodedWord.ts"
import * as Header from "../mail/Header.ts"
import * as Ip from "../mail/Ip.ts"
import type { Kind, Steps } from "./ExpressionOperators.ts"
import { maxText, pay, tester } from "./ExpressionOperators.ts"
import * as Syntax from "./ExpressionSyntax.ts"
import type * as Stage from "./Stage.ts"

/** Addresses a condition asks about with is_local(). */
export type Asked = "rcpt" | "mail_from" | "from"

/** What a message is judged by. */
export interface Facts {
  readonly mail: Stage.Metadata
  /** Needed only where `needsHeaders` says so. */
  readonly header: Header.Header | undefined
  readonly nowMillis: number
  /** Needed only for the addresses named by `asks`. */
  readonly isLocal: (address: string) => boolean
}

/** One judgement: the facts, one recipient or none, and the steps that are left. */
interface Judgement extends Facts, Steps {
  readonly recipient: string | null
  /** Answers that are the same for all recipients of the message. */
  readonly memo: Map<Run, unknown>
}

type Run = (on: Judgement) => unknown

interface Code {
  readonly run: Run
  readonly kind: Kind
  /** Whether the answer may differ between two recipients of one message. */
  readonly varies: boolean
}

/** A compiled condition. */
export interface Condition {
  readonly needsHeaders: boolean
  readonly asks: ReadonlySet<Asked>
  readonly run: Run
}

/** `condition => section`. */
export interface Rule {
  readonly condition: Condition
  readonly section: string
}

/** Steps of one decision: a third of a second at the very most, and far above any use. */
export const maxSteps = 10_000

/** Reads `expression => section`; the failure says the column and what was expected. */
export const rule = (text: string): Result.Result<Rule, string> =>
  Result.map(Syntax.parseRule(text), ({ condition, section }) => ({
    condition: compile(condition),
    section
  }))

/** Recipients that may each use all steps; a thousand of them share what ten may use. */
const fullBudgets = 10

/**
 * For each of `recipients` (null = the message as a whole) the section of the first rule that
 * holds, else `otherwise`. Once the steps of a decision are used up, it and all later ones are
 * `otherwise`, and `exhausted` says so.
 */
export const decide = (
  { otherwise, rules }: { readonly rules: ReadonlyArray<Rule>; readonly otherwise: string },
  facts: Facts,
  recipients: ReadonlyArray<string | null>
): { readonly sections: ReadonlyArray<string>; readonly exhausted: boolean } => {
  const memo = new Map<Run, unknown>()
  let exhausted = false
  let shared = maxSteps * Math.min(recipients.length, fullBudgets)
  const sections = recipients.map((recipient) => {
    if (exhausted) return otherwise
    const budget = Math.min(maxSteps, shared)
    const on: Judgement = { ...facts, memo, recipient, left: budget }
    const found = rules.find(({ condition }) => isTrue(condition.run(on)))
    shared -= budget - on.left
    exhausted = on.left < 0
    return exhausted ? otherwise : (found?.section ?? otherwise)
  })
  return { sections, exhausted }
}

/** A condition on its own, as `decide` takes it. */
export const holds = (condition: Condition, facts: Facts, recipient: string | null): boolean => {
  const rules = [{ condition, section: "yes" }]
  return decide({ rules, otherwise: "no" }, facts, [recipient]).sections[0] === "yes"
}

/** Null, false, "", 0 and [] are false. */
const isTrue = (value: unknown): boolean =>
  Array.isArray(value)
    ? value.length > 0
    : value !== null && value !== false && value !== "" && value !== 0

/** What a text costs to go through. */
const reading = (text: string): number => 1 + (text.length >> 6)

/** Closures for a tree. The tree must come from `Syntax.parse`. */
export const compile = (node: Syntax.Node): Condition => {
  const nodes = walk(node)
  return {
    run: once(code(node)).run,
    needsHeaders: nodes.some(
      (n) =>
        (n._tag === "Call" && (n.name === "header" || n.name === "headers")) ||
        (n._tag === "Path" && n.name === "headers_size")
    ),
    // The parser takes nothing else as argument of is_local().
    asks: new Set(
      nodes.flatMap((n) =>
        n._tag === "Call" && n.name === "is_local" ? n.args.map(Syntax.print) : []
      ) as ReadonlyArray<Asked>
    )
  }
}

/** The node and all below it. */
const walk = (node: Syntax.Node): ReadonlyArray<Syntax.Node> => [node, ...below(node).flatMap(walk)]

const below = (node: Syntax.Node): ReadonlyArray<Syntax.Node> => {
  switch (node._tag) {
    case "List":
      return node.items
    case "Call":
      return node.args
    case "Any":
      return [node.list, node.value]
    case "Not":
      return [node.of]
    case "And":
    case "Or":
      return node.all
    case "Compare":
      return [node.left, node.right]
    default:
      return []
  }
}

const code = (node: Syntax.Node): Code => {
  switch (node._tag) {
    case "Literal":
      return fixed(() => node.value)
    case "List":
      return joined(node.items, (codes, on) => codes.map(({ run }) => run(on)))
    case "Path":
      return path(node.name)
    case "State":
      return fixed(({ mail }) => node.keys.reduce<unknown>(member, mail.state) ?? null)
    case "Call":
      return call(node.name, node.args)
    case "Any":
      return any(node)
    case "Not":
      return applied(code(node.of), (value) => !isTrue(value))
    case "And":
      return joined(node.all, (codes, on) => codes.every(({ run }) => isTrue(run(on))))
    case "Or":
      return joined(node.all, (codes, on) => codes.some(({ run }) => isTrue(run(on))))
    case "Compare":
      return compare(node)
  }
}

const fixed = (run: Run, kind: Kind = "exact"): Code => ({ run, kind, varies: false })

/** Parts of one answer: beside a part that varies, the others are worked out once per message. */
const together = (
  codes: ReadonlyArray<Code>
): { readonly codes: ReadonlyArray<Code>; readonly varies: boolean } => {
  const varies = codes.some((one) => one.varies)
  return { varies, codes: varies ? codes.map(once) : codes }
}

const once = (one: Code): Code => {
  if (one.varies) return one
  const { run } = one
  return {
    ...one,
    run: (on) => {
      if (on.memo.has(run)) return on.memo.get(run)
      const value = run(on)
      if (on.left >= 0) on.memo.set(run, value)
      return value
    }
  }
}

const member = (of: unknown, key: string): unknown =>
  typeof of === "object" && of !== null && Object.hasOwn(of, key)
    ? (of as { readonly [key: string]: unknown })[key]
    : null

const joined = (
  nodes: ReadonlyArray<Syntax.Node>,
  result: (codes: ReadonlyArray<Code>, on: Judgement) => unknown
): Code => {
  const { codes, varies } = together(nodes.map(code))
  return { run: (on) => result(codes, on), kind: "exact", varies }
}

const perRecipient = (of: (recipient: string) => string | null, kind: Kind): Code => ({
  run: ({ recipient }) => (recipient === null ? null : of(recipient)),
  kind,
  varies: true
})

const path = (name: Syntax.PathName): Code => {
  switch (name) {
    case "size":
      return fixed(({ mail }) => mail.sizeBytes)
    case "headers_size":
      return fixed(({ header }) => header?.raw.length ?? null)
    case "recipients":
      return fixed(({ mail }) => mail.recipients.length)
    case "mail_from":
      return fixed(({ mail }) => mail.sender, "address")
    case "mail_from.local":
      return fixed(({ mail }) => local(mail.sender))
    case "mail_from.domain":
      return fixed(({ mail }) => domain(mail.sender), "domain")
    case "from":
      return fixed(({ mail }) => mail.fromHeader, "address")
    case "from.domain":
      return fixed(({ mail }) => domain(mail.fromHeader), "domain")
    case "subject":
      return fixed(({ mail }) => mail.subject)
    case "stage":
      return fixed(({ mail }) => mail.section)
    case "age": // seconds since admission
      return fixed((on) => (on.nowMillis - DateTime.toEpochMillis(on.mail.receivedAt)) / 1000)
    case "attempts":
      return fixed(({ mail }) => mail.attempts)
    case "token":
      return fixed(({ mail }) => mail.token)
    case "client_ip":
      return fixed(({ mail }) => member(member(mail.state, "client"), "ip"))
    case "rcpt":
      return perRecipient((recipient) => recipient, "address")
    case "rcpt.local":
      return perRecipient(local, "exact")
    case "rcpt.domain":
      return perRecipient(domain, "domain")
    case "rcpt.detail":
      return perRecipient((recipient) => parts(recipient).detail, "exact")
    case "rcpt.base":
      return perRecipient((recipient) => parts(recipient).name, "exact")
  }
}

/** What is before the last "@"; also of an address from SQL that no grammar would take. */
const local = (address: string): string | null => {
  const at = address.lastIndexOf("@")
  return at === -1 ? null : address.slice(0, at)
}

const domain = (address: unknown): string | null => {
  const at = typeof address === "string" ? address.lastIndexOf("@") : -1
  return typeof address !== "string" || at === -1 ? null : address.slice(at + 1)
}

/** The parts of `user+detail` (RFC 5233 section 4). */
const parts = (
  address: string
): { readonly name: string | null; readonly detail: string | null } => {
  const { detail, name } = Address.splitDetail(local(address) ?? "", "+")
  return { name: name === "" ? null : name, detail: detail ?? null }
}

const call = (name: Syntax.FunctionName, args: ReadonlyArray<Syntax.Node>): Code => {
  const first = args[0]
  const word = first?._tag === "Literal" ? String(first.value) : ""
  switch (name) {
    case "header":
      return fixed((on) => headerValues(on, word, 1)[0] ?? null)
    case "headers":
      return fixed((on) => headerValues(on, word, Number.POSITIVE_INFINITY))
    case "setting":
      return { run: (on) => setting(on, word), kind: "exact", varies: true }
    case "now_hour": // UTC
      return fixed(({ nowMillis }) => Math.floor(nowMillis / 3_600_000) % 24)
    case "in_net":
      return inNet(args)
    case "count":
      return applied(elements(first!), (value) => (Array.isArray(value) ? value.length : null))
    case "is_local":
      return applied(
        code(first!),
        text((value, on) => on.isLocal(value))
      )
    case "exists":
      return applied(code(first!), (value) => value !== null)
    case "len":
      return applied(code(first!), (value) =>
        typeof value === "string" ? characters(value) : Array.isArray(value) ? value.length : null
      )
    case "lower":
      return applied(
        code(first!),
        text((value) => value.toLowerCase())
      )
    case "domain":
      return { ...applied(code(first!), domain), kind: "domain" }
    case "random":
      return applied(code(first!), text(percentile))
  }
}

const applied = (of: Code, result: (value: unknown, on: Judgement) => unknown): Code => ({
  run: (on) => result(of.run(on), on),
  kind: "exact",
  varies: of.varies
})

/** Of a text alone; what is none gives null. */
const text =
  (result: (value: string, on: Judgement) => unknown) =>
  (value: unknown, on: Judgement): unknown =>
    typeof value === "string" ? result(value, on) : null

/** Code points. */
const characters = (text: string): number => {
  let n = 0
  for (const _ of text) n++
  return n
}

/** 0 to 99, always the same for the same text. */
const percentile = (text: string): number =>
  createHash("sha256").update(text).digest().readUInt32BE(0) % 100

/** Unfolded and decoded (RFC 2047), at most `most` values. */
const headerValues = (on: Judgement, name: string, most: number): ReadonlyArray<string> => {
  if (on.header === undefined) return []
  const values: Array<string> = []
  for (const raw of most === 1 ? firstOnly(on.header, name) : Header.all(on.header, name)) {
    const cut = raw.slice(0, maxText)
    if (!pay(on, reading(cut))) break
    values.push(cut.includes("=?") ? EncodedWord.decode(cut) : cut)
  }
  return values
}

const firstOnly = (header: Header.Header, name: string): ReadonlyArray<string> => {
  const value = Header.first(header, name)
  return value === undefined ? [] : [value]
}

/** The setting of the recipient judged, or of the only one. */
const setting = ({ mail, recipient }: Judgement, key: string): unknown => {
  const address = recipient ?? (mail.recipients.length === 1 ? mail.recipients[0] : undefined)
  return address === undefined ? null : (member(member(mail.settings, address), key) ?? null)
}

const inNet = (args: ReadonlyArray<Syntax.Node>): Code => {
  const networks = args
    .slice(1)
    .flatMap((arg) => Ip.parseNetwork(arg._tag === "Literal" ? String(arg.value) : "") ?? [])
  return applied(
    code(args[0]!),
    text((value) => {
      const address = Ip.parse(value)
      return address === undefined
        ? null
        : networks.some((network) => Ip.contains(network, address))
    })
  )
}

/** Where a list is wanted, `recipients` is the addresses; elsewhere it is their number. */
const elements = (node: Syntax.Node): Code =>
  node._tag === "Path" && node.name === "recipients"
    ? fixed(({ mail }) => mail.recipients, "address")
    : code(node)

const any = ({ list, op, value }: Syntax.Node & { readonly _tag: "Any" }): Code => {
  const {
    codes: [items, right],
    varies
  } = together([elements(list), code(value)])
  const test = tester(op, strongest(items!.kind, right!.kind), value)
  return {
    kind: "exact",
    varies,
    run: (on) => {
      const of = items!.run(on)
      const wanted = right!.run(on)
      if (!Array.isArray(of)) return null
      return of.some((item) => pay(on, 1) && test(item, wanted, on) === true)
    }
  }
}

const compare = ({ left, op, right }: Syntax.Node & { readonly _tag: "Compare" }): Code => {
  if (op === "==" || op === "!=") {
    const other = isNull(right) ? left : isNull(left) ? right : undefined
    if (other !== undefined) return applied(code(other), (of) => (of === null) === (op === "=="))
  }
  const list = op === "in" ? elements(right) : code(right)
  const {
    codes: [a, b],
    varies
  } = together([code(left), list])
  const test = tester(op, strongest(a!.kind, b!.kind), right)
  return { kind: "exact", varies, run: (on) => test(a!.run(on), b!.run(on), on) }
}

const isNull = (node: Syntax.Node): boolean => node._tag === "Literal" && node.value === null

const strongest = (a: Kind, b: Kind): Kind => (a === "exact" ? b : a)
