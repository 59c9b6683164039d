// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The grammar of the language of `if`: text to tree and tree to text.
 *
 *   expr = and {"or" and}        and = not {"and" not}        not = ["not"] cmp
 *   cmp  = val [op val]          op  = == != < <= > >= in =~ !~ ~= contains starts ends
 *   val  = string | number | duration | true | false | null | path | func "(" args ")"
 *        | "[" val, … "]" | "(" expr ")"
 *
 * A tree that was parsed holds only names, arguments and patterns that exist and are in order, so
 * that evaluating it cannot fail. Pure, never throws.
 */
import * as Result from "effect/Result"
import { RE2JS } from "re2js"
import * as Ip from "../mail/Ip.ts"
import type { Token } from "./ExpressionTokens.ts"
import * as Tokens from "./ExpressionTokens.ts"

/** Octets of UTF-8 an expression may have: a screen full, parsed in under a millisecond. */
const maxBytes = 4096
/** Parts of an expression: what evaluating it costs has this bound. */
const maxNodes = 200
/** Open brackets: parsing recurses, and the stack must not depend on the text. */
const maxDepth = 32
/** Characters of a pattern. */
const maxPattern = 256
/** Instructions of a pattern: matching takes time in proportion to them. */
const maxProgram = 1000

const paths = [
  "size",
  "headers_size",
  "recipients",
  "mail_from",
  "mail_from.local",
  "mail_from.domain",
  "from",
  "from.domain",
  "subject",
  "stage",
  "age",
  "attempts",
  "token",
  "client_ip",
  "rcpt",
  "rcpt.local",
  "rcpt.domain",
  "rcpt.detail",
  "rcpt.base"
] as const
export type PathName = (typeof paths)[number]

/** What an argument must be; all but a value is fixed when the configuration is read. */
type Argument = "value" | "address" | "network" | "field" | "key"

const functions = {
  is_local: ["address"],
  in_net: ["value", "network"],
  count: ["value"],
  lower: ["value"],
  len: ["value"],
  exists: ["value"],
  domain: ["value"],
  now_hour: [],
  random: ["value"],
  header: ["field"],
  headers: ["field"],
  setting: ["key"]
} as const satisfies { readonly [name: string]: ReadonlyArray<Argument> }
export type FunctionName = keyof typeof functions

/** Arguments of in_net at most: the address and 50 networks. */
const maxArguments = 51

const operators = [
  "==",
  "!=",
  "<",
  "<=",
  ">",
  ">=",
  "in",
  "=~",
  "!~",
  "~=",
  "contains",
  "starts",
  "ends"
] as const
export type Operator = (typeof operators)[number]

export type Node =
  | { readonly _tag: "Literal"; readonly value: string | number | boolean | null }
  | { readonly _tag: "List"; readonly items: ReadonlyArray<Node> }
  | { readonly _tag: "Path"; readonly name: PathName }
  | { readonly _tag: "State"; readonly keys: ReadonlyArray<string> }
  | { readonly _tag: "Call"; readonly name: FunctionName; readonly args: ReadonlyArray<Node> }
  | { readonly _tag: "Any"; readonly list: Node; readonly op: Operator; readonly value: Node }
  | { readonly _tag: "Not"; readonly of: Node }
  | { readonly _tag: "And" | "Or"; readonly all: ReadonlyArray<Node> }
  | { readonly _tag: "Compare"; readonly op: Operator; readonly left: Node; readonly right: Node }

/** Where a parse stands. `error` is set once; from then on every step gives undefined. */
interface Parser {
  readonly text: string
  token: Token
  nodes: number
  depth: number
  error: string | undefined
}

type Parsed = Node | undefined

/** A whole expression; the failure says the column and what was expected there. */
export const parse = (text: string): Result.Result<Node, string> => {
  const p = start(text)
  const node = expression(p)
  if (node !== undefined && p.token.kind !== "end") expected(p, "an operator, and, or, or the end")
  return node === undefined || p.error !== undefined
    ? Result.fail(p.error ?? "")
    : Result.succeed(node)
}

/** `expr => section`. */
export const parseRule = (
  text: string
): Result.Result<{ readonly condition: Node; readonly section: string }, string> => {
  const p = start(text)
  const condition = expression(p)
  const ends = "an operator, and, or, or => and a section"
  if (condition !== undefined && !is(p, "=>")) expected(p, ends)
  if (condition === undefined || p.error !== undefined) return Result.fail(p.error ?? "")
  const section = text.slice(p.token.end).trim()
  return /^[A-Za-z0-9._-]{1,64}$/.test(section)
    ? Result.succeed({ condition, section })
    : Result.fail(`column ${p.token.end + 1}: expected the name of a stage section behind =>`)
}

const start = (text: string): Parser => {
  const p: Parser = { text, token: Tokens.next("", 0), nodes: 0, depth: 0, error: undefined }
  if (Buffer.byteLength(text) > maxBytes) p.error = `expected at most ${maxBytes} octets`
  else p.token = Tokens.next(text, 0)
  return p
}

