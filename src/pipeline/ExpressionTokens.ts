// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The words of the language of `if`: text to tokens, one at a time. Pure, never throws.
 */

/** One word of an expression. `at` and `end` are offsets in its text. */
export type Token = Word & { readonly at: number; readonly end: number }

type Word =
  | { readonly kind: "number"; readonly value: number }
  | { readonly kind: "string" | "name" | "sign"; readonly value: string }
  | { readonly kind: "end" }
  /** No word of the language; `expected` says what was. */
  | { readonly kind: "wrong"; readonly expected: string }

const number = /^\d{1,15}(?:\.\d{1,6})?/
const name = /^[A-Za-z_][A-Za-z0-9_]*/
/** Longer signs stand before their own beginnings. */
const sign = /^(?:=>|==|!=|<=|>=|=~|!~|~=|[<>()[\],.])/
const hex = /^[0-9A-Fa-f]{2}/

/** Octets for sizes, seconds for durations: the units differ in case alone (M octets,
  m minutes). */
const units: { readonly [unit: string]: number } = {
  K: 1024,
  M: 1024 ** 2,
  G: 1024 ** 3,
  s: 1,
  m: 60,
  h: 3600,
  d: 86_400
}

const escapes: { readonly [letter: string]: string } = {
  "\\": "\\",
  '"': '"',
  "'": "'",
  n: "\n",
  t: "\t"
}

/** The word that begins at `from` or behind the blanks there. */
export const next = (text: string, from: number): Token => {
  let at = from
  while (text[at] === " " || text[at] === "\t") at++
  if (at >= text.length) return { kind: "end", at: text.length, end: text.length }
  if (text[at] === '"' || text[at] === "'") return string(text, at)
  const rest = text.slice(at)
  const digits = number.exec(rest)?.[0]
  if (digits !== undefined) return numeral(text, at, digits)
  const word = name.exec(rest)?.[0]
  if (word !== undefined) return { kind: "name", value: word, at, end: at + word.length }
  const mark = sign.exec(rest)?.[0]
  if (mark !== undefined) return { kind: "sign", value: mark, at, end: at + mark.length }
  return { kind: "wrong", expected: "a value or an operator", at, end: at }
}

/** A number with its unit. Whole when it has one, and never past what counts exactly. */
const numeral = (text: string, at: number, digits: string): Token => {
  const unitAt = at + digits.length
  const unit = name.exec(text.slice(unitAt))?.[0] ?? ""
  const factor = unit === "" ? 1 : Object.hasOwn(units, unit) ? units[unit]! : undefined
  const end = unitAt + unit.length
  if (factor === undefined || (unit !== "" && digits.includes("."))) {
    return {
      kind: "wrong",
      expected: "a number, or a whole number with one of K M G s m h d",
      at,
      end
    }
  }
  const value = Number(digits) * factor
  return value > Number.MAX_SAFE_INTEGER || /^\d/.test(text.slice(end))
    ? { kind: "wrong", expected: "a number below 9 007 199 254 740 992", at, end }
    : { kind: "number", value, at, end }
}

const string = (text: string, at: number): Token => {
  const quote = text[at]
  let value = ""
  let here = at + 1
  while (here < text.length && text[here] !== quote) {
    if (text[here] !== "\\") {
      value += text[here++]
      continue
    }
    const letter = text[here + 1] ?? ""
    const code = letter === "x" ? hex.exec(text.slice(here + 2))?.[0] : undefined
    const meant =
      code === undefined ? escaped(letter) : String.fromCharCode(Number.parseInt(code, 16))
    if (meant === undefined) {
      return { kind: "wrong", expected: "one of \\\\ \\\" \\' \\n \\t \\xHH", at: here, end: here }
    }
    value += meant
    here += code === undefined ? 2 : 4
  }
  return here < text.length
    ? { kind: "string", value, at, end: here + 1 }
    : { kind: "wrong", expected: "the quote that ends this string", at, end: here }
}

const escaped = (letter: string): string | undefined =>
  Object.hasOwn(escapes, letter) ? escapes[letter] : undefined

/** A string as it is written in an expression. */
export const quote = (value: string): string =>
  `"${value.replace(/[\\"\p{Cc}]/gu, (c) =>
    c === "\\" || c === '"'
      ? `\\${c}`
      : c === "\n"
        ? "\\n"
        : c === "\t"
          ? "\\t"
          : `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`
  )}"`
