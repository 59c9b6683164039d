// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The operators of the language of `if` on values: what is equal, within, alike. Null stands for
 * "not comparable", which is no truth. Patterns match in linear time (RE2). Pure.
 */
import { RE2JS } from "re2js"
import * as Address from "../mail/Address.ts"
import type * as Syntax from "./ExpressionSyntax.ts"

/** How two texts are compared: exactly, or as addresses or domains (ASCII case and A-labels). */
export type Kind = "exact" | "address" | "domain"

/** The steps a decision has left; below zero = used up. */
export interface Steps {
  left: number
}

/** Characters of a text that are looked at. */
export const maxText = 64 * 1024

/** Pays for work; false = the steps are used up, and the work must not be done. */
export const pay = (on: Steps, steps: number): boolean => {
  if (on.left >= 0) on.left -= steps
  return on.left >= 0
}

export type Test = (left: unknown, right: unknown, on: Steps) => boolean | null

/** The test an operator stands for. Null = not comparable. */
export const tester = (op: Syntax.Operator, kind: Kind, right: Syntax.Node): Test => {
  switch (op) {
    case "==":
      return (a, b) => equal(kind, a, b)
    case "!=":
      return (a, b) => negated(equal(kind, a, b))
    case "<":
      return numbers((a, b) => a < b)
    case "<=":
      return numbers((a, b) => a <= b)
    case ">":
      return numbers((a, b) => a > b)
    case ">=":
      return numbers((a, b) => a >= b)
    case "in":
      return (a, b, on) => within(kind, a, b, on)
    case "contains":
      return texts(kind, (a, b) => a.includes(b))
    case "starts":
      return texts(kind, (a, b) => a.startsWith(b))
    case "ends":
      return texts(kind, (a, b) => a.endsWith(b))
    case "=~":
      return matcher(RE2JS.compile(patternOf(right)))
    case "!~": {
      const matches = matcher(RE2JS.compile(patternOf(right)))
      return (a, b, on) => negated(matches(a, b, on))
    }
    case "~=":
      return matcher(glob(patternOf(right), kind))
  }
}

const patternOf = (node: Syntax.Node): string => (node._tag === "Literal" ? String(node.value) : "")

const negated = (truth: boolean | null): boolean | null => (truth === null ? null : !truth)

const numbers =
  (test: (a: number, b: number) => boolean): Test =>
  (a, b) =>
    typeof a === "number" && typeof b === "number" ? test(a, b) : null

const texts =
  (kind: Kind, test: (a: string, b: string) => boolean): Test =>
  (a, b) =>
    typeof a === "string" && typeof b === "string" ? test(folded(kind, a), folded(kind, b)) : null

/** Only values of one type are equal or not; lists and objects are neither. */
const equal = (kind: Kind, a: unknown, b: unknown): boolean | null =>
  typeof a === "string" && typeof b === "string"
    ? a === b || folded(kind, a) === folded(kind, b)
    : a === null || typeof a === "object" || typeof a !== typeof b
      ? null
      : a === b

/** Membership; a domain is also in a list that has `.example.com` when it is below example.com. */
const within = (kind: Kind, a: unknown, list: unknown, on: Steps): boolean | null => {
  if (a === null || !Array.isArray(list)) return null
  const key = kind === "domain" && typeof a === "string" ? folded(kind, a) : ""
  const isBelow = (item: unknown): boolean =>
    key !== "" &&
    typeof item === "string" &&
    item.startsWith(".") &&
    key.endsWith(folded(kind, item))
  return list.some((item) => pay(on, 1) && (equal(kind, a, item) === true || isBelow(item)))
}

/**
 * A text to compare. The local part of an address compares without regard to ASCII case too, and a
 * domain by its A-labels (RFC 5890 section 2.3.2.4).
 */
const folded = (kind: Kind, text: string): string => {
  if (kind === "exact") return text
  const at = kind === "address" ? text.lastIndexOf("@") : -1
  return asciiLower(text.slice(0, at + 1)) + aLabels(text.slice(at + 1))
}

const asciiLower = (text: string): string =>
  text.replace(/[A-Z]+/g, (letters) => letters.toLowerCase())

/** Also of the `.example.com` of a list; a name that has no A-labels stays as it is. */
const aLabels = (name: string): string => {
  const dot = name.startsWith(".") ? "." : ""
  return dot + (Address.domainToAscii(name.slice(dot.length)) ?? asciiLower(name.slice(dot.length)))
}

/** Characters times instructions that are matched in one step, about 30 µs at worst. */
const matchingPerStep = 2048

const matcher = (pattern: RE2JS): Test => {
  const program = pattern.programSize()
  return (text, _, on) => {
    if (typeof text !== "string") return null
    const subject = text.length > maxText ? text.slice(0, maxText) : text
    const steps = 1 + Math.floor((subject.length * program) / matchingPerStep)
    return pay(on, steps) ? pattern.test(subject) : null
  }
}

/** `*` any text, `?` one character, the whole of the text. */
const glob = (text: string, kind: Kind): RE2JS => {
  const source = [...text]
    .map((c) => (c === "*" ? ".*" : c === "?" ? "." : RE2JS.quote(c)))
    .join("")
  const flags = RE2JS.DOTALL | (kind === "exact" ? 0 : RE2JS.CASE_INSENSITIVE)
  return RE2JS.compile(`^(?:${source})$`, flags)
}