const advance = (p: Parser): void => {
  p.token = Tokens.next(p.text, p.token.end)
}

/** Notes the first error; gives undefined, so that a step can end with it. */
const expected = (p: Parser, what: string, at = p.token.at): undefined => {
  const { token } = p
  const wanted = token.kind === "wrong" && at === token.at ? token.expected : what
  const found =
    at !== token.at
      ? ""
      : token.kind === "end"
        ? ", found the end"
        : token.kind === "wrong"
          ? ""
          : `, found ${p.text.slice(token.at, token.end)}`
  p.error ??= `column ${at + 1}: expected ${wanted}${found}`
  return undefined
}

const is = (p: Parser, word: string): boolean =>
  (p.token.kind === "sign" || p.token.kind === "name") && p.token.value === word

/** Takes `word` if it is next. */
const take = (p: Parser, word: string): boolean => {
  const here = is(p, word)
  if (here) advance(p)
  return here
}

/** Counts a part. */
const node = (p: Parser, made: Node): Parsed =>
  p.error !== undefined || ++p.nodes > maxNodes
    ? expected(p, `at most ${maxNodes} parts in one expression`)
    : made

const expression = (p: Parser): Parsed => chain(p, "or", "Or", conjunction)
const conjunction = (p: Parser): Parsed => chain(p, "and", "And", negation)

const chain = (p: Parser, word: string, tag: "And" | "Or", part: (p: Parser) => Parsed): Parsed => {
  const first = part(p)
  if (first === undefined || !is(p, word)) return first
  const all = [first]
  while (take(p, word)) {
    const more = part(p)
    if (more === undefined) return undefined
    all.push(more)
  }
  return node(p, { _tag: tag, all })
}

const negation = (p: Parser): Parsed => {
  if (!take(p, "not")) return comparison(p)
  const of = comparison(p)
  return of && node(p, { _tag: "Not", of })
}

const comparison = (p: Parser): Parsed => {
  const left = value(p)
  if (left === undefined) return undefined
  const op = operator(p)
  if (op === undefined) return left
  const right = operand(p, op)
  return right && node(p, { _tag: "Compare", op, left, right })
}

/** Takes an operator if one is next. */
const operator = (p: Parser): Operator | undefined => {
  const op = operators.find((word) => is(p, word))
  if (op !== undefined) advance(p)
  return op
}

/** What stands to the right of an operator; a pattern is compiled once to see that it is one. */
const operand = (p: Parser, op: Operator): Parsed => {
  const at = p.token.at
  const right = value(p)
  if (right === undefined || (op !== "=~" && op !== "!~" && op !== "~=")) return right
  const pattern = literal(right)
  if (pattern === undefined || pattern.length > maxPattern) {
    return expected(p, `a pattern in quotes of at most ${maxPattern} characters`, at)
  }
  const wrong = op === "~=" ? undefined : patternError(pattern)
  return wrong === undefined ? right : expected(p, `a regular expression (RE2): ${wrong}`, at)
}

const patternError = (pattern: string): string | undefined => {
  const compiled = Result.try(() => RE2JS.compile(pattern))
  return Result.isFailure(compiled)
    ? String(compiled.failure instanceof Error ? compiled.failure.message : compiled.failure)
    : compiled.success.programSize() > maxProgram
      ? "this one is too large"
      : undefined
}

const value = (p: Parser): Parsed => {
  const { token } = p
  if (token.kind === "number" || token.kind === "string") {
    advance(p)
    return node(p, { _tag: "Literal", value: token.value })
  }
  if (token.kind === "name") return named(p, token.value)
  if (is(p, "(")) return nested(p, group)
  if (is(p, "[")) return nested(p, (q) => listed(q, "]", (items) => ({ _tag: "List", items })))
  return expected(p, "a value")
}

/** One bracket deeper; the opening one is taken here. */
const nested = (p: Parser, inner: (p: Parser) => Parsed): Parsed => {
  if (p.depth >= maxDepth) return expected(p, `at most ${maxDepth} brackets in one another`)
  p.depth++
  advance(p)
  const made = inner(p)
  p.depth--
  return made
}

const group = (p: Parser): Parsed => {
  const inner = expression(p)
  return inner === undefined || take(p, ")") ? inner : expected(p, "an operator, and, or, or )")
}

/** Values between commas up to `closing`. */
const listed = (p: Parser, closing: string, make: (items: ReadonlyArray<Node>) => Node): Parsed => {
  const items: Array<Node> = []
  while (!take(p, closing)) {
    if (items.length > 0 && !take(p, ",")) return expected(p, `, or ${closing}`)
    const item = value(p)
    if (item === undefined) return undefined
    items.push(item)
  }
  return node(p, make(items))
}

const constants: ReadonlyMap<string, boolean | null> = new Map([
  ["true", true],
  ["false", false],
  ["null", null]
])

const named = (p: Parser, word: string): Parsed => {
  const at = p.token.at
  const constant = constants.get(word)
  advance(p)
  if (constant !== undefined) return node(p, { _tag: "Literal", value: constant })
  if (is(p, "(")) return nested(p, (q) => (word === "any" ? any(q) : call(q, word, at)))
  return word === "state" ? stateKeys(p) : path(p, word, at)
}

const path = (p: Parser, first: string, at: number): Parsed => {
  let name = first
  while (take(p, ".")) {
    if (p.token.kind !== "name") return expected(p, "a name")
    name += `.${p.token.value}`
    advance(p)
  }
  const known = paths.find((known) => known === name)
  return known === undefined
    ? expected(p, `a value; ${name} is none of state.KEY, ${paths.join(", ")}`, at)
    : node(p, { _tag: "Path", name: known })
}

const stateKeys = (p: Parser): Parsed => {
  const keys: Array<string> = []
  while (is(p, ".") || is(p, "[")) {
    const bracket = is(p, "[")
    advance(p)
    if (p.token.kind !== (bracket ? "string" : "name")) {
      return expected(p, bracket ? "a key in quotes" : "a key")
    }
    keys.push(String(p.token.value))
    advance(p)
    if (bracket && !take(p, "]")) return expected(p, "]")
  }
  return keys.length === 0 ? expected(p, ".KEY behind state") : node(p, { _tag: "State", keys })
}

const any = (p: Parser): Parsed => {
  const list = value(p)
  if (list === undefined) return undefined
  if (!take(p, ",")) return expected(p, ", and an operator")
  const op = operator(p)
  if (op === undefined) return expected(p, `one of ${operators.join(" ")}`)
  if (!take(p, ",")) return expected(p, ", and a value")
  const right = operand(p, op)
  if (right === undefined) return undefined
  return take(p, ")") ? node(p, { _tag: "Any", list, op, value: right }) : expected(p, ")")
}

const call = (p: Parser, word: string, at: number): Parsed => {
  const names = Object.keys(functions) as ReadonlyArray<FunctionName>
  const name = names.find((known) => known === word)
  if (name === undefined) {
    return expected(p, `a function; ${word} is none of any, ${names.join(", ")}`, at)
  }
  const made = listed(p, ")", (args) => ({ _tag: "Call", name, args }))
  if (made?._tag !== "Call") return undefined
  const wrong = argumentError(name, made.args)
  return wrong === undefined ? made : expected(p, wrong, at)
}

/** What the arguments should have been; the last kind of in_net may repeat. */
const argumentError = (name: FunctionName, args: ReadonlyArray<Node>): string | undefined => {
  const kinds: ReadonlyArray<Argument> = functions[name]
  const most = name === "in_net" ? maxArguments : kinds.length
  if (args.length < kinds.length || args.length > most) {
    const many = most > kinds.length ? `${kinds.length} to ${most}` : String(most)
    return `${many} argument${most === 1 ? "" : "s"} for ${name}`
  }
  const wrong = args.findIndex((arg, i) => !fits[kinds[i] ?? "network"](arg))
  return wrong === -1 ? undefined : `${words[kinds[wrong] ?? "network"]} as argument of ${name}`
}

const words: { readonly [A in Argument]: string } = {
  value: "a value",
  address: "rcpt, mail_from or from",
  network: 'a network in quotes such as "10.0.0.0/8"',
  field: "the name of a header field in quotes",
  key: "a key in quotes"
}

const literal = (arg: Node): string | undefined =>
  arg._tag === "Literal" && typeof arg.value === "string" ? arg.value : undefined

const fits: { readonly [A in Argument]: (arg: Node) => boolean } = {
  value: () => true,
  address: (arg) => arg._tag === "Path" && ["rcpt", "mail_from", "from"].includes(arg.name),
  network: (arg) => Ip.parseNetwork(literal(arg) ?? "") !== undefined,
  field: (arg) => /^[!-9;-~]{1,200}$/.test(literal(arg) ?? ""), // RFC 5322 section 3.6.8
  key: (arg) => literal(arg) !== undefined
}

/** The expression as text; parsing it gives the same tree. */
export const print = (node: Node): string => {
  switch (node._tag) {
    case "Literal":
      return typeof node.value === "string" ? Tokens.quote(node.value) : String(node.value)
    case "List":
      return `[${node.items.map(part).join(", ")}]`
    case "Path":
      return node.name
    case "State":
      return `state${node.keys.map((key) => `[${Tokens.quote(key)}]`).join("")}`
    case "Call":
      return `${node.name}(${node.args.map(part).join(", ")})`
    case "Any":
      return `any(${part(node.list)}, ${node.op}, ${part(node.value)})`
    case "Not":
      return `not ${part(node.of)}`
    case "Compare":
      return `${part(node.left)} ${node.op} ${part(node.right)}`
    case "And":
    case "Or":
      return node.all.map(part).join(node._tag === "And" ? " and " : " or ")
  }
}

/** A part of a larger expression, in brackets where its own operator would not stand alone. */
const part = (node: Node): string =>
  node._tag === "Not" || node._tag === "Compare" || node._tag === "And" || node._tag === "Or"
    ? `(${print(node)})`
    : print(node)
